"""Whole weights of a tied model in bfloat16 into a real vLLM server that computes in it, by files and from memory."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.local_server import LocalServer

from agentic_opd.core.precision import Noise, tolerance_for
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.distributed import DistContext
from agentic_opd.training.model import tied_names
from agentic_opd.training.policy import TrainedPolicy, load_policy
from agentic_opd.training.push import Probe, WeightPusher
from tests.support.plugin_client import ask, score
from tests.support.tiny_model import save_tiny_model
from tests.support.vllm import forked_server

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

PROBE = Probe(tuple(range(300, 400)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tied")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LocalServer]:
    """It is asked to serve the tied model, and takes weights both ways."""
    root, log = folder / "weights", folder / "vllm.log"
    root.mkdir()
    options = ("--weights-root", str(root), "--weight-transfer", "gloo", "--", "--dtype", "bfloat16")
    with forked_server(save_tiny_model(folder / "tiny"), *options, log=log) as server:
        yield server


def served(server: LocalServer) -> torch.Tensor:
    return torch.tensor(score(server, [(list(PROBE.token_ids), len(PROBE.token_ids) - 1)])[0].actual_R)


@pytest.mark.parametrize(
    "changes", [{}, {"weight_transfer": "gloo"}, {"lora_rank": 4}], ids=["files", "gloo", "merged"]
)
def test_ten_pushes_leave_the_server_where_the_trainer_is(
    server: LocalServer, folder: Path, changes: dict[str, Any]
) -> None:
    config = TrainerConfig(
        model=str(folder / "tiny"), vllm_urls=[server.base_url], weights_dir=folder / "weights", **changes
    )
    policy = load_policy(config, DistContext("cpu")).eval()
    start = torch.tensor(PROBE.own_logprobs(policy, "cpu"))
    torch.manual_seed(0)

    async def run() -> None:
        pusher = WeightPusher(config, DistContext("cpu"))
        try:
            for version in range(1, 11):
                move(policy, 3e-3 if "lora_rank" not in changes else 1e-2)
                done = await pusher.push(policy, version, PROBE)
                assert done is not None
                assert done.difference is not None
                assert done.difference_rms is not None
                assert not Noise(done.difference_rms, done.difference).exceeds(tolerance_for("bfloat16"))
                assert done.rounded_share < 0.5
        finally:
            await pusher.close()

    asyncio.run(run())
    assert ask(server, "/v1/opd/info").body["weight_version"] == 10
    own = torch.tensor(PROBE.own_logprobs(policy, "cpu"))
    moved, moved_there = own - start, served(server) - start
    assert moved.abs().mean() > 0.1
    assert float(moved @ moved_there / (moved @ moved)) == pytest.approx(1.0, abs=0.1)
    assert Noise.of(served(server) - own).rms < tolerance_for("bfloat16").rms
    assert tied_names(policy.model)


def move(policy: TrainedPolicy, by: float) -> None:
    """What an update of AdamW does at this learning rate, in a random direction."""
    with torch.no_grad():
        for one in policy.parameters():
            if one.requires_grad:
                one.add_(by * torch.randn_like(one).sign())


def test_the_server_says_what_it_is_and_that_it_unties(server: LocalServer, folder: Path) -> None:
    info = ask(server, "/v1/opd/info").body
    assert (info["dtype"], info["tied_embeddings"], info["model"]) == ("bfloat16", False, str(folder / "tiny"))
    said = server.log.read_text()
    assert said.count("an untied copy is served") == 1
