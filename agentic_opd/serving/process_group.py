"""The process group through which a trainer (rank 0) sends whole weights to the workers of its servers.

The backend is NCCL between GPUs, by vLLM's own weight transfer, and gloo between CPUs.
"""

import queue
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any, Literal

Backend = Literal["nccl", "gloo"]
PATIENCE = timedelta(seconds=120)
"""Time limit of joining a group, and of each broadcast."""


_CLOSING = timedelta(seconds=15)
_BROADCAST = "a broadcast of weights"
_STUCK = "did not end within"


class Group(ABC):
    """A member's handle of the group; the trainer has rank 0."""

    _results: "_Results | None" = None
    """Receives the result of the broadcast that runs, or the error that ends it."""
    _is_busy = False

    def broadcast(self, tensor: Any) -> None:
        """Send the tensor if this is rank 0, else receive into it.

        Raises:
            RuntimeError: a member has left, or did not take part within `PATIENCE`; or the group was closed.
        """
        self._results = _Results()
        self._is_busy = True

        def run() -> None:
            try:
                self._broadcast(tensor)
            finally:
                self._is_busy = False

        within(PATIENCE, _BROADCAST, run, self._results)

    @abstractmethod
    def _broadcast(self, tensor: Any) -> None:
        """Call the library's broadcast, which may block as long as a member hangs."""

    def close(self) -> None:
        """Leave the group; a broadcast that another thread waits for ends.

        The library may leave only when its broadcast has ended; that is not waited for.
        """
        if self._results is not None:
            self._results.put((None, RuntimeError("the group was closed")))
        with suppress(RuntimeError):  # A member that hangs can't be notified; the process ends without it.
            within(timedelta(0) if self._is_busy else _CLOSING, "leaving the group", self._leave)

    @abstractmethod
    def _leave(self) -> None:
        """Free the library's handle, which may block as long as a member hangs."""


_Results = queue.SimpleQueue[tuple[Any, BaseException | None]]


def within(limit: timedelta, name: str, call: Callable[[], Any], results: _Results | None = None) -> Any:
    """Return the result of a call that may block for ever in a library, which knows no time limit.

    The call runs in a daemon thread, which is abandoned after `limit` and does not keep the process from ending. An
    error put into `results` ends the wait earlier.

    Raises:
        RuntimeError: the call did not return in time.
    """
    results = results or _Results()

    def run() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:  # noqa: BLE001 (raised again by the waiting thread)
            results.put((None, error))

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        result, error = results.get(timeout=limit.total_seconds())
    except queue.Empty:
        raise RuntimeError(
            f"{name} {_STUCK} {limit.total_seconds():g} s: another member of the group hangs, was stopped or lost its "
            "network"
        ) from None
    if error is not None:
        raise error
    return result


def is_stuck(error: BaseException) -> bool:
    """Return whether `within` gave a call up, also if the error arrives as text from a worker."""
    return _STUCK in str(error)


class GlooGroup(Group):
    """A gloo group on one network address, independent of torch's default process group."""

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        """Join the group as `rank`, and wait until all members have joined; rank 0 listens at this address only."""
        from torch import distributed as torch_distributed

        distributed: Any = torch_distributed
        listening: dict[str, Any] = {}
        if rank == 0:
            listener = socket.create_server((address, port), family=_family(address))
            listening = {"master_listen_fd": listener.detach(), "use_libuv": False}
        store = distributed.TCPStore(address, port, world_size, rank == 0, PATIENCE, **listening)
        options = distributed.ProcessGroupGloo._Options()
        own_address = address if rank == 0 else address_towards(address)
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=own_address)]
        options._timeout = PATIENCE
        self._group: Any = distributed.ProcessGroupGloo(store, rank, world_size, options)

    def _broadcast(self, tensor: Any) -> None:
        from torch import distributed

        options = distributed.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()

    def _leave(self) -> None:
        self._group = None


class NcclGroup(Group):
    """The trainer's handle of vLLM's NCCL group."""

    def __init__(self, address: str, port: int, world_size: int) -> None:
        """Join as rank 0, and wait until all members have joined; arguments as `GlooGroup`."""
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        where = {"master_address": address, "master_port": port, "world_size": world_size}
        self._communicator: Any = within(PATIENCE, "joining the NCCL group", lambda: trainer_init(where))

    def _broadcast(self, tensor: Any) -> None:
        import torch

        nccl_broadcast(self._communicator, tensor, 0, torch.cuda.current_stream(tensor.device))

    def _leave(self) -> None:
        self._communicator.destroy()


def nccl_broadcast(communicator: Any, tensor: Any, src: int, stream: Any) -> None:
    """Broadcast by vLLM's communicator, and wait until the tensor was sent or has arrived."""
    import torch

    with torch.cuda.device(tensor.device):  # A new thread has the first device.
        communicator.broadcast(tensor, src=src, stream=stream)
        stream.synchronize()


class LimitedCommunicator:
    """A worker's communicator of vLLM, of which each broadcast has the same time limit as the trainer's."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator

    def broadcast(self, tensor: Any, src: int, stream: Any) -> None:
        """Send or receive a tensor; raises as `Group.broadcast`."""
        within(PATIENCE, _BROADCAST, lambda: nccl_broadcast(self._communicator, tensor, src, stream))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)


def limit_nccl_waits() -> None:
    """Give the waits of vLLM's NCCL engine, which has no time limits, those of this module."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    join: Any = NCCLWeightTransferEngine.init_transfer_engine
    if hasattr(join, "__wrapped__"):
        return

    def limited(self: Any, init_info: Any) -> None:
        join(self, init_info)
        self.model_update_group = LimitedCommunicator(self.model_update_group)

    limited.__wrapped__ = join  # type: ignore[attr-defined]
    NCCLWeightTransferEngine.init_transfer_engine = limited


def trainer_end(backend: Backend, address: str, port: int, world_size: int) -> Group:
    """Open the group as rank 0, and wait until all members have joined."""
    if backend == "gloo":
        return GlooGroup(address, port, 0, world_size)
    return NcclGroup(address, port, world_size)


def address_towards(host: str) -> str:
    """Return this machine's address on the route to `host`."""
    family, _, _, _, remote = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        probe.connect(remote)  # Connecting a datagram socket sends nothing.
        return str(probe.getsockname()[0])


def free_port(address: str) -> int:
    """Return a port of `address` that is free now."""
    with closing(socket.create_server((address, 0), family=_family(address))) as probe:
        return int(probe.getsockname()[1])


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
