"""Rollouts -> the distributions of the report's overview. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentic_opd.report.rollouts import Rollout

GAP_EDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Bins of the gap's distribution, in nats, on both sides of 0; below the first a gap counts as none."""


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
    """Yield the distributions of scores, parts of the reward, votes, hints' lengths and `gaps`, where there are any."""
    yield _tenths("score", [rollout.score for rollout in rollouts])
    parts: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, part in (rollout.reward or {}).items():
            parts[name].append(part)
    for name, values in parts.items():
        yield _tenths(f"reward: {name.replace('_', ' ')}", values)
    turns = [turn for rollout in rollouts for turn in rollout.turns]
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
