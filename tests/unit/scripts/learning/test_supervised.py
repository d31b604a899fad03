"""The supervised start of `scripts/learn`: right conversations, and a bot's games, as groups."""

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from learning import supervised
from learning.babyai_bot import bot_steps

from agentic_opd.core.types import IGNORED, sampled_spans
from agentic_opd.distill.insertion import HINT_HEADER
from agentic_opd.env.config import AgenticOPDEnvConfig
from agentic_opd.rollout.renderer import load_tokenizer
from agentic_opd.wire.group import ScoredGroup, ScoredRollout
from agentic_opd_environments.conversations import PythonCall
from agentic_opd_environments.functions import FunctionCase
from tests.support.environment import read_lines
from tests.support.tiny_model import save_tiny_model
from tests.unit.environments.test_conversations import RIGHT, question, world_of
from tests.unit.environments.test_functions import CONVERT, STOP, written

pytestmark = pytest.mark.slow


def config_of(world: dict[str, Any]) -> AgenticOPDEnvConfig:
    renderer = {"name": "qwen3", "options": {"enable_thinking": False}}
    return AgenticOPDEnvConfig.model_validate({"world": world, "renderer": renderer, "max_token_length": 16384})


def functions_called(rollout: ScoredRollout) -> list[tuple[str, dict[str, Any]]]:
    calls = [call["function"] for message in rollout.messages or () for call in message.get("tool_calls") or ()]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.mark.sandbox
def test_right_conversations_become_groups_whose_mistakes_are_context(tmp_path: Path) -> None:
    world_of(tmp_path, question())
    asked, convert = tmp_path / "one_turn", {"convert": {"value": [2.0], "unit": ["km", "leagues"], "digits": ["", 2]}}
    asked.mkdir()
    one_turn = written(asked, ("How far is it?", [CONVERT, STOP], [convert]))
    world = {
        "type": "functions",
        "questions": [str(tmp_path / "questions.json"), one_turn["questions"]],
        "answers": [str(tmp_path / "answers.json"), one_turn["answers"]],
        "apis": str(tmp_path / "tea/apis"),
        "held_out": 0.0,
    }
    config, start = config_of(world), supervised.Start(9, 1, 1e-4, 9)
    model, path = save_tiny_model(tmp_path / "model"), tmp_path / "right.jsonl"
    assert asyncio.run(supervised.write_right_episodes(config, model, path, start)) == (2, 2)
    rollouts = sorted(
        (group.rollouts[0] for group in map(ScoredGroup.from_wire, read_lines(path))), key=lambda r: len(r.tokens_T)
    )
    one, conversation = rollouts
    assert functions_called(one)[-1] == ("convert", {"value": 2.0, "unit": "km"})
    called = functions_called(conversation)
    right = [PythonCall.parse(text).name for texts in RIGHT for text in texts]
    assert {"owner": "Ann", "tea": "mint"} in [arguments for _, arguments in called], "one of them is by position"
    messages = [message for rollout in rollouts for message in rollout.messages or ()]
    errors = [message["content"] for message in messages if message["role"] == "tool" and "Error" in message["content"]]
    assert errors, "the environment answers the mistakes"
    for rollout in rollouts:
        assert rollout.checks is not None
        assert rollout.checks.all_passed
        assert rollout.num_turns is not None
        assert [t for t, m in zip(rollout.logprobs_T, rollout.masks_T, strict=True) if m == -100 and t != 1.0] == []
    num_learned = sum(len(sampled_spans(rollout.masks_T)) for rollout in rollouts)
    assert num_learned == sum(rollout.num_turns or 0 for rollout in rollouts) - len(errors)
    assert len(called) == len(right) + len([e for e in errors if e in str(conversation.messages)])


FUNCTIONS = {
    "get_tea": {"parameters": {"properties": {"tea": {}, "cup": {}}, "required": ["tea"]}},
    "fill": {"parameters": {"properties": {"litres": {}}, "required": ["litres"]}},
    "stop": {"parameters": {"properties": {}, "required": []}},
}


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize(("name", "arguments"), [("get_tea", {"tea": "mint", "cup": 2}), ("stop", {}), ("fill", {})])
def test_a_mistake_is_another_call_that_no_function_takes(name: str, arguments: dict[str, Any], seed: int) -> None:
    wrong, given = supervised.mistaken(name, arguments, FUNCTIONS, random.Random(seed))
    if wrong in FUNCTIONS:
        assert wrong == name
        parameters = FUNCTIONS[name]["parameters"]
        assert {*given} - {*parameters["properties"]} or {*parameters["required"]} - {*given}
        if len(given) == len(arguments):
            assert [*given.values()] == [*arguments.values()]
        else:
            assert given.items() < arguments.items() or given.items() > arguments.items()
    else:
        assert given == arguments


def test_no_question_has_a_function_of_a_held_out_conversation(tmp_path: Path) -> None:
    (task,) = world_of(tmp_path, question()).tasks()
    own, kettle = {"brew": {}, "serve": {}}, {"serve": {}, "pour": {}}
    trained = replace(task, data=replace(task.data, functions=own))
    held_out = replace(task, data=replace(task.data, functions=kettle))
    questions = [
        replace(task, task_id=name, data=FunctionCase({name: {}}, (), (), frozenset()))
        for name in ("cafe.pour", "serve", "ask")
    ]
    start = supervised.Start(1, 1, 1e-4, 9)
    chosen = supervised.imitated([trained, *questions], [held_out], start)
    assert {each.task_id for each in chosen} == {task.task_id, "serve", "ask"}


def test_a_bots_games_become_groups_and_those_beyond_the_limit_are_left_out(tmp_path: Path) -> None:
    level, limit = "BabyAI-PickupLoc-v0", 12
    config = config_of({"type": "babyai", "levels": [level], "seeds": [0, 8], "max_steps": limit})
    model, path = save_tiny_model(tmp_path / "model"), tmp_path / "right.jsonl"
    played = {
        task_id: bot_steps(level, seed, None, supervised.GAME_MISTAKES, supervised.GAME_HINTS, random.Random(task_id))
        for seed in range(8)
        for task_id in (f"babyai/{level}/{seed}",)
    }
    short = {task_id for task_id, steps in played.items() if len(steps) <= limit}
    assert asyncio.run(supervised.write_right_episodes(config, model, path, supervised.Start(99, 1, 1e-4))) == (
        len(short),
        8,
    )
    groups, tokenizer = [ScoredGroup.from_wire(line) for line in read_lines(path)], load_tokenizer(str(model))
    assert {group.task_id for group in groups} == short != set()
    assert any(step.is_mistake for task_id in short for step in played[task_id])
    for group in groups:
        steps, (rollout,) = played[str(group.task_id)], group.rollouts
        assert len([*sampled_spans(rollout.masks_T)]) == sum(not step.is_mistake for step in steps)
        assert [arguments["action"] for _, arguments in functions_called(rollout)] == [step.action for step in steps]
        tokens = zip(rollout.tokens_T, rollout.masks_T, strict=True)
        context = tokenizer.decode([token for token, learned in tokens if learned == IGNORED])
        assert context.count(HINT_HEADER) == sum(step.hint is not None for step in steps)
        assert all(f"{HINT_HEADER}{step.hint}" in context for step in steps if step.hint)
    assert asyncio.run(supervised.write_right_episodes(config, model, path, supervised.Start(3, 1, 1e-4)))[1] == 3


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


def test_a_start_of_a_single_batch_is_trained(tmp_path: Path) -> None:
    config = config_of({"type": "babyai", "levels": ["BabyAI-GoToLocal-v0"], "seeds": [0, 8], "max_steps": 24})
    model, start = save_tiny_model(tmp_path / "model"), supervised.Start(supervised.START_BATCH, 1, 1e-4)
    final = asyncio.run(supervised.supervised_start(config, model, tmp_path / "start", start))
    assert (final / "model.safetensors").exists()
    assert not (tmp_path / "start" / "checkpoints").exists()
    assert len(read_lines(tmp_path / "start" / "metrics.jsonl")) == 1
