"""What the plugin's routes share: reading a body, refusing it by field, the API key, and clients that go away.

Bodies are read by msgspec, which vLLM brings: it takes a tenth of pydantic's time, stops at the first thing that does
not fit, where pydantic lists millions, and knows no NaN and no infinity. Of a key that stands twice in an object the
last value counts, and both are checked.
"""

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose
from vllm.exceptions import RetryableRequestError, VLLMClientError

from agentic_opd.serving.engine import MAX_BODY_VARIABLE, PluginState, RefusedError, api_keys, state_of

Result = TypeVar("Result")
Parsed = TypeVar("Parsed")
Handler = Callable[[PluginState, bytes], Coroutine[Any, Any, Mapping[str, object] | AsyncGenerator[Any]]]
"""Answers a request's body with JSON data, or with a stream of them."""

PARSED_AT_ONCE = 2**16
"""Bytes that are parsed on the event loop, in less than a millisecond."""
DISCARD_S = 30.0
"""Seconds that a refused body is taken for."""
OPEN_ROUTES = ("/health", "/metrics")
"""What `KeyGuard` lets everybody ask: that the server is alive, and its numbers."""
MOST_SHOWN = 300
"""Characters of a message, which may quote what the client sent."""

_PLACE = re.compile(r"(.*) - at (?:`\w+` in )?`\$\.?(.*)`", re.DOTALL)
"""msgspec's message, and where in the body."""
_FIELD = re.compile(r"Object (?:contains unknown|missing required) field `(.*)`", re.DOTALL)


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request body, or an object in it: nothing is coerced, and unknown fields are refused."""


async def receive_body(request: Request, max_bytes: int) -> bytes:
    """The request's body; of one that is longer than `max_bytes` nothing is kept.

    Raises:
        RefusedError: 413.
        ClientDisconnect: the client went before it had sent all of it.
    """
    chunks = request.stream()
    declared = request.headers.get("Content-Length", "")
    is_too_long = declared.isdecimal() and int(declared) > max_bytes
    body = bytearray()
    while not is_too_long and (chunk := await anext(chunks, None)) is not None:
        body += chunk
        is_too_long = len(body) > max_bytes
    if not is_too_long:
        return bytes(body)
    body.clear()
    await discard(request, chunks)
    raise RefusedError(
        None,
        f"the body is longer than the {max_bytes} bytes that this server reads; send less, or restart it with "
        f"scripts/serve_vllm --max-body-mib N, or with {MAX_BODY_VARIABLE}=N",
        413,
    )


async def discard(request: Request, chunks: AsyncIterator[bytes]) -> None:
    """Take the rest of a refused body, for a while, and keep none of it.

    A client reads its answer only when it has sent everything; if the server hung up before, it would see a broken
    connection instead. One that waits for a go-ahead (`Expect`) gets its answer at once.

    Raises:
        ClientDisconnect: the client went.
    """
    if "Expect" not in request.headers:
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                async for _ in chunks:
                    pass


async def read_body(state: PluginState, body: bytes, model: type[Parsed]) -> Parsed:
    """The body's JSON as `model`; a long one is parsed by the parser's thread.

    Raises:
        RefusedError: naming the first field that does not fit.
    """
    if len(body) <= PARSED_AT_ONCE:
        return parse(body, model)
    return await asyncio.get_running_loop().run_in_executor(state.parser, parse, body, model)


def parse(body: bytes, model: type[Parsed]) -> Parsed:
    """JSON as `model`.

    Raises:
        RefusedError: naming the first field that does not fit.
    """
    try:
        return msgspec.json.decode(body, type=model)
    except msgspec.ValidationError as error:
        text = shortened(str(error))
        place = _PLACE.fullmatch(text)
        message, path = place.groups() if place else (text, "")
        named = _FIELD.fullmatch(message)
        field = ".".join(filter(None, (path, named and named[1])))
        raise RefusedError(
            field or None, message if field else f"the JSON is not what is expected: {message}"
        ) from error
    except RecursionError as error:
        raise RefusedError(None, "the body is not JSON that can be read: it is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedError(None, f"the body is not JSON: {error}") from error


def guarded(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """`handler` behind the server's key, its refusals as `{"error": {"field", "message"}}`, ended when the client goes.

    vLLM itself guards a few path prefixes only. What is not a refusal (a dead engine, a full queue) is left to vLLM's
    own handlers, which answer 5xx and end a server whose engine is dead.
    """

    async def route(request: Request) -> Response:
        try:
            state = state_of(request)
            await check_key(request, state.api_keys)
            body = await receive_body(request, state.max_body_bytes)
            answer = await unless_gone(request, handler(state, body))
            if isinstance(answer, AsyncGenerator):
                stream = answer
                # A refusal comes before the first event, and has a status of its own.
                first = await unless_gone(request, _first(stream))
                return Response(status_code=499) if first is None else event_stream(first, stream)
        except ClientDisconnect:
            answer = None
        except RefusedError as refused:
            return refused_response(refused)
        except VLLMClientError as error:
            return refused_response(RefusedError(getattr(error, "parameter", None), str(error.args[0])))
        return Response(status_code=499) if answer is None else JSONResponse(answer)

    return route


async def _first(stream: AsyncGenerator[Any]) -> Any:
    return await anext(stream)


def event_stream(first: Any, rest: AsyncGenerator[Any]) -> StreamingResponse:
    """JSON data as server-sent events; what fails under way is the last event, `{"error": {"message"}}`."""

    async def events() -> AsyncGenerator[bytes]:
        async with aclosing(rest):
            yield _event(first)
            try:
                async for event in rest:
                    yield _event(event)
            except (VLLMClientError, RetryableRequestError) as error:
                yield _event({"error": {"field": None, "message": shortened(str(error))}})
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def _event(data: Mapping[str, object]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(data)


def refused_response(refused: RefusedError) -> JSONResponse:
    """The answer that the client reads."""
    field = refused.field and shortened(refused.field)
    body = {"error": {"field": field, "message": shortened(refused.message)}}
    return JSONResponse(body, status_code=refused.status)


def shortened(text: str) -> str:
    """`text`, or its beginning and its end."""
    half = MOST_SHOWN // 2
    return text if len(text) <= MOST_SHOWN else f"{text[:half]} ... {text[-half:]}"


async def check_key(request: Request, keys: Sequence[str]) -> None:
    """Compare a request's bearer token with the server's keys; without keys everybody may ask.

    Raises:
        RefusedError: 401.
    """
    if not _has_key(request.headers, keys):
        await discard(request, request.stream())
        raise RefusedError("Authorization", "this server wants its API key: send 'Authorization: Bearer KEY'", 401)


def _has_key(headers: Headers, keys: Sequence[str]) -> bool:
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    # Every key is compared, so that the time taken does not tell which of them came close.
    matches = [secrets.compare_digest(token.encode(), key.encode()) for key in keys]
    return not keys or (scheme.lower() == "bearer" and any(matches))


class KeyGuard:
    """ASGI middleware of vLLM's server (`--middleware`): each route but `OPEN_ROUTES` needs the server's key.

    vLLM itself guards a few path prefixes, and answers `/tokenize` and `/invocations` without a key.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it with 401; a web socket is closed before it is accepted."""
        if self._is_open(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocketClose(1008, "this server wants its API key")(scope, receive, send)
        else:
            try:
                await check_key(Request(scope, receive), api_keys(scope["app"].state.args))
            except RefusedError as refused:
                await refused_response(refused)(scope, receive, send)
            except ClientDisconnect:
                return

    @staticmethod
    def _is_open(scope: Scope) -> bool:
        """Whether a request needs no key, or brings it; a browser asks for permission (OPTIONS) without one."""
        if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS":
            return True
        path = scope["path"].removeprefix(scope.get("root_path", "")).removesuffix("/")
        return path in OPEN_ROUTES or _has_key(Headers(scope=scope), api_keys(scope["app"].state.args))


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`, or None once the client has gone: `work` is cancelled then, and with it the engine's part.

    The body must have been read: after it, the only message that can come is that the client has gone.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_until_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        gone.cancel()
        task.cancel()


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
