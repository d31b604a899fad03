"""The gateway's web server."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from agentic_opd.gateway.serve import WebServer
from agentic_opd.gateway.web import make_app
from tests.unit.gateway.fakes import USER, Running, ScriptedVllm, gateway_before, until


def test_an_idle_connection_outlives_an_agents_thought() -> None:
    """A client that reuses one at the moment of its end would see a lost connection; vLLM is started with 60 s."""
    assert WebServer(FastAPI()).config.timeout_keep_alive >= 60


def test_an_answer_that_a_stop_overtakes_is_refused_as_one_to_ask_again(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients of OpenAI and Anthropic try a 503 again; uvicorn's own answer is a 500 without JSON, and a traceback."""

    async def talk() -> None:
        vllm = ScriptedVllm(tokenizer, gate=asyncio.Event())
        async with gateway_before(vllm, tmp_path) as at:
            server = WebServer(make_app(at.gateway))
            server.config.port, server.config.timeout_graceful_shutdown = 0, 1
            serving = asyncio.create_task(server.serve())
            await until(lambda: _is(server.started))
            at = Running(at.gateway, vllm, f"http://127.0.0.1:{_port(server)}", at.groups_path, at.http)
            asking = asyncio.create_task(at.chat(USER))
            await until(lambda: _is(bool(vllm.asked)))
            server.should_exit = True
            response = await asking
            assert (response.status_code, response.headers["Retry-After"]) == (503, "5")
            assert "was stopped" in response.json()["error"]["message"]
            await serving

    with caplog.at_level(logging.ERROR):
        asyncio.run(talk())
    assert "Traceback" not in caplog.text


async def _is(value: bool) -> bool:
    return value


def _port(server: WebServer) -> int:
    return server.servers[0].sockets[0].getsockname()[1]
