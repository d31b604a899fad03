"""Whole weights from a trainer's memory into real vLLM servers, by vLLM's own weight transfer over gloo.

One server is the one with all flags; with a second, `--all` shows that several are in one group.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.local_server import LocalServer

from agentic_opd.core.errors import ConfigError, ServerError
from agentic_opd.core.http import JsonClient
from agentic_opd.plugin.client import PluginClient
from agentic_opd.serving.process_group import Group
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.distributed import DistContext
from agentic_opd.training.model import served_weights, whole_specs
from agentic_opd.training.policy import load_policy
from agentic_opd.training.push import Probe, Pushed, WeightPusher
from agentic_opd.training.step import train_step
from agentic_opd.training.transfer import WeightSender
from tests.support.plugin_client import ask, random_ids, score
from tests.support.training import make_config, make_rollout
from tests.support.vllm import RootedServer, SharedServer, StartVllm

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

WORLD = DistContext("cpu")


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.all)])
def servers(request: pytest.FixtureRequest, rooted: RootedServer) -> list[LocalServer]:
    return [rooted.server] if request.param == 1 else [rooted.server, request.getfixturevalue("second")]


@pytest.fixture(scope="module")
def second(start_vllm: StartVllm) -> Iterator[LocalServer]:
    with start_vllm("--weight-transfer", "gloo") as server:
        yield server


def config_of(urls: list[str], folder: Path, **changes: Any) -> TrainerConfig:
    return make_config(
        weights_dir=folder,
        vllm_urls=urls,
        weight_transfer="gloo",
        loss={"forward_kl": 1.0},
        server_retry_s=5,
        **changes,
    )


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4, "lr": 1e-2}], ids=["whole", "lora"])
def test_servers_get_what_was_trained_and_nothing_is_written(
    servers: list[LocalServer], without_adapters: str, tmp_path: Path, changes: dict[str, Any]
) -> None:
    urls = [without_adapters, *(server.base_url for server in servers[1:])]
    config = config_of(urls, tmp_path / "weights", **changes)
    policy = load_policy(config, WORLD)
    batch = make_rollout(policy.model)
    probe, optimizer = (
        Probe.of(batch),
        torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], config.lr),
    )
    before = torch.tensor(probe.own_logprobs(policy, "cpu"))

    async def run() -> list[Pushed]:
        pusher, pushes = WeightPusher(config, WORLD), list[Pushed]()
        try:
            for version in (1, 2):
                train_step(policy, optimizer, batch, config, WORLD)
                pushed = await pusher.push(policy, version, probe)
                assert pushed is not None
                pushes.append(pushed)
        finally:
            await pusher.close()
        return pushes

    pushes = asyncio.run(run())
    assert max(pushed.difference or 0.0 for pushed in pushes) < 1e-3
    own, ids = torch.tensor(probe.own_logprobs(policy, "cpu")), list(probe.token_ids)
    assert (own - before).abs().max() > 0.1
    for server in servers:
        torch.testing.assert_close(
            torch.tensor(score(server, [(ids, len(ids) - 1)])[0].actual_R), own, atol=1e-3, rtol=0
        )
        assert ask(server, "/v1/opd/info").body["weight_version"] == 2
    sent = served_weights(policy.model, policy.model.state_dict(), torch.float32)
    assert pushes[0].size_bytes == sum(4 * one.numel() for one in sent.values())
    assert not list(tmp_path.rglob("*.safetensors"))


class Leaving:
    """A trainer's end that is gone after a few weights."""

    def __init__(self, group: Group) -> None:
        self._group, self._sends = group, 3

    def broadcast(self, tensor: Any) -> None:
        if not self._sends:
            self._group.close()
            raise RuntimeError("gone")
        self._sends -= 1
        self._group.broadcast(tensor)

    def close(self) -> None:
        self._group.close()


def test_a_trainer_that_goes_in_the_middle_leaves_the_server_as_it_was(rooted: RootedServer, tmp_path: Path) -> None:
    config, ids = config_of([rooted.base_url], tmp_path), random_ids(31, 80, 1000)
    policy = load_policy(config, WORLD)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.02)
    weights = served_weights(policy.model, policy.model.state_dict(), torch.float32)
    specs = whole_specs(policy.model, torch.float32, has_head=True)

    def served() -> tuple[int, list[float]]:
        return ask(rooted.server, "/v1/opd/info").body["weight_version"], list(
            score(rooted.server, [(ids, 40)])[0].actual_R
        )

    async def run() -> None:
        client = JsonClient(rooted.server.base_url, retry_s=1.0)
        try:
            server = await PluginClient.connected(client)
            sender = await WeightSender.joined("gloo", [server], "cpu")
            with pytest.raises(ServerError):
                await WeightSender([server], Leaving(sender.group), "cpu").send(specs, weights.items(), 7)  # type: ignore[arg-type]
        finally:
            await client.close()

    before = served()
    asyncio.run(run())
    version, logprobs = served()
    assert version == before[0]
    np.testing.assert_allclose(logprobs, before[1], atol=1e-4, rtol=0)

    async def again() -> Pushed | None:
        pusher = WeightPusher(config, WORLD)
        try:
            return await pusher.push(policy, 8, Probe(tuple(ids)))
        finally:
            await pusher.close()

    assert asyncio.run(again()) is not None
    version, logprobs = served()
    assert version == 8
    assert np.abs(np.subtract(logprobs, before[1])).max() > 0.1


def test_what_does_not_fit_is_refused(rooted: RootedServer, vllm_server: SharedServer, tmp_path: Path) -> None:
    config = config_of([vllm_server.base_url], tmp_path)
    policy = load_policy(config, WORLD)

    async def push() -> None:
        pusher = WeightPusher(config, WORLD)
        try:
            await pusher.push(policy, 1, None)
        finally:
            await pusher.close()

    with pytest.raises(ConfigError, match="restart it with scripts/serve_vllm --weight-transfer gloo"):
        asyncio.run(push())
    body = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]], "version": 1}
    assert ask(vllm_server, "/v1/opd/receive_weights", body).status == 409
    reply = ask(rooted.server, "/v1/opd/receive_weights", body)
    assert (reply.status, reply.body["error"]["field"]) == (400, "shapes")
    assert ask(rooted.server, "/v1/opd/receive_weights", {**body, "dtypes": []}).status == 400
    assert ask(rooted.server, "/v1/opd/join_transfer", {"address": "127.0.0.1", "port": 0}).status == 400
