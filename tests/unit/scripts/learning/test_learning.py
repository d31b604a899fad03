"""The experiment of `scripts/learn`: its controls, its curves, and its plan."""

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from learning import controlled_env, first_solutions, laboratory, results

from agentic_opd.core.types import TeacherRequest, Vote
from agentic_opd.distill.judge import JudgeReply
from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks

Point = laboratory.Point


class FixedJudge:
    """Always the same votes."""

    def __init__(self, *votes: Vote) -> None:
        self.votes = votes

    async def ask(self, messages: Any, num_votes: int) -> JudgeReply:
        return JudgeReply(self.votes, 0.5)


class KeepingTeacher:
    """Keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[TeacherRequest] = []

    async def score(self, request: TeacherRequest, top_k: int) -> None:
        self.asked.append(request)


def ask(judge: Any) -> list[tuple[int | None, str | None]]:
    reply = asyncio.run(judge.ask([], 2))
    return [(vote.decision, vote.hint) for vote in reply.votes]


def test_a_wrong_hint_is_one_of_another_task() -> None:
    pool = controlled_env.HintPool(Random(0))
    positive, negative = Vote(1, "Return str(n).", "..."), Vote(-1, None, "...")
    judge = FixedJudge(positive, negative)
    first = controlled_env.WrongHintJudge(judge, "fizzbuzz", pool)
    second = controlled_env.WrongHintJudge(FixedJudge(Vote(1, "Sort it first.", "...")), "two_sum", pool)
    assert ask(first) == [(-1, None), (-1, None)]  # No other task has a hint yet.
    assert ask(second) == [(1, "Return str(n).")]
    assert ask(first) == [(1, "Sort it first."), (-1, None)]


def test_without_a_hint_the_teacher_reads_what_the_student_read() -> None:
    """[1 2 | 90 91 | 3] + [7 8] becomes [1 2 3] + [7 8]."""
    teacher = KeepingTeacher()
    request = TeacherRequest((1, 2, 90, 91, 3, 7, 8), 2, 2, (90, 91))
    asyncio.run(controlled_env.NoHintTeacher(teacher).score(request, 5))
    assert teacher.asked == [TeacherRequest((1, 2, 3, 7, 8), 2, 2, ())]


CURVES = {
    "opd": {"0": [Point(0, 0.5, 128), Point(64, 0.92, 128)], "1": [Point(0, 0.6, 128), Point(64, 0.84, 128)]},
    "grpo": {"0": [Point(0, 0.5, 128), Point(64, 0.7, 128)]},
}


def test_curves_are_averaged_and_raced_to_the_target() -> None:
    assert results.mean_curve(CURVES["opd"]) == [Point(0, 0.55, 256), Point(64, pytest.approx(0.88), 256)]
    assert results.rollouts_to(CURVES["opd"]["0"]) == 64
    assert results.rollouts_to(CURVES["opd"]["1"]) is None
    assert results.rows(CURVES, {"opd": "lr 1", "grpo": "lr 2"}) == [
        ("opd", "lr 1", "2", "55% (50% to 60%)", "88% (84% to 92%)", "64, not in 64", "not in 64"),
        ("grpo", "lr 2", "1", "50% (50% to 50%)", "70% (70% to 70%)", "not in 64", "not in 64"),
    ]


def test_the_sweep_takes_the_curve_that_lies_highest_and_a_control_takes_that_of_opd() -> None:
    swept = {"lr 1": [Point(32, 0.7, 128), Point(64, 0.9, 128)], "lr 2": [Point(32, 0.8, 128), Point(64, 0.82, 128)]}
    assert results.best(swept) == "lr 2"
    assert [results.tuned_as(mode) for mode in laboratory.MODES] == ["opd", "grpo", "opd+grpo", "opd", "opd"]


def test_curves_survive_the_file_and_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert results.read_curves(path) == {}
    results.write_json(path, CURVES)
    assert results.read_curves(path) == CURVES
    results.draw(CURVES, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_modes_differ_in_what_they_name_and_nothing_else() -> None:
    run = laboratory.Run("wrong-hint", 3, laboratory.Setting(1e-3, 32), 256)
    place = laboratory.Laboratory(FakeServer(2), FakeServer(3), Path("policy"), Path("out"), 16, 4, 2, "linear")
    commands = {mode: place.serve_command(run._replace(mode=mode), "http://127.0.0.1:1") for mode in laboratory.MODES}
    plain = commands["opd"]
    assert commands["opd+grpo"] == plain
    assert commands["wrong-hint"] == [*plain, "--env.hint_control", "wrong"]
    assert commands["no-hint"] == [*plain, "--env.hint_control", "none"]
    assert commands["grpo"] == [*plain, "--env.opd_enabled", "false"]
    urls = {name: plain[plain.index(name) + 1] for name in plain if name.endswith("base_url")}
    assert urls == {
        "--openai.base_url": "http://127.0.0.1:2/v1",
        "--env.judge_base_url": "http://127.0.0.1:3/v1",
        "--env.teacher_base_url": "http://127.0.0.1:3/v1",
    }


class FakeServer:
    def __init__(self, port: int) -> None:
        self.base_url = f"http://127.0.0.1:{port}"


LEARNED = Path("docs/learning")


def test_the_committed_result_is_what_the_pages_show() -> None:
    curves = results.read_curves(LEARNED / "results.json")
    assert list(curves) == list(laboratory.MODES)
    assert all(len(seeds) >= 3 for seeds in curves.values())
    points = [curve for seeds in curves.values() for curve in seeds.values()]
    assert len({tuple(point.rollouts for point in curve) for curve in points}) == 1
    assert min(point.episodes for curve in points for point in curve) >= 128
    sweep = results.read_curves(LEARNED / "sweep.json")
    table = results.markdown(curves, {mode: results.best(sweep[results.tuned_as(mode)]) for mode in curves})
    assert (LEARNED / "results.md").read_text() == table
    for page in (LEARNED / "README.md", Path("README.md")):
        assert table in page.read_text(), page


def test_first_solutions_are_told_from_repairs() -> None:
    task = next(task for task in builtin_tasks() if task.task_id == "builtin/is_palindrome")
    assert task.reference_solution is not None

    def row(passed: bool, *texts: str | None) -> dict[str, Any]:
        calls = [json.dumps({"path": "solution.py", "content": text}) if text else "{no JSON" for text in texts]
        messages = [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "write_file", "arguments": call}}],
            }
            for call in calls
        ]
        return {"task_id": task.task_id, "passed": passed, "messages": messages}

    right, wrong = task.reference_solution, "def is_palindrome(s): return None"
    rows = [row(True, right), row(True, None, right), row(True, wrong, right), row(False, wrong), row(False, None)]
    assert asyncio.run(first_solutions.first_solutions(rows)) == (2, 1)
