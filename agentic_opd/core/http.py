"""One way to ask an HTTP server: `RetryWindow` asks again while that may help, `JsonClient` is pooled and keyed on top
of it, and `read_answer` turns the JSON into a typed answer.
"""

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from agentic_opd.core.concurrency import in_turn
from agentic_opd.core.errors import ServerError, ServerMismatchError, ServerRequestError, ServerUnreachableError
from agentic_opd.core.text import read_json

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")
ModelT = TypeVar("ModelT", bound=BaseModel)

_BACKOFF_S = (0.1, 5.0)
"""First and longest pause between two attempts; each pause doubles the one before and is jittered."""
_DONE = b"[DONE]"
"""The data of a stream's last event."""
_QUIET_S = 2.0
"""An outage that is over sooner is not worth a line."""


class NoAnswerError(Exception):
    """One attempt came to nothing in a way that may pass; the message says how."""


class RetryWindow:
    """Repeats the requests of one client, which share what they know of an outage.

    A request is repeated for `retry_s` seconds after its first failure. An outage is one, not one a request: it is
    logged once, and after `retry_s` without any answer every request is tried once and fails at once, until the
    server answers one.

    Args:
        server: What is asked, for the log.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._down_since: float | None = None
        self._is_logged = False

    async def ask(self, attempt: Callable[[], Awaitable[AnswerT]], retry_s: float) -> AnswerT:
        """Call `attempt` until it does not raise NoAnswerError; a ServerError that it raises is an answer too.

        Raises:
            NoAnswerError: the window is over; what the last attempt came to.
        """
        pause, failed_since = _BACKOFF_S[0], float("inf")
        while True:
            try:
                answer = await attempt()
            except ServerError:
                self._down_since = None
                raise
            except NoAnswerError as error:
                now = time.monotonic()
                if self._down_since is None:
                    self._down_since, self._is_logged = now, False
                failed_since = min(failed_since, self._down_since)
                if now + pause > failed_since + retry_s:
                    raise
                if now - self._down_since > _QUIET_S and not self._is_logged:
                    self._is_logged = True
                    logger.warning(
                        "%s does not answer (%s); it is asked again for %.0f s", self._server, error, retry_s
                    )
            else:
                self._down_since = None
                return answer
            await asyncio.sleep(pause * random.uniform(0.7, 1.3))
            pause = min(2 * pause, _BACKOFF_S[1])


def may_pass(status: int) -> bool:
    """Whether the same request may be answered later, by the HTTP status that it was refused with."""
    return status >= 500 or status in (408, 429)


def read_answer(model: type[ModelT], answer: object, url: str, what: str) -> ModelT:
    """Read the JSON that `url` answered, which should be `what`.

    Raises:
        ServerMismatchError: it is something else.
    """
    try:
        return model.model_validate(answer)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:3])
        raise ServerMismatchError(f"{url} is not {what}: it answered {str(answer)[:200]!r} ({wrong})") from error


@dataclass
class JsonClient:
    """A client of one server. Requests must be safe to repeat: a lost connection is answered by asking again.

    Args:
        base_url: Where the server is; a trailing `/v1` is part of the routes, not of this.
        api_key: Sent as a bearer token if given; never part of an error or a repr.
        timeout_s: Seconds one attempt may take.
        retry_s: Seconds to go on asking a server that refuses connections, resets them, times out or answers 5xx, 408
            or 429; see `RetryWindow`.
        hint: What to do about a server that is not there; ends the error's message.
    """

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    retry_s: float = 60.0
    hint: str = "scripts/serve_vllm MODEL starts one."
    connections: int = field(default=0, init=False)
    """Opened so far. While it stays the same, one process answers."""
    _window: RetryWindow = field(init=False, repr=False)
    _session: aiohttp.ClientSession | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.base_url = self.base_url.rstrip("/").removesuffix("/v1")
        self._window = RetryWindow(self.base_url)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST `body` as JSON and return the answer's JSON; see `request`."""
        return await self.request("POST", path, json.dumps(body).encode())

    async def get(self, path: str) -> Any:
        """GET and return the answer's JSON; see `request`."""
        return await self.request("GET", path, None)

    async def request(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """Ask until there is an answer, a refusal, or no time left. `data` is JSON; `headers` are further ones.

        Raises:
            ServerRequestError: 4xx (not 408 and 429); `.status` holds the code.
            ServerUnreachableError: nothing usable within `retry_s`.
        """
        try:
            return await self._window.ask(lambda: self._once(method, path, data, headers or {}), self.retry_s)
        except NoAnswerError as error:
            raise self._unreachable(path, error) from error

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[list[bytes]]:
        """POST `body` as JSON and yield the data of the answer's server-sent events: at each time all that have come.

        Until the answer begins it is asked as `request` asks; an answer that breaks off is not asked for again. Closing
        the generator closes the connection, by which the server sees that nobody waits any more.

        Raises:
            ServerRequestError: 4xx (not 408 and 429); `.status` holds the code.
            ServerUnreachableError: nothing usable within `retry_s`, or the answer broke off.
        """
        data = json.dumps(body).encode()
        try:
            answer = await self._window.ask(lambda: self._begun(path, data), self.retry_s)
        except NoAnswerError as error:
            raise self._unreachable(path, error) from error
        try:
            async with answer:
                unfinished = b""
                async for chunk in answer.content.iter_any():
                    *lines, unfinished = (unfinished + chunk).split(b"\n")
                    events = [line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")]
                    is_done = _DONE in events
                    if is_done:
                        del events[events.index(_DONE) :]
                    if events:
                        yield events
                    if is_done:
                        return
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise ServerUnreachableError(f"the answer of {self.base_url}{path} broke off: {error!r}") from error
        raise ServerUnreachableError(f"the answer of {self.base_url}{path} broke off")

    async def _begun(self, path: str, data: bytes) -> aiohttp.ClientResponse:
        """An answer of which the head is there, and that is no refusal."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=self.timeout_s)
        headers = {"Content-Type": "application/json"}
        try:
            answer = await self._open().post(self.base_url + path, data=data, headers=headers, timeout=timeout)
            if answer.status < 400:
                return answer
            text = await answer.text()
        except (aiohttp.ClientError, TimeoutError, ConnectionError, UnicodeDecodeError) as error:
            raise NoAnswerError(str(error) or type(error).__name__) from error
        raise self._refusal(path, answer.status, text)

    def _unreachable(self, path: str, error: NoAnswerError) -> ServerUnreachableError:
        return ServerUnreachableError(
            f"{self.base_url}{path} gave no usable answer for {self.retry_s:g} s: {error}. "
            f"Is the server up at this address? {self.hint}"
        )

    def _refusal(self, path: str, status: int, text: str) -> NoAnswerError | ServerRequestError:
        if may_pass(status):
            return NoAnswerError(f"HTTP {status}: {text[:300]}")
        return ServerRequestError(
            f"{self.base_url}{path} refused the request: HTTP {status}: {text[:1000]}", status, text
        )

    async def _once(self, method: str, path: str, data: bytes | None, headers: Mapping[str, str]) -> Any:
        headers = {"Content-Type": "application/json", **headers} if data is not None else headers
        try:
            async with self._open().request(method, self.base_url + path, data=data, headers=headers) as answer:
                text = await answer.text()
                if answer.status < 400:
                    async with in_turn():
                        return read_json(text)
        except (aiohttp.ClientError, TimeoutError, ConnectionError, ValueError, RecursionError) as error:
            raise NoAnswerError(str(error) or type(error).__name__) from error
        raise self._refusal(path, answer.status, text)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            trace = aiohttp.TraceConfig()
            trace.on_connection_create_end.append(self._count_connection)
            self._session = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
                timeout=aiohttp.ClientTimeout(total=self.timeout_s, sock_connect=10),
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2),
                trace_configs=[trace],
            )
        return self._session

    async def _count_connection(self, *_: object) -> None:
        self.connections += 1

    async def close(self) -> None:
        """Close pooled connections."""
        if self._session is not None:
            await self._session.close()
