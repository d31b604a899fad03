"""Rollouts -> the numbers of the report's overview. Pure.

A gap is teacher minus baseline (usually the student) in nats, at scored tokens only. A number that can't be computed is
None, not 0.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentic_opd.core.precision import coarsest, root_mean_square
from agentic_opd.core.types import TurnOutcome
from agentic_opd.report.hints import HintRow, hinted_turns, rows_by_evidence, rows_by_hint
from agentic_opd.report.read import MOVED, ShownRollout
from agentic_opd.wire.counts import JudgeCounts, RolloutCounts, TurnCounts

NO_GAP = 0.01
"""Size of a gap (nats) up to which it counts as zero: `colour_limit` ignores it, and no list shows it."""
MOVED_EDGES = (MOVED, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Bin edges (nats) for the gaps of tokens that moved, on both sides of 0."""


class Distribution(NamedTuple):
    """A histogram of `n` values (`of`: rollouts, turns, tokens or hints).

    `ticks` are labels: of the bins' edges (one more than bins), or of the bins if each bin is a single value.
    """

    name: str
    unit: str
    of: str
    ticks: tuple[str, ...]
    counts: tuple[int, ...]
    n: int
    median: float


def distributions_of(rollouts: Sequence[ShownRollout], moved: NDArray[np.float64]) -> Iterator[Distribution]:
    """Yield histograms of the `moved` gaps (nats), the scores, the reward's parts, the votes and the hints' lengths."""
    if len(moved):
        edges = np.asarray([-np.inf, *(-edge for edge in reversed(MOVED_EDGES)), *MOVED_EDGES, np.inf])
        # A token with a gap of exactly -0.05 has moved, and numpy's bins exclude their upper edge.
        edges[len(MOVED_EDGES)] = np.nextafter(-MOVED, 0)
        counts = np.delete(np.histogram(moved, edges)[0], len(MOVED_EDGES))
        up = [f"{edge:g}" for edge in MOVED_EDGES[1:]]
        middle = f"±{MOVED:g}"
        ticks = ("", *(f"-{edge}" for edge in reversed(up)), middle, *up, "")
        yield _distribution("gap of the tokens that moved", "nats", "tokens", moved, ticks, counts)
    firsts = [rollout for rollout in rollouts if rollout.counts.rollouts]
    yield _tenths("score", [rollout.score for rollout in firsts])
    parts: dict[str, list[float]] = defaultdict(list)
    for rollout in firsts:
        for name, part in (rollout.reward or {}).items():
            parts[name].append(part)
    for name, values in parts.items():
        yield _tenths(f"reward: {name.replace('_', ' ')}", values)
    turns = [turn for rollout in rollouts for turn in rollout.records]
    all_votes = [rollout.votes_on(index) for rollout in rollouts for index in range(len(rollout.records))]
    votes = [of_turn for of_turn in all_votes if of_turn is not None]
    if votes:
        positive, values = [for_hint for for_hint, _ in votes], range(max(num_votes for _, num_votes in votes) + 1)
        bins = [positive.count(count) for count in values]
        yield _distribution("votes for a hint", "", "turns", positive, map(str, values), bins)
    if lengths := [len(turn.hint) for turn in turns if turn.hint is not None]:
        width = max(10, -(-max(lengths) // 100) * 10)
        edges = np.arange(0, max(lengths) + width + 1, width)
        counts = np.histogram(lengths, edges)[0]
        yield _distribution("hint length", "characters", "hints", lengths, map(str, edges), counts)


def _tenths(name: str, values: Sequence[float]) -> Distribution:
    low, high = min(0.0, *values), max(1.0, *values)
    counts, edges = np.histogram(values, 10, (low, high))
    return _distribution(name, "", "rollouts", values, (f"{edge:.3g}" for edge in edges), counts)


def _distribution(
    name: str,
    unit: str,
    of: str,
    values: Sequence[float] | NDArray[np.float64],
    ticks: Iterable[str],
    counts: Iterable[int],
) -> Distribution:
    bins = tuple(int(count) for count in counts)
    return Distribution(name, unit, of, tuple(ticks), bins, len(values), float(np.median(values)))


GAPS_SHOWN = 12
_LIMITS = (0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0)

_STAGES: tuple[tuple[str, tuple[TurnOutcome, ...]], ...] = (
    ("with a next state", (TurnOutcome.NO_NEXT_STATE,)),
    ("voted on", (TurnOutcome.NOT_JUDGED, TurnOutcome.JUDGE_ERROR)),
    ("with a hint", (TurnOutcome.VOTE_FAILED, TurnOutcome.LEAKED)),
    ("scored", (TurnOutcome.TOO_LONG, TurnOutcome.SCORING_ERROR, TurnOutcome.REFUTED, TurnOutcome.UNPROVEN)),
)
"""Stages of the funnel, each with the outcomes of the turns that did not reach it."""


class Stage(NamedTuple):
    """Number of turns that reached a stage, and of those lost since the previous stage, by outcome."""

    name: str
    turns: int
    lost: dict[str, int]


class TaskRow(NamedTuple):
    """One task; `passed` is None without verifications, `mean_gap` (nats) is None without scored tokens."""

    task: str
    rollouts: int
    passed: int | None
    mean_score: float
    turns: int
    hints: int
    sampled_tokens: int
    scored_tokens: int
    mean_gap: float | None


class GapRow(NamedTuple):
    """A token with one of the largest |gap| (nats): its rollout's index, and its index among the sampled tokens."""

    rollout: int
    sampled: int
    gap: float


class JudgeCost(NamedTuple):
    """Tokens of the judge in rollouts whose questions all have known tokens, and the rollouts' number and hints."""

    questions: int
    uncounted: int
    """Questions of the other rollouts, too, whose tokens are not known."""
    rollouts: int
    hints: int
    read_tokens: int
    sampled_tokens: int


@dataclass(frozen=True, slots=True)
class Overview:
    groups: int
    rollouts: int
    passed: int | None
    turns: int
    hints: int
    tokens: int
    sampled_tokens: int
    scored_tokens: int
    moved_tokens: int
    mean_score: float
    mean_gap: float | None
    mean_gap_reasoning: float | None
    """Mean gap of the scored reasoning tokens."""
    mean_gap_answer: float | None
    """Mean gap of the other scored tokens; None if no reasoning token is scored."""
    mean_moved: float | None
    """Mean |gap| (nats) of the tokens that moved."""
    colour_limit: float
    """Initial |gap| (nats) of full colour: the median |gap| above `NO_GAP`, rounded up to a value of `_LIMITS`."""
    positive_gaps: float | None
    """Share of the scored tokens with a positive gap."""
    gap_rms: float | None
    """Root mean square (nats) of all gaps."""
    noise_floor: float | None
    """Largest gap (nats) without a hint, over all groups."""
    noise_rms: float | None
    """Root mean square (nats) of the gaps without a hint, over the values of the rollouts' groups, one per rollout."""
    precision: str | None
    """The coarsest precision of the teachers; None if no group records one."""
    judge: JudgeCost | None
    """None if the file holds no question to the judge."""
    funnel: tuple[Stage, ...]
    """Empty if no turn has a record."""
    distributions: tuple[Distribution, ...]
    by_task: tuple[TaskRow, ...]
    hint_rows: tuple[HintRow, ...]
    evidence_rows: tuple[HintRow, ...]
    gap_rows: tuple[GapRow, ...]
    """The largest positive gaps, then the largest negative ones, at most `GAPS_SHOWN` in all."""


def overview(rollouts: Sequence[ShownRollout]) -> Overview:
    gaps, counts = np.concatenate([rollout.gaps for rollout in rollouts]), _counts(rollouts)
    is_reasoning = np.concatenate([rollout.is_reasoning for rollout in rollouts])
    moved, hinted = np.concatenate([rollout.moved for rollout in rollouts]), hinted_turns(rollouts)
    distillations = [rollout.distillation for rollout in rollouts if rollout.distillation is not None]
    floors = [group.noise_floor for group in distillations if group.noise_floor is not None]
    squares = [group.noise_rms for group in distillations if group.noise_rms is not None]
    return Overview(
        groups=len({rollout.line for rollout in rollouts}),
        rollouts=counts.rollouts,
        passed=counts.passed if counts.verified else None,
        turns=sum(len(rollout.spans) for rollout in rollouts),
        hints=counts.records.hints,
        tokens=counts.tokens,
        sampled_tokens=counts.sampled_tokens,
        scored_tokens=counts.scored_tokens,
        moved_tokens=len(moved),
        mean_score=counts.score / counts.rollouts,
        mean_gap=_mean(gaps),
        mean_gap_reasoning=_mean(gaps[is_reasoning]),
        mean_gap_answer=_mean(gaps[~is_reasoning]) if is_reasoning.any() else None,
        mean_moved=_mean(np.abs(moved)),
        colour_limit=colour_limit(gaps),
        positive_gaps=_mean(gaps > 0),
        gap_rms=root_mean_square(gaps) if len(gaps) else None,
        noise_floor=max(floors, default=None),
        noise_rms=root_mean_square(squares) if squares else None,
        precision=coarsest(group.precision for group in distillations),
        judge=_judge_cost(rollouts),
        funnel=_funnel(counts.records),
        distributions=tuple(distributions_of(rollouts, moved)),
        by_task=_by_task(rollouts),
        hint_rows=rows_by_hint(hinted),
        evidence_rows=rows_by_evidence(hinted),
        gap_rows=_gap_rows(rollouts),
    )


def _counts(rollouts: Iterable[ShownRollout]) -> RolloutCounts:
    total = RolloutCounts()
    for rollout in rollouts:
        total.merge(rollout.counts)
    return total


def _judge_cost(rollouts: Iterable[ShownRollout]) -> JudgeCost | None:
    total, uncounted, num_rollouts, hints = JudgeCounts(), 0, 0, 0
    for rollout in rollouts:
        counts = rollout.judge_counts
        uncounted += counts.uncounted
        if not counts.uncounted:
            total.merge(counts)
            num_rollouts += rollout.counts.rollouts
            hints += rollout.counts.records.hints
    if not total.questions + uncounted:
        return None
    return JudgeCost(total.questions, uncounted, num_rollouts, hints, total.read_tokens, total.sampled_tokens)


def colour_limit(gaps: NDArray[np.float64]) -> float:
    """Return the |gap| (nats) of full colour; see `Overview`."""
    sizes = np.abs(gaps[np.abs(gaps) > NO_GAP])
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


def _by_task(rollouts: Sequence[ShownRollout]) -> tuple[TaskRow, ...]:
    by_task: dict[str, list[ShownRollout]] = defaultdict(list)
    for rollout in rollouts:
        by_task[rollout.task_id].append(rollout)
    rows: list[TaskRow] = []
    for task, task_rollouts in sorted(by_task.items()):
        gaps, counts = np.concatenate([rollout.gaps for rollout in task_rollouts]), _counts(task_rollouts)
        passed = counts.passed if counts.verified else None
        score, turns = counts.score / counts.rollouts, sum(len(rollout.spans) for rollout in task_rollouts)
        tokens = counts.sampled_tokens, counts.scored_tokens
        rows.append(TaskRow(task, counts.rollouts, passed, score, turns, counts.records.hints, *tokens, _mean(gaps)))
    return tuple(rows)


def _gap_rows(rollouts: Sequence[ShownRollout]) -> tuple[GapRow, ...]:
    def largest(sign: int) -> list[GapRow]:
        rows: list[GapRow] = []
        for index, rollout in enumerate(rollouts):
            sampled, gaps = np.flatnonzero(rollout.is_scored_S), rollout.gaps
            for rank in np.argsort(-sign * gaps)[:GAPS_SHOWN].tolist():
                if sign * gaps[rank] > NO_GAP:
                    rows.append(GapRow(index, int(sampled[rank]), float(gaps[rank])))
        return sorted(rows, key=lambda row: -sign * row.gap)[: GAPS_SHOWN // 2]

    return (*largest(1), *largest(-1))


def _mean(values: NDArray[np.float64] | NDArray[np.bool_]) -> float | None:
    return float(np.mean(values)) if len(values) else None
