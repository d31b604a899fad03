"""The gateway's web server."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from agentic_opd.gateway.serve import WebServer
from agentic_opd.gateway.web import make_app
from tests.unit.gateway.fakes import USER, ScriptedVllm, gateway_before, until


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
