"""The judge reads shuffled answers that do not say whose they are, and each distinct answer once."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import ServerMismatchError, ServerUnreachableError
from agentic_opd.core.types import Task, Verification
from agentic_opd.learn.grades import grade_answers, grade_key
from agentic_opd.learn.stages import RowFile

TASKS = {name: Task(name, messages=[{"role": "user", "content": f"Question {name}."}]) for name in "abcdefgh"}


class Grader:
    """A world that writes down what it grades; an answer with `?` has no vote."""

    def __init__(self) -> None:
        self.graded: list[tuple[str, str]] = []

    async def verify(self, task: Task, left: Any) -> Verification:
        *history, answer = left.messages
        assert history == [*task.messages]
        self.graded.append((task.task_id, answer["content"]))
        if answer["content"] == "?":
            raise ServerMismatchError("no vote")
        if answer["content"] == "gone":
            raise ServerUnreachableError("gone")
        return Verification.of_score(0.75, "votes", "votes")


def arms(after: str = "new") -> dict[str, dict[str, Any]]:
    said = {"before": dict.fromkeys(TASKS, "old"), "after": dict.fromkeys(TASKS, after) | {"a": "old"}}
    return {
        arm: {name: {"message": {"role": "assistant", "content": text}} for name, text in rows.items()}
        for arm, rows in said.items()
    }


def graded(path: Path, answers: dict[str, dict[str, Any]], seed: int = 0) -> tuple[Grader, dict[str, Any]]:
    world, file = Grader(), RowFile(path)
    try:
        asyncio.run(grade_answers(TASKS, answers, world, file, seed, 1))  # type: ignore[arg-type]
    finally:
        file.close()
    return world, file.rows


def test_answers_are_graded_in_a_shuffled_order_and_equal_ones_once(tmp_path: Path) -> None:
    world, rows = graded(tmp_path / "grades.jsonl", arms())
    assert len(world.graded) == len({*world.graded}) == 15
    order = [text for _, text in world.graded]
    assert order not in (sorted(order), sorted(order, reverse=True))
    assert graded(tmp_path / "again.jsonl", arms())[0].graded == world.graded
    assert graded(tmp_path / "other.jsonl", arms(), seed=1)[0].graded != world.graded
    assert rows[grade_key("a", {"content": "old"})]["grade"] == 0.75


def test_an_answer_without_a_vote_has_no_grade(tmp_path: Path) -> None:
    _, rows = graded(tmp_path / "grades.jsonl", arms("?"))
    assert rows[grade_key("b", {"content": "?"})]["grade"] is None
    assert rows[grade_key("b", {"content": "old"})]["grade"] == 0.75


def test_grades_of_an_earlier_process_are_not_asked_for_again(tmp_path: Path) -> None:
    path = tmp_path / "grades.jsonl"
    with pytest.raises(ServerUnreachableError):
        graded(path, arms("gone"))
    first = path.read_text()
    world, rows = graded(path, arms())
    assert path.read_text().startswith(first)
    assert len(world.graded) == 15 - len(first.splitlines())
    assert {row["grade"] for row in rows.values()} == {0.75}
