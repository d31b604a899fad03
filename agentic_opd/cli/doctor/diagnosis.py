"""Checks and their diagnoses. An error raised by a check is a failure; checks that depend on it are skipped."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from pydantic import SecretStr

from agentic_opd.core.errors import OPDError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.server_info import ServerInfo
from agentic_opd.distill.connect import PolicyEndpoint
from agentic_opd.env.config import AgenticOPDEnvConfig
from agentic_opd.rollout.chat import Chat

PATIENCE_S = 60.0
"""Time limit of one check in seconds, including the download of tasks from the hub."""

_RETRY_S = 2.0
_TIMEOUT_S = 30.0
"""Time limits in seconds, shorter than a run's, for a quick diagnosis."""


@dataclass
class Setup:
    """The settings, and the results of checks that later checks use: `infos` has one entry per client."""

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
        """Seconds to keep asking a server that does not answer."""
        return min(self.config.server_retry_s, _RETRY_S)

    def client(self, url: str, key: str | None = None) -> JsonClient:
        """Return a client with short time limits."""
        return JsonClient(url, key, timeout_s=_TIMEOUT_S, retry_s=self.retry_s)

    @property
    def policy(self) -> PolicyEndpoint:
        """The first of the policy's servers; its model is the configured one until the server has reported its own."""
        key = SecretStr(self.servers[0].api_key) if self.servers[0].api_key else None
        model = self.infos[0].model if self.infos else self.servers[0].model_name
        return PolicyEndpoint(f"{self.clients[0].base_url}/v1", model, key)

    def known_chat(self) -> Chat:
        """Return the chat created by the renderer's check."""
        assert self.chat is not None
        return self.chat

    async def close(self) -> None:
        """Close all connections."""
        for client in self.clients:
            await client.close()


class Status(StrEnum):
    """Result of a check."""

    OK = "ok"
    WARNING = "warning"
    """A run would start, but something needs attention."""
    FAILED = "failed"
    """A run would not start, or would be useless."""
    SKIPPED = "skipped"
    """Not checked: a check that it needs failed, or the settings do not use the feature."""


class Note(NamedTuple):
    """Result of a check that did not raise."""

    text: str
    status: Status = Status.OK


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One line of output."""

    name: str
    status: Status
    text: str


@dataclass(frozen=True, slots=True)
class Check:
    """Checks one thing; may store results in the set-up for the checks that need it."""

    name: str
    run: Callable[[Setup], Awaitable[Note]]
    needs: tuple[str, ...] = ()


async def run_checks(checks: Sequence[Check], setup: Setup) -> AsyncIterator[Diagnosis]:
    """Yield the diagnosis of each check, in order."""
    missing: set[str] = set()
    for check in checks:
        lacking = [name for name in check.needs if name in missing]
        if lacking:
            diagnosis = Diagnosis(check.name, Status.SKIPPED, f"needs: {', '.join(lacking)}")
        else:
            diagnosis = await _diagnose(check, setup)
        if lacking or diagnosis.status is Status.FAILED:
            missing.add(check.name)
        yield diagnosis


async def _diagnose(check: Check, setup: Setup) -> Diagnosis:
    try:
        async with asyncio.timeout(PATIENCE_S):
            note = await check.run(setup)
    except TimeoutError:
        return Diagnosis(check.name, Status.FAILED, f"did not come to an end within {PATIENCE_S:g} s")
    except OPDError as error:
        return Diagnosis(check.name, Status.FAILED, str(error))
    return Diagnosis(check.name, note.status, note.text)
