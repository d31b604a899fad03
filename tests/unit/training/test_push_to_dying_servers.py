"""A server that is killed in the middle of a push ends neither the trainer nor another server for ever.

The killed one ends itself by SIGKILL when the load has begun; see `tests.support.dying_server`.
"""

import asyncio
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from bench.local_server import free_port

from agentic_opd.core.errors import ServerUnreachableError
from agentic_opd.core.http import JsonClient
from agentic_opd.plugin.client import PluginClient
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.distributed import DistContext
from agentic_opd.training.policy import load_policy
from agentic_opd.training.push import WeightPusher
from tests.support.tiny_model import save_tiny_model

pytest.importorskip("vllm", reason="the plugin runs inside vLLM, which is not installed")
pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

WORLD = DistContext("cpu")


class Servers(NamedTuple):
    dying: str
    living: str
    process: Any
    """Of the one that dies."""


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    from tests.support.dying_server import dying_server  # It imports vLLM.

    monkeypatch.setenv("AGENTIC_OPD_WEIGHTS_ROOT", str(tmp_path))
    with ExitStack() as stack:
        urls, processes = list[str](), list[Any]()
        for role in ("dies", "lives"):
            port = free_port()
            server = dying_server(port, tmp_path / f"{role}.log", dies=role == "dies")
            processes.append(stack.enter_context(server))
            urls.append(f"http://127.0.0.1:{port}")
        asyncio.run(answering(urls))
        yield Servers(*urls, processes[0])


async def answering(urls: list[str]) -> None:
    """Wait until the servers answer."""
    for url in urls:
        async with JsonClient(url, retry_s=300.0) as client:
            await client.get("/v1/opd/info")


@pytest.mark.parametrize("way", ["files", "gloo", pytest.param("adapters", marks=pytest.mark.all)])
def test_the_trainer_and_the_other_server_go_on(way: str, servers: Servers, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "model": str(save_tiny_model(tmp_path / "model", tied=False)),
        "weights_dir": tmp_path / "weights",
    }
    settings |= {"lora_rank": 4} if way == "adapters" else {"weight_transfer": way}
    config = TrainerConfig(**settings, server_retry_s=0.2)  # type: ignore[arg-type]
    policy = load_policy(config, WORLD)

    async def push(urls: list[str], version: int) -> None:
        pusher = WeightPusher(config.model_copy(update={"vllm_urls": urls}), WORLD)
        try:
            await pusher.push(policy, version, None)
        finally:
            await pusher.close()

    async def version_of(url: str) -> int | None:
        async with JsonClient(url) as client:
            server = await PluginClient.connected(client)
            return server.info.weight_version

    problem = "disconnected while it received version 1" if way == "gloo" else re.escape(servers.dying)
    with pytest.raises(ServerUnreachableError, match=problem):
        asyncio.run(push([servers.dying, servers.living], 1))
    servers.process.join()
    assert servers.process.exitcode == -signal.SIGKILL
    if way == "gloo":
        assert asyncio.run(version_of(servers.living)) == 0  # Whole, and the old ones.
    asyncio.run(push([servers.living], 2))  # Waits until the living server has ended the first push.
    assert asyncio.run(version_of(servers.living)) == 2
