"""The gateway's HTTP routes: bodies, keys and headers in, each protocol's JSON out.

Logs contain no conversation text.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, nullcontext, suppress
from functools import partial
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from agentic_opd.core.concurrency import fair_slot
from agentic_opd.core.errors import OPDError, ServerUnreachableError
from agentic_opd.core.text import read_json
from agentic_opd.core.types import MOST_SCORE
from agentic_opd.gateway.body import ClosedModel, EndingBody, OpenModel, read_body
from agentic_opd.gateway.choice import Finished, Piece
from agentic_opd.gateway.client import read_client
from agentic_opd.gateway.errors import ClientError
from agentic_opd.gateway.exchange import Answer, Begun
from agentic_opd.gateway.gateway import Gateway
from agentic_opd.gateway.keys import discard
from agentic_opd.gateway.learners import LearnerOwner
from agentic_opd.gateway.protocols import PROTOCOLS
from agentic_opd.gateway.protocols.base import Reply, WireProtocol
from agentic_opd.gateway.protocols.responses import OpenAIResponses, input_items, stored_response
from agentic_opd.gateway.request import Request
from agentic_opd.gateway.telemetry import CONTENT_TYPE, Telemetry
from agentic_opd.gateway.turns import Feedback
from agentic_opd.gateway.ui.routes import page_routes

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Body = TypeVar("Body", bound=BaseModel)
Owner = Callable[[HttpRequest], Awaitable[str]]
"""Function that returns the digest of a client's key, or raises ClientError for an unknown key."""

_PARSED_AT_ONCE = 2**16
"""Largest body (bytes) that is parsed on the event loop, which takes a few milliseconds."""


class _TurnFeedback(ClosedModel):
    """The body of `POST /sessions/{name}/turns/{turn}/feedback`."""

    reward: Annotated[float, Field(ge=-MOST_SCORE, le=MOST_SCORE)] | None = None
    text: Annotated[str, Field(max_length=100_000)] | None = None


class _InputItemsQuery(OpenModel):
    """The query of `GET /v1/responses/{answer}/input_items`."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    """Id of the item before the page."""


class Answers(Protocol):
    """A source of answers: a gateway, or an environment that runs agent programs."""

    model: str
    tokenizer: Any
    telemetry: Telemetry

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a sequence."""
        ...

    async def count(self, request: Request, owner: str) -> int:
        """Return the number of tokens of the prompt of a client's request."""
        ...

    def answer(self, request: Request, owner: str) -> Answer:
        """Answer a request of the client whose key has the digest `owner`."""
        ...


_SESSION = "/sessions/{name:path}"
"""Path of a session; its name may hold slashes, so a longer path is added to the application before a shorter one."""


def make_app(gateway: Gateway) -> Starlette:
    """Return the web application of a gateway: the routes of all protocols, of sessions and of the page."""
    keys = [key.get_secret_value() for key in gateway.config.api_keys]
    owner_of = LearnerOwner(keys, gateway.config.learners)
    chat = ChatRoutes(
        gateway,
        owner_of,
        max_body_bytes=gateway.config.max_body_bytes,
        max_choices=gateway.config.max_choices,
    )
    app = chat_app(chat, "", _SESSION)
    routes = _Routes(gateway, chat)
    app.router.routes += page_routes(
        gateway,
        keys,
        owner_of.of_key,
        gateway.telemetry,
        tokenizer=gateway.tokenizer,
        trainer_dir=gateway.config.trainer_dir,
        learner_folder=gateway.learner_folder,
        has_named_learners=owner_of.is_named,
    )
    app.add_route("/health", routes.health, methods=["GET"])
    app.add_route("/metrics", chat.guarded(routes.metrics), methods=["GET"])
    app.add_route(f"{_SESSION}/end", chat.guarded(routes.end), methods=["POST"])
    for prefix in (_SESSION, ""):
        path = f"{prefix}{OpenAIResponses.path}/{{answer}}"
        app.add_route(path, chat.guarded(routes.response), methods=["GET"])
        app.add_route(path, chat.guarded(routes.forget), methods=["DELETE"])
        app.add_route(f"{path}/input_items", chat.guarded(routes.input_items), methods=["GET"])
        app.add_route(f"{prefix}/turns/{{turn}}/feedback", chat.guarded(routes.feedback), methods=["POST"])
    app.add_route(_SESSION, chat.guarded(routes.session), methods=["GET"])
    app.add_route(_SESSION, chat.guarded(routes.delete), methods=["DELETE"])
    app.add_route("/learner", chat.guarded(routes.delete_learner), methods=["DELETE"])
    if gateway.config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=gateway.config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=["X-Session-Id", "Retry-After"],
        )
    return app


def chat_app(chat: "ChatRoutes", *prefixes: str) -> Starlette:
    """Build a web application with the routes of all protocols under each prefix."""
    app = Starlette(exception_handlers={HTTPException: _no_route})
    for prefix in prefixes:
        for protocol in PROTOCOLS:
            answer = chat.guarded(partial(chat.answer, protocol), protocol)
            app.add_route(f"{prefix}{protocol.path}", answer, methods=["POST"])
            if protocol.count_path is not None:
                count = chat.guarded(partial(chat.count, protocol), protocol)
                app.add_route(f"{prefix}{protocol.count_path}", count, methods=["POST"])
        app.add_route(f"{prefix}/v1/models", chat.guarded(chat.models), methods=["GET"])
        app.add_route(f"{prefix}/v1/models/{{model:path}}", chat.guarded(chat.model), methods=["GET"])
    return app


async def _no_route(http: HttpRequest, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    routes = ", ".join(protocol.path for protocol in PROTOCOLS)
    refused = ClientError(
        status, f"there is no such route, or not with this method; requests are answered at {routes}", code="no_route"
    )
    protocol = next((protocol for protocol in PROTOCOLS if protocol.path in http.url.path), PROTOCOLS[0])
    return JSONResponse(protocol.error(refused), status)


class ChatRoutes:
    """The routes of all protocols, with authentication."""

    def __init__(self, answers: Answers, owner: Owner, *, max_body_bytes: int, max_choices: int) -> None:
        self._answers, self._owner, self._telemetry = answers, owner, answers.telemetry
        self._max_body_bytes, self._max_choices = max_body_bytes, max_choices
        self._parser = ThreadPoolExecutor(1, "requests")
        self._texts: dict[int, str] = {}
        """The text of each token that stood among logprobs; decoding takes most of their time otherwise."""

    def _decode(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) != 1:
            return self._answers.tokenizer.decode(token_ids)
        (token_id,) = token_ids
        if token_id not in self._texts:
            self._texts[token_id] = self._answers.tokenizer.decode(token_ids)
        return self._texts[token_id]

    def guarded(
        self, handler: Callable[[HttpRequest, str], Awaitable[Response]], protocol: WireProtocol = PROTOCOLS[0]
    ) -> Callable[[HttpRequest], Awaitable[Response]]:
        """Wrap `handler`: authenticate the client, map errors to responses, and count all responses by status."""

        async def handle(http: HttpRequest) -> Response:
            try:
                response = await handler(http, await self._owner(http))
            except ClientDisconnect:
                self._telemetry.hung_up.inc()
                response = Response(status_code=499)
            except (ClientError, OPDError) as error:
                response = _refusal(error, protocol)
            except asyncio.CancelledError:  # By uvicorn's shutdown, which still sends the response.
                response = _refusal(ClientError(503, "the gateway was stopped; try again"), protocol)
            self._telemetry.requests.labels(str(response.status_code)).inc()
            return response

        return handle

    async def _read(self, protocol: WireProtocol, http: HttpRequest, *, counts: bool = False) -> Request:
        client = read_client(http.headers, http.path_params.get("name"), self._max_choices)
        body = await _body(http, self._max_body_bytes)
        return await self.parsed(body, partial(protocol.read, client=client, counts=counts))

    async def answer(self, protocol: WireProtocol, http: HttpRequest, owner: str) -> Response:
        start = time.monotonic()
        request = await self._read(protocol, http)
        reply = protocol.reply(request, self._answers.model, self._decode)
        events = _timed(self._answers.answer(request, owner), self._telemetry, start)
        if not request.reply_format.stream:
            await _unless_gone(http, _read_answer(events, reply))
            write = partial(_written, reply)
            # Logprobs of a long answer take seconds.
            return await asyncio.to_thread(write) if request.sampling.top_logprobs is not None else write()
        # Request errors occur before the first token, while the HTTP status can still report them.
        first = await _unless_gone(http, _until_sampled(events))
        return _EventStream(
            _stream(first, events, reply, request, self._telemetry),
            media_type="text/event-stream",
            headers={"X-Session-Id": first[0].session_id, "Cache-Control": "no-cache"},
        )

    async def count(self, protocol: WireProtocol, http: HttpRequest, owner: str) -> Response:
        """Answer with the number of tokens of a request's prompt; nothing is sampled or stored."""
        request = await self._read(protocol, http, counts=True)
        return JSONResponse(protocol.counted(await self._answers.count(request, owner)))

    async def parsed(self, body: bytes, read: Callable[[object], Result]) -> Result:
        """Parse the body's JSON and return `read` of it. Large bodies are parsed on a thread, one at a time.

        Raises:
            ClientError: 400, the body is not JSON. Errors of `read` are raised too.
        """
        if len(body) <= _PARSED_AT_ONCE:
            return read(_json(body))
        return await asyncio.get_running_loop().run_in_executor(self._parser, lambda: read(_json(body)))

    async def models(self, http: HttpRequest, owner: str) -> Response:
        """Answer `GET /v1/models` with the policy's model, as OpenAI's and Anthropic's clients read it."""
        card = self._card(self._answers.model)
        ids = {"first_id": card["id"], "last_id": card["id"], "has_more": False}
        return JSONResponse({"object": "list", "data": [card], **ids})

    async def model(self, http: HttpRequest, owner: str) -> Response:
        """Answer `GET /v1/models/{model}`; the policy is served under any name."""
        return JSONResponse(self._card(http.path_params["model"]))

    def _card(self, name: str) -> dict[str, Any]:
        openai = {"id": name, "object": "model", "created": 0, "owned_by": "agentic_opd"}
        anthropic = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        return {**openai, **anthropic, "max_model_len": self._answers.max_model_len}


class _Routes:
    """The gateway's routes for metrics and sessions."""

    def __init__(self, gateway: Gateway, chat: ChatRoutes) -> None:
        self._gateway, self._chat = gateway, chat

    async def health(self, http: HttpRequest) -> Response:
        """Answer `GET /health`: 503 while the disk refuses what the gateway must keep. It needs no key."""
        problems = await self._gateway.problems()
        if not problems:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "degraded", "failing_outputs": problems}, 503)

    async def metrics(self, http: HttpRequest, owner: str) -> Response:
        await asyncio.gather(self._gateway.read_versions(), self._gateway.problems())
        return Response(self._gateway.telemetry.text(), headers={"Content-Type": CONTENT_TYPE})

    async def end(self, http: HttpRequest, owner: str) -> Response:
        """Answer `POST /sessions/{name}/end`: end the session and return its status."""
        ending = await self._read(http, EndingBody)
        name = http.path_params["name"]
        status = await self._gateway.end(owner, name, ending.reward, ending.feedback, ending.group)
        return JSONResponse(status.body())

    async def feedback(self, http: HttpRequest, owner: str) -> Response:
        """Answer `POST /sessions/{name}/turns/{turn}/feedback`, or without a session, by the answer's id."""
        body = await self._read(http, _TurnFeedback)
        if body.reward is None and not (body.text or "").strip():
            raise ClientError(400, "feedback has a reward, a text or both", "text")
        names = http.path_params
        feedback = Feedback(body.reward, body.text)
        turn_id = await self._gateway.give_feedback(owner, names.get("name"), names["turn"], feedback)
        return JSONResponse({"turn": turn_id})

    async def _read(self, http: HttpRequest, model: type[Body]) -> Body:
        body = await _body(http, self._gateway.config.max_body_bytes, or_nothing=True)
        return await self._chat.parsed(body, partial(read_body, model))

    async def response(self, http: HttpRequest, owner: str) -> Response:
        """Answer `GET /v1/responses/{answer}` with an answer of the journal."""
        row, path = await self._gateway.recorded(owner, http.path_params["answer"])
        return JSONResponse(stored_response(path[-1], self._gateway.model, row.opened))

    async def forget(self, http: HttpRequest, owner: str) -> Response:
        """Answer `DELETE /v1/responses/{answer}`: the answer can't be fetched again; its turn stays in its session."""
        answer_id = http.path_params["answer"]
        await self._gateway.forget(owner, answer_id)
        return JSONResponse({"id": answer_id, "object": "response", "deleted": True})

    async def input_items(self, http: HttpRequest, owner: str) -> Response:
        """Answer `GET /v1/responses/{answer}/input_items`, one page of the conversation before an answer."""
        query = read_body(_InputItemsQuery, dict(http.query_params))
        _, path = await self._gateway.recorded(owner, http.path_params["answer"])
        items = input_items(path)
        if query.order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        if query.after is not None and query.after not in ids:
            raise ClientError(400, f"after: there is no item {query.after[:80]!r}", "after")
        start = 0 if query.after is None else ids.index(query.after) + 1
        page = items[start : start + query.limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": "", "last_id": ""}
        return JSONResponse({"object": "list", "data": page, **ends, "has_more": start + query.limit < len(items)})

    async def delete(self, http: HttpRequest, owner: str) -> Response:
        """Answer `DELETE /sessions/{name}`: an ended session; with learners, also all that was learned from it."""
        name = http.path_params["name"]
        session_id = await self._gateway.delete(owner, name)
        return JSONResponse({"session_id": name, "id": session_id, "deleted": True})

    async def delete_learner(self, http: HttpRequest, owner: str) -> Response:
        """Answer `DELETE /learner`: the client's own learner with all sessions and versions."""
        return JSONResponse({"learner": await self._gateway.delete_learner(owner), "deleted": True})

    async def session(self, http: HttpRequest, owner: str) -> Response:
        """Answer `GET /sessions/{name}` with the session's status."""
        status = await self._gateway.status(owner, http.path_params["name"])
        return JSONResponse(status.body())


# -------------------------------------------------------------------------------------------------------- one answer


async def _timed(answer: Answer, telemetry: Telemetry, start: float) -> Answer:
    """Yield the events of the answer, and record the times to its first token and to its end."""
    is_first = True
    async with aclosing(answer):
        async for event in answer:
            if is_first and not isinstance(event, Begun):
                telemetry.first_token_s.observe(time.monotonic() - start)
                is_first = False
            yield event
    telemetry.answer_s.observe(time.monotonic() - start)


async def _read_answer(events: Answer, reply: Reply) -> None:
    async with aclosing(events):
        async for event in events:
            reply.take(event)
            if reply.request.sampling.top_logprobs is not None and not isinstance(event, Begun):
                # Tokenizers are not thread-safe: `_written`, on a thread, finds the texts of all tokens decoded.
                async with fair_slot():
                    reply.logprobs((event.rest if isinstance(event, Finished) else event).tokens)


def _written(reply: Reply) -> Response:
    return JSONResponse(reply.body(), headers={"X-Session-Id": reply.session_id})


async def _until_sampled(events: Answer) -> tuple[Begun, Piece | Finished]:
    """Return the first two events: `Begun`, and the first sampled piece or finished choice."""
    begun, first = await anext(events), await anext(events)
    assert isinstance(begun, Begun)
    assert not isinstance(first, Begun)
    return begun, first


class _EventStream(StreamingResponse):
    """A streamed answer. If uvicorn's shutdown cancels it, the connection ends without the end of the stream."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):
            await super().__call__(scope, receive, send)


async def _stream(
    first: tuple[Begun, Piece | Finished], rest: Answer, reply: Reply, request: Request, telemetry: Telemetry
) -> AsyncGenerator[str]:
    """Yield the server-sent events of an answer; an error while sampling is sent as an event."""
    is_whole, last, left = False, "", request.sampling.n
    try:
        async with aclosing(_all(first, rest)) as events:
            async for event in events:
                reply.take(event)
                # Of many streams with logprobs one is written at a time, so that other clients are answered in between.
                async with fair_slot() if request.sampling.top_logprobs is not None else nullcontext():
                    text = "".join(reply.events(event))
                left -= isinstance(event, Finished)
                if left and text:
                    yield text
                elif not left:  # Send it together with the end of the stream: one write is cheaper than three.
                    last = text
        last += reply.closing()
        is_whole = True
    except (ClientError, OPDError) as error:
        is_whole = True
        last += reply.failed(_as_refused(error))
    finally:
        if not is_whole:
            telemetry.hung_up.inc()
    yield last


async def _all(first: tuple[Begun, Piece | Finished], rest: Answer) -> Answer:
    async with aclosing(rest):
        for event in first:
            yield event
        async for event in rest:
            yield event


# ----------------------------------------------------------------------------------------------------- requests, errors


async def _body(http: HttpRequest, max_bytes: int, *, or_nothing: bool = False) -> bytes:
    """Receive a JSON body, still unparsed; with `or_nothing`, an empty body is read as `{}`.

    A web page of another origin can post text, or nothing, to a loopback address, but JSON only after a CORS preflight.
    Browsers send `Origin` with each post.
    """
    declared = http.headers.get("Content-Length", "")
    chunks, body = http.stream(), bytearray()
    is_too_long = declared.isdecimal() and int(declared) > max_bytes
    while not is_too_long and (chunk := await anext(chunks, None)) is not None:
        body += chunk
        is_too_long = len(body) > max_bytes
    if is_too_long:
        body.clear()
        await discard(chunks)
        raise ClientError(413, f"the body is longer than the {max_bytes} bytes that are read (env.max_body_bytes)")
    is_empty = or_nothing and not body
    is_json = http.headers.get("Content-Type", "").partition(";")[0].strip().lower() == "application/json"
    if not is_json and ("Origin" in http.headers or not is_empty):
        raise ClientError(415, "the body must be JSON, with 'Content-Type: application/json'")
    return b"{}" if is_empty else bytes(body)


def _json(body: bytes) -> object:
    try:
        return read_json(body, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ClientError(400, "the body is not JSON that can be read") from error


def _finite(spelled: str) -> float:
    if not math.isfinite(number := float(spelled)):
        raise ValueError(f"{spelled:.20} is no finite number")
    return number


def _refusal(error: ClientError | OPDError, protocol: WireProtocol) -> Response:
    refused = _as_refused(error)
    headers = {"Retry-After": "5"} if refused.status == 503 else None
    return JSONResponse(protocol.error(refused), refused.status, headers=headers)


def _as_refused(error: ClientError | OPDError) -> ClientError:
    """Map an error to one for the client; internal errors are logged and reveal only their kind."""
    if isinstance(error, ClientError):
        return error
    logger.warning("a request failed: %s: %s", type(error).__name__, error)
    if isinstance(error, ServerUnreachableError):
        return ClientError(503, "the policy's server does not answer; try again")
    return ClientError(502, "the policy's server or the journal failed; the gateway's log names the cause")


async def _unless_gone(http: HttpRequest, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`, and cancel it if the client disconnects. The body must have been read before."""
    task, disconnected = asyncio.create_task(work), asyncio.create_task(_disconnected(http))
    try:
        await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        disconnected.cancel()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await disconnected
        if not task.done():
            await asyncio.wait((task,))


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
