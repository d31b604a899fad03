"""A pretrained model of the package registry, SmolLM2-135M-Instruct, through every part: rollouts, gateway, pushes.

Its chat template knows no tools, its embeddings are tied, and its checkpoint is in bfloat16, as with many small models.
"""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from bench.local_server import LocalServer

from agentic_opd.cli.validate import validate
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.distributed import DistContext
from agentic_opd.training.policy import load_policy
from agentic_opd.training.push import Probe, WeightPusher
from agentic_opd.wire.group import ScoredGroup
from agentic_opd.worlds.choose import world_class
from agentic_opd.worlds.config import WorldConfig
from agentic_opd.worlds.custom import HookedWorld
from tests.support import commands
from tests.support.environment import read_lines
from tests.support.gateway import served
from tests.support.places import ROOT
from tests.support.vllm import Forward, forked_server

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

MODEL = ROOT / "runs/models/smollm2-135m-instruct"
TOLERANCE = 2e-3
"""Nats, of float32 on the CPU with a vocabulary of 49,152."""


class Real(NamedTuple):
    """The server of the model, and the folder that it takes weights from."""

    server: LocalServer
    root: Path


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    made = subprocess.run(["scripts/install/real_model"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    if "can't be downloaded" in made.stderr:
        pytest.skip(f"the package registry can't be reached: {made.stderr[-300:]}")
    assert made.returncode == 0, made.stderr
    root = tmp_path_factory.mktemp("real")
    options = ("--max-model-len", "2048", "--weights-root", str(root), "--max-lora-rank", "8")
    with forked_server(MODEL, *options, log=root / "vllm.log") as server:
        yield Real(server, root)


def test_rollouts_are_scored_as_transformers_scores_them(real: Real, forward: Forward, tmp_path: Path) -> None:
    out = tmp_path / "groups.jsonl"
    flags = ("--openai.base_url", f"{real.server.base_url}/v1", "--env.data_path_to_save_groups", str(out))
    done = commands.run("agentic_opd.env", "process", "--config", "configs/real.yaml", *flags, "--env.total_steps", "1")
    assert done.returncode == 0, done
    groups = [ScoredGroup.from_wire(line) for line in read_lines(out)]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [turn.outcome.value for rollout in rollouts for turn in rollout.turns or ()] == ["scored"] * 4
    assert any(message.get("tool_calls") for one in rollouts for message in (one.messages or ())[-2:])
    assert validate(out).violations == 0
    for rollout in rollouts[:2]:
        assert rollout.turns is not None
        (turn,) = rollout.turns
        start, end = turn.span
        assert rollout.rows is not None
        own = forward(rollout.tokens_T[:end], MODEL)[start - 1 : -1]
        sampled = rollout.tokens_T[start:end]
        np.testing.assert_allclose(own[range(end - start), sampled], rollout.logprobs_T[start:end], atol=TOLERANCE)
        assert turn.insert_at is not None
        read = (*rollout.tokens_T[: turn.insert_at], *turn.hint_token_ids, *rollout.tokens_T[turn.insert_at : end])
        teacher = forward(read, MODEL)[-(end - start) - 1 : -1]
        for at, row in zip(range(start, end), teacher, strict=True):
            ids, logprobs = rollout.rows.token_ids_TK[at], rollout.rows.logprobs_TK[at]
            np.testing.assert_allclose(row[list(ids)], logprobs, atol=TOLERANCE)


def test_a_client_of_the_gateway_gets_a_true_tool_call(real: Real, tmp_path: Path) -> None:
    world = HookedWorld(world_class(str(ROOT / "scripts/demo_policy/home_world.py:Home"))(), WorldConfig())
    task = asyncio.run(world.train_and_eval_tasks())[0][0]
    start = [{"role": "system", "content": world.system_prompt}, *task.examples]
    start.append({"role": "user", "content": task.prompt})
    flags = ("--env.renderer.name", "default", "--env.renderer.options", "{tool_parser: pythonic}")
    flags += ("--env.renderer.tool_format", "text", "--env.hint.source", "feedback", "--env.tokenizer_name", str(MODEL))
    flags += ("--openai.model_name", str(MODEL))
    with served(real.server.base_url, tmp_path, *flags) as gateway:
        names = {tool["function"]["name"] for tool in world.tools}
        asked: dict[str, Any] = {"model": real.server.model, "tools": [*world.tools], "max_tokens": 40}
        choices = gateway.chat(*start, session="real", temperature=0.7, n=16, **asked).choices
        message = next(choice.message for choice in choices if choice.message.tool_calls)
        (call, *_) = message.tool_calls
        assert call.function.name in names
        assert isinstance(json.loads(call.function.arguments), dict)
        answer = {"role": "tool", "tool_call_id": call.id, "content": "Done."}
        more = gateway.chat(*start, message.model_dump(), answer, session="real", **asked)
        assert more.usage.completion_tokens > 0
        group = gateway.end("real", reward=1.0)
    turns = [turn for rollout in group["overrides"] for turn in rollout["opd"]["turns"]]
    assert "scored" in {turn["outcome"] for turn in turns}
    assert validate(tmp_path / "groups.jsonl").violations == 0


def test_a_push_brings_the_server_where_the_trainer_is(real: Real) -> None:
    """An adapter, then whole weights: tied embeddings, which the server untied when it was started; then as it was."""
    moved = [pushed(real, 1, 1e-2, lora_rank=4), pushed(real, 2, 3e-4)]
    pushed(real, 3, 0.0)
    assert min(moved) > 0.05, "it would not be seen"


def pushed(real: Real, version: int, by: float, **changes: Any) -> float:
    """Move each trained weight by so much, and push; returns by how much that changed the probe (nats)."""
    import torch

    config = TrainerConfig(model=str(MODEL), vllm_urls=[real.server.base_url], weights_dir=real.root, **changes)
    policy = load_policy(config, DistContext("cpu")).eval()
    probe = Probe(tuple(range(1000, 1060)))
    before = np.array(probe.own_logprobs(policy, "cpu"))
    torch.manual_seed(0)
    with torch.no_grad():
        for one in policy.parameters():
            if one.requires_grad:
                one.add_(by * torch.randn_like(one).sign())

    async def push() -> Any:
        pusher = WeightPusher(config, DistContext("cpu"))
        try:
            return await pusher.push(policy, version, probe)
        finally:
            await pusher.close()

    assert asyncio.run(push()).difference < TOLERANCE
    return float(np.abs(np.array(probe.own_logprobs(policy, "cpu")) - before).max())
