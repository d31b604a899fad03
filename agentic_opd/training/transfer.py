"""Send whole weights to servers without files: the trainer's end of vLLM's weight transfer (I/O)."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import ConfigError, ServerUnreachableError
from agentic_opd.plugin.client import PluginClient
from agentic_opd.serving.process_group import Backend, Group, address_towards, free_port, trainer_end


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

    async def send(self, weights: Mapping[str, Tensor], version: int) -> int:
        """Send the weights to all servers as `version`; return the bytes that each server received.

        Raises:
            ServerError: a server failed to receive them.
        """
        tensors = list(weights.values())
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        shapes = [list(tensor.shape) for tensor in tensors]
        received = [server.receive_weights(list(weights), dtypes, shapes, version) for server in self.servers]
        try:
            await gather_all([asyncio.to_thread(self._broadcast, tensors), *received])
        except RuntimeError as error:
            raise ServerUnreachableError(
                f"a server left while it was sent version {version}: {error}. Start it, then the trainer with resume."
            ) from error
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _broadcast(self, weights: Sequence[Tensor]) -> None:
        for tensor in weights:
            self.group.broadcast(tensor.detach().to(self.device).contiguous())
