"""At learning rate 0 nothing moves, on every path by which weights reach a server.

Each run trains on a batch whose teacher disagrees, and pushes after each step. What the server computes before and
after is the same: a path that rounds, transposes, merges or mixes weights wrongly moves it.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentic_opd.training.trainer import open_trainer
from tests.support.plugin_client import ask, random_ids, score
from tests.support.training import ScriptedClient, make_config, make_group
from tests.support.vllm import RootedServer

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

LOSS = {"forward_kl": 1.0, "grpo": 1.0, "route_by_turn": False}
STEPS = 2
ADAPTERS = {"lora_rank": 4}
AVERAGED = {"ema_decay": 0.5}
PATHS: dict[str, tuple[dict[str, Any], bool]] = {
    "checkpoint": ({}, False),
    "gloo": ({"weight_transfer": "gloo"}, False),
    "adapters": (ADAPTERS, True),
    "merged": (ADAPTERS, False),
    "merged over gloo": ({**ADAPTERS, "weight_transfer": "gloo"}, False),
    "teacher's adapters": ({**ADAPTERS, **AVERAGED}, True),
    "teacher's server": (AVERAGED, False),
}
"""Settings of each path, and whether the server takes adapters."""


@pytest.mark.parametrize("path", PATHS)
def test_at_learning_rate_0_the_servers_compute_what_they_did(
    path: str, rooted: RootedServer, without_adapters: str, tmp_path: Path
) -> None:
    settings, takes_adapters = PATHS[path]
    url = rooted.base_url if takes_adapters else without_adapters
    urls = {"vllm_urls": [], "teacher_urls": [url]} if path == "teacher's server" else {"vllm_urls": [url]}
    sequences = [(random_ids(number, 80, 1000), 40) for number in (1, 2)]
    readers = ["policy", *(["teacher"] if path == "teacher's adapters" else [])]

    def served() -> np.ndarray[Any, Any]:
        rows = [score(rooted.server, sequences, read_by=reader) for reader in readers]
        return np.concatenate([np.column_stack((one.actual_R, one.top_logprobs_RK)) for both in rows for one in both])

    before = served()
    places = {"output_dir": tmp_path, "weights_dir": rooted.root}
    config = make_config(**places, **urls, **settings, lr=0.0, weight_decay=0.1, total_steps=STEPS, loss=LOSS)
    trainer = open_trainer(config)
    trainer.source = ScriptedClient(config, [[make_group(trainer.learner.model)]] * STEPS)
    asyncio.run(trainer.run())
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert min(step["grad_norm"] for step in steps) > 1e-3, "there was something to learn"
    assert ask(rooted.server, "/v1/opd/info").body["weight_version"] == STEPS
    np.testing.assert_allclose(served(), before, atol=1e-6, rtol=0)
