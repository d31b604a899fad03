"""Two runs side by side; a group of sample.py has two rollouts of four turns, two of which have the same hint."""

from typing import Any

import pytest

from agentic_opd.core.intervals import mean_of_tasks, wilson
from agentic_opd.report.compare import Comparison, compare
from agentic_opd.report.read import Run

from .sample import HINT, SCORED, UNSCORED, group, rollouts, with_records


def run_of(*groups: Any, **settings: Any) -> Run:
    return Run("groups.jsonl", settings, tuple(rollouts(*groups)))


def by_name(compared: Comparison) -> dict[str, Any]:
    return {rates.name: rates for rates in compared.rates}


def test_rates_are_over_the_tasks_that_both_have() -> None:
    """Task c, which only the second run has, would make 5 of 6 of its 3 of 4."""
    first = run_of(group("a", passed=(0, 0)), group("b", passed=(4, 0)))
    second = run_of(group("a", passed=(4, 4)), group("b", passed=(4, 0)), group("c", passed=(4, 4)))
    compared = compare(first, second)
    rates = by_name(compared)["pass rate"]
    assert (rates.first, rates.second) == (mean_of_tasks([0.0, 0.5], 2), mean_of_tasks([1.0, 0.5], 2))
    assert rates.change.value == pytest.approx(0.5)
    assert rates.change.low < 0.5 < rates.change.high
    assert (compared.common_tasks, compared.only) == (2, (0, 1))
    assert by_name(compared)["turns with a hint"].first.value == 0.5


def test_tasks_stand_side_by_side() -> None:
    pairs = compare(run_of(group("a"), group("b")), run_of(group("b", passed=(4, 4)), group("c"))).tasks
    assert [(pair.task, pair.first is None, pair.second is None) for pair in pairs] == [
        ("a", False, True),
        ("b", False, False),
        ("c", True, False),
    ]
    assert pairs[1].passed.second == wilson(1.0, 2)
    assert (pairs[0].passed.second, pairs[0].passed.change) == (None, None)
    assert pairs[1].first == {"passed": 1, "rollouts": 2, "hints": 2, "turns": 4}


def test_runs_without_a_task_in_common_are_rated_by_their_own() -> None:
    compared = compare(run_of(group("a", passed=(4, 4))), run_of(group("b", passed=(0, 0))))
    assert compared.common_tasks == 0
    assert by_name(compared)["pass rate"].change.value == -1.0


def test_outcomes_hints_and_settings() -> None:
    other = "Another hint, for another thing."
    told = {**SCORED, "hint": other, "votes": [{"decision": 1, "hint": other, "text": other}]}
    compared = compare(
        run_of(group("a"), seed=0, prm_votes=3), run_of(with_records(told, UNSCORED, task="a"), seed=1, prm_votes=3)
    )
    assert {name: (x, y) for name, x, y in compared.outcomes} == {"scored": (2, 2), "vote_failed": (2, 2)}
    assert [(pair.text, pair.turns, pair.moved) for pair in compared.hints] == [
        (HINT, (2, 0), (4, 0)),
        (other, (0, 2), (0, 4)),
    ]
    assert compared.settings == (("seed", 0, 1),)


def test_what_a_file_does_not_say_has_no_rate() -> None:
    bare = {name: group()[name] for name in ("tokens", "masks", "scores", "inference_logprobs")}
    compared = compare(run_of({**bare, "group_overrides": {"task_id": "t"}}), run_of(group("t")))
    assert by_name(compared)["pass rate"].first is None
    assert by_name(compared)["pass rate"].change is None
    assert compared.hints[0].turns == (0, 2)
