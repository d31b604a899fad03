"""The user of `scripts/learn --talk`: what it tries is its own, and what it says names no fix."""

import ast
import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest
from demo_policy.transcripts import complaint
from demo_policy.variants import Fault, TaskVariants, load_variants
from learning import __main__ as learn
from learning import laboratory, talk

from agentic_opd.core.types import Task
from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks

pytestmark = pytest.mark.slow

TASKS = builtin_tasks()
NEVER_SEEN = {("fizzbuzz", "zero"), ("longest_common_prefix", "no_words")}
"""Faults that show at a single input, which is one of the hidden tests'."""


def inputs(source: str) -> set[str]:
    """The calls that a source checks, spelled in one way."""
    compared = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Compare)]
    return {ast.unparse(node.left) for node in compared}


def failing(task: Task, solution: str) -> list[str]:
    """The tries that a solution of ours fails, as the verifier reports them."""
    space: dict[str, Any] = {}
    exec(solution, space)
    lines: list[str] = []
    for one in talk.tries_of(task):
        call, _, expected = one.partition(" == ")
        try:
            got = eval(call, space)
        except Exception as error:  # noqa: BLE001
            lines.append(f"FAIL {call}: {type(error).__name__}: {error}")
        else:
            lines += [f"FAIL {call}: expected {expected}, got {got!r}"] * (repr(got) != expected)
    return lines


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.entry_point)
def test_the_users_inputs_are_its_own(task: Task) -> None:
    assert task.hidden_tests is not None
    own = inputs("\n".join(talk.tries_of(task)))
    assert len(own) >= 3
    assert not own & inputs(task.hidden_tests)
    assert not own & inputs(task.prompt.partition("Examples")[2].partition("\n")[2])
    assert talk.tried(task).hidden_tests == "\n".join(
        [f"from solution import {task.entry_point}", "", *(f"assert {one}" for one in talk.tries_of(task)), ""]
    )


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.entry_point)
def test_right_solutions_are_left_alone_and_faults_are_seen(task: Task) -> None:
    variants: TaskVariants = load_variants()[task.entry_point or ""]
    assert task.reference_solution is not None
    for solution in (task.reference_solution, *variants.correct):
        assert failing(task, solution) == []
    missed = {(task.entry_point, fault.name) for fault in variants.faults if not failing(task, fault.solution)}
    assert missed == {one for one in NEVER_SEEN if one[0] == task.entry_point}


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.entry_point)
def test_a_complaint_says_what_came_and_nothing_of_the_code(task: Task) -> None:
    def check(fault: Fault) -> None:
        report = "\n".join(failing(task, fault.solution))
        for seed in range(20):
            said = complaint(report, Random(seed))
            assert said
            assert not any(hint in said for hint in fault.hints)
            written = {
                line.strip() for line in (*fault.mended.splitlines(), *(task.reference_solution or "").splitlines())
            }
            assert not any(line in said for line in written)

    for fault in load_variants()[task.entry_point or ""].faults:
        check(fault)


def test_a_complaint_names_a_call_what_came_and_what_should() -> None:
    report = "Hidden tests: 0 of 1 passed.\nFAIL f([1]): expected 'a', got None"
    said = {complaint(report, Random(seed)) for seed in range(50)}
    assert len(said) == 4
    assert all("f([1])" in one and "'a'" in one and "None" in one for one in said)
    vague = {complaint("FAIL f([1]): ValueError: 3", Random(seed)) for seed in range(50)}
    assert vague == {"It fails with an error for me.", "It does not work for me, please look again."}


def test_a_batch_waits_until_the_one_before_it_is_trained_on() -> None:
    class Listener:
        def __init__(self) -> None:
            self.heard: list[tuple[str, str | None]] = []

        async def session(self, task: Task, name: str) -> None:
            self.heard.append((name, task.entry_point))

    async def hold(trained: int, start: int = 0) -> list[tuple[str, str | None]]:
        listener: Any = Listener()
        asked = iter([trained] * 2)  # Once before each batch; again by one that waits.
        try:
            await talk.converse(listener, TASKS[:3], range(start, 2), 4, lambda: next(asked))
        except RuntimeError:
            listener.heard.append(("waits", None))
        return listener.heard

    names = [task.entry_point for task in TASKS[:3]]
    first = [(f"batch-0-{place}", names[place % 3]) for place in range(4)]
    assert asyncio.run(hold(0)) == [*first, ("waits", None)]
    second = [(f"batch-1-{place}", names[(place + 1) % 3]) for place in range(4)]
    assert asyncio.run(hold(1)) == [*first, *second]
    assert asyncio.run(hold(1, start=1)) == second


def test_a_conversation_reads_the_same_in_anthropics_protocol() -> None:
    function = {"name": "run", "arguments": '{"command": "ls"}'}
    answer = {"role": "assistant", "content": "I look.", "tool_calls": [{"id": "c", "type": "function"}]}
    answer["tool_calls"][0]["function"] = function  # pyright: ignore[reportIndexIssue, reportArgumentType]
    messages = [
        *({"role": "system", "content": "You help."}, {"role": "user", "content": "Do it."}, answer),
        *({"role": "tool", "tool_call_id": one, "content": f"{one}.py"} for one in "cd"),
    ]
    read = talk.as_anthropic(messages)
    assert read["system"] == "You help."
    assert [(one["role"], len(one["content"])) for one in read["messages"]] == [
        ("user", 1),
        ("assistant", 2),
        ("user", 2),
    ]
    assert talk.as_chat(read["messages"][1]["content"]) == answer
    assert [block["tool_use_id"] for block in read["messages"][2]["content"]] == ["c", "d"]


def test_a_user_without_hints_differs_in_the_hints_alone() -> None:
    class FakeServer:
        base_url = "http://127.0.0.1:2"

    server: Any = FakeServer()
    place = laboratory.Laboratory(
        server, "http://127.0.0.1:2", Path("policy"), Path("out"), 16, 4, 4, "linear", False, True
    )
    run = laboratory.Run("opd", 0, laboratory.Setting(1e-4, 32, 4.0), 256)
    plain, none = (place.gateway_flags(run._replace(mode=mode), "http://127.0.0.1:1") for mode in ("opd", "no-hint"))
    assert [text for text in plain if "groups.jsonl" not in text] + ["--env.hint.source", laboratory.NO_HINT] == [
        text for text in none if "groups.jsonl" not in text
    ]
    assert plain[plain.index("--env.rollout_server_url") + 1] == "http://127.0.0.1:1"


def test_talk_knows_no_reward_no_other_task_and_no_replay(capsys: pytest.CaptureFixture[str]) -> None:
    talked = laboratory.MODES.keys() - laboratory.OBJECTIVES.keys() - {"opd-judge", "opd-full"}
    for mode in ("opd", *talked):
        parts = laboratory.MODES[mode]
        fits = "grpo" not in parts["loss"] and "step_reward" not in parts["loss"]
        fits &= not {"other", laboratory.WRONG_HINT, "sibling", "reference"} & {*parts.get("env", {}).values()}
        fits &= "max_batches_offpolicy" not in parts.get("env", {}) and "hint.proof.type" not in parts.get("env", {})
        assert (mode in laboratory.TALK_MODES) == fits, mode
    with pytest.raises(SystemExit):
        learn.parse_args(["--talk", "--modes", "opd", "grpo"])
    assert "--talk has no mode grpo" in capsys.readouterr().err
    assert learn.parse_args(["--talk", "--modes", "opd", "no-hint"]).talk
