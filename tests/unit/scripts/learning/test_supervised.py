"""The supervised start of `scripts/learn`: right conversations, and a bot's games, as groups."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from learning import supervised
from learning.babyai_bot import bot_actions

from agentic_opd.env.config import AgenticOPDEnvConfig
from agentic_opd.wire.group import ScoredGroup
from agentic_opd_environments.conversations import PythonCall
from tests.support.environment import read_lines
from tests.support.tiny_model import save_tiny_model
from tests.unit.environments.test_conversations import RIGHT, question, world_of

pytestmark = pytest.mark.slow


@pytest.mark.sandbox
def test_right_conversations_become_groups_whose_sampled_tokens_are_the_right_calls(tmp_path: Path) -> None:
    world_of(tmp_path, question())
    world = {
        "type": "functions",
        "questions": str(tmp_path / "questions.json"),
        "answers": str(tmp_path / "answers.json"),
        "apis": str(tmp_path / "tea/apis"),
        "held_out": 0.0,
    }
    renderer = {"name": "qwen3", "options": {"enable_thinking": False}}
    config = AgenticOPDEnvConfig.model_validate({"world": world, "renderer": renderer, "max_token_length": 16384})
    model, path = save_tiny_model(tmp_path / "model"), tmp_path / "right.jsonl"
    assert asyncio.run(supervised.write_right_episodes(config, model, path, 9)) == (1, 1)
    (group,) = map(ScoredGroup.from_wire, read_lines(path))
    (rollout,) = group.rollouts
    assert (rollout.score, rollout.num_turns) == (rollout.score, 8)
    assert rollout.checks is not None
    assert rollout.checks.all_passed
    calls = [call["function"] for message in rollout.messages or () for call in message.get("tool_calls") or ()]
    assert [call["name"] for call in calls] == [PythonCall.parse(text).name for texts in RIGHT for text in texts]
    assert json.loads(calls[3]["arguments"]) == {"owner": "Ann", "tea": "mint"}, "one of them is by position"


def test_a_bots_games_become_groups_and_those_beyond_the_limit_are_left_out(tmp_path: Path) -> None:
    world = {"type": "babyai", "levels": ["BabyAI-PickupLoc-v0"], "seeds": [0, 8], "max_steps": 6}
    renderer = {"name": "qwen3", "options": {"enable_thinking": False}}
    config = AgenticOPDEnvConfig.model_validate({"world": world, "renderer": renderer, "max_token_length": 16384})
    model, path = save_tiny_model(tmp_path / "model"), tmp_path / "right.jsonl"
    lengths = {seed: len(bot_actions("BabyAI-PickupLoc-v0", seed)) for seed in range(8)}
    short = {f"babyai/BabyAI-PickupLoc-v0/{seed}" for seed, length in lengths.items() if length <= 6}
    assert asyncio.run(supervised.write_right_episodes(config, model, path, 99)) == (len(short), 8)
    groups = [ScoredGroup.from_wire(line) for line in read_lines(path)]
    assert {group.task_id for group in groups} == short != set()
    for group in groups:
        assert group.rollouts[0].num_turns == lengths[int(str(group.task_id).rpartition("/")[2])] + 1
    assert asyncio.run(supervised.write_right_episodes(config, model, path, 3))[1] == 3


def test_the_shortest_conversations_are_taken(tmp_path: Path) -> None:
    (task,) = world_of(tmp_path, question()).tasks()
    fewer = replace(task, task_id="b", data=replace(task.data, right_calls=task.data.right_calls[:2]))
    shorter = replace(task, task_id="c", prompt="Fill.")
    assert [chosen.task_id for chosen in supervised.shortest([task, fewer, shorter], 2)] == ["b", "c"]


def test_a_finished_start_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    nothing: Any = None
    start = supervised.Start(2, 1, 1e-4)
    assert asyncio.run(supervised.supervised_start(nothing, nothing, tmp_path, start)) == tmp_path / "final"
