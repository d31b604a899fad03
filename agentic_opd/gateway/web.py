"""The gateway's routes: bodies, keys and headers in, OpenAI's JSON out. No text of a conversation reaches a log."""

import asyncio
import json
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial
from hashlib import sha256
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from agentic_opd.core.errors import OPDError, ServerUnreachableError
from agentic_opd.core.text import read_json
from agentic_opd.core.types import MOST_SCORE
from agentic_opd.gateway.choice import Finished, Piece
from agentic_opd.gateway.config import is_loopback
from agentic_opd.gateway.errors import RefusedError
from agentic_opd.gateway.gateway import Gateway, SessionStatus
from agentic_opd.gateway.reply import Reply
from agentic_opd.gateway.request import Asked, read_request
from agentic_opd.gateway.sampler import Answer, Begun
from agentic_opd.gateway.telemetry import CONTENT_TYPE, Telemetry

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Owner = Callable[[Request], Awaitable[str]]
"""The digest of a client's key; raises RefusedError if that is none."""

_PARSED_AT_ONCE = 2**16
"""Bytes that are parsed on the event loop, in a few milliseconds."""
_DISCARD_S = 10.0
"""Seconds that a refused body is taken for: a client reads its answer when it has sent everything."""


class _Ending(BaseModel):
    """The body of `POST /sessions/{name}/end`."""

    model_config = ConfigDict(extra="forbid")

    reward: Annotated[float, Field(ge=-MOST_SCORE, le=MOST_SCORE)] | None = None
    feedback: Annotated[str, Field(max_length=100_000)] | None = None


class Answers(Protocol):
    """What answers requests: a gateway, or an environment that runs programs."""

    model: str
    tokenizer: Any
    telemetry: Telemetry

    def answer(self, asked: Asked, owner: str) -> Answer:
        """Answer a request of the client with this key's digest."""
        ...


def make_app(gateway: Gateway) -> FastAPI:
    """The web application before a gateway that is ready."""
    keys = [key.get_secret_value() for key in gateway.config.api_keys]
    chat = ChatRoutes(
        gateway,
        partial(_owner, keys=keys),
        max_body_bytes=gateway.config.max_body_bytes,
        max_choices=gateway.config.max_choices,
    )
    app = chat_app(chat, "", "/sessions/{name}")
    routes = _Routes(gateway, chat)
    app.add_api_route("/health", _health, methods=["GET"])
    app.add_api_route("/metrics", chat.guarded(routes.metrics), methods=["GET"])
    app.add_api_route("/sessions/{name}/end", chat.guarded(routes.end), methods=["POST"])
    app.add_api_route("/sessions/{name}", chat.guarded(routes.session), methods=["GET"])
    return app


def chat_app(chat: "ChatRoutes", *prefixes: str) -> FastAPI:
    """A web application with the routes of OpenAI's clients, below each prefix."""
    app = FastAPI(title="agentic_opd gateway", docs_url=None, redoc_url=None, openapi_url=None)
    for prefix in prefixes:
        app.add_api_route(f"{prefix}/v1/chat/completions", chat.guarded(chat.chat), methods=["POST"])
        app.add_api_route(f"{prefix}/v1/models", chat.guarded(chat.models), methods=["GET"])
    app.add_exception_handler(HTTPException, _no_route)
    return app


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return JSONResponse(RefusedError(status, "there is no such route, or not with this method").to_wire(), status)


class ChatRoutes:
    """The routes of OpenAI's clients, for clients of known keys."""

    def __init__(self, answers: Answers, owner: Owner, *, max_body_bytes: int, max_choices: int) -> None:
        """Prepare.

        Args:
            answers: Answers the requests.
            owner: Whose request it is.
            max_body_bytes: Longest body of a request.
            max_choices: Largest `n` of a request.
        """
        self._answers, self._owner, self._telemetry = answers, owner, answers.telemetry
        self._max_body_bytes, self._max_choices = max_body_bytes, max_choices
        self._parser = ThreadPoolExecutor(1, "requests")

    def guarded(
        self, handler: Callable[[Request, str], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """`handler` with the digest of the client's key, its errors as answers, all of them counted."""

        async def handle(request: Request) -> Response:
            try:
                response = await handler(request, await self._owner(request))
            except ClientDisconnect:
                self._telemetry.hung_up.inc()
                response = Response(status_code=499)
            except (RefusedError, OPDError) as error:
                response = _refusal(error)
            self._telemetry.requests.labels(str(response.status_code)).inc()
            return response

        return handle

    async def chat(self, request: Request, owner: str) -> Response:
        """Sample an answer."""
        start, headers = time.monotonic(), request.headers
        body = await _body(request, self._max_body_bytes)
        read = partial(
            read_request,
            max_choices=self._max_choices,
            session=_name(request.path_params.get("name") or headers.get("X-Session-Id"), "session_id"),
            group=_name(headers.get("X-Group-Id"), "X-Group-Id"),
            turn_type=headers.get("X-Turn-Type"),
            is_last=_is_true(headers.get("X-Session-Done")),
        )
        asked = await self.parsed(body, read)
        reply = Reply(self._answers.model, self._answers.tokenizer.decode, asked.top_logprobs)
        events = _timed(self._answers.answer(asked, owner), self._telemetry, start)
        if not asked.stream:
            await _unless_gone(request, _whole(events, reply))
            return JSONResponse(reply.completion(), headers={"X-Session-Id": reply.session_id})
        # What is wrong with a request shows before its first token, while there is still a status to say it by.
        first = await _unless_gone(request, _until_sampled(events))
        return StreamingResponse(
            _stream(first, events, reply, asked, self._telemetry),
            media_type="text/event-stream",
            headers={"X-Session-Id": first[0].session_id, "Cache-Control": "no-cache"},
        )

    async def parsed(self, body: bytes, read: Callable[[object], Result]) -> Result:
        """What `read` makes of the body's JSON; a long one is read on a thread, one at a time.

        Raises:
            RefusedError: 400, it is not JSON; and what `read` raises.
        """
        if len(body) <= _PARSED_AT_ONCE:
            return read(_json(body))
        return await asyncio.get_running_loop().run_in_executor(self._parser, lambda: read(_json(body)))

    async def models(self, request: Request, owner: str) -> Response:
        """The policy's model."""
        card = {"id": self._answers.model, "object": "model", "created": 0, "owned_by": "agentic_opd"}
        return JSONResponse({"object": "list", "data": [card]})


class _Routes:
    """What a gateway says of itself and of sessions, and how a session is ended."""

    def __init__(self, gateway: Gateway, chat: ChatRoutes) -> None:
        self._gateway, self._chat = gateway, chat

    async def metrics(self, request: Request, owner: str) -> Response:
        """The gateway's numbers."""
        return Response(self._gateway.telemetry.text(), headers={"Content-Type": CONTENT_TYPE})

    async def end(self, request: Request, owner: str) -> Response:
        """End a session."""
        body = await _body(request, self._gateway.config.max_body_bytes, or_nothing=True)
        try:
            ending = await self._chat.parsed(body, _Ending.model_validate)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            field = ".".join(map(str, first["loc"]))
            raise RefusedError(400, f"{field or 'body'}: {first['msg']}", field or None) from error
        status = await self._gateway.end(owner, request.path_params["name"], ending.reward, ending.feedback)
        return JSONResponse(_status(status))

    async def session(self, request: Request, owner: str) -> Response:
        """What became of a session."""
        return JSONResponse(_status(await self._gateway.status(owner, request.path_params["name"])))


# -------------------------------------------------------------------------------------------------------- one answer


async def _timed(answer: Answer, telemetry: Telemetry, start: float) -> Answer:
    """The answer; its times are measured."""
    is_first = True
    async with aclosing(answer):
        async for event in answer:
            if is_first and not isinstance(event, Begun):
                telemetry.first_token_s.observe(time.monotonic() - start)
                is_first = False
            yield event
    telemetry.answer_s.observe(time.monotonic() - start)


async def _whole(events: Answer, reply: Reply) -> None:
    async with aclosing(events):
        async for event in events:
            reply.take(event)


async def _until_sampled(events: Answer) -> tuple[Begun, Piece | Finished]:
    """The beginning, and the first thing that was sampled."""
    begun, first = await anext(events), await anext(events)
    assert isinstance(begun, Begun)
    assert not isinstance(first, Begun)
    return begun, first


async def _stream(
    first: tuple[Begun, Piece | Finished], rest: Answer, reply: Reply, asked: Asked, telemetry: Telemetry
) -> AsyncGenerator[str]:
    """The server-sent events of an answer; what fails under way is the last of them."""
    is_whole, last, left = False, "", asked.n
    try:
        async with aclosing(_all(first, rest)) as events:
            async for event in events:
                reply.take(event)
                text = "".join(_event(chunk) for chunk in reply.chunks(event))
                left -= isinstance(event, Finished)
                if left:
                    yield text
                else:  # Only the end of the stream comes after it, and one write is cheaper than three.
                    last = text
        if asked.include_usage:
            last += _event(reply.usage_chunk())
        is_whole = True
    except (RefusedError, OPDError) as error:
        is_whole = True
        last += _event(_as_refused(error).to_wire())
    finally:
        if not is_whole:
            telemetry.hung_up.inc()
    yield f"{last}data: [DONE]\n\n"


async def _all(first: tuple[Begun, Piece | Finished], rest: Answer) -> Answer:
    async with aclosing(rest):
        for event in first:
            yield event
        async for event in rest:
            yield event


def _event(data: dict[str, Any]) -> str:
    # In ASCII: some clients take U+2028 for the end of a line.
    return f"data: {json.dumps(data)}\n\n"


def _status(status: SessionStatus) -> dict[str, Any]:
    return {
        "session_id": status.name or status.session_id,
        "id": status.session_id,
        "state": status.state.value,
        "turns": status.turns,
    }


# ----------------------------------------------------------------------------------------------------- requests, errors


async def _owner(request: Request, keys: list[str]) -> str:
    """A digest of the client's key: sessions of different keys never meet.

    Raises:
        RefusedError: 401, the key is none of the gateway's; 403, it has none, and is called by a foreign name.
    """
    token = bearer(request)
    if not keys and not is_loopback(request.url.hostname or ""):
        # A web page may have its own name lead to this machine, and then ask as if it were the gateway's.
        raise RefusedError(403, "without api_keys the gateway is asked by a loopback address, as 127.0.0.1")
    # Every key is compared, so that the time taken does not tell which of them came close.
    matches = [secrets.compare_digest(token.encode(), key.encode()) for key in keys]
    if keys and not any(matches):
        raise await no_key(request)
    return digest_of_key(token)


def bearer(request: Request) -> str:
    """The key that a request brings; empty if it brings none."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def digest_of_key(key: str) -> str:
    """What stands for a key wherever it is kept."""
    return sha256(key.encode()).hexdigest()[:32]


async def no_key(request: Request) -> RefusedError:
    """The refusal of a request without a key that is known; its body is taken, and thrown away."""
    await _discard(request.stream())
    return RefusedError(401, "a key is needed: send 'Authorization: Bearer KEY'", None, "invalid_api_key")


async def _body(request: Request, max_bytes: int, *, or_nothing: bool = False) -> bytes:
    """A body of JSON, not yet read; `or_nothing`: an empty body is an empty object.

    Raises:
        RefusedError: 413 or 415.
        ClientDisconnect: the client went before it had sent all of it.
    """
    declared = request.headers.get("Content-Length", "")
    chunks, body = request.stream(), bytearray()
    is_too_long = declared.isdecimal() and int(declared) > max_bytes
    while not is_too_long and (chunk := await anext(chunks, None)) is not None:
        body += chunk
        is_too_long = len(body) > max_bytes
    if is_too_long:
        body.clear()
        await _discard(chunks)
        raise RefusedError(413, f"the body is longer than the {max_bytes} bytes that are read (env.max_body_bytes)")
    if or_nothing and not body:
        return b"{}"
    # A web page of another origin may send text to a loopback address, but no JSON without being asked.
    if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
        raise RefusedError(415, "the body must be JSON, with 'Content-Type: application/json'")
    return bytes(body)


def _json(body: bytes) -> object:
    """Raises RefusedError (400) if it is not JSON."""
    try:
        return read_json(body, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, "the body is not JSON that can be read") from error


def _finite(spelled: str) -> float:
    if not math.isfinite(number := float(spelled)):
        raise ValueError(f"{spelled:.20} is no finite number")
    return number


async def _discard(chunks: AsyncGenerator[bytes]) -> None:
    """Take the rest of a refused body, for a while, and keep none of it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            async for _ in chunks:
                pass


def _name(name: str | None, field: str) -> str | None:
    """Raises RefusedError if a session, or a group, can't be called so."""
    if name is not None and not 0 < len(name) <= 256:
        raise RefusedError(400, "a name has 1 to 256 characters", field)
    return name


def _is_true(value: str | None) -> bool:
    """Raises RefusedError if it is neither true nor false."""
    if value is not None and value.lower() not in ("true", "false"):
        raise RefusedError(400, f"X-Session-Done is {value[:40]!r}; expected true or false", "X-Session-Done")
    return value is not None and value.lower() == "true"


def _refusal(error: RefusedError | OPDError) -> Response:
    refused = _as_refused(error)
    headers = {"Retry-After": "5"} if refused.status == 503 else None
    return JSONResponse(refused.to_wire(), refused.status, headers=headers)


def _as_refused(error: RefusedError | OPDError) -> RefusedError:
    """What a client is told: of the gateway's own troubles only their kind."""
    if isinstance(error, RefusedError):
        return error
    logger.warning("a request failed: %s: %s", type(error).__name__, error)
    if isinstance(error, ServerUnreachableError):
        return RefusedError(503, "the policy's server does not answer; try again")
    return RefusedError(502, "the policy's server, or the journal, did not do its part; the gateway's log says more")


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled if the client goes first. The body must have been read.

    Raises:
        ClientDisconnect: it did.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await gone
        if not task.done():
            await asyncio.wait((task,))


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
