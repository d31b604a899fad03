"""Two runs -> their comparison: pass and hint rates with intervals, outcomes, tasks side by side, hints. Pure.

A difference is the second run minus the first. The sampling unit is the task, with one value per task. If the runs have
tasks in common, rates and their differences are over the common tasks only.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from agentic_opd.core.intervals import Estimate, difference, mean_of_tasks, wilson
from agentic_opd.report.hints import HintRow, hinted_turns, rows_by_hint
from agentic_opd.report.read import Run, ShownRollout
from agentic_opd.wire.counts import RolloutCounts


class Rates(NamedTuple):
    """A share in both runs and its change, each with its 95% interval; None where a run lacks the data."""

    name: str
    first: Estimate | None
    second: Estimate | None
    change: Estimate | None


class TaskPair(NamedTuple):
    """A task in both runs; `first` and `second` hold its counts in each run, None in a run without the task."""

    task: str
    passed: Rates
    first: dict[str, int] | None
    second: dict[str, int] | None


class HintPair(NamedTuple):
    """A hint in both runs: the number of its turns, and of the tokens that it moved."""

    text: str
    turns: tuple[int, int]
    moved: tuple[int, int]


class Comparison(NamedTuple):
    """The differences of two runs; `settings` holds (name, first, second) of the settings that differ."""

    common_tasks: int
    only: tuple[int, int]
    """Numbers of tasks that only the first, and only the second, run has."""
    rates: tuple[Rates, ...]
    outcomes: tuple[tuple[str, int, int], ...]
    tasks: tuple[TaskPair, ...]
    hints: tuple[HintPair, ...]
    settings: tuple[tuple[str, Any, Any], ...]


def compare(first: Run, second: Run) -> Comparison:
    """Compare two runs: rates over the tasks that both have, or over all tasks if they have none in common."""
    counts = _by_task(first.rollouts), _by_task(second.rollouts)
    names = tuple(map(frozenset[str], counts))
    common = sorted(names[0] & names[1])
    rated = (common, common) if common else (sorted(names[0]), sorted(names[1]))
    counts_by_run = tuple([by_task[task] for task in tasks] for by_task, tasks in zip(counts, rated, strict=True))
    outcomes = [
        Counter(record.outcome.value for rollout in run.rollouts for record in rollout.records)
        for run in (first, second)
    ]
    return Comparison(
        common_tasks=len(common),
        only=(len(names[0] - names[1]), len(names[1] - names[0])),
        rates=(
            _rates("pass rate", counts_by_run, lambda task: (task.passed, task.verified)),
            _rates("turns with a hint", counts_by_run, lambda task: (task.records.hints, task.records.turns)),
            _rates("sampled tokens scored", counts_by_run, lambda task: (task.scored_tokens, task.sampled_tokens)),
        ),
        outcomes=tuple((name, outcomes[0][name], outcomes[1][name]) for name in {**outcomes[0], **outcomes[1]}),
        tasks=tuple(_task_pair(task, counts[0].get(task), counts[1].get(task)) for task in sorted(names[0] | names[1])),
        hints=_hint_pairs(first.rollouts, second.rollouts),
        settings=_changed_settings(first, second),
    )


def _by_task(rollouts: Sequence[ShownRollout]) -> dict[str, RolloutCounts]:
    by_task: dict[str, RolloutCounts] = defaultdict(RolloutCounts)
    for rollout in rollouts:
        by_task[rollout.task_id].merge(rollout.counts)
    return dict(by_task)


def _rates(
    name: str, counts_by_run: Sequence[Sequence[RolloutCounts]], count: Callable[[RolloutCounts], tuple[int, int]]
) -> Rates:
    estimates: list[Estimate | None] = []
    for of_tasks in counts_by_run:
        counted = [(part, total) for part, total in map(count, of_tasks) if total]
        samples = sum(total for _, total in counted) / max(1, len(counted))
        estimates.append(mean_of_tasks([part / total for part, total in counted], samples) if counted else None)
    return Rates(name, *_with_change(*estimates))


def _with_change(
    first: Estimate | None, second: Estimate | None
) -> tuple[Estimate | None, Estimate | None, Estimate | None]:
    return first, second, None if first is None or second is None else difference(first, second)


def _task_pair(task: str, first: RolloutCounts | None, second: RolloutCounts | None) -> TaskPair:
    rates = [
        None if counts is None or not counts.verified else wilson(counts.passed / counts.verified, counts.verified)
        for counts in (first, second)
    ]
    sides = [
        None
        if counts is None
        else {
            "passed": counts.passed,
            "rollouts": counts.rollouts,
            "hints": counts.records.hints,
            "turns": counts.records.turns,
        }
        for counts in (first, second)
    ]
    return TaskPair(task, Rates(task, *_with_change(*rates)), *sides)


def _hint_pairs(first: Sequence[ShownRollout], second: Sequence[ShownRollout]) -> tuple[HintPair, ...]:
    sides: list[dict[str, HintRow]] = []
    for rollouts in (first, second):
        sides.append({row.key: row for row in rows_by_hint(hinted_turns(rollouts))})
    pairs = [
        HintPair(
            text=next(side[key].text for side in sides if key in side),
            turns=(sides[0][key].turns if key in sides[0] else 0, sides[1][key].turns if key in sides[1] else 0),
            moved=(sides[0][key].moved if key in sides[0] else 0, sides[1][key].moved if key in sides[1] else 0),
        )
        for key in {**sides[0], **sides[1]}
    ]
    return tuple(sorted(pairs, key=lambda pair: -sum(pair.turns)))


def _changed_settings(first: Run, second: Run) -> tuple[tuple[str, Any, Any], ...]:
    if not first.settings or not second.settings:
        return ()
    names = {**first.settings, **second.settings}
    pairs = ((name, first.settings.get(name), second.settings.get(name)) for name in sorted(names))
    return tuple((name, before, after) for name, before, after in pairs if before != after)
