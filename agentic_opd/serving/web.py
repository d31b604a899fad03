"""Shared parts of the plugin's routes: reading and validating bodies, access, and disconnected clients.

Bodies are parsed by msgspec, a dependency of vLLM. It takes a tenth of pydantic's time, stops at the first error where
pydantic may list millions, and rejects NaN and infinity. If an object has a key twice, both values are validated and
the last one counts.
"""

import asyncio
import ipaddress
import re
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose
from vllm.exceptions import RetryableRequestError, VLLMClientError

from agentic_opd.serving.engine import MAX_BODY_VARIABLE, Access, PluginState, state_of
from agentic_opd.serving.errors import RouteError

Result = TypeVar("Result")
Parsed = TypeVar("Parsed")
Handler = Callable[[PluginState, bytes], Coroutine[Any, Any, Mapping[str, object] | AsyncGenerator[Any]]]
"""Maps a request's body to JSON data, or to a stream of JSON data."""

PARSED_AT_ONCE = 2**16
"""Largest body, in bytes, that is parsed on the event loop; that takes less than a millisecond."""
DISCARD_S = 30.0
"""Seconds after which the server stops receiving a refused body."""
OPEN_ROUTES = ("/health", "/metrics")
"""Routes that `KeyGuard` leaves open to everybody."""
JSON = "application/json"
MOST_SHOWN = 300
"""Largest length, in characters, of an error message or field name, which may quote the client's input."""
_MOST_REASON = 120
"""Largest length, in characters, of the reason with which a web socket is closed; the protocol has room for 123."""

_PATH = re.compile(r"(.*) - at (?:`\w+` in )?`\$\.?(.*)`", re.DOTALL)
"""Splits msgspec's error into the message and the path in the body."""
_FIELD = re.compile(r"Object (?:contains unknown|missing required) field `(.*)`", re.DOTALL)


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of request bodies and of objects inside them; values are not coerced, and unknown fields are refused."""


async def receive_body(request: Request, max_bytes: int) -> bytes:
    """Receive the request's body.

    Raises:
        RouteError: 413, the body is longer than `max_bytes`.
        ClientDisconnect: the client disconnected before it had sent the whole body.
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
    raise RouteError(
        None,
        f"the body is longer than the {max_bytes} bytes that this server reads; send less, or restart it with "
        f"scripts/serve_vllm --max-body-mib N, or with {MAX_BODY_VARIABLE}=N",
        413,
    )


async def discard(request: Request, chunks: AsyncIterator[bytes]) -> None:
    """Receive and discard the rest of a refused body, for at most `DISCARD_S` seconds.

    Many clients read the response only after sending the whole body, and would report a broken connection if the server
    closed it earlier. Nothing is received from a client that waits for permission to send (`Expect`).
    """
    if "Expect" not in request.headers:
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                async for _ in chunks:
                    pass


async def read_body(state: PluginState, body: bytes, model: type[Parsed]) -> Parsed:
    """Parse a JSON body as `model`, in the parser's thread if it is longer than `PARSED_AT_ONCE`.

    Raises:
        RouteError: the body is not valid; the error names the first wrong field.
    """
    if len(body) <= PARSED_AT_ONCE:
        return parse(body, model)
    return await asyncio.get_running_loop().run_in_executor(state.parser, parse, body, model)


def parse(body: bytes, model: type[Parsed]) -> Parsed:
    """Parse JSON as `model`.

    Raises:
        RouteError: the body is not valid; the error names the first wrong field.
    """
    try:
        return msgspec.json.decode(body, type=model)
    except msgspec.ValidationError as error:
        text = shortened(str(error))
        match = _PATH.fullmatch(text)
        message, path = match.groups() if match else (text, "")
        named = _FIELD.fullmatch(message)
        field = ".".join(filter(None, (path, named and named[1])))
        raise RouteError(
            field or None, message if field else f"the JSON has another form than expected: {message}"
        ) from error
    except RecursionError as error:
        raise RouteError(None, "the body is not JSON that can be read: it is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RouteError(None, f"the body is not JSON: {error}") from error


def guarded(
    handler: Handler, media_type: str = JSON, *, computes: bool = False
) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a handler as a route: check access, return refusals as JSON, and cancel on a client's disconnect.

    A posted body must be of `media_type`. A web page of another origin can post text or no type at all unasked. A route
    that `computes` is refused while the weights are broken, also if they broke before its answer was complete.

    A refusal's body is `{"error": {"field", "message", "kind"}}`. Other errors (a dead engine, a full queue) are left
    to vLLM's handlers, which respond with 5xx and shut down a server whose engine is dead.
    """

    async def route(request: Request) -> Response:
        try:
            state = state_of(request)
            await check_access(request, state.access)
            await _check_type(request, media_type)
            body = await receive_body(request, state.max_body_bytes)
            if computes:
                state.check_weights()
            answer = await unless_gone(request, handler(state, body))
            if computes:
                state.check_weights()
            if isinstance(answer, AsyncGenerator):
                stream = answer
                # Wait for the first event before the response starts, so that a refusal can still set the status.
                first = await unless_gone(request, _first(stream))
                return Response(status_code=499) if first is None else event_stream(first, stream)
        except ClientDisconnect:
            answer = None
        except RouteError as refused:
            return refused_response(refused)
        except VLLMClientError as error:
            return refused_response(RouteError(getattr(error, "parameter", None), str(error.args[0])))
        return Response(status_code=499) if answer is None else JSONResponse(answer)

    return route


async def _first(stream: AsyncGenerator[Any]) -> Any:
    return await anext(stream)


def event_stream(first: Any, rest: AsyncGenerator[Any]) -> StreamingResponse:
    """Stream JSON data as server-sent events, ending with `[DONE]`.

    An error after the first event becomes an event `{"error": {"field", "message"}}` before `[DONE]`.
    """

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


def refused_response(refused: RouteError) -> JSONResponse:
    field = refused.field and shortened(refused.field)
    message = refused.message if refused.kind else shortened(refused.message)
    body = {"error": {"field": field, "message": message} | ({"kind": refused.kind} if refused.kind else {})}
    return JSONResponse(body, status_code=refused.status)


def shortened(text: str) -> str:
    """Shorten `text` to its beginning and end if it is longer than `MOST_SHOWN`."""
    half = MOST_SHOWN // 2
    return text if len(text) <= MOST_SHOWN else f"{text[:half]} ... {text[-half:]}"


async def _check_type(request: Request, media_type: str) -> None:
    """Refuse a posted body of another type than `media_type`, with a RouteError (415)."""
    sent = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if request.method == "POST" and sent != media_type:
        await discard(request, request.stream())
        raise RouteError("Content-Type", f"the body must be sent with 'Content-Type: {media_type}'", 415)


async def check_access(request: Request, access: Access) -> None:
    """Check a request's bearer token against the server's keys, or, without keys, where the request comes from.

    Raises:
        RouteError: 401, the token is missing or wrong; 403, a web page may have sent the request.
    """
    if (refused := refusal(request, access)) is not None:
        await discard(request, request.stream())
        raise refused


def refusal(request: HTTPConnection, access: Access) -> RouteError | None:
    """Return why a request is refused, or None.

    A server without keys would obey any web page that is open in a browser on its network: by default vLLM answers the
    preflights of all pages. A browser names the page in `Origin`. A page whose own name resolves to the server's
    address (DNS rebinding) is of the same origin, but its name stands in `Host`.
    """
    if access.keys:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        # Compare with every key, so that timing does not reveal which one matched.
        matches = [secrets.compare_digest(token.encode(), key.encode()) for key in access.keys]
        if scheme.lower() == "bearer" and any(matches):
            return None
        problem = "this is not the server's API key" if scheme else "an API key is needed"
        return RouteError("Authorization", f"{problem}: send 'Authorization: Bearer KEY'", 401)
    host = request.headers.get("Host")
    if host is not None and not access.is_socket and not _is_own_name(_name_of(f"//{host}"), access):
        return RouteError(
            "Host",
            f"without a key this server answers at its own addresses only, such as 127.0.0.1, not at {host!a}: use "
            "such an address, or start the server with a key (scripts/serve_vllm --api-key)",
            403,
        )
    origin = request.headers.get("Origin")
    if origin is None or origin in access.origins or _is_loopback(_name_of(origin)):
        return None
    if origin.partition("://")[2] == host:
        return None
    return RouteError(
        "Origin",
        f"without a key this server answers no web page of {origin!a}: start it with a key (scripts/serve_vllm "
        "--api-key), or name the page in vLLM's --allowed-origins",
        403,
    )


def _is_own_name(name: str, access: Access) -> bool:
    """Return whether `name` can only mean this server, so that no web page can have it as its own name.

    A server that listens at other addresses than loopback is also reached by IP addresses, and by names of its network:
    a name on the internet has a dot.
    """
    if _is_loopback(name):
        return True
    if not name or (access.host is not None and _is_loopback(access.host)):
        return False
    return _is_address(name) or "." not in name or name in (access.host, socket.gethostname())


def _name_of(url: str) -> str:
    """Return the host name of a URL; empty if there is none that can be read."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


class KeyGuard:
    """ASGI middleware for vLLM's server (`--middleware`) that applies `check_access` to all routes but `OPEN_ROUTES`.

    vLLM itself protects only a few path prefixes, and serves `/tokenize` and `/invocations` without a key.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it with 401 or 403; a refused web socket is closed before it is accepted."""
        if self._is_open(scope):
            await self._app(scope, receive, send)
            return
        access = Access.of_server(scope["app"].state.args)
        if scope["type"] == "websocket":
            refused = refusal(HTTPConnection(scope), access)
            app = self._app if refused is None else WebSocketClose(1008, refused.message[:_MOST_REASON])
            await app(scope, receive, send)
            return
        try:
            await check_access(Request(scope, receive), access)
            if self._computes(scope) and (state := getattr(scope["app"].state, "agentic_opd", None)) is not None:
                state.check_weights()
        except RouteError as refused:
            await refused_response(refused)(scope, receive, send)
        except ClientDisconnect:
            return
        else:
            await self._app(scope, receive, send)

    @staticmethod
    def _computes(scope: Scope) -> bool:
        """Return whether a route of vLLM may compute with the model; the plugin's own routes check by themselves."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return scope.get("method") == "POST" and not path.startswith(("/v1/opd/", "/tokenize", "/detokenize"))

    @staticmethod
    def _is_open(scope: Scope) -> bool:
        """Return whether any client may send the request; browsers send preflights (OPTIONS) without keys."""
        if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS":
            return True
        return scope["path"].removeprefix(scope.get("root_path", "")).removesuffix("/") in OPEN_ROUTES


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Await `work`, but cancel it and return None if the client disconnects; this aborts the engine's request too.

    The body must have been read before: then a disconnect is the only message that can still arrive.
    """
    task = asyncio.create_task(work)
    disconnect = asyncio.create_task(_wait_until_gone(request))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        disconnect.cancel()
        task.cancel()


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
