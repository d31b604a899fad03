"""A recording gateway passes requests and answers on as they came, and journals what was said as text."""

import asyncio
import gzip
import json
import logging
import re
import socket
import sqlite3
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from anthropic import AsyncAnthropic
from openai import APIStatusError, AsyncOpenAI
from pydantic import ValidationError

from agentic_opd.gateway import answers
from agentic_opd.gateway.config import GatewayConfig
from agentic_opd.gateway.journal import Journal, SessionState
from agentic_opd.gateway.relay import protocol_of

from .fakes import AGAIN, MORE, TOOL, USER, until
from .foreign import (
    KEY,
    Handler,
    Recording,
    call,
    call_item,
    chat_answer,
    chat_stream,
    gateway_at,
    message_item,
    messages_answer,
    messages_stream,
    recording_gateway,
    response,
    responses_stream,
    rows_in,
    says,
    sessions_in,
    sse,
)

Talk = Callable[[Recording], Awaitable[Any]]
SYSTEM = {"role": "system", "content": "You are an agent."}


def run(folder: Path, handler: Handler, talk: Talk, **settings: Any) -> Any:
    async def held() -> Any:
        async with recording_gateway(handler, folder, **settings) as gateway:
            return await talk(gateway)

    return asyncio.run(held())


def texts(folder: Path) -> list[list[list[Any]]]:
    """Return the messages of each turn, by session."""
    return [[[*turn.messages] for turn in turns] for turns in sessions_in(folder).values()]


def spoken(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


# ------------------------------------------------------------------------------------------------- what the client gets


@pytest.mark.parametrize(
    ("path", "body", "stream"),
    [
        ("/v1/chat/completions", {"messages": [USER]}, chat_stream(["Hel", "lo."], [call("c1", code="f()")])),
        ("/v1/messages", {"messages": [USER], "max_tokens": 9}, messages_stream({"type": "text", "text": "Hello."})),
        ("/v1/responses", {"input": "Write f."}, responses_stream(message_item("Hello."))),
    ],
)
def test_a_stream_arrives_byte_for_byte_and_piece_by_piece(
    tmp_path: Path, path: str, body: dict[str, Any], stream: bytes
) -> None:
    gate, halves = asyncio.Event(), (stream[: len(stream) // 2], stream[len(stream) // 2 :])

    async def handler(request: web.Request, received: bytes) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Of-Upstream": "yes"})
        await answer.prepare(request)
        await answer.write(halves[0])
        await gate.wait()
        await answer.write(halves[1])
        return answer

    async def talk(gateway: Recording) -> None:
        sent = json.dumps({"model": "big", "stream": True, **body}, indent=3).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        async with gateway.http.stream("POST", f"{gateway.url}{path}?a=b%20c", content=sent, headers=headers) as answer:
            assert answer.headers["X-Of-Upstream"] == "yes"
            received, pieces = b"", answer.aiter_raw()
            while len(received) < len(halves[0]):  # The first half arrives before the second is sent.
                received += await anext(pieces)
            assert received == halves[0]
            gate.set()
            async for piece in pieces:
                received += piece
        assert received == stream
        ((method, target, _, seen),) = gateway.upstream.seen
        assert (method, target, seen) == ("POST", f"{path}?a=b%20c", sent)
        await gateway.recorded(1)

    run(tmp_path, handler, talk)


def test_headers_pass_both_ways_but_those_of_a_connection(tmp_path: Path) -> None:
    async def handler(request: web.Request, body: bytes) -> web.StreamResponse:
        answer = web.json_response(chat_answer("Hello."), headers={"X-Limit": "3", "Server": "theirs", "Date": "then"})
        answer.headers.add("Set-Cookie", "a=1")
        answer.headers.add("Set-Cookie", "b=2")
        return answer

    async def talk(gateway: Recording) -> Any:
        headers = {"Connection": "keep-alive, X-Hop", "X-Hop": "gone", "TE": "trailers", "User-Agent": "claude-cli/2"}
        headers |= {"Accept-Encoding": "gzip, exotic", "X-Session-Id": "mine", "Cookie": "c=3", "anthropic-beta": "x"}
        answer = await gateway.post("/v1/chat/completions", {"messages": [USER]}, **headers)
        assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
        assert (answer.headers["X-Limit"], answer.headers["Server"], answer.headers["Date"]) == ("3", "theirs", "then")
        await gateway.recorded(1)
        ((_, _, seen, _),) = gateway.upstream.seen
        return {name.lower(): value for name, value in seen}

    seen = run(tmp_path, handler, talk)
    assert seen["host"].startswith("127.0.0.1")
    assert seen["authorization"] == f"Bearer {KEY}"
    assert (seen["user-agent"], seen["cookie"], seen["anthropic-beta"]) == ("claude-cli/2", "c=3", "x")
    assert seen["accept-encoding"] == "gzip", "an encoding that the journal can't read is not asked for"
    assert not {"x-hop", "te", "x-gateway-key"} & seen.keys()


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (429, b'{"error": {"type": "rate_limit_error"}}', {"Retry-After": "17", "anthropic-ratelimit-requests": "0"}),
        (500, b"<html>sorry</html>", {"Content-Type": "text/html"}),
        (529, b'{"type": "error"}', {}),
        (302, b"", {"Location": "http://127.0.0.1:1/elsewhere"}),
        (204, b"", {}),
    ],
)
def test_an_error_of_the_upstream_passes_as_it_came(
    tmp_path: Path, status: int, body: bytes, headers: dict[str, str]
) -> None:
    async def handler(request: web.Request, received: bytes) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers=headers)

    async def talk(gateway: Recording) -> httpx.Response:
        answer = await gateway.post("/v1/messages", {"messages": [USER], "max_tokens": 3})
        assert len(gateway.upstream.seen) == 1, "a redirect is not followed"
        return answer

    answer = run(tmp_path, handler, talk)
    assert (answer.status_code, answer.content) == (status, body)
    assert {name: answer.headers[name] for name in headers} == headers
    assert sessions_in(tmp_path) == {}


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS"])
@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/messages/count_tokens", "/any/thing?key=1", "/v1/threads/x/messages"]
)
def test_any_other_request_passes_and_is_not_recorded(tmp_path: Path, method: str, path: str) -> None:
    async def handler(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.json_response({"method": request.method, "body": body.decode()})

    async def talk(gateway: Recording) -> None:
        content = b'{"a": 1}' if method in ("POST", "PUT") else b""
        answer = await gateway.http.request(method, f"{gateway.url}{path}", content=content)
        assert answer.status_code == 200
        assert method == "HEAD" or answer.json() == {"method": method, "body": content.decode()}
        assert gateway.upstream.seen[0][1] == path
        assert await gateway.metric("unrecorded_total") == 0

    run(tmp_path, handler, talk)
    assert sessions_in(tmp_path) == {}


def test_the_path_of_the_upstream_precedes_that_of_a_request(tmp_path: Path) -> None:
    async def talk(gateway: Recording) -> None:
        await gateway.chat(USER)
        await gateway.post("/sessions/mine%2Ftwo/v1/chat/completions", {"messages": [USER, MORE]})
        await gateway.post("/chat/completions", {"messages": [USER, AGAIN]})
        paths = [path for _, path, _, _ in gateway.upstream.seen]
        assert paths == ["/api/v1/chat/completions", "/api/v1/chat/completions", "/api/chat/completions"]
        await gateway.recorded(3)

    run(tmp_path, says(*[chat_answer("Hello.")] * 3), talk, path="/api/v1/")
    assert {row.name for row in rows_in(tmp_path)} == {None, "mine/two"}


def test_a_connection_that_the_upstream_cuts_is_cut_for_the_client(tmp_path: Path) -> None:
    stream = chat_stream(["Hel", "lo", " world."])
    half = stream[: stream.index(b" world")]
    half = half[: half.rindex(b"\n\n") + 2]

    async def handler(request: web.Request, body: bytes) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(half)
        assert request.transport is not None
        await until(lambda: written(request.transport))
        request.transport.close()
        return answer

    async def written(transport: Any) -> bool:
        return transport.get_write_buffer_size() == 0

    async def talk(gateway: Recording) -> None:
        received = b""
        url, body = f"{gateway.url}/v1/chat/completions", {"messages": [USER], "stream": True}
        async with gateway.http.stream("POST", url, json=body) as answer:
            pieces = answer.aiter_raw()
            while len(received) < len(half):
                received += await anext(pieces)
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(pieces)
        assert received == half
        await gateway.recorded(1)

    run(tmp_path, handler, talk)
    ((turn,),) = sessions_in(tmp_path).values()
    assert turn.messages[-1] == spoken("Hello")
    assert (turn.is_whole, turn.finish_reason) == (False, "")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_an_upstream_that_does_not_answer_is_named(tmp_path: Path, path: str) -> None:
    async def talk() -> httpx.Response:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            address = f"http://127.0.0.1:{unused.getsockname()[1]}"
            async with gateway_at(address, tmp_path) as (url, _), httpx.AsyncClient() as http:
                answer = await http.post(f"{url}{path}?key={KEY}", json={"messages": [USER]})
                assert address in answer.text
                return answer

    answer = asyncio.run(talk())
    error = answer.json()["error"]
    assert answer.status_code == 502
    assert "does not answer: Connection refused." in error["message"]
    assert ("type" in answer.json()) == (path == "/v1/messages"), "the protocol's form"
    assert KEY not in answer.text


def test_a_client_that_leaves_ends_the_upstreams_work(tmp_path: Path) -> None:
    cancelled = asyncio.Event()
    stream = chat_stream(["Hel", "lo."])

    async def handler(request: web.Request, body: bytes) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        try:
            await answer.write(stream[: stream.index(b"lo.")])
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return answer

    async def talk(gateway: Recording) -> None:
        url = f"{gateway.url}/v1/chat/completions"
        async with gateway.http.stream("POST", url, json={"messages": [USER], "stream": True}) as answer:
            await anext(answer.aiter_raw())
        async with asyncio.timeout(60):
            await cancelled.wait()
        await gateway.recorded(1)
        assert await gateway.metric("hung_up_total") == 1

    run(tmp_path, handler, talk)
    ((turn,),) = sessions_in(tmp_path).values()
    assert (turn.messages[-1], turn.is_whole) == (spoken("Hel"), False)


@pytest.mark.slow
def test_a_slow_client_holds_the_upstream_back(tmp_path: Path) -> None:
    """What a client has not read yet waits at the upstream, not in the gateway."""
    sent = 0
    chunk = b": " + b"x" * 2**16 + b"\n\n"
    most = 64 * 2**20

    async def handler(request: web.Request, body: bytes) -> web.StreamResponse:
        nonlocal sent
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        while sent < most:
            await answer.write(chunk)
            sent += len(chunk)
        return answer

    async def talk(gateway: Recording) -> None:
        nonlocal sent
        before = -1
        url = f"{gateway.url}/v1/chat/completions"
        async with gateway.http.stream("POST", url, json={"messages": [USER], "stream": True}) as answer:
            pieces = answer.aiter_raw()
            await anext(pieces)

            async def has_stopped() -> bool:
                nonlocal before
                same, before = sent == before, sent
                await asyncio.sleep(0.1)
                return same

            await until(has_stopped)
            assert sent < most / 2
            received = 0
            async for piece in pieces:
                received += len(piece)
        assert received > most / 2

    run(tmp_path, handler, talk)


@pytest.mark.slow
def test_a_large_request_passes_whole(tmp_path: Path) -> None:
    large = {"role": "user", "content": "x" * 10 * 2**20}

    async def talk(gateway: Recording) -> None:
        await gateway.chat(large)
        assert len(gateway.upstream.seen[0][3]) > 10 * 2**20
        await gateway.recorded(1)

    run(tmp_path, says(chat_answer("Read.")), talk)
    assert texts(tmp_path) == [[[large, spoken("Read.")]]]


# ------------------------------------------------------------------------------------------------------------ encodings


def brotli(data: bytes) -> bytes:
    return pytest.importorskip("brotli").compress(data)


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("backports.zstd").compress(data)


ENCODERS = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli,
    "zstd": zstd,
}


@pytest.mark.parametrize("encoding", ENCODERS)
def test_an_encoded_body_passes_unchanged_and_is_read(tmp_path: Path, encoding: str) -> None:
    encoded = ENCODERS[encoding](json.dumps(chat_answer("Hello.")).encode())

    async def handler(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.Response(
            body=encoded, headers={"Content-Type": "application/json", "Content-Encoding": encoding}, zlib_executor=None
        )

    async def talk(gateway: Recording) -> None:
        request = ENCODERS[encoding](json.dumps({"messages": [USER]}).encode())
        headers = {"Content-Encoding": encoding, "Content-Type": "application/json", "Accept-Encoding": encoding}
        url = f"{gateway.url}/v1/chat/completions"
        async with gateway.http.stream("POST", url, content=request, headers=headers) as answer:
            assert b"".join([piece async for piece in answer.aiter_raw()]) == encoded
            assert answer.headers["Content-Encoding"] == encoding
        await gateway.recorded(1)

    run(tmp_path, handler, talk)
    assert texts(tmp_path) == [[[USER, spoken("Hello.")]]]


def test_what_cant_be_read_passes_and_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "LARGEST_BODY", 2**16)
    bomb = gzip.compress(b" " * 2**17)
    bodies = [(b"not json", "identity"), (b"\x1f\x8b broken", "gzip"), (bomb, "gzip"), (b"{}", "exotic")]
    left = iter(bodies)

    async def handler(request: web.Request, body: bytes) -> web.StreamResponse:
        content, encoding = next(left)
        return web.Response(body=content, headers={"Content-Type": "application/json", "Content-Encoding": encoding})

    async def talk(gateway: Recording) -> None:
        for content, _ in bodies:
            async with gateway.http.stream("POST", f"{gateway.url}/v1/messages", json={"messages": [USER]}) as answer:
                assert b"".join([piece async for piece in answer.aiter_raw()]) == content
        await gateway.left_out(len(bodies))

    with caplog.at_level(logging.WARNING):
        run(tmp_path, handler, talk)
    assert sessions_in(tmp_path) == {}
    assert "its content encoding gzip is broken" in caplog.text
    assert answers.TOO_LARGE in caplog.text


# ---------------------------------------------------------------------------------------------------- what is journaled


def test_conversations_of_the_openai_client_are_recorded_as_text(tmp_path: Path) -> None:
    called = call("call_1", code="f()")

    async def talk(gateway: Recording) -> None:
        client = AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0)
        history: list[Any] = [SYSTEM, USER]
        first = await client.chat.completions.create(model="big", messages=history, tools=[TOOL])  # type: ignore[call-overload]
        history += [first.choices[0].message, {"role": "tool", "tool_call_id": "call_1", "content": "ok"}]
        text = ""
        async for event in await client.chat.completions.create(  # type: ignore[call-overload]
            model="big", messages=history, tools=[TOOL], stream=True, stream_options={"include_usage": True}
        ):
            text += event.choices[0].delta.content or "" if event.choices else ""
        assert text == "Done."
        await gateway.recorded(2)
        await client.close()

    run(tmp_path, says(chat_answer(None, [called], "tool_calls"), chat_stream(["Do", "ne."])), talk)
    ((first, second),) = sessions_in(tmp_path).values()
    assert [*first.messages] == [SYSTEM, USER, spoken("", tool_calls=[called])]
    assert [*second.messages] == [{"role": "tool", "tool_call_id": "call_1", "content": "ok"}, spoken("Done.")]
    assert (first.parent, second.parent, second.message_index) == (None, first.turn_id, 4)
    assert (first.model, first.finish_reason, first.usage) == ("big", "tool_calls", {"input": 7, "output": 3})
    assert (second.finish_reason, second.usage, second.is_whole) == ("stop", {"input": 7, "output": 3}, True)
    assert [tool["function"]["name"] for tool in first.tools] == ["run"]


def test_conversations_of_the_anthropic_client_are_recorded_as_text(tmp_path: Path) -> None:
    blocks = [
        {"type": "thinking", "thinking": "I run it.", "signature": "sig"},
        {"type": "text", "text": "Running."},
        {"type": "tool_use", "id": "toolu_1", "name": "run", "input": {"code": "f()"}},
    ]
    tools: Any = [{"name": "run", "description": "Runs.", "input_schema": {"type": "object", "properties": {}}}]

    async def talk(gateway: Recording) -> None:
        client = AsyncAnthropic(base_url=gateway.url, api_key=KEY, max_retries=0)
        history: Any = [USER]
        common: Any = {"model": "big", "max_tokens": 99, "tools": tools, "system": "You are an agent."}
        async with client.messages.stream(messages=history, **common) as stream:
            first = await stream.get_final_message()
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "ok"}]}
        history = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = await client.messages.create(messages=history, **common)
        assert second.content[0].type == "text"
        await gateway.recorded(2)
        await client.close()

    answer = messages_answer({"type": "text", "text": "Done."})
    run(tmp_path, says(messages_stream(*blocks, reason="tool_use"), answer), talk)
    ((first, second),) = sessions_in(tmp_path).values()
    called = call("toolu_1", code="f()")
    assert first.messages[-1] == spoken("Running.", reasoning_content="I run it.", tool_calls=[called])
    assert [*second.messages] == [{"role": "tool", "tool_call_id": "toolu_1", "content": "ok"}, spoken("Done.")]
    assert (first.finish_reason, first.answer_id, first.usage) == ("tool_use", "msg_1", {"input": 7, "output": 3})


@pytest.mark.slow
@pytest.mark.parametrize("is_last_empty", [False, True], ids=["items", "no items in the last event"])
def test_responses_that_refer_to_earlier_ones_are_recorded_with_their_history(
    tmp_path: Path, is_last_empty: bool
) -> None:
    tools: Any = [
        {"type": "function", "name": "run", "parameters": {"type": "object", "properties": {}}, "strict": None}
    ]

    async def talk(gateway: Recording) -> None:
        client = AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0)
        common: Any = {"model": "big", "tools": tools, "instructions": "Be brief."}
        async with client.responses.stream(input="Write f.", **common) as stream:
            async for _ in stream:
                pass
        result: Any = {"type": "function_call_output", "call_id": "call_1", "output": "ok"}
        await gateway.recorded(1)
        second = await client.responses.create(input=[result], previous_response_id="resp_1", **common)
        assert second.output_text == "Done."
        await gateway.recorded(2)
        await client.close()

    items = [message_item("Running."), call_item("call_1", code="f()")]
    stream = responses_stream(*items, is_last_empty=is_last_empty)
    run(tmp_path, says(stream, response(message_item("Done."), response_id="resp_2")), talk)
    ((first, second),) = sessions_in(tmp_path).values()
    assert first.messages[-1] == spoken("Running.", tool_calls=[call("call_1", code="f()")])
    assert [*second.messages] == [{"role": "tool", "tool_call_id": "call_1", "content": "ok"}, spoken("Done.")]
    assert second.parent == first.turn_id


def test_an_answer_whose_history_is_unknown_is_left_out_and_counted(tmp_path: Path) -> None:
    async def talk(gateway: Recording) -> None:
        await gateway.post("/v1/responses", {"input": "More.", "previous_response_id": "resp_of_yesterday"})
        await gateway.left_out(1)

    run(tmp_path, says(response(message_item("Done."))), talk)
    assert sessions_in(tmp_path) == {}


def test_equal_conversations_at_the_same_time_stay_apart(tmp_path: Path) -> None:
    """Four clients say the same; the model says the same to each, but for the ids of its calls."""
    numbers = iter(range(100))

    async def handler(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.json_response(chat_answer(None, [call(f"call_{next(numbers)}", code="f()")], "tool_calls"))

    async def talk(gateway: Recording) -> None:
        histories: list[list[Any]] = [[USER] for _ in range(4)]
        for count in range(1, 4):
            answers = await asyncio.gather(*(gateway.chat(*history, tools=[TOOL]) for history in histories))
            for history, answer in zip(histories, answers, strict=True):
                message = answer.json()["choices"][0]["message"]
                result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}
                history += [message, result]
            await gateway.recorded(4 * count)

    run(tmp_path, handler, talk)
    sessions = sessions_in(tmp_path)
    assert [len(turns) for turns in sessions.values()] == [3] * 4
    for turns in sessions.values():
        called = [turn.messages[-1]["tool_calls"][0]["id"] for turn in turns]
        results = [turn.messages[0].get("tool_call_id") for turn in turns[1:]]
        assert results == called[:-1], "each result answers a call of its own session"
        assert [turn.parent for turn in turns[1:]] == [turn.turn_id for turn in turns[:-1]]


def test_a_restarted_gateway_continues_conversations(tmp_path: Path) -> None:
    async def talk() -> None:
        async with recording_gateway(says(chat_answer("First.")), tmp_path) as gateway:
            await gateway.chat(USER)
        # What was answered is in the journal when the gateway has stopped.
        assert texts(tmp_path) == [[[USER, spoken("First.")]]]
        async with recording_gateway(says(chat_answer("Second.")), tmp_path) as gateway:
            await gateway.chat(USER, spoken("First."), MORE)

    asyncio.run(talk())
    ((first, second),) = sessions_in(tmp_path).values()
    assert (second.parent, [*second.messages]) == (first.turn_id, [MORE, spoken("Second.")])
    assert [row.state for row in rows_in(tmp_path)] == [SessionState.RECORDING]


def test_a_session_ends_by_name_or_when_it_is_idle(tmp_path: Path) -> None:
    async def talk(gateway: Recording) -> None:
        await gateway.post("/sessions/mine/v1/chat/completions", {"messages": [USER]})
        ended = await gateway.post("/sessions/mine/end", {"reward": 0.5, "feedback": "Good."})
        assert ended.json() | {"id": ""} == {"session_id": "mine", "id": "", "state": "recorded", "turns": 1}
        assert (await gateway.post("/sessions/mine/end", {})).status_code == 404
        assert (await gateway.http.get(f"{gateway.url}/sessions/mine")).json()["state"] == "recorded"

    async def fall_silent(gateway: Recording) -> None:
        await gateway.chat(USER, MORE)

        async def both_ended() -> bool:
            return [row.state for row in rows_in(tmp_path)] == [SessionState.RECORDED] * 2

        await until(both_ended)

    run(tmp_path, says(chat_answer("Hello.")), talk)
    run(tmp_path, says(chat_answer("Hello.")), fall_silent, session_idle_s=0.2)
    (mine, idle) = [row.ending for row in rows_in(tmp_path)]
    assert mine is not None
    assert (mine.reward, mine.feedback) == (0.5, "Good.")
    assert idle is not None
    assert idle.stop == "idle"


@pytest.mark.parametrize("header", ["X-Session-Id", "X-Claude-Code-Session-Id"])
def test_a_session_ends_with_the_answer_whose_connection_is_still_open(tmp_path: Path, header: str) -> None:
    """A client has all of a stream before the upstream closes the connection."""
    gate, stream = asyncio.Event(), chat_stream(["Hello."])

    async def handler(request: web.Request, received: bytes) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(stream)
        await gate.wait()
        return answer

    async def talk(gateway: Recording) -> None:
        body, headers = {"model": "big", "stream": True, "messages": [USER]}, {header: "mine"}
        url = f"{gateway.url}/v1/chat/completions"
        async with gateway.http.stream("POST", url, json=body, headers=headers) as answer:
            received, pieces = b"", answer.aiter_raw()
            while len(received) < len(stream):
                received += await anext(pieces)
            ending = asyncio.create_task(gateway.post("/sessions/mine/end", {"reward": 1}))
            for _ in range(3):  # They are answered meanwhile.
                await gateway.http.get(f"{gateway.url}/health")
            assert not ending.done(), "its answer is not recorded yet"
            gate.set()
            ended = await ending
        assert (ended.status_code, ended.json()["turns"]) == (200, 1)

    run(tmp_path, handler, talk)


def test_pictures_are_named_and_counted(tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    look = {"role": "user", "content": [{"type": "text", "text": "Look: "}, image]}

    async def talk(gateway: Recording) -> None:
        await gateway.chat(look)
        await gateway.recorded(1)
        await gateway.chat(look, spoken("A cat."), MORE)
        await gateway.recorded(2)

    run(tmp_path, says(chat_answer("A cat."), chat_answer("A dog.")), talk)
    ((first, second),) = sessions_in(tmp_path).values()
    assert first.messages[0] == {"role": "user", "content": "Look: [picture]"}
    assert (first.left_out, second.left_out) == (("image_url",), ())
    assert second.parent == first.turn_id


def test_fields_that_the_gateway_would_refuse_of_its_own_policy_are_recorded(tmp_path: Path) -> None:
    """What says how to answer is the upstream's business: a prefill, search, thinking, unknown parameters."""

    async def talk(gateway: Recording) -> None:
        body = {"messages": [USER, {"role": "assistant", "content": "def"}], "max_tokens": 3, "thinking": {"type": "x"}}
        await gateway.post("/v1/messages", {**body, "tools": [{"type": "web_search_20250305", "name": "web_search"}]})
        await gateway.chat(USER, best_of=3, guided_json={}, temperature=1.9, n=2)
        await gateway.recorded(2)

    run(tmp_path, says(messages_answer({"type": "text", "text": " f()"}), chat_answer("Hello.")), talk)
    assert len(sessions_in(tmp_path)) == 2


def test_a_stream_with_an_error_in_it_is_marked(tmp_path: Path) -> None:
    whole = messages_stream({"type": "text", "text": "Hello."})
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    stream = whole[: whole.index(b"event: content_block_stop")] + sse(error, names=True)

    async def talk(gateway: Recording) -> None:
        answer = await gateway.post("/v1/messages", {"messages": [USER], "max_tokens": 3, "stream": True})
        assert answer.content == stream
        await gateway.recorded(1)

    run(tmp_path, says(stream), talk)
    ((turn,),) = sessions_in(tmp_path).values()
    assert (turn.messages[-1], turn.is_whole) == (spoken("Hello."), False)


# ---------------------------------------------------------------------------------------------------------- who may ask


def test_the_clients_key_is_in_nothing_that_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async def handler(request: web.Request, body: bytes) -> web.StreamResponse:
        assert KEY in str(request.headers) + request.path_qs
        if request.path == "/cut":
            assert request.transport is not None
            request.transport.close()
        return web.json_response(chat_answer("Hello."), status=200 if request.path.startswith("/v1") else 500)

    async def talk(gateway: Recording) -> list[str]:
        body = {"messages": [USER], "model": "big"}
        for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}, {"api-key": KEY, "Cookie": f"k={KEY}"}):
            await gateway.http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers)
            await gateway.http.post(f"{gateway.url}/v1/messages", json=body, headers=headers)
        await gateway.http.post(f"{gateway.url}/v1/chat/completions?key={KEY}", json=body)
        cut = await gateway.http.post(f"{gateway.url}/cut?key={KEY}", json=body)
        assert cut.status_code == 502
        refused = await gateway.http.get(f"{gateway.url}/sessions/none", headers={"authorization": f"Bearer {KEY}"})
        await gateway.recorded(4)
        return [cut.text, refused.text, (await gateway.http.get(f"{gateway.url}/metrics")).text]

    with caplog.at_level(logging.DEBUG):
        answered = run(tmp_path, handler, talk)
    printed = capfd.readouterr()
    of_others = ("httpx", "httpcore", "aiohttp.access")  # The client's and the upstream's loggers.
    records = [record for record in caplog.records if not record.name.startswith(of_others)]
    logged = "\n".join([*(record.getMessage() for record in records), *answered, printed.out, printed.err])
    assert "turns_total" in logged
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert tmp_path / "journal.sqlite" in files
    for written in (logged.encode(), *(path.read_bytes() for path in files)):
        assert KEY.encode() not in written


def test_a_key_of_the_gateway_has_a_header_of_its_own(tmp_path: Path) -> None:
    async def talk(gateway: Recording) -> None:
        refused = await gateway.chat(USER)
        assert refused.status_code == 401
        assert "x-gateway-key" in refused.json()["error"]["message"]
        assert (await gateway.post("/v1/messages", {}, x_gateway_key="wrong")).json()["type"] == "error"
        assert gateway.upstream.seen == []
        for key in ("first", "second"):
            answer = await gateway.post("/v1/chat/completions", {"messages": [USER]}, x_gateway_key=key)
            assert answer.status_code == 200
        await gateway.recorded(2)
        assert not any("gateway" in name.lower() for _, _, headers, _ in gateway.upstream.seen for name, _ in headers)
        assert (await gateway.http.get(f"{gateway.url}/health")).status_code == 200
        assert (await gateway.http.get(f"{gateway.url}/metrics")).status_code == 401
        bearer = {"Authorization": "Bearer first"}
        assert (await gateway.http.get(f"{gateway.url}/metrics", headers=bearer)).status_code == 200

    run(tmp_path, says(*[chat_answer("Hello.")] * 2), talk, api_keys=("first", "second"))
    assert len({row.owner for row in rows_in(tmp_path)}) == 2


def test_web_pages_and_foreign_host_names_are_refused(tmp_path: Path) -> None:
    async def talk(gateway: Recording) -> None:
        for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"}):
            answer = await gateway.http.post(f"{gateway.url}/v1/messages", json={}, headers=headers)
            assert answer.status_code == 403
        assert gateway.upstream.seen == []
        await gateway.post("/v1/chat/completions", {"messages": [USER]}, Origin="vscode-file://vscode-app")
        await gateway.recorded(1)

    run(tmp_path, says(chat_answer("Hello.")), talk)


@pytest.mark.parametrize(
    "target", ["evil.example:80", "http://evil.example/v1/models", "*", "//evil.example/v1", "/@evil"]
)
def test_only_the_upstream_is_contacted(tmp_path: Path, target: str) -> None:
    async def handler(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.json_response({"reached": "upstream"})

    async def talk(gateway: Recording) -> bytes:
        host, port = gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        return answer

    answer = run(tmp_path, handler, talk)
    assert b'"reached"' in answer or answer.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"upstream": "https://user:secret@api.example.org"}, "clients send the key"),
        ({"upstream": "https://api.example.org?key=1"}, "clients send the key"),
        ({"upstream": "https://api.example.org", "host": "0.0.0.0"}, "set api_keys"),
        ({"upstream": "https://api.example.org", "rollout_server_url": "http://127.0.0.1:1"}, "only records"),
        ({"upstream": "https://api.example.org", "cors_origins": ("http://localhost:1",)}, "only records"),
    ],
)
def test_settings_that_do_not_go_with_an_upstream_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        GatewayConfig(**settings)


def test_the_address_of_an_upstream_may_end_in_v1() -> None:
    for address in ("https://api.example.org/api/v1/", "https://api.example.org/api/v1", "https://api.example.org/api"):
        assert GatewayConfig(upstream=address).upstream == "https://api.example.org/api"


@pytest.mark.parametrize(
    ("path", "protocol"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/deployments/x/chat/completions", "/v1/chat/completions"),
        ("/backend-api/codex/responses", "/v1/responses"),
        ("/api/v1/messages", "/v1/messages"),
        ("/messages", "/v1/messages"),
        ("/v1/threads/x/messages", None),
        ("/v1/messages/count_tokens", None),
        ("/v1/responses/resp_1", None),
        ("/v1/completions", None),
    ],
)
def test_the_path_tells_the_protocol(path: str, protocol: str | None) -> None:
    assert protocol_of("POST", path) == protocol
    assert protocol_of("GET", path) is None


# --------------------------------------------------------------------------------------------------------------- around


@pytest.mark.parametrize("keys", [(), ("a-key",)])
def test_recorded_sessions_are_shown_on_the_page_and_nothing_of_it_is_passed_on(
    tmp_path: Path, keys: tuple[str, ...]
) -> None:
    async def talk(gateway: Recording) -> None:
        headers = dict.fromkeys(["X-Gateway-Key"] if keys else [], "a-key")
        await gateway.post("/sessions/mine/v1/chat/completions", {"messages": [USER]}, **headers)
        await gateway.recorded(1)
        assert (await gateway.http.get(f"{gateway.url}/ui")).status_code == 401
        key = "".join(keys)
        login = await gateway.http.post(f"{gateway.url}/ui/login", data={"key": key}, headers={"Origin": gateway.url})
        assert login.status_code == 303
        listed = (await gateway.http.get(f"{gateway.url}/ui")).text
        (session_id,) = {*re.findall(r"/ui/sessions/(session-[0-9a-f]+)", listed)}
        shown = (await gateway.http.get(f"{gateway.url}/ui/sessions/{session_id}")).text
        assert "Hello." in shown
        assert "<form" in shown, "to sign out"
        assert "feedback" not in shown.partition("<main")[2].partition("</main>")[0]
        download = await gateway.http.get(f"{gateway.url}/ui/sessions/{session_id}.jsonl")
        assert json.loads(download.text)["kind"] == "foreign"
        mine = f"{gateway.url}/sessions/mine"
        assert (await gateway.http.delete(mine, headers=headers)).status_code == 409, "it is open"
        await gateway.post("/sessions/mine/end", {}, **headers)
        assert (await gateway.http.delete(mine, headers=headers)).status_code == 200
        assert (await gateway.http.get(f"{gateway.url}/ui/sessions/{session_id}")).status_code == 404
        assert len(gateway.upstream.seen) == 1

    run(tmp_path, says(chat_answer("Hello.")), talk, api_keys=keys)


def test_clients_are_answered_while_the_disk_refuses_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = Journal.add_turns

    def full(journal: Journal, turns: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async def talk(gateway: Recording) -> None:
        monkeypatch.setattr(Journal, "add_turns", full)
        monkeypatch.setattr(Journal, "try_again", lambda journal: full(journal, ()))
        assert (await gateway.chat(USER)).status_code == 200
        await gateway.left_out(1)
        health = await gateway.http.get(f"{gateway.url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "degraded")
        monkeypatch.undo()
        assert Journal.add_turns is writes
        assert (await gateway.http.get(f"{gateway.url}/health")).status_code == 200
        await gateway.chat(USER)
        await gateway.recorded(1)

    run(tmp_path, says(*[chat_answer("Hello.")] * 2), talk)
    assert texts(tmp_path) == [[[USER, spoken("Hello.")]]]


def test_an_error_of_the_upstream_is_the_real_clients_to_see(tmp_path: Path) -> None:
    async def handler(request: web.Request, body: bytes) -> web.StreamResponse:
        error = {"error": {"message": "Slow down.", "type": "rate_limit", "code": "busy"}}
        return web.json_response(error, status=429, headers={"Retry-After": "17"})

    async def talk(gateway: Recording) -> None:
        client = AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0)
        with pytest.raises(APIStatusError) as raised:
            await client.chat.completions.create(model="big", messages=[USER])  # type: ignore[list-item]
        assert raised.value.status_code == 429
        assert raised.value.response.headers["Retry-After"] == "17"
        await client.close()

    run(tmp_path, handler, talk)
