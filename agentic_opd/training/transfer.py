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
from agentic_opd.core.http import JsonClient
from agentic_opd.core.server_info import ServerInfo
from agentic_opd.serving.process_group import Backend, Group, address_towards, free_port, trainer_end


@dataclass(frozen=True, slots=True)
class WeightSender:
    """The process group of this process (rank 0) and the workers of all servers."""

    clients: Sequence[JsonClient]
    group: Group
    device: str

    @classmethod
    async def joined(
        cls, backend: Backend, clients: Sequence[JsonClient], infos: Sequence[ServerInfo], device: str
    ) -> "WeightSender":
        """Open the group and let all servers join.

        Args:
            backend: The group's backend.
            clients: One client a server.
            infos: The info of each server, in the same order.
            device: The device that weights are sent from.

        Raises:
            ConfigError: a server was started without `--weight-transfer` of this backend.
            ServerError: a server can't join, or can't reach this process.
        """
        for client, info in zip(clients, infos, strict=True):
            if info.weight_transfer != backend:
                raise ConfigError(
                    f"weight_transfer is {backend}, and {client.base_url} takes weights from "
                    f"{info.weight_transfer or 'files'}: restart it with scripts/serve_vllm --weight-transfer {backend}"
                )
        address = address_towards(urlsplit(clients[0].base_url).hostname or "127.0.0.1")
        offsets = list(accumulate((info.workers for info in infos), initial=1))
        port, world_size = free_port(address), offsets[-1]
        where = {"address": address, "port": port, "world_size": world_size}
        joins: list[Awaitable[Any]] = [
            client.post("/v1/opd/join_transfer", {**where, "rank_offset": offset})
            for client, offset in zip(clients, offsets, strict=False)
        ]
        opened = asyncio.to_thread(trainer_end, backend, address, port, world_size)
        try:
            group, *_ = await gather_all([opened, *joins])
        except RuntimeError as error:  # torch raises it if a peer does not arrive or leaves.
            raise ServerUnreachableError(
                f"the servers did not join the trainer at {address}:{port}: {error}"
            ) from error
        return cls(clients, group, device)

    async def send(self, weights: Mapping[str, Tensor], version: int) -> int:
        """Send the weights to all servers as `version`.

        Returns:
            Bytes that each server received.

        Raises:
            ServerError: a server failed to receive them.
        """
        body = {
            "names": list(weights),
            "dtypes": [str(one.dtype).removeprefix("torch.") for one in weights.values()],
            "shapes": [list(one.shape) for one in weights.values()],
            "version": version,
        }
        received: list[Awaitable[Any]] = [client.post("/v1/opd/receive_weights", body) for client in self.clients]
        try:
            await gather_all([asyncio.to_thread(self._broadcast, list(weights.values())), *received])
        except RuntimeError as error:
            raise ServerUnreachableError(
                f"a server left while it was sent version {version}: {error}. Start it, then the trainer with resume."
            ) from error
        return sum(one.numel() * one.element_size() for one in weights.values())

    def _broadcast(self, weights: Sequence[Tensor]) -> None:
        for one in weights:
            self.group.broadcast(one.detach().to(self.device).contiguous())
