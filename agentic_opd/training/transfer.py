"""Send whole weights to servers without files: the trainer's end of vLLM's weight transfer (I/O)."""

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import ConfigError, ServerUnreachableError
from agentic_opd.plugin.client import PluginClient
from agentic_opd.serving.process_group import Backend, Group, address_towards, free_port, trainer_end
from agentic_opd.training.model import TensorSpec


@dataclass(frozen=True, slots=True)
class WeightSender:
    """The process group of this process (rank 0) and the workers of all servers."""

    servers: Sequence[PluginClient]
    group: Group
    device: str

    @classmethod
    async def joined(cls, backend: Backend, servers: Sequence[PluginClient], device: str) -> "WeightSender":
        """Open the group and let all servers join; `device` is the one that weights are sent from.

        Raises:
            ConfigError: a server was started without `--weight-transfer` of this backend.
            ServerError: a server can't join, or can't reach this process.
        """
        for server in servers:
            if server.info.weight_transfer != backend:
                raise ConfigError(
                    f"weight_transfer is {backend}, and {server.url} takes weights from "
                    f"{server.info.weight_transfer or 'files'}: restart it with scripts/serve_vllm --weight-transfer "
                    f"{backend}"
                )
        address = address_towards(urlsplit(servers[0].url).hostname or "127.0.0.1")
        offsets = list(accumulate((server.info.workers for server in servers), initial=1))
        port, world_size = free_port(address), offsets[-1]
        joins: list[Awaitable[Any]] = [
            server.join_transfer(address, port, world_size, offset)
            for server, offset in zip(servers, offsets, strict=False)
        ]
        opened = asyncio.to_thread(trainer_end, backend, address, port, world_size)
        try:
            group, *_ = await gather_all([opened, *joins])
        except RuntimeError as error:  # torch raises it if a peer does not arrive or leaves.
            raise ServerUnreachableError(
                f"the servers did not join the trainer at {address}:{port}: {error}"
            ) from error
        return cls(servers, group, device)

    async def send(self, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Send the tensors, in the order of `specs`, to all servers as `version`; return the bytes that each received.

        Each tensor is taken from the iterable when the previous one was sent.

        Raises:
            ServerError: a server failed to receive them.
        """
        dtypes = [str(spec.dtype).removeprefix("torch.") for spec in specs.values()]
        shapes = [list(spec.shape) for spec in specs.values()]
        received = [server.receive_weights(list(specs), dtypes, shapes, version) for server in self.servers]
        is_sent = False
        try:
            await gather_all([asyncio.to_thread(self._broadcast, specs, tensors), *received])
            is_sent = True
        except RuntimeError as error:
            raise ServerUnreachableError(
                f"a server disconnected while it received version {version}: {error}. Start it, then the trainer with "
                "resume."
            ) from error
        finally:
            if not is_sent:
                self.group.close()  # The other servers still wait for a tensor.
        return sum(spec.size_bytes for spec in specs.values())

    def _broadcast(self, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> None:
        for expected, (name, tensor) in zip(specs, tensors, strict=True):
            assert name == expected, f"{name} is sent in place of {expected}"
            self.group.broadcast(tensor.detach().to(self.device).contiguous())
