"""A process group of a trainer and the workers of its servers, through which whole weights go from the first to the
others: NCCL between GPUs, as vLLM's own weight transfer has it, and gloo between CPUs.
"""

import socket
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any, Literal, Protocol

Backend = Literal["nccl", "gloo"]
PATIENCE = timedelta(seconds=120)
"""How long one end waits for another."""


class Group(Protocol):
    """One end of the group; the trainer's has rank 0."""

    def broadcast(self, tensor: Any) -> None:
        """Send the tensor from rank 0, or fill it with what rank 0 sends."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class GlooGroup:
    """gloo over sockets of one address, apart from torch's own group of the process."""

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        """Wait until all are there.

        Args:
            address: Where rank 0 listens; it listens nowhere else.
            port: The port there.
            rank: Of this end.
            world_size: Ends in all.
        """
        from torch import distributed as torch_distributed

        distributed: Any = torch_distributed
        given: dict[str, Any] = {}
        if rank == 0:
            listener = socket.create_server((address, port), family=_family(address))
            given = {"master_listen_fd": listener.detach(), "use_libuv": False}
        store = distributed.TCPStore(address, port, world_size, rank == 0, PATIENCE, **given)
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=_own_address(address, rank))]
        options._timeout = PATIENCE
        self._group: Any = distributed.ProcessGroupGloo(store, rank, world_size, options)

    def broadcast(self, tensor: Any) -> None:
        """See `Group.broadcast`."""
        from torch import distributed

        options = distributed.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()

    def close(self) -> None:
        """See `Group.close`."""
        self._group = None


class NcclGroup:
    """The trainer's end of vLLM's own group."""

    def __init__(self, address: str, port: int, world_size: int) -> None:
        """Wait until all are there; see `GlooGroup`."""
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        where = {"master_address": address, "master_port": port, "world_size": world_size}
        self._communicator: Any = trainer_init(where)

    def broadcast(self, tensor: Any) -> None:
        """See `Group.broadcast`."""
        import torch

        stream = torch.cuda.current_stream()
        self._communicator.broadcast(tensor, src=0, stream=stream)
        stream.synchronize()

    def close(self) -> None:
        """See `Group.close`."""
        self._communicator.destroy()


def trainer_end(backend: Backend, address: str, port: int, world_size: int) -> Group:
    """Open rank 0, and wait until all are there."""
    if backend == "gloo":
        return GlooGroup(address, port, 0, world_size)
    return NcclGroup(address, port, world_size)


def register_gloo() -> None:
    """Let vLLM's workers find `gloo_transfer`; vLLM calls it in each process, as one of its general plugins."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with suppress(ValueError):  # It is there already.
        WeightTransferEngineFactory.register_engine(
            "gloo", "agentic_opd.serving.gloo_transfer", "GlooWeightTransferEngine"
        )


def address_towards(host: str) -> str:
    """The address of this machine that `host` is reached from."""
    found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    with closing(socket.socket(found[0][0], socket.SOCK_DGRAM)) as probe:
        probe.connect(found[0][4])  # Of a datagram socket this sends nothing.
        return str(probe.getsockname()[0])


def free_port(address: str) -> int:
    """A port that nobody listens at."""
    with closing(socket.create_server((address, 0), family=_family(address))) as probe:
        return int(probe.getsockname()[1])


def _own_address(address: str, rank: int) -> str:
    return address if rank == 0 else address_towards(address)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
