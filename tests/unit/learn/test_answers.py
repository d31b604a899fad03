"""Which held-out turns are evaluated, and what is counted of an answer."""

import pytest

from agentic_opd.core.types import Task
from agentic_opd.learn.answers import drawn, figures_of
from agentic_opd.logs.turns import LoggedTurn

TOOL = {"type": "function", "function": {"name": "run", "description": "Run.", "parameters": {"type": "object"}}}


def test_the_turns_that_a_user_replied_to_come_first_and_the_seed_draws_the_others() -> None:
    replies = {str(i): "user" if i in (3, 17) else "tool" for i in range(20)}
    turns = {
        name: LoggedTurn([{"role": role, "content": "x"} for role in ("user", "assistant", reply)], 1, ())
        for name, reply in replies.items()
    }
    names = drawn(turns, 0)
    assert {*names[:2]} == {"3", "17"}
    assert sorted(names) == sorted(turns)
    assert names == drawn(dict(reversed(turns.items())), 0) != drawn(turns, 1)


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
