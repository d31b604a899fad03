"""Adaptive concurrency and timeout for requests to a slow server.

Requests in one batch finish late and at about the same time. A request is therefore cancelled only if the server has
answered no request for `patience_s`. It is then retried with lower concurrency.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

_NARROWED_BY = 4


class StalledError(Exception):
    """The server answered no request for `patience_s`, even with a concurrency of 1."""


class Pace:
    """Runs at most `limit` concurrent requests, and lowers `limit` if the server is too slow.

    If the server does not answer even a single request, one request per `patience_s` is sent; all others fail at once.
    `server` and `setting`, the name of the setting of `limit`, are for the log.
    """

    def __init__(self, server: str, limit: int, patience_s: float, setting: str) -> None:
        self.limit, self.patience_s = limit, patience_s
        self._server, self._setting = server, setting
        self._under_way = 0
        self._changed = asyncio.Condition()
        self._answered_at = self._stalled_at = float("-inf")

    async def ask(self, request: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        """Make a request; retry it with lower concurrency if the server is too slow.

        Raises:
            StalledError: the server does not answer, even with a concurrency of 1.
        """
        while True:
            async with self._slot() as limit:
                try:
                    return await self._answer(request)
                except StalledError:
                    if limit == 1:
                        self._stalled_at = time.monotonic()
                        raise
                    self._narrow(max(1, limit // _NARROWED_BY))

    @asynccontextmanager
    async def _slot(self) -> AsyncGenerator[int]:
        """Wait for a free slot, and yield the limit at that time."""
        async with self._changed:
            try:
                await self._changed.wait_for(lambda: self._under_way < self.limit)
            except asyncio.CancelledError:
                self._changed.notify()  # This one may have been woken for a free slot.
                raise
            if time.monotonic() < self._stalled_at + self.patience_s:
                self._changed.notify()
                raise StalledError
            self._under_way += 1
        try:
            yield self.limit
        finally:
            self._under_way -= 1
            async with self._changed:
                self._changed.notify()  # Not all: thousands may wait, and each would look at the limit.

    async def _answer(self, request: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        started = time.monotonic()
        asked: asyncio.Future[Any] = asyncio.ensure_future(request())
        try:
            while not asked.done():
                left = max(started, self._answered_at) + self.patience_s - time.monotonic()
                if left <= 0:
                    raise StalledError
                await asyncio.wait({asked}, timeout=left)
        finally:
            if not asked.done():
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
        self._answered_at, self._stalled_at = time.monotonic(), float("-inf")
        return asked.result()

    def _narrow(self, limit: int) -> None:
        if limit < self.limit:
            logger.warning(
                "%s answered none of %d requests within %g s; it is sent %d at a time from now on (%s)",
                *(self._server, self.limit, self.patience_s, limit, self._setting),
            )
            self.limit = limit
