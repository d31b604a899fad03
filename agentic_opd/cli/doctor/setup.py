"""What the checks look at, and what they find out for one another."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import SecretStr

from agentic_opd.core.http import JsonClient
from agentic_opd.core.server_info import ServerInfo
from agentic_opd.distill.connect import PolicyEndpoint
from agentic_opd.env.config import AgenticOPDEnvConfig
from agentic_opd.rollout.chat import Chat

_RETRY_S = 2.0
_TIMEOUT_S = 30.0
"""A run waits longer; a person who asks what is wrong wants to know it now."""


@dataclass
class Setup:
    """The settings, and what is known of the servers so far: `infos` has an entry for each of `clients`."""

    config: AgenticOPDEnvConfig
    servers: Sequence[Any]
    is_serve: bool = False
    """Whether a missing trajectory API is a failure."""
    clients: list[JsonClient] = field(init=False)
    infos: list[ServerInfo] = field(default_factory=list[ServerInfo])
    tokenizer: Any = None
    chat: Chat | None = None

    def __post_init__(self) -> None:
        self.clients = [self.client(server.base_url, server.api_key) for server in self.servers]

    @property
    def retry_s(self) -> float:
        """Seconds to go on asking a server that does not answer."""
        return min(self.config.server_retry_s, _RETRY_S)

    def client(self, url: str, key: str | None = None) -> JsonClient:
        """A client that soon gives up."""
        return JsonClient(url, key, timeout_s=_TIMEOUT_S, retry_s=self.retry_s)

    @property
    def policy(self) -> PolicyEndpoint:
        """The first of the policy's servers; its model is the settings' as long as it has not said its own."""
        key = SecretStr(self.servers[0].api_key) if self.servers[0].api_key else None
        model = self.infos[0].model if self.infos else self.servers[0].model_name
        return PolicyEndpoint(f"{self.clients[0].base_url}/v1", model, key)

    def known_chat(self) -> Chat:
        """The chat that the renderer's check made."""
        assert self.chat is not None
        return self.chat

    async def close(self) -> None:
        """Close connections."""
        for client in self.clients:
            await client.close()
