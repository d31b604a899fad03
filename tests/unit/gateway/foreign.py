"""A recording gateway on loopback before an upstream that says what a test wants, and keeps what reached it."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import SecretStr

from agentic_opd.gateway.config import GatewayConfig
from agentic_opd.gateway.foreign import ForeignTurn
from agentic_opd.gateway.journal import Journal, SessionRow, SessionState
from agentic_opd.gateway.serve import WebServer, recording

from .fakes import until

KEY = "sk-upstream-0123456789abcdef"
"""The client's key for the upstream."""


def sse(*events: Any, names: bool = False) -> bytes:
    """Return events as a stream; texts are written as they are."""
    written: list[str] = []
    for event in events:
        if isinstance(event, str):
            written.append(event)
            continue
        name = f"event: {event['type']}\n" if names else ""
        written.append(f"{name}data: {json.dumps(event)}\n\n")
    return "".join(written).encode()


def chat_answer(content: str | None, calls: Sequence[Any] = (), reason: str = "stop", **message: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, **message, **({"tool_calls": [*calls]} if calls else {})}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    choices = [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}]
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "big",
        "choices": choices,
        "usage": usage,
    }


def chat_stream(pieces: Sequence[str], calls: Sequence[Any] = (), reason: str = "stop") -> bytes:
    """Return a stream of chat completions, its calls in two pieces each."""
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "big"}

    def chunk(delta: Any, finish_reason: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}

    events: list[Any] = [": a comment\n\n", chunk({"role": "assistant", "content": ""})]
    events += [chunk({"content": piece}) for piece in pieces]
    for index, call in enumerate(calls):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        first = {"index": index, "id": call["id"], "type": "function", "function": {"name": name, "arguments": ""}}
        events.append(chunk({"tool_calls": [first]}))
        for half in (arguments[:3], arguments[3:]):
            events.append(chunk({"tool_calls": [{"index": index, "function": {"arguments": half}}]}))
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return sse(*events, chunk({}, reason), {**head, "choices": [], "usage": usage}, "data: [DONE]\n\n")


def call(call_id: str, name: str = "run", **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def messages_answer(*blocks: Any, reason: str = "end_turn") -> dict[str, Any]:
    usage = {"input_tokens": 7, "output_tokens": 3}
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "big", "stop_sequence": None}
    return {**head, "content": [*blocks], "stop_reason": reason, "usage": usage}


def messages_stream(*blocks: Any, reason: str = "end_turn") -> bytes:
    """Return a stream of Anthropic's events, each block's text in two pieces."""
    events: list[Any] = [
        {"type": "message_start", "message": {**messages_answer(), "stop_reason": None}},
        {"type": "ping"},
    ]
    fields = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
    for index, block in enumerate(blocks):
        kind = block["type"]
        empty = {**block, "input": {}} if kind == "tool_use" else {**block, kind: ""}
        events.append({"type": "content_block_start", "index": index, "content_block": empty})
        text = json.dumps(block["input"]) if kind == "tool_use" else block[kind]
        name = "partial_json" if kind == "tool_use" else kind
        for half in (text[:3], text[3:]):
            delta = {"type": fields[kind], name: half}
            events.append({"type": "content_block_delta", "index": index, "delta": delta})
        events.append({"type": "content_block_stop", "index": index})
    delta = {"stop_reason": reason, "stop_sequence": None}
    events += [{"type": "message_delta", "delta": delta, "usage": {"output_tokens": 3}}, {"type": "message_stop"}]
    return sse(*events, names=True)


def message_item(text: str, item_id: str = "msg_1") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"id": item_id, "type": "message", "role": "assistant", "status": "completed", "content": [part]}


def call_item(call_id: str, name: str = "run", **arguments: Any) -> dict[str, Any]:
    item = {"id": f"fc_{call_id}", "type": "function_call", "call_id": call_id, "status": "completed"}
    return {**item, "name": name, "arguments": json.dumps(arguments)}


def response(*items: Any, response_id: str = "resp_1", status: str = "completed") -> dict[str, Any]:
    usage = {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    head = {"id": response_id, "object": "response", "created_at": 1, "model": "big", "status": status, "error": None}
    rest = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "output": [*items]}
    return {**head, **rest, "usage": {**usage, **details}}


def responses_stream(*items: Any, response_id: str = "resp_1", is_last_empty: bool = False) -> bytes:
    events: list[Any] = [
        {"type": "response.created", "response": response(response_id=response_id, status="in_progress")}
    ]
    for index, item in enumerate(items):
        begun = {**item, "content": []} if item["type"] == "message" else {**item, "arguments": ""}
        events.append({"type": "response.output_item.added", "output_index": index, "item": begun})
        if item["type"] == "message":
            text = item["content"][0]["text"]
            place = {"item_id": item["id"], "output_index": index, "content_index": 0, "logprobs": []}
            part = {"type": "output_text", "text": "", "annotations": []}
            events.append({"type": "response.content_part.added", **place, "part": part})
            events += [{"type": "response.output_text.delta", **place, "delta": half} for half in (text[:3], text[3:])]
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": "response.an_unknown_event", "output_index": 0})
    whole = response(*(() if is_last_empty else items), response_id=response_id)
    events.append({"type": "response.completed", "response": whole})
    return sse(*({**event, "sequence_number": number} for number, event in enumerate(events)), names=True)


Handler = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


@dataclass
class Upstream:
    """Answers each request by `handler`; `seen` holds what reached it."""

    handler: Handler
    seen: list[tuple[str, str, list[tuple[str, str]], bytes]] = field(default_factory=list)
    """Method, path with query, headers, body."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append((request.method, request.raw_path, [*request.headers.items()], body))
        return await self.handler(request, body)


def says(*answers: Any) -> Handler:
    """Return a handler that gives these answers one after the other: bodies as JSON, or bytes as a stream."""
    left = iter(answers)

    async def handler(request: web.Request, body: bytes) -> web.StreamResponse:
        answer = next(left)
        if isinstance(answer, bytes):
            return web.Response(body=answer, headers={"Content-Type": "text/event-stream; charset=utf-8"})
        return web.json_response(answer)

    return handler


@dataclass
class Recording:
    """A recording gateway that answers at `url`."""

    url: str
    server: WebServer
    upstream: Upstream
    http: httpx.AsyncClient
    folder: Path

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.post(f"{self.url}{path}", json=body, headers={"Authorization": f"Bearer {KEY}", **named})

    async def chat(self, *messages: Any, **body: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", {"model": "big", "messages": [*messages], **body})

    async def metric(self, name: str) -> float:
        lines = (await self.http.get(f"{self.url}/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"agentic_opd_gateway_{name}"))

    async def recorded(self, turns: int) -> None:
        """Wait until so many turns are in the journal."""

        async def is_so() -> bool:
            return sum(map(len, sessions_in(self.folder).values())) >= turns

        await until(is_so)

    async def left_out(self, count: int) -> None:
        """Wait until so many answers were not recorded."""

        async def is_so() -> bool:
            return await self.metric("unrecorded_total") >= count

        await until(is_so)


def rows_in(folder: Path) -> list[SessionRow]:
    journal = Journal(folder / "journal.sqlite", only_read=True)
    try:
        return journal.sessions(*SessionState)
    finally:
        journal.close()


def sessions_in(folder: Path) -> dict[str, list[ForeignTurn]]:
    """Return the turns of each session in the journal."""
    journal = Journal(folder / "journal.sqlite", only_read=True)
    try:
        return {row.session_id: journal.foreign_turns(row.session_id) for row in journal.sessions(*SessionState)}
    finally:
        journal.close()


@asynccontextmanager
async def recording_gateway(
    handler: Handler, folder: Path, path: str = "", **settings: Any
) -> AsyncGenerator[Recording]:
    """A recording gateway whose journal lies in `folder`, before an upstream below `path`."""
    upstream = Upstream(handler)
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", upstream.answer)
    async with (
        TestServer(app) as server,
        gateway_at(str(server.make_url(path)), folder, **settings) as (url, running),
        httpx.AsyncClient(timeout=60) as http,
    ):
        yield Recording(url, running, upstream, http, folder)


@asynccontextmanager
async def gateway_at(address: str, folder: Path, **settings: Any) -> AsyncGenerator[tuple[str, WebServer]]:
    """A recording gateway before the upstream at an address: its own address, and its server."""
    keys = tuple(SecretStr(key) for key in settings.pop("api_keys", ()))
    groups = folder / "groups.jsonl"
    config = GatewayConfig(upstream=address, data_path_to_save_groups=groups, api_keys=keys, **settings)
    async with recording(config) as (web_server, _):
        web_server.config.port = 0
        serving = asyncio.create_task(web_server.serve())

        async def is_up() -> bool:
            return web_server.started

        await until(is_up)
        try:
            yield f"http://127.0.0.1:{web_server.servers[0].sockets[0].getsockname()[1]}", web_server
        finally:
            # Uvicorn's end waits for open connections.
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            for listening in web_server.servers:
                listening.close()
