"""When a step may begin (`train_when`): at any time, at hours of the day, or while the servers are idle (I/O)."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime, time, timedelta
from typing import NamedTuple

from agentic_opd.core.errors import ServerMismatchError, ServerUnreachableError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.text import text_lines
from agentic_opd.training.config import TrainerConfig, read_hours

logger = logging.getLogger(__name__)

_LOOK_S = 2.0
"""Seconds between two looks at the clock and the servers while steps wait."""
_IN_PROGRESS = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_FINISHED = "vllm:request_success_total"
"""vLLM's count of requests, of which those that end between two looks are seen too."""


class ServerRequests(NamedTuple):
    """Requests of a server, from its `/metrics`."""

    in_progress: float
    finished: float


def local_time() -> datetime:
    return datetime.now().astimezone()


class TrainWhen:
    """Holds steps back until one may begin; only the trainer's first process does."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        is_first: bool = True,
        now: Callable[[], datetime] = local_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Create clients of the servers to be watched; no request is sent yet."""
        self._when, self._idle_s = config.train_when, config.idle_s
        self._now, self._sleep = now, sleep
        self._last_busy = now()
        self._looked_at: datetime | None = None
        """Time of the last look at which a step might begin."""
        self._finished: list[float] | None = None
        """Count of finished requests of each server at the last look; None: not known."""
        secret = config.vllm_api_key
        key = secret.get_secret_value() if secret else os.environ.get("VLLM_API_KEY")
        watched = config.vllm_urls if is_first and self._when == "idle" else []
        self._servers = [JsonClient(url, key, retry_s=0.0) for url in watched]

    async def until_open(self) -> None:
        """Return once a step may begin; the log has the reason of a wait once.

        Raises:
            ServerMismatchError: a server does not count its requests.
            ServerRequestError: a server refused the request.
        """
        logged = None
        if self._looked_at is not None and self._now() - self._looked_at < timedelta(seconds=_LOOK_S):
            return
        while (obstacle := await self._obstacle()) is not None:
            if obstacle != logged:
                logger.info("training waits (train_when %s): %s", self._when, obstacle)
                logged = obstacle
            await self._sleep(_LOOK_S)
        self._looked_at = self._now()
        if logged is not None:
            logger.info("training continues")

    async def _obstacle(self) -> str | None:
        """Return why no step may begin now, in the same words for as long as the reason is the same."""
        if self._when == "always":
            return None
        if self._when != "idle":
            begin, end = read_hours(self._when)
            is_open = is_within(self._now().time(), begin, end)
            return None if is_open else f"steps begin from {begin:%H:%M} to {end:%H:%M} local time"
        if (unreachable := await self._look()) is not None:
            return f"{unreachable} does not answer, so it may have requests"
        if self._now() - self._last_busy < timedelta(seconds=self._idle_s):
            return f"until the servers have had no request for {self._idle_s:g} s"
        return None

    @asynccontextmanager
    async def own_requests(self) -> AsyncGenerator[None]:
        """Do not count the trainer's own requests, which it sends in this block.

        Requests of others that begin and end within the block are not counted either.
        """
        if self._servers:
            await self._look()
        yield
        if self._servers:
            await self._look(is_after_own=True)

    async def _look(self, *, is_after_own: bool = False) -> str | None:
        """Note whether there were requests since the last look; return a server that does not answer, if any."""
        answers: list[ServerRequests] = []
        for server in self._servers:
            try:
                answers.append(await requests_of(server))
            except ServerUnreachableError:
                self._finished, self._last_busy = None, self._now()
                return server.base_url
        finished = [requests.finished for requests in answers]
        is_changed = finished != self._finished and not is_after_own
        if is_changed or any(requests.in_progress for requests in answers):
            self._last_busy = self._now()
        self._finished = finished
        return None

    async def close(self) -> None:
        for server in self._servers:
            await server.close()


async def requests_of(server: JsonClient) -> ServerRequests:
    """Read a server's requests in progress and the number of finished ones.

    Raises:
        ServerMismatchError: the server does not count them.
        ServerUnreachableError: no answer.
        ServerRequestError: the server refused the request.
    """
    try:
        totals = read_counts(await server.get_text("/metrics"))
    except ValueError as error:
        raise ServerMismatchError(f"{server.base_url}/metrics has a count that is no number: {error}") from error
    if missing := [name for name in (*_IN_PROGRESS, _FINISHED) if name not in totals]:
        raise ServerMismatchError(
            f"{server.base_url}/metrics has no {' and no '.join(missing)}, which train_when idle needs to count "
            "requests: start vLLM without --disable-log-stats, or set train_when to always or to hours such as "
            "22:00-06:00"
        )
    return ServerRequests(sum(totals[name] for name in _IN_PROGRESS), totals[_FINISHED])


def read_counts(text: str) -> dict[str, float]:
    """Return vLLM's counts of requests in Prometheus' text format by name, summed over their labels.

    Raises:
        ValueError: a count is not a number.
    """
    totals: dict[str, float] = {}
    for line in text_lines(text):
        name = line.partition("{")[0].partition(" ")[0]
        if name in (*_IN_PROGRESS, _FINISHED):
            totals[name] = totals.get(name, 0.0) + float(line.rpartition(" ")[2])
    return totals


def is_within(now: time, begin: time, end: time) -> bool:
    """Return whether a time of day is from `begin` until before `end`, the next day's if that is earlier."""
    return begin <= now < end if begin < end else now >= begin or now < end
