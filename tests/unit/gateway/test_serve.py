"""The gateway's web server."""

import asyncio
import importlib
import json
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from agentic_opd.gateway import serve
from agentic_opd.gateway.serve import WebServer
from agentic_opd.gateway.web import make_app
from tests.unit.gateway.fakes import USER, Running, ScriptedVllm, gateway_before, until


def test_an_idle_connection_outlives_an_agents_thought() -> None:
    """A client that reuses one at the moment of its end would see a lost connection; vLLM is started with 60 s."""
    assert WebServer(Starlette()).config.timeout_keep_alive >= 60


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_a_stop_overtakes_is_one_to_ask_again(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """Clients of OpenAI and Anthropic try a 503 again; uvicorn's own answer is a 500 without JSON, and a traceback.

    A stream has begun before; its connection ends without the end of the stream.
    """

    async def talk() -> None:
        vllm = ScriptedVllm(tokenizer, gate=asyncio.Event())
        async with gateway_before(vllm, tmp_path) as at:
            server = WebServer(make_app(at.gateway))
            server.config.port = server.config.timeout_graceful_shutdown = 0
            serving = asyncio.create_task(server.serve())
            await until(lambda: _is(server.started))
            port = server.servers[0].sockets[0].getsockname()[1]
            at = replace(at, url=f"http://127.0.0.1:{port}")
            asking = asyncio.create_task(at.chat(USER, stream=stream))
            await until(lambda: _is(bool(vllm.asked)))
            server.should_exit = True
            if stream:
                with pytest.raises(httpx.RemoteProtocolError):
                    await asking
            else:
                response = await asking
                assert (response.status_code, response.headers["Retry-After"]) == (503, "5")
                assert "was stopped" in response.json()["error"]["message"]
            await serving

    with caplog.at_level(logging.ERROR):
        asyncio.run(talk())
    assert "Traceback" not in caplog.text


async def _is(value: bool) -> bool:
    return value


LOOPS = [asyncio.new_event_loop, pytest.importorskip("uvloop").new_event_loop]
"""The gateway runs on uvloop where it is installed."""
PROTOCOLS = ["httptools_impl.HttpToolsProtocol", "h11_impl.H11Protocol"]


def request_bytes(*, stream: bool, path: str = "/v1/chat/completions") -> bytes:
    body = json.dumps({"messages": [USER], "stream": stream}).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def served(
    folder: Path, vllm: ScriptedVllm, talk: Callable[[Running, Any, Any], Awaitable[Any]], loop: Any = None
) -> Any:
    """Give `talk` a raw connection to the gateway."""

    async def with_gateway() -> Any:
        async with gateway_before(vllm, folder) as at:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(at.url.rpartition(":")[2]))
            try:
                return await talk(at, reader, writer)
            finally:
                writer.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(with_gateway())


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of uvicorn's two implementations, of which it takes the first where httptools is installed."""
    module, _, name = request.param.partition(".")
    base = getattr(importlib.import_module(f"uvicorn.protocols.http.{module}"), name)
    monkeypatch.setattr(serve, "PROTOCOL", type("Tried", (serve.HalfClosed, base), {}))


def unchunked(body: bytes) -> bytes:
    """Read chunks as a client does: a size may begin with zeros."""
    whole = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        chunk, body = rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        assert chunk or not body, "nothing follows the last chunk"
        whole += chunk
    return whole


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.slow
def test_a_client_that_closes_its_sending_half_gets_its_answer(
    tokenizer: Any, tmp_path: Path, stream: bool, is_late: bool, loop: Any
) -> None:
    """It closes it at once, or while the policy samples."""
    vllm = ScriptedVllm(tokenizer, lambda *_: "A word or two.", gate=asyncio.Event())

    async def talk(at: Running, reader: Any, writer: Any) -> bytes:
        writer.write(request_bytes(stream=stream))
        if not is_late:
            writer.write_eof()
        await until(lambda: _is(bool(vllm.asked)))
        if is_late:
            writer.write_eof()
        await asyncio.sleep(0.3)  # The bytes that tell whether a client has gone are sent meanwhile.
        assert vllm.aborted == 0
        vllm.gate.set()
        return await reader.read()

    answer = served(tmp_path, vllm, talk, loop)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer[:80]
    head, _, body = answer.partition(b"\r\n\r\n")
    if stream:
        assert unchunked(body).endswith(b"data: [DONE]\n\n")
        body = unchunked(body)
    assert (b"A word or two." in body) is not stream
    assert b"finish_reason" in body
    assert b"chunked" in head if stream else int(head.partition(b"content-length: ")[2].split()[0]) == len(body)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_reset", [False, True])
def test_a_client_that_has_gone_is_noticed_though_it_might_have_closed_one_half(
    tokenizer: Any, tmp_path: Path, stream: bool, is_reset: bool, loop: Any
) -> None:
    vllm = ScriptedVllm(tokenizer, lambda *_: "one two three four " * 40, gate=asyncio.Event(), step_s=0.01)

    async def talk(at: Running, reader: Any, writer: Any) -> None:
        writer.write(request_bytes(stream=stream))
        await until(lambda: _is(bool(vllm.asked)))
        if stream:
            await reader.readuntil(b"data: ")  # Nothing further is sampled until the gate is open.
        if is_reset:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()
        await until(lambda: _is(vllm.aborted == 1))
        await until(lambda: at.becomes("open_sessions", 0))

    served(tmp_path, vllm, talk, loop)


def test_what_ends_before_a_whole_request_is_closed(tokenizer: Any, tmp_path: Path, protocol: None) -> None:
    async def talk(at: Running, reader: Any, writer: Any) -> bytes:
        writer.write(request_bytes(stream=False)[:-1])
        writer.write_eof()
        return await reader.read()

    vllm = ScriptedVllm(tokenizer)
    assert served(tmp_path, vllm, talk) == b""
    assert vllm.asked == []


def test_requests_one_behind_the_other_are_all_answered(tokenizer: Any, tmp_path: Path, protocol: None) -> None:
    async def talk(at: Running, reader: Any, writer: Any) -> bytes:
        for session in "abc":
            writer.write(request_bytes(stream=False, path=f"/sessions/{session}/v1/chat/completions"))
        writer.write_eof()
        return await reader.read()

    answer = served(tmp_path, ScriptedVllm(tokenizer), talk)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.count(b"Said 0.") == 3
