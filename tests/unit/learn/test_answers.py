"""Which held-out turns are evaluated, and what is counted of an answer."""

import pytest

from agentic_opd.core.types import Task
from agentic_opd.learn.answers import drawn, figures_of
from agentic_opd.learn.config import LearnConfig

TOOL = {"type": "function", "function": {"name": "run", "description": "Run.", "parameters": {"type": "object"}}}


def test_the_turns_that_a_user_replied_to_come_first_and_the_others_are_drawn_by_the_seed() -> None:
    tasks = [Task(str(i)) for i in range(20)]
    replied = {"3", "17"}
    names = [task.task_id for task in drawn(tasks, replied, LearnConfig(max_held_out=6))]
    assert len(names) == 6
    assert replied <= {*names}
    assert names == sorted(names, key=int)
    assert names == [task.task_id for task in drawn(tasks, replied, LearnConfig(max_held_out=6))]
    assert names != [task.task_id for task in drawn(tasks, replied, LearnConfig(max_held_out=6, seed=1))]
    assert drawn(tasks, replied, LearnConfig(max_held_out=20)) == tasks


@pytest.mark.parametrize(
    ("calls", "is_calling", "parse"),
    [
        ([], False, False),
        ([("run", None)], True, True),
        ([("run", None), ("run", "not closed")], True, False),
        ([("fly", None)], True, False),
    ],
)
def test_calls_parse_and_name_an_offered_tool(calls: list[tuple[str, str]], is_calling: bool, parse: bool) -> None:
    message = {"role": "assistant", "content": "a b c d a b c d"}
    row = {"message": message, "calls": [{"name": name, "error": error} for name, error in calls], "tokens": 7}
    figures = figures_of(row, Task("t", tools=[TOOL]))
    assert (figures.is_calling, figures.calls_parse, figures.tokens) == (is_calling, parse, 7)
    assert figures.repetition == pytest.approx(0.2)
