"""The trainer's group with its servers: a member that hangs, is stopped or dies ends no wait for ever."""

import asyncio
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from agentic_opd.core.errors import ServerUnreachableError
from agentic_opd.serving import process_group
from agentic_opd.serving.process_group import GlooGroup, Group, NcclGroup, free_port
from agentic_opd.training.model import TensorSpec
from agentic_opd.training.transfer import WeightSender
from tests.support.waiting import until

pytestmark = pytest.mark.processes


def receive_one(port: int, ends_with: str) -> NoReturn:
    """Be a worker that receives one tensor, and then is stopped or killed."""
    try:
        GlooGroup("127.0.0.1", port, 1, 2).broadcast(torch.zeros(4))
        os.kill(os.getpid(), getattr(signal, ends_with))
    finally:
        os._exit(1)


class Member:
    """The trainer's end of a group with such a worker, which is a fork of this process: it need not import torch."""

    def __init__(self, ends_with: str) -> None:
        port = free_port("127.0.0.1")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of a fork beside threads; the worker uses none of them.
            self.pid = os.fork()
        if self.pid == 0:
            receive_one(port, ends_with)
        self.group = GlooGroup("127.0.0.1", port, 0, 2)
        self.group.broadcast(torch.ones(4))

    def has_gone(self) -> bool:
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] in "TtZX"

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.group.close()


@pytest.fixture(params=["SIGSTOP", "SIGKILL"])
def member(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Member]:
    member = Member(request.param)
    try:
        until(member.has_gone)
        monkeypatch.setattr(process_group, "PATIENCE", timedelta(seconds=0.5))
        yield member
    finally:
        member.close()


LARGE = torch.zeros(2**24)
"""More than the sockets' buffers hold."""
SPECS = {"weight": TensorSpec(torch.float32, (2**24,))}


def test_a_broadcast_to_a_worker_that_was_stopped_or_killed_ends(member: Member) -> None:
    with pytest.raises(RuntimeError, match=r"did not end within 0.5 s: another member .* was stopped|[Cc]onnection"):
        member.group.broadcast(LARGE)


def test_the_error_of_a_push_says_what_to_do(member: Member) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    server: Any = SimpleNamespace(receive_weights=never)
    with pytest.raises(
        ServerUnreachableError, match=r"disconnected while it received version 7: .*Start it, then the trainer"
    ):
        asyncio.run(WeightSender([server], member.group, "cpu").send(SPECS, [("weight", LARGE)], 7))


class Library:
    """NCCL's communicator and stream, of which a call never returns until the test has ended."""

    def __init__(self, hangs_in: str) -> None:
        self.hangs_in, self.over, self.began = hangs_in, threading.Event(), threading.Event()

    def _call(self, name: str) -> None:
        self.began.set()
        if name == self.hangs_in:
            self.over.wait()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
        self._call("broadcast")

    def synchronize(self) -> None:
        self._call("synchronize")

    def destroy(self) -> None:
        self._call("destroy")


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    library = Library(request.param)
    monkeypatch.setattr(process_group, "PATIENCE", timedelta(seconds=0.1))
    monkeypatch.setattr(process_group, "_CLOSING", timedelta(seconds=0.1))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: library)
    yield library
    library.over.set()


def nccl_group(library: Library) -> Group:
    group = NcclGroup.__new__(NcclGroup)
    group._communicator = library
    return group


@pytest.mark.parametrize("library", ["broadcast", "synchronize"], indirect=True)
def test_nccl_waits_no_longer_than_gloo(library: Library) -> None:
    with pytest.raises(RuntimeError, match=r"a broadcast of weights did not end within 0.1 s"):
        nccl_group(library).broadcast(torch.zeros(1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("library", ["broadcast", "synchronize"], indirect=True)
def test_so_does_a_worker_of_vllms_nccl_engine(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is vLLM's; its communicator is a fake, which hangs as NCCL does when the trainer was stopped."""
    nccl_engine = pytest.importorskip("vllm.distributed.weight_transfer.nccl_engine")
    engine_class = nccl_engine.NCCLWeightTransferEngine
    monkeypatch.setattr(nccl_engine, "worker_init_process_group", lambda info, parallel: library)
    monkeypatch.setattr(engine_class, "init_transfer_engine", engine_class.init_transfer_engine)  # Undone at the end.
    process_group.limit_nccl_waits()
    model = SimpleNamespace(load_weights=lambda weights: None)
    engine = engine_class.__new__(engine_class)
    engine.parallel_config, engine.device, engine.model = None, torch.device("cpu"), model
    info = {"packed": False, "packed_buffer_size_bytes": 1, "packed_num_buffers": 1}
    engine.init_transfer_engine(SimpleNamespace(**info))
    monkeypatch.setattr(nccl_engine.torch.cuda, "current_stream", lambda device=None: library)
    with pytest.raises(RuntimeError, match=r"a broadcast of weights did not end within 0.1 s") as raised:
        engine.receive_weights(nccl_engine.NCCLWeightTransferUpdateInfo(["w"], ["float32"], [[4]]))
    assert process_group.is_stuck(Exception(f"Call to update_weights method failed: {raised.value}"))


@pytest.mark.parametrize("library", ["broadcast"], indirect=True)
def test_a_broadcast_ends_when_another_thread_closes_the_group(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "PATIENCE", timedelta(hours=1))
    group = nccl_group(library)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(group.broadcast, torch.zeros(1))
        library.began.wait()
        group.close()
        with pytest.raises(RuntimeError, match="the group was closed"):
            sending.result()


@pytest.mark.parametrize("library", ["destroy"], indirect=True)
def test_leaving_a_group_that_hangs_ends(library: Library) -> None:
    group = nccl_group(library)
    group.broadcast(torch.zeros(1))
    group.close()


def test_an_error_of_the_library_is_raised_as_it_is() -> None:
    class Broken(Group):
        def _broadcast(self, tensor: Any) -> None:
            raise ValueError("no such dtype")

        def _leave(self) -> None:
            pass

    with pytest.raises(ValueError, match="no such dtype"):
        Broken().broadcast(None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_server_whose_workers_hang_in_a_transfer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentic_opd.serving import transfer

    sent = list[tuple[int, int]]()
    monkeypatch.setattr(transfer, "_LIMIT_S", 0.01)
    monkeypatch.setattr(transfer.os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(transfer.os, "getpid", lambda: 4711)

    async def hang() -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(transfer._within_limit(hang(), "receiving weights"))
    assert sent == [(4711, signal.SIGTERM)]
