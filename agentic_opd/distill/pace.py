"""Adaptive concurrency, timeout and pauses for requests to a slow or limited server.

Requests in one batch finish late and at about the same time. A request is therefore cancelled only if the server has
answered no request for `patience_s`. It is then retried with lower concurrency.

If the server refuses a request because of its rate limit, all requests wait for the pause that it asks for. Then a
single request is sent, and after its answer the others, at most half as many at a time as before. Each round of answers
adds one, up to the limit of the settings.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from agentic_opd.core.errors import RateLimitError
from agentic_opd.core.rate_limits import LONGEST_PAUSE_S

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

_sleep = asyncio.sleep

_NARROWED_BY = 4
_BACKOFF_S = (1.0, 60.0)
"""First and longest pause after a rate limit without a pause of its own; each doubles the previous one."""
_LONGEST_LIMIT_S = 2 * LONGEST_PAUSE_S
"""Seconds of a rate limit without any answer after which requests fail."""
_LOGGED_PAUSE_S = 30.0
"""Shortest pause that is logged if the concurrency does not reach a new low."""


class StalledError(Exception):
    """The server answered no request for `patience_s`, even with a concurrency of 1."""


class Pace:
    """Runs at most `limit` concurrent requests, and lowers `limit` if the server is too slow or limits its requests.

    If the server does not answer even a single request, one request per `patience_s` is sent; all others fail at once.
    So they do if its rate limit lasts longer than `_LONGEST_LIMIT_S`: one request is sent after each pause.
    `server` and `setting`, the name of the setting of `limit`, are for the log.
    """

    def __init__(self, server: str, limit: int, patience_s: float, setting: str) -> None:
        self.limit, self.patience_s = limit, patience_s
        self._server, self._setting = server, setting
        self._widest = self._lowest = limit
        self._under_way = 0
        self._changed = asyncio.Condition()
        self._answered_at = self._stalled_at = float("-inf")
        self._answers_since_change = 0
        self._pause: asyncio.Task[None] | None = None
        self._resumes_at = self._limited_since = float("-inf")
        self._backoff_s = _BACKOFF_S[0]
        self._is_limited = self._is_probing = False
        self._given_up: RateLimitError | None = None

    async def ask(self, request: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        """Make a request; retry it with lower concurrency if the server is too slow, and after a rate limit's pause.

        Raises:
            StalledError: the server does not answer, even with a concurrency of 1.
            RateLimitError: the server's rate limit did not end.
        """
        while True:
            async with self._slot() as limit:
                try:
                    answer = await self._answer(request)
                except StalledError:
                    if limit == 1:
                        self._stalled_at = time.monotonic()
                        raise
                    self._narrow(max(1, limit // _NARROWED_BY))
                    continue
                except RateLimitError as error:
                    await self._begin_pause(error)
                    if self._given_up is not None:
                        raise
                    continue
                except Exception:
                    await self._end_limit()
                    raise
                await self._end_limit()
                await self._widen()
                return answer

    async def close(self) -> None:
        """End a pause; requests that wait for its end fail."""
        if self._pause is None:
            return
        self._pause.cancel()
        await asyncio.gather(self._pause, return_exceptions=True)
        self._given_up = RateLimitError(f"{self._server} was closed in a pause of its rate limit")
        async with self._changed:
            self._changed.notify_all()

    @asynccontextmanager
    async def _slot(self) -> AsyncGenerator[int]:
        """Wait for a free slot, and yield the limit at that time."""
        async with self._changed:
            try:
                await self._changed.wait_for(lambda: self._given_up is not None or self._under_way < self._allowed)
            except asyncio.CancelledError:
                self._changed.notify()  # This one may have been woken for a free slot.
                raise
            if self._given_up is not None:
                raise RateLimitError(str(self._given_up), self._given_up.pause_s)
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

    @property
    def _allowed(self) -> int:
        """Number of requests that may be under way now."""
        if self._pause is not None:
            return 0
        return 1 if self._is_probing else self.limit

    async def _answer(self, request: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        started = time.monotonic()
        task: asyncio.Future[Any] = asyncio.ensure_future(request())
        try:
            while not task.done():
                left = max(started, self._answered_at) + self.patience_s - time.monotonic()
                if left <= 0:
                    raise StalledError
                await asyncio.wait({task}, timeout=left)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._answered_at, self._stalled_at = time.monotonic(), float("-inf")
        return task.result()

    def _narrow(self, limit: int) -> None:
        self._widest = min(self._widest, limit)
        if limit < self.limit:
            logger.warning(
                "%s answered none of %d requests within %g s; it is sent %d at a time from now on (%s)",
                *(self._server, self.limit, self.patience_s, limit, self._setting),
            )
            self.limit = limit

    async def _widen(self) -> None:
        """Raise the limit by one after as many answers as it allows requests."""
        self._answers_since_change += 1
        if self.limit >= self._widest or self._answers_since_change < self.limit:
            return
        self._answers_since_change = 0
        self.limit += 1
        if self.limit == self._widest:
            self._lowest = self._widest
            logger.info("%s is sent %d requests at a time again (%s)", self._server, self.limit, self._setting)
        async with self._changed:
            self._changed.notify()

    async def _begin_pause(self, error: RateLimitError) -> None:
        """Hold all requests for the pause that the server asks for, or prolong a pause by it."""
        now = time.monotonic()
        if not self._is_limited:
            self._is_limited, self._limited_since, self._backoff_s = True, now, _BACKOFF_S[0]
            pause_s = error.pause_s or self._backoff_s
        else:
            # A server that refuses again after its own pause may ask for too short ones.
            pause_s = max(error.pause_s or 0.0, self._backoff_s)
        pause_s = min(pause_s, LONGEST_PAUSE_S)
        self._resumes_at = max(self._resumes_at, now + pause_s)
        if self._pause is not None:
            return
        if error.pause_s is not None and error.pause_s > LONGEST_PAUSE_S:
            logger.warning(
                "%s asks for a pause of %.0f s, which may be a mistake: it is asked again after %.0f s",
                *(self._server, error.pause_s, LONGEST_PAUSE_S),
            )
        self._backoff_s = min(2 * self._backoff_s, _BACKOFF_S[1])
        self.limit, self._answers_since_change = max(1, self.limit // 2), 0
        if self.limit < self._lowest or pause_s >= _LOGGED_PAUSE_S:
            self._lowest = min(self._lowest, self.limit)
            logger.warning(
                "%s is over its rate limit: it is sent no request for %.3g s, and then %d at a time, more with each "
                "round of answers (%s): %s",
                *(self._server, pause_s, self.limit, self._setting, error),
            )
        self._pause = asyncio.create_task(self._resume())
        if now >= self._limited_since + _LONGEST_LIMIT_S:
            self._given_up = error
            async with self._changed:
                self._changed.notify_all()

    async def _resume(self) -> None:
        """Wait for the end of the pause, and let one request pass."""
        while (left := self._resumes_at - time.monotonic()) > 0:
            await _sleep(left)
        self._pause, self._given_up, self._is_probing = None, None, True
        async with self._changed:
            self._changed.notify()

    async def _end_limit(self) -> None:
        """Let all requests pass after an answer, unless a pause has begun since."""
        if not self._is_limited:
            return
        self._limited_since = time.monotonic()
        if self._pause is None:
            self._is_limited = self._is_probing = False
            async with self._changed:
                self._changed.notify(self.limit)
