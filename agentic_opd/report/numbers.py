"""Rollouts -> the numbers of the report's overview. Pure.

Gaps are teacher minus student in nats, at scored tokens only; a number that can't be computed is None, not 0.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentic_opd.core.types import TurnOutcome
from agentic_opd.report.read import Rollout
from agentic_opd.wire.counts import RolloutCounts, TurnCounts
from agentic_opd.wire.group import TurnRecord

GAP_EDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Bins of the gap's distribution, in nats, on both sides of 0; a gap below the first counts as no gap."""


class Distribution(NamedTuple):
    """Counts in bins, `labels` one a bin, with the mean and percentiles of what was counted."""

    name: str
    unit: str
    labels: tuple[str, ...]
    counts: tuple[int, ...]
    n: int
    mean: float | None
    p5: float | None
    p50: float | None
    p95: float | None


def distributions_of(rollouts: Sequence[Rollout], gaps: NDArray[np.float64]) -> Iterator[Distribution]:
    """Yield the distributions of scores, parts of the reward, votes, hints' lengths and `gaps`, if there are any."""
    yield _tenths("score", [rollout.score for rollout in rollouts])
    parts: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, part in (rollout.reward or {}).items():
            parts[name].append(part)
    for name, values in parts.items():
        yield _tenths(f"reward: {name.replace('_', ' ')}", values)
    turns = [turn for rollout in rollouts for turn in rollout.records]
    positive = [sum(vote.decision == 1 for vote in turn.votes) for turn in turns if turn.votes]
    if positive:
        most = max(len(turn.votes) for turn in turns)
        bins = [positive.count(count) for count in range(most + 1)]
        yield _distribution("votes for a hint", "votes a turn", positive, map(str, range(most + 1)), bins)
    if lengths := [len(turn.hint) for turn in turns if turn.hint is not None]:
        width = max(10, -(-max(lengths) // 100) * 10)
        edges = np.arange(0, max(lengths) + width + 1, width)
        labels = (f"{edge} to {edge + width - 1}" for edge in edges[:-1])
        yield _distribution("hint length", "characters", lengths, labels, np.histogram(lengths, edges)[0])
    if len(gaps):
        edges = np.asarray([-np.inf, *(-edge for edge in reversed(GAP_EDGES)), *GAP_EDGES, np.inf])
        bins = np.histogram(gaps, edges)[0]
        yield _distribution("token gap", "nats", gaps, _gap_labels(), bins)


def _tenths(name: str, values: Sequence[float]) -> Distribution:
    low, high = min(0.0, *values), max(1.0, *values)
    counts, edges = np.histogram(values, 10, (low, high))
    labels = (f"{start:.3g} to {end:.3g}" for start, end in pairwise(edges))
    return _distribution(name, "", values, labels, counts)


def _gap_labels() -> Iterable[str]:
    up = [f"{low:g} to {high:g}" for low, high in pairwise(GAP_EDGES)]
    last = f"{GAP_EDGES[-1]:g}"
    down = [f"-{label.split()[2]} to -{label.split()[0]}" for label in reversed(up)]
    return (f"below -{last}", *down, f"within ±{GAP_EDGES[0]:g}", *up, f"above {last}")


def _distribution(
    name: str, unit: str, values: Sequence[float] | NDArray[np.float64], labels: Iterable[str], counts: Iterable[int]
) -> Distribution:
    p5, p50, p95 = np.percentile(values, (5, 50, 95)).tolist()
    bins = tuple(int(count) for count in counts)
    return Distribution(name, unit, tuple(labels), bins, len(values), float(np.mean(values)), p5, p50, p95)


HINTS_SHOWN = 40
GAPS_SHOWN = 12
_LIMITS = (0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0)

_STAGES: tuple[tuple[str, tuple[TurnOutcome, ...]], ...] = (
    ("with a next state", (TurnOutcome.NO_NEXT_STATE,)),
    ("voted on", (TurnOutcome.JUDGE_ERROR,)),
    ("with a hint", (TurnOutcome.VOTE_FAILED, TurnOutcome.LEAKED)),
    ("scored", (TurnOutcome.TOO_LONG, TurnOutcome.SCORING_ERROR)),
)
"""The way of a turn: each stage, and the outcomes of the turns that did not reach it."""


class Stage(NamedTuple):
    """How many turns came as far as this, and how many were lost on the way here, by outcome."""

    name: str
    turns: int
    lost: dict[str, int]


class TaskRow(NamedTuple):
    """One task; `passed` is None if the file says nothing of hidden tests, `mean_gap` if nothing was scored."""

    task: str
    rollouts: int
    passed: int | None
    mean_score: float
    turns: int
    hints: int
    scored_tokens: int
    mean_gap: float | None


class HintRow(NamedTuple):
    """One hint, word for word, how often it was accepted, and the first turn that had it."""

    text: str
    times: int
    tasks: int
    mean_gap: float | None
    rollout: int
    position: int


class GapRow(NamedTuple):
    """A token with one of the largest gaps, up or down: its rollout and which of its sampled tokens it is."""

    rollout: int
    sampled: int
    gap: float


@dataclass(frozen=True, slots=True)
class Overview:
    """All numbers of the overview; see the classes above."""

    groups: int
    rollouts: int
    passed: int | None
    turns: int
    hints: int
    tokens: int
    sampled_tokens: int
    scored_tokens: int
    mean_score: float
    mean_gap: float | None
    colour_limit: float
    """A round number of nats that half of the gaps which are not next to 0 lie below: where colours start out full."""
    positive_gaps: float | None
    """Share of the scored tokens that the teacher finds likelier."""
    noise_floor: float | None
    funnel: tuple[Stage, ...]
    """Empty if no turn has a record."""
    distributions: tuple[Distribution, ...]
    by_task: tuple[TaskRow, ...]
    hint_rows: tuple[HintRow, ...]
    """The most frequent first, at most HINTS_SHOWN."""
    gap_rows: tuple[GapRow, ...]
    """The largest first, at most GAPS_SHOWN."""


def overview(rollouts: Sequence[Rollout]) -> Overview:
    """Add up `rollouts`, of which there must be at least one."""
    gaps, counts = np.concatenate([rollout.gaps for rollout in rollouts]), _counts(rollouts)
    floors = [rollout.noise_floor for rollout in rollouts if rollout.noise_floor is not None]
    return Overview(
        groups=len({rollout.line for rollout in rollouts}),
        rollouts=counts.rollouts,
        passed=counts.passed if counts.verified else None,
        turns=sum(len(rollout.spans) for rollout in rollouts),
        hints=counts.records.hints,
        tokens=counts.tokens,
        sampled_tokens=counts.sampled_tokens,
        scored_tokens=counts.scored_tokens,
        mean_score=counts.score / counts.rollouts,
        mean_gap=_mean(gaps),
        colour_limit=_colour_limit(gaps),
        positive_gaps=_mean(gaps > 0),
        noise_floor=max(floors, default=None),
        funnel=_funnel(counts.records),
        distributions=tuple(distributions_of(rollouts, gaps)),
        by_task=_by_task(rollouts),
        hint_rows=_hint_rows(rollouts),
        gap_rows=_gap_rows(rollouts),
    )


def turn_gaps(rollout: Rollout, span: tuple[int, int]) -> NDArray[np.float64]:
    """The gaps (nats) of one turn's scored tokens."""
    first, behind = np.searchsorted(rollout.sampled_S[rollout.is_scored_S], span)
    return rollout.gaps[first:behind]


def _counts(rollouts: Iterable[Rollout]) -> RolloutCounts:
    total = RolloutCounts()
    for rollout in rollouts:
        total.merge(rollout.counts)
    return total


def _colour_limit(gaps: NDArray[np.float64]) -> float:
    sizes = np.abs(gaps[np.abs(gaps) > GAP_EDGES[0]])
    half = float(np.median(sizes)) if len(sizes) else 1.0
    return next((limit for limit in _LIMITS if limit >= half), _LIMITS[-1])


def _funnel(records: TurnCounts) -> tuple[Stage, ...]:
    if not records.turns:
        return ()
    stages = [Stage("all turns", records.turns, {})]
    for name, losses in _STAGES:
        lost = {outcome.value: records.outcomes[outcome] for outcome in losses}
        stages.append(Stage(name, stages[-1].turns - sum(lost.values()), lost))
    return tuple(stages)


def _by_task(rollouts: Sequence[Rollout]) -> tuple[TaskRow, ...]:
    by_task: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        by_task[rollout.task_id].append(rollout)
    rows: list[TaskRow] = []
    for task, own in sorted(by_task.items()):
        gaps, counts = np.concatenate([rollout.gaps for rollout in own]), _counts(own)
        passed = counts.passed if counts.verified else None
        score, turns = counts.score / counts.rollouts, sum(len(rollout.spans) for rollout in own)
        hints, scored = counts.records.hints, counts.scored_tokens
        rows.append(TaskRow(task, counts.rollouts, passed, score, turns, hints, scored, _mean(gaps)))
    return tuple(rows)


def _hint_rows(rollouts: Sequence[Rollout]) -> tuple[HintRow, ...]:
    places: dict[str, list[tuple[int, TurnRecord]]] = defaultdict(list)
    for index, rollout in enumerate(rollouts):
        for turn in rollout.records:
            if turn.hint is not None:
                places[turn.hint].append((index, turn))
    rows: list[HintRow] = []
    for text, where in sorted(places.items(), key=lambda place: -len(place[1]))[:HINTS_SHOWN]:
        gaps = np.concatenate([turn_gaps(rollouts[index], turn.span) for index, turn in where])
        tasks = len({rollouts[index].task_id for index, _ in where})
        index, turn = where[0]
        rows.append(HintRow(text, len(where), tasks, _mean(gaps), index, turn.span[0]))
    return tuple(rows)


def _gap_rows(rollouts: Sequence[Rollout]) -> tuple[GapRow, ...]:
    def largest(sign: int) -> list[GapRow]:
        rows: list[GapRow] = []
        for index, rollout in enumerate(rollouts):
            sampled, gaps = np.flatnonzero(rollout.is_scored_S), rollout.gaps
            for at in np.argsort(-sign * gaps)[:GAPS_SHOWN].tolist():
                if sign * gaps[at] > GAP_EDGES[0]:
                    rows.append(GapRow(index, int(sampled[at]), float(gaps[at])))
        return sorted(rows, key=lambda row: -sign * row.gap)[: GAPS_SHOWN // 2]

    return (*largest(1), *largest(-1))


def _mean(values: NDArray[np.float64] | NDArray[np.bool_]) -> float | None:
    return float(np.mean(values)) if len(values) else None
