"""The world of function calls: verdicts by BFCL's rules, answers of the environment, files, and splits."""

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import DatasetError
from agentic_opd.core.types import Task, ToolCall, Verification
from agentic_opd.distill.leaks import leaks
from agentic_opd.env.config import AgentEnvConfig
from agentic_opd.worlds.choose import make_world
from agentic_opd.worlds.custom import HookedWorld
from agentic_opd_environments.calls import verdict
from agentic_opd_environments.functions import FunctionsWorld, held_out_ids

CONVERT: dict[str, Any] = {
    "name": "convert",
    "description": "Convert a length.",
    "parameters": {
        "type": "dict",
        "properties": {
            "value": {"type": "float"},
            "unit": {"type": "string"},
            "digits": {"type": "integer"},
            "steps": {"type": "array", "items": {"type": "integer"}},
            "place": {"type": "dict", "properties": {"city": {"type": "string"}}},
        },
        "required": ["value", "unit"],
    },
}
ALLOWED = {
    "value": [2.0],
    "unit": ["km", "kilo-metres"],
    "digits": ["", 2],
    "steps": ["", [1, 2]],
    "place": ["", {"city": ["Rome", ""]}],
}
STOP: dict[str, Any] = {
    "name": "stop",
    "description": "",
    "parameters": {"type": "dict", "properties": {}, "required": []},
}
RIGHT = {"value": 2, "unit": "km"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"unit": "Kilo Metres"}, None),
        ({"digits": 2, "steps": [1, 2], "place": {"city": "ROME"}}, None),
        ({"place": {}}, None),
        ({"unit": "m"}, 'convert: the parameter unit has a wrong value, "m".'),
        ({"unit": None}, "convert: the parameter unit has a wrong value, null."),
        ({"value": 3}, "convert: the parameter value has a wrong value, 3."),
        ({"value": 10**400}, "convert: the parameter value has a wrong value, 1000"),
        ({"value": "2"}, 'convert: the parameter value has a wrong value, "2".'),
        ({"digits": True}, "convert: the parameter digits has a wrong value, true."),
        ({"steps": [2, 1]}, "convert: the parameter steps has a wrong value, [2, 1]."),
        ({"steps": [1, "2"]}, 'convert: the parameter steps has a wrong value, [1, "2"].'),
        ({"place": {"city": "Rome", "street": "x"}}, "convert: the parameter place has a wrong value"),
        ({"colour": "red"}, "convert: the parameter colour does not belong to the call."),
    ],
)
def test_one_call_is_judged_by_allowed_values_and_types(changes: dict[str, Any], reason: str | None) -> None:
    found = verdict({"convert": CONVERT}, [("convert", {**RIGHT, **changes})], [{"convert": ALLOWED}])
    assert found is None if reason is None else (found or "").startswith(reason)


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([("stop", {}), ("convert", RIGHT)], None),
        ([("convert", RIGHT), ("stop", {})], None),
        ([("convert", RIGHT)], "1 calls were made, expected 2."),
        ([("convert", RIGHT), ("convert", RIGHT)], "convert is not the function that is needed."),
        ([("stop", {}), ("convert", {"unit": "km"})], "convert: the parameter value is missing."),
    ],
)
def test_several_calls_may_come_in_any_order(calls: list[tuple[str, dict[str, Any]]], reason: str | None) -> None:
    assert verdict({"convert": CONVERT, "stop": STOP}, calls, [{"convert": ALLOWED}, {"stop": {}}]) == reason


def test_a_required_value_that_may_be_left_out_is_missing_where_no_empty_one_is_allowed() -> None:
    assert verdict({"convert": CONVERT}, [("convert", RIGHT)], [{"convert": {**ALLOWED, "digits": [2]}}]) == (
        "convert: the parameter digits is missing."
    )


def written(folder: Path, *rows: tuple[str, list[dict[str, Any]], list[dict[str, Any]]]) -> dict[str, Any]:
    """Questions and their answers as files; the options of the world."""
    questions, answers = folder / "questions.json", folder / "answers.json"
    asked = [
        {"id": str(n), "question": [[{"role": "user", "content": text}]], "function": functions}
        for n, (text, functions, _) in enumerate(rows)
    ]
    right = [{"id": str(n), "ground_truth": answer} for n, (_, _, answer) in enumerate(rows)]
    questions.write_text("".join(f"{json.dumps(row)}\n" for row in asked))
    answers.write_text("".join(f"{json.dumps(row)}\n" for row in right))
    return {"questions": str(questions), "answers": str(answers), "held_out": 0.0}


def episode(world: HookedWorld, task: Task, *calls: tuple[str, Any]) -> tuple[list[str], Verification]:
    """What the environment answers, and the verdict."""

    async def run() -> tuple[list[str], Verification]:
        async with world.session(task) as session:
            results = [await session.run_tool(ToolCall("c", name, given, "")) for name, given in calls]
            left = await session.collect()
        return [result.content for result in results], await world.verify(task, left)

    return asyncio.run(run())


QUESTION = "How far is 2 miles in kilometres?"


def made_world(folder: Path) -> tuple[HookedWorld, Task]:
    options = written(folder, (QUESTION, [CONVERT, STOP], [{"convert": ALLOWED}]))
    world = make_world(AgentEnvConfig(world={"type": "functions", **options}))
    assert isinstance(world, HookedWorld)
    (task,), held_out = asyncio.run(world.train_and_eval_tasks())
    assert held_out == []
    return world, task


def test_wrong_calls_are_answered_with_what_is_wrong_and_do_not_count(tmp_path: Path) -> None:
    world, task = made_world(tmp_path)
    said, verification = episode(
        world,
        task,
        ("converter", {}),
        ("convert", {"value": "2", "units": "km"}),
        ("convert", {"value": 2, "unit": "km", "steps": ["1"]}),
        ("convert", RIGHT),
    )
    assert said == [
        'Error: the name must be one of "convert", "stop".',
        "Error: convert can't be called like this: unit is missing; value must be a number; there is no parameter "
        "units.",
        "Error: convert can't be called like this: steps must be an array of integers.",
        '{"status": "ok"}',
    ]
    assert (verification.passed, verification.total, verification.judge_report) == (1, 1, "The calls are right.")


def test_a_parameter_without_a_type_takes_any_value_and_a_function_may_have_no_properties(tmp_path: Path) -> None:
    free = {"mode": {"enum": ["a", 1]}, "items": {"type": "array", "items": {"enum": ["b"]}}}
    free["note"] = {"type": ["string", "null"]}
    functions = [
        {"name": "set", "description": "", "parameters": {"type": "object", "properties": free, "required": None}},
        {"name": "stop", "description": "", "parameters": {"type": "object"}},
    ]
    answers = [{"set": {"mode": [1], "items": ["", ["b"]], "note": [None]}}, {"stop": {}}]
    options = written(tmp_path, ("Set it, then stop.", functions, answers))
    world = make_world(AgentEnvConfig(world={"type": "functions", **options}))
    assert isinstance(world, HookedWorld)
    (task,), _ = asyncio.run(world.train_and_eval_tasks())
    given = {"mode": 1, "items": ["b"], "note": None}
    said, verification = episode(world, task, ("set", given), ("stop", {"x": 1}), ("stop", {}))
    assert said[1] == "Error: stop can't be called like this: there is no parameter x."
    assert verification.passed == 1


def test_the_judge_reads_no_allowed_value_and_a_hint_with_one_leaks(tmp_path: Path) -> None:
    world, task = made_world(tmp_path)
    _, verification = episode(world, task, ("convert", {"value": 2, "unit": "feet"}))
    assert verification.passed == 0
    assert verification.judge_report == 'convert: the parameter unit has a wrong value, "feet".'
    assert "kilo-metres" in verification.report
    shown = f"{task.prompt}\n{json.dumps(task.tools)}"
    assert "kilo-metres" not in shown
    assert leaks("The unit should be kilo-metres.", task.hidden_tests or "", shown)
    assert not leaks("The unit is wrong: the question asks for another one than feet.", task.hidden_tests or "", shown)


def test_a_small_models_prompt_holds_the_functions_and_one_turn_is_judged(tmp_path: Path) -> None:
    convert = {**CONVERT, "parameters": {**CONVERT["parameters"], "properties": {"unit": {"type": "string"}}}}
    convert["parameters"]["properties"]["value"] = {"type": "float", "description": "How much."}
    options = written(tmp_path, (QUESTION, [convert], [{"convert": {"value": [2.0], "unit": ["km"]}}]))
    world = FunctionsWorld(**dict[str, Any](options, example=True, in_prompt=True, max_turns=1))
    (task,) = world.tasks()
    shown = "convert(unit: string, value: number): Convert a length.\n  value: How much."
    assert task.prompt == f"{shown}\n\n{QUESTION}"
    assert task.limits == {"max_turns": 1}
    asked, called = task.examples
    assert asked["content"].startswith("add(a: integer, b: integer): Add two numbers.")
    assert asked["content"].endswith("\n\nWhat is 2 plus 3?")
    (call,) = called["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    verdict_text = world.verify(task, world.start(task)).judge_report
    assert not task.needs_no_call
    assert verdict_text == 'The name must be "convert", the parameters "unit" (a string), "value" (a number).'


def test_without_answers_no_call_is_right(tmp_path: Path) -> None:
    world = FunctionsWorld(written(tmp_path, ("Hello", [STOP], []))["questions"], held_out=0.0)
    (task,) = world.tasks()
    assert (world.verify(task, world.start(task)).passed, task.hidden_tests, task.needs_no_call) == (1, None, True)


def function(name: str) -> dict[str, Any]:
    return {**STOP, "name": name}


def test_training_and_held_out_tasks_share_no_function_and_no_question(tmp_path: Path) -> None:
    rows = [
        (f"Question {n % 35}", [function(f"f{n % 12}"), function(f"g{n % 30}")], [{f"f{n % 12}": {}}])
        for n in range(40)
    ]
    options = written(tmp_path, *rows[:12], *((f"Other {n}", [function(f"h{n}")], [{f"h{n}": {}}]) for n in range(28)))
    split_file = tmp_path / "runs/split.json"
    world = FunctionsWorld(**dict[str, Any](options, held_out=0.3, split_file=str(split_file)))
    train, held_out = world.tasks(), world.eval_tasks()
    assert len(train) + len(held_out) == 40
    assert 8 <= len(held_out) <= 12
    assert not {name for task in train for name in task.data.functions} & {
        n for t in held_out for n in t.data.functions
    }
    assert not {task.prompt for task in train} & {task.prompt for task in held_out}
    split = json.loads(split_file.read_text())
    assert split["eval"] == [task.task_id for task in held_out]
    again = FunctionsWorld(**dict[str, Any](options, held_out=0.9, seed=5, split_file=str(split_file)))
    assert again.eval_tasks() == held_out, "a split file decides"
    assert held_out_ids([*train, *held_out], 0.3, 0) == {task.task_id for task in held_out}
    assert held_out_ids([*train, *held_out], 0.3, 1) != {task.task_id for task in held_out}
    other = FunctionsWorld(**written(tmp_path, ("Hello", [STOP], [])), split_file=str(split_file))
    with pytest.raises(DatasetError, match="is of other questions"):
        other.tasks()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"question": [[], []]}, "question '0' has 2 turns of the user, expected one"),
        ({"function": [{**STOP, "parameters": {"type": "HashMap", "properties": {}}}]}, "no field or type 'HashMap'"),
        ({"function": [function("other")]}, "the answer calls stop, which is not one of its functions"),
        ({"id": "live_relevance_0-0-0"}, "question 'live_relevance_0-0-0': any call is right there"),
        ({"id": "9"}, "question '9' has no line in the files of answers"),
        ({"id": 9}, "line 1: expected an object with `id`"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    options = written(tmp_path, ("Stop it.", [STOP], [{"stop": {}}]))
    path = Path(options["questions"])
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DatasetError, match=said):
        FunctionsWorld(**options).tasks()
    path.unlink()
    with pytest.raises(DatasetError, match="can't be read"):
        FunctionsWorld(**options).tasks()


@pytest.mark.all
def test_verdicts_are_those_of_bfcls_checker() -> None:
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or spec.origin is None:
        pytest.skip(
            "bfcl-eval is not installed: pip install --no-deps --target FOLDER bfcl-eval mpmath, FOLDER in PYTHONPATH"
        )
    site = Path(spec.origin).parents[1]
    done = subprocess.run([sys.executable, "scripts/checks/bfcl", site], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
