"""Deliver written groups to the trajectory API, at least once, under one `group_id` (I/O).

The journal records which groups were sent; a restarted gateway sends the others. The API builds batches only from items
of the registered group size: see `outbox.parts`.
"""

import asyncio
import logging
from collections import deque
from contextlib import suppress
from functools import partial

from agentic_opd.atropos.api import EnvDescription, TrajectoryApi
from agentic_opd.atropos.outbox import Membership, Outbox, SentCounts
from agentic_opd.core.errors import ConfigError, OPDError, OutputError, ServerError
from agentic_opd.gateway.journal import Journal
from agentic_opd.gateway.telemetry import Telemetry

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
"""Maximum seconds between two status requests to the API, which may have been restarted in between."""
_FAREWELL_S = 2.0


class Delivery:
    """A background task that sends the groups of one gateway to one API."""

    def __init__(self, url: str, env: EnvDescription, journal: Journal, telemetry: Telemetry) -> None:
        """Start with the unsent groups of the journal; the API need not be reachable yet."""
        self._journal, self._telemetry = journal, telemetry
        self._waiting = deque(journal.unsent_groups())
        telemetry.unsent.set(len(self._waiting))
        self._news = asyncio.Event()
        self._api = TrajectoryApi(url)
        self._member = Membership(self._api, env)
        self._counts = SentCounts()
        self._outbox = Outbox(self._member, self._counts)
        self._queued = self._new_apis = 0
        self._sending = asyncio.create_task(self._send())
        self._sending.add_done_callback(_ended)

    @property
    def unsent(self) -> int:
        """Number of groups that the API has not accepted yet."""
        return len(self._waiting)

    @property
    def queued(self) -> int:
        """Number of groups of this gateway in the API's queue when it was last asked."""
        return self._queued

    def add(self, group_id: str) -> None:
        self._waiting.append(group_id)
        self._telemetry.unsent.set(len(self._waiting))
        self._news.set()

    async def close(self) -> None:
        """Stop; the next gateway sends the groups that are still unsent."""
        self._sending.cancel()
        await asyncio.gather(self._sending, return_exceptions=True)
        with suppress(OPDError, TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                await self._member.leave()
        await self._api.close()

    async def _send(self) -> None:
        while True:
            await self._member.ensure()
            while self._waiting:
                await self._deliver(self._waiting[0])
                self._waiting.popleft()
                self._telemetry.unsent.set(len(self._waiting))
            status = await self._member.status()
            if self._member.new_apis != self._new_apis:
                self._new_apis = self._member.new_apis
                self._telemetry.lost.inc(self._queued)
                logger.warning("the trajectory API was started again: about %d groups of it are lost", self._queued)
            self._queued = status.self_queue_size
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._news.wait()

    async def _deliver(self, group_id: str) -> None:
        group = await self._journal.group(group_id)
        if group is None:  # Its session was deleted from the journal.
            return
        self._outbox.add(group)
        await self._outbox.send_all()
        await self._mark(group_id)
        self._tell()

    async def _mark(self, group_id: str) -> None:
        """Mark a group as sent, as soon as the disk takes it."""
        while True:
            try:
                return await self._journal.run(partial(self._journal.sent_group, group_id))
            except OutputError as error:
                logger.warning("the next group is sent when this one is marked as sent: %s", error)
            await asyncio.sleep(_LOOK_S)

    def _tell(self) -> None:
        """Add the counts of sent and skipped items since the last call to the metrics."""
        self._telemetry.sent.inc(self._counts.sent)
        for reason, count in self._counts.skipped.items():
            self._telemetry.skipped.labels(reason).inc(count)
        self._counts.sent = 0
        self._counts.skipped.clear()


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        level = logging.ERROR if isinstance(error, ConfigError | ServerError) else logging.CRITICAL
        logger.log(level, "no more groups are sent until the gateway is started again; they wait: %s", error)
