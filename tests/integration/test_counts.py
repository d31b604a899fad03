"""One run in which the trainer, run-api and vLLM are each killed outright: it ends, and every group is counted."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from agentic_opd.serving.local import LocalServer, free_port, stop

from .conftest import StartVllm
from .recording_proxy import Exchange, RecordingProxy, recording_proxy
from .test_serve import serving
from .test_serve_api import handed_out, sent
from .test_trainer import ROOT, metrics, trainer
from .trajectory import trajectory_api

pytestmark = pytest.mark.vllm

STEPS, GROUPS = 6, 2
"""Steps of the whole run, and groups of 4 rollouts a batch."""


@contextmanager
def training(folder: Path, proxy: RecordingProxy, vllm_url: str, *changes: str) -> Generator[subprocess.Popen[bytes]]:
    argv = trainer(folder, proxy, vllm_url, f"--total_steps={STEPS}", *changes)  # type: ignore[arg-type]
    with (folder / "trainer.log").open("ab") as output:
        process = subprocess.Popen(argv, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        stop(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def trained(folder: Path) -> int:
    """Groups in all steps that were taken, those that a kill made undone included."""
    return sum(int(row["groups"]) for row in metrics(folder)) if (folder / "train" / "metrics.jsonl").exists() else 0


def until(holds: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 180
    while not holds():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def accepted(exchanges: Sequence[Exchange]) -> set[str]:
    ids = sent(exchanges)
    assert len(set(ids)) == len(ids)
    return set(ids)


def test_counts_agree_when_everything_was_killed_once(start_vllm: StartVllm, tmp_path: Path) -> None:
    weights, log = tmp_path / "weights", tmp_path / "trainer.log"
    weights.mkdir()
    api_port, vllm_port = free_port(), free_port()
    vllm_url = f"http://127.0.0.1:{vllm_port}"

    def start() -> AbstractContextManager[LocalServer]:
        return start_vllm("--weights-root", str(weights), port=vllm_port)

    with ExitStack() as stack:
        proxy = stack.enter_context(recording_proxy(f"http://127.0.0.1:{api_port}"))
        vllm = stack.enter_context(start())
        env = stack.enter_context(serving(proxy.url, vllm_url, tmp_path, "--env.max_batches_offpolicy", "1"))
        with trajectory_api(tmp_path / "first.log", api_port) as api:
            with training(tmp_path, proxy, vllm_url) as first:
                until(lambda: trained(tmp_path) >= 2 * GROUPS, first, log)
                until(lambda: len(handed_out(proxy.exchanges)) > trained(tmp_path), first, log)
                kill(first)
            in_hand = len(handed_out(proxy.exchanges)) - trained(tmp_path)
            second = stack.enter_context(training(tmp_path, proxy, vllm_url, "--resume"))
            until(lambda: trained(tmp_path) >= 3 * GROUPS, second, log)
            api.kill()
            before = proxy.settled()
            assert api.received() == len(accepted(before))
        with trajectory_api(tmp_path / "second.log", api_port) as api:
            until(lambda: trained(tmp_path) >= 4 * GROUPS, second, log)
            vllm.kill()
            stack.enter_context(start())
            assert second.wait(180) == 0, log.read_text()
            assert env.process.wait(60) == 0, env.said()
            left = api.left_over()
            after = proxy.exchanges[len(before) :]
            assert api.received() == len(accepted(after))
    assert [row["step"] for row in metrics(tmp_path)][-1] == STEPS
    assert metrics(tmp_path)[-1]["duplicates"] == 0
    handed = handed_out(before) + handed_out(after)
    assert len(set(handed)) == len(handed)
    lost = accepted(before) - set(handed)
    assert in_hand == GROUPS
    assert trained(tmp_path) == len(handed) - in_hand
    assert len(accepted(after)) == len(handed_out(after)) + left
    everything = len(accepted(before) | accepted(after))
    assert everything == trained(tmp_path) + in_hand + len(lost) + left
    assert f"{everything} groups sent" in env.said()
    assert "0 failed, 0 unsent" in env.said()
