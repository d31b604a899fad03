import json
from pathlib import Path

import pytest
from learning.hint_lifts.written import lifts_by, write_lifts

from agentic_opd.core.errors import OutputError
from agentic_opd.core.intervals import difference, mean_of_tasks, wilson
from agentic_opd.report.lifts import (
    Lifts,
    ResampledTurn,
    hint_key,
    lift_of,
    lifts_path,
    read_lifts,
)


def turn(passed_with: int, passed_without: int, hint: str = "Use sorted.", at: int = 0) -> ResampledTurn:
    return ResampledTurn(1, 0, at, "t", hint, ("tool",), 8, passed_with, passed_without)


def test_the_lift_is_the_difference_of_the_means_over_turns() -> None:
    lift = lift_of([turn(8, 2), turn(4, 0)])
    with_hint, without = mean_of_tasks([1.0, 0.5], 8), mean_of_tasks([0.25, 0.0], 8)
    assert (lift.turns, lift.with_hint, lift.without_hint) == (2, with_hint, without)
    assert lift.lift == difference(without, with_hint)
    assert lift.lift.value == pytest.approx(0.625)
    assert lift.lift.low < 0.625 < lift.lift.high


def test_of_a_single_turn_the_samples_are_drawn() -> None:
    assert lift_of([turn(6, 2)]).lift == difference(wilson(0.25, 8), wilson(0.75, 8))


def test_hints_in_other_spelling_are_one_and_the_best_comes_first() -> None:
    turns = [turn(2, 2), turn(8, 0, "use  Sorted"), turn(8, 0, "Return a tuple.")]
    lifts = lifts_by(turns, lambda one: hint_key(one.hint))
    assert [(name, lift.turns) for name, lift in lifts.items()] == [("return a tuple", 1), ("use sorted", 2)]


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = lifts_path(tmp_path / "groups.jsonl.gz")
    assert path == lifts_path(tmp_path / "groups.jsonl") == tmp_path / "groups.hints.json"
    assert read_lifts(path) is None
    lifts = Lifts(8, 1.0, "policy", 0, 3, (turn(8, 2), turn(4, 0, at=1)))
    write_lifts(path, lifts)
    assert read_lifts(path) == lifts
    told = json.loads(path.read_text())
    assert told["by_hint"]["use sorted"]["lift"] == list(lift_of(lifts.turns).lift)
    assert list(told["by_evidence"]) == ["tool"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "{}", '{"samples": 1', "[]"])
def test_a_file_that_is_none_is_one_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "groups.hints.json"
    path.write_text(text)
    with pytest.raises(OutputError, match="measure them again with scripts/learning/measure_hints, or remove the file"):
        read_lifts(path)
    with pytest.raises(OutputError, match="cannot write"):
        write_lifts(tmp_path / "none" / "x", Lifts(1, 1.0, "p", 0, 0, ()))
