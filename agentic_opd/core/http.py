"""HTTP client: `RetryWindow` repeats requests during an outage, `JsonClient` adds pooling and the API key, and
`read_answer` validates the JSON response.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import aiohttp
from pydantic import TypeAdapter, ValidationError

from agentic_opd.core.concurrency import fair_slot
from agentic_opd.core.errors import (
    BrokenWeightsError,
    NotSentError,
    ServerError,
    ServerMemoryError,
    ServerMismatchError,
    ServerRequestError,
    ServerUnreachableError,
)
from agentic_opd.core.rate_limits import LONGEST_PAUSE_S, pause_asked
from agentic_opd.core.text import read_json, request_body

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")
ModelT = TypeVar("ModelT")

_BACKOFF_S = (0.1, 5.0)
"""First and longest pause between two attempts; each pause doubles the previous one, with jitter."""
_LAST_EVENT = b"[DONE]"
"""The data of a stream's last event."""
_QUIET_S = 2.0
"""Shortest outage, in seconds, that is logged."""


_LONGEST_LIMIT_S = 2 * LONGEST_PAUSE_S
"""Seconds of pauses that a server asks for, without any answer, after which requests fail."""


class NoAnswerError(Exception):
    """A transient failure of one attempt; the message names the cause.

    `pause_s` is the number of seconds that the server wants to pass before the next request; None if it names none.
    """

    def __init__(self, message: str, pause_s: float | None = None) -> None:
        super().__init__(message)
        self.pause_s = pause_s


class NotConnectedError(aiohttp.ClientConnectionError):
    """A request that may not open a connection would have to."""


class RetryWindow:
    """Repeats the requests of one client, which share the state of an outage.

    A request is repeated for `retry_s` seconds after its first failure. An outage is shared by all requests: it is
    logged once. After `retry_s` seconds without any answer, each request is tried once and fails at once, until the
    server answers one.

    A pause that the server asks for (`Retry-After`) is no outage: all requests wait for its end.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._down_since: float | None = None
        self._is_logged = False
        self._limited_since: float | None = None
        self._resumes_at = float("-inf")

    async def ask(self, attempt: Callable[[], Awaitable[AnswerT]], retry_s: float) -> AnswerT:
        """Call `attempt` until it does not raise NoAnswerError; a ServerError that it raises ends the outage too.

        Raises:
            NoAnswerError: the window is over; this is the error of the last attempt.
        """
        pause, failed_since = _BACKOFF_S[0], float("inf")
        while True:
            if (left := self._resumes_at - time.monotonic()) > 0:
                await asyncio.sleep(left)
            try:
                answer = await attempt()
            except ServerError:
                self._down_since = self._limited_since = None
                raise
            except NoAnswerError as error:
                now = time.monotonic()
                if error.pause_s and retry_s > 0:
                    self._keep_pause(error.pause_s, now, error)
                    failed_since = float("inf")
                    continue
                if self._down_since is None:
                    self._down_since, self._is_logged = now, False
                failed_since = min(failed_since, self._down_since)
                if now + pause > failed_since + retry_s:
                    raise
                if now - self._down_since > _QUIET_S and not self._is_logged:
                    self._is_logged = True
                    logger.warning("%s does not answer (%s); retrying for %.0f s", self._server, error, retry_s)
            else:
                self._down_since = self._limited_since = None
                return answer
            await asyncio.sleep(pause * random.uniform(0.7, 1.3))
            pause = min(2 * pause, _BACKOFF_S[1])

    def _keep_pause(self, pause_s: float, now: float, error: NoAnswerError) -> None:
        """Hold all requests for the pause that the server asks for; raise the error if it has asked for too long."""
        self._down_since = None
        if self._limited_since is None:
            self._limited_since = now
            logger.warning("%s asks for a pause of %.3g s (%s); no request is sent to it", self._server, pause_s, error)
        if now >= self._limited_since + _LONGEST_LIMIT_S:
            raise error
        if pause_s > LONGEST_PAUSE_S:
            logger.warning(
                "%s: a pause of %.0f s may be a mistake; it ends after %.0f s", self._server, pause_s, LONGEST_PAUSE_S
            )
        # A server that asks for a millisecond again and again is asked less and less often.
        shortest_s = min((now - self._limited_since) / 2 + _BACKOFF_S[0], _BACKOFF_S[1])
        self._resumes_at = max(self._resumes_at, now + min(max(pause_s, shortest_s), LONGEST_PAUSE_S))


def may_pass(status: int) -> bool:
    """Return whether a request refused with this HTTP status may succeed later."""
    return status >= 500 or status in (408, 429)


def key_advice(status: int, answer: str, has_key: bool, setting: str) -> str:
    """Return what to do about the API key after a refusal; empty if the refusal is about something else.

    Args:
        status: HTTP status of the refusal.
        answer: Text of the response.
        has_key: Whether the request had a key.
        setting: Name of the key's setting.
    """
    # The plugin's own refusals with 403 name the wrong field.
    if status not in (401, 403) or (status == 403 and '"field"' in answer):
        return ""
    if not has_key:
        return f" No API key was sent: set {setting}."
    return f" An API key was sent, and this server does not accept it: check {setting}." if status == 401 else ""


def read_answer(model: type[ModelT], answer: object, url: str, expected: str) -> ModelT:
    """Validate the JSON response of `url` as a pydantic model or dataclass.

    `what` names the expected kind of response in the message.

    Raises:
        ServerMismatchError: the response has another form.
    """
    try:
        return TypeAdapter(model).validate_python(answer)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()[:3])
        raise ServerMismatchError(f"{url} is not {expected}: it answered {str(answer)[:200]!r} ({wrong})") from error


@dataclass
class JsonClient:
    """A client of one server. Requests must be safe to repeat, because a lost connection leads to a retry.

    Args:
        base_url: Address of the server. A trailing `/v1` is removed, because the routes include it. A query is
            part of each request, and not of `base_url` afterwards, which errors name.
        api_key: Bearer token, if given; never part of an error or a repr.
        timeout_s: Time limit of one attempt, in seconds.
        retry_s: Seconds to keep asking a server that refuses connections, resets them, times out or answers 5xx, 408 or
            429; see `RetryWindow`.
        hint: Advice for an unreachable server; ends the error's message.
        key_setting: Name of the key's setting, for the error of a server that refuses the key or wants one.
    """

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    retry_s: float = 60.0
    hint: str = "scripts/serve_vllm MODEL starts one."
    key_setting: str = "openai.api_key or the variable VLLM_API_KEY"
    connections: int = field(default=0, init=False)
    """Number of connections opened so far. While it does not change, the same process answers."""
    _query: str = field(init=False, repr=False)
    _window: RetryWindow = field(init=False, repr=False)
    _session: aiohttp.ClientSession | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        address, _, self._query = self.base_url.partition("?")
        self.base_url = address.rstrip("/").removesuffix("/v1")
        self._window = RetryWindow(self.base_url)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST `body` as JSON and return the JSON of the response; see `request`."""
        return await self.request("POST", path, request_body(body))

    async def get(self, path: str) -> Any:
        """GET `path` and return the JSON of the response; see `request`."""
        return await self.request("GET", path, None)

    async def get_text(self, path: str) -> str:
        """GET `path` and return the text of the response; see `request`."""
        return await self.request("GET", path, None, read=lambda content: content.decode("utf-8", "replace"))

    async def request(
        self,
        method: str,
        path: str,
        data: bytes | None,
        headers: Mapping[str, str] | None = None,
        *,
        reuse: bool = False,
        read: Callable[[bytes], Any] = read_json,
    ) -> Any:
        """Send a request, with retries, until an answer, a refusal, or the end of the window.

        `data` is JSON; `headers` are additional headers. With `reuse` the request opens no connection, so only the
        process that answered before can receive it. `read` makes the result from the response's content.

        Raises:
            NotSentError: `reuse`, and no connection is open.
            ServerRequestError: 4xx (not 408 and 429); `.status` holds the code.
            ServerUnreachableError: no usable answer within `retry_s`.
        """
        try:
            return await self._window.ask(
                lambda: self._once(method, path, data, headers or {}, reuse, read), self.retry_s
            )
        except NoAnswerError as error:
            raise self._unreachable(path, error) from error

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[list[bytes]]:
        """POST `body` as JSON and yield the data of the server-sent events, all that have arrived in one list.

        Retries as `request` does until the response begins; a response that breaks off is not requested again. Closing
        the generator closes the connection, so that the server notices the disconnected client.

        Raises:
            ServerRequestError: 4xx (not 408 and 429); `.status` holds the code.
            ServerUnreachableError: no usable answer within `retry_s`, or the response broke off.
        """
        data = request_body(body)
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
                    is_done = _LAST_EVENT in events
                    if is_done:
                        del events[events.index(_LAST_EVENT) :]
                    if events:
                        yield events
                    if is_done:
                        return
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise ServerUnreachableError(f"the answer of {self.base_url}{path} broke off: {error!r}") from error
        raise ServerUnreachableError(f"the answer of {self.base_url}{path} broke off")

    async def _begun(self, path: str, data: bytes) -> aiohttp.ClientResponse:
        """Send the request once and return the response when its head has arrived; raise if it is a refusal."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=self.timeout_s)
        headers = {"Content-Type": "application/json"}
        try:
            answer = await self._open().post(self._url(path), data=data, headers=headers, timeout=timeout)
            if answer.status < 400:
                return answer
            text = await answer.text()
        except (aiohttp.ClientError, TimeoutError, ConnectionError, UnicodeDecodeError) as error:
            raise NoAnswerError(str(error) or type(error).__name__) from error
        raise self._refusal(path, answer, text)

    def _url(self, path: str) -> str:
        if not self._query:
            return self.base_url + path
        return f"{self.base_url}{path}{'&' if '?' in path else '?'}{self._query}"

    def _unreachable(self, path: str, error: NoAnswerError) -> ServerUnreachableError:
        if isinstance(error.__cause__, NotConnectedError):
            return NotSentError(f"{self.base_url}{path} was not asked: the connection is closed")
        return ServerUnreachableError(
            f"{self.base_url}{path} gave no usable answer for {self.retry_s:g} s: {error}. "
            f"Is the server up at this address? {self.hint}"
        )

    def _refusal(self, path: str, answer: aiohttp.ClientResponse, text: str) -> NoAnswerError | ServerError:
        status = answer.status
        if may_pass(status):
            pause_s = pause_asked(answer.headers, text, is_limit=status == 429)
            return NoAnswerError(f"HTTP {status}: {_on_a_line(text, 300)}", pause_s)
        error_class = _KINDS.get(_kind_of(text))
        if error_class is not None:
            return error_class(f"{self.base_url}{path}: {_on_a_line(text, 2000)}")
        advice = key_advice(status, text, bool(self.api_key), self.key_setting)
        return ServerRequestError(
            f"{self.base_url}{path} refused the request: HTTP {status}: {_on_a_line(text, 1000)}{advice}", status, text
        )

    async def _once(
        self,
        method: str,
        path: str,
        data: bytes | None,
        headers: Mapping[str, str],
        reuse: bool,
        read: Callable[[bytes], Any],
    ) -> Any:
        headers = {"Content-Type": "application/json", **headers} if data is not None else headers
        url = self._url(path)
        try:
            async with self._open().request(method, url, data=data, headers=headers, trace_request_ctx=reuse) as answer:
                content = await answer.read()
                if answer.status < 400:
                    async with fair_slot():
                        return read(content)
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError, ConnectionError, ValueError, RecursionError) as error:
            raise NoAnswerError(str(error) or type(error).__name__) from error
        raise self._refusal(path, answer, text)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            trace = aiohttp.TraceConfig()
            trace.on_connection_create_start.append(_may_connect)
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
        if self._session is not None:
            await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


_KINDS = {"out_of_memory": ServerMemoryError, "broken_weights": BrokenWeightsError}
"""Errors by the `kind` that the vLLM plugin names in a refusal (`serving.errors.Kind`)."""


def _kind_of(text: str) -> str:
    """Return the kind that a refusal of the vLLM plugin names; empty for all others."""
    if '"kind"' not in text:
        return ""
    try:
        return str(read_json(text)["error"]["kind"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _on_a_line(text: str, max_chars: int) -> str:
    """Return a response's text on one line, at most `most` characters; a web page is only named."""
    if text.lstrip()[:15].lower().startswith(("<!doctype html", "<html")):
        return "a web page"
    return " ".join(text.split())[:max_chars]


async def _may_connect(_session: object, context: Any, _params: object) -> None:
    if context.trace_request_ctx:
        raise NotConnectedError("no connection is open")
