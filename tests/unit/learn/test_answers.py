"""What is counted of an answer."""

import pytest

from agentic_opd.learn.answers import figures_of


@pytest.mark.parametrize(
    ("calls", "is_calling", "parse"),
    [
        ([], False, False),
        ([("run", None)], True, True),
        ([("run", None), ("run", "not closed")], True, False),
        ([("fly", None)], True, False),
    ],
)
def test_calls_parse_and_name_a_tool_of_the_log(calls: list[tuple[str, str]], is_calling: bool, parse: bool) -> None:
    message = {"role": "assistant", "content": "a b c d a b c d"}
    row = {"message": message, "calls": [{"name": name, "error": error} for name, error in calls], "tokens": 7}
    figures = figures_of(row, {"run"})
    assert (figures.is_calling, figures.calls_parse, figures.tokens) == (is_calling, parse, 7)
    assert figures.repetition == pytest.approx(0.2)
