"""The process group through which a trainer (rank 0) sends whole weights to the workers of its servers.

The backend is NCCL between GPUs, by vLLM's own weight transfer, and gloo between CPUs.
"""

import socket
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any, Literal

Backend = Literal["nccl", "gloo"]
PATIENCE = timedelta(seconds=120)
"""Timeout of joining a gloo group and of each of its broadcasts."""


class GlooGroup:
    """A gloo group on one network address, independent of torch's default process group."""

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        """Join the group as `rank`, and wait until all members have joined; rank 0 listens at this address only."""
        from torch import distributed as torch_distributed

        distributed: Any = torch_distributed
        given: dict[str, Any] = {}
        if rank == 0:
            listener = socket.create_server((address, port), family=_family(address))
            given = {"master_listen_fd": listener.detach(), "use_libuv": False}
        store = distributed.TCPStore(address, port, world_size, rank == 0, PATIENCE, **given)
        options = distributed.ProcessGroupGloo._Options()
        own = address if rank == 0 else address_towards(address)
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=own)]
        options._timeout = PATIENCE
        self._group: Any = distributed.ProcessGroupGloo(store, rank, world_size, options)

    def broadcast(self, tensor: Any) -> None:
        """Send the tensor if this is rank 0, else receive into it."""
        from torch import distributed

        options = distributed.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()

    def close(self) -> None:
        self._group = None


class NcclGroup:
    """The trainer's handle of vLLM's NCCL group."""

    def __init__(self, address: str, port: int, world_size: int) -> None:
        """Join as rank 0, and wait until all members have joined; arguments as `GlooGroup`."""
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        where = {"master_address": address, "master_port": port, "world_size": world_size}
        self._communicator: Any = trainer_init(where)

    def broadcast(self, tensor: Any) -> None:
        import torch

        stream = torch.cuda.current_stream()
        self._communicator.broadcast(tensor, src=0, stream=stream)
        stream.synchronize()

    def close(self) -> None:
        self._communicator.destroy()


Group = GlooGroup | NcclGroup
"""A member's handle of the group; the trainer has rank 0."""


def trainer_end(backend: Backend, address: str, port: int, world_size: int) -> Group:
    """Open the group as rank 0, and wait until all members have joined."""
    if backend == "gloo":
        return GlooGroup(address, port, 0, world_size)
    return NcclGroup(address, port, world_size)


def register_gloo() -> None:
    """Register `gloo_transfer` with vLLM, which calls this function in each process as a general plugin."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with suppress(ValueError):  # The name is registered already.
        WeightTransferEngineFactory.register_engine(
            "gloo", "agentic_opd.serving.gloo_transfer", "GlooWeightTransferEngine"
        )


def address_towards(host: str) -> str:
    """Return this machine's address on the route to `host`."""
    found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    with closing(socket.socket(found[0][0], socket.SOCK_DGRAM)) as probe:
        probe.connect(found[0][4])  # Connecting a datagram socket sends nothing.
        return str(probe.getsockname()[0])


def free_port(address: str) -> int:
    """Return a port of `address` that is free now."""
    with closing(socket.create_server((address, 0), family=_family(address))) as probe:
        return int(probe.getsockname()[1])


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
