"""EpisodeStats of many episodes -> the numbers that are logged. Pure.

    name                        unit       what
    opd/mean_hints_per_rollout  hints      accepted hints an episode
    opd/mean_turns_scored       turns      scored turns an episode
    opd/hint_rate               share      accepted hints of all turns
    opd/outcome/<name>          turns      turns that ended in this outcome; they add up to all turns
    opd/total_hints             hints      accepted hints
    opd/total_scored_turns      turns      scored turns
    opd/scored_token_fraction   share      scored tokens of all sampled tokens
    opd/gap_mean, opd/gap_std   nats       teacher minus student at the scored tokens
    opd/noise_floor             nats       largest gap without a hint, over the groups measured
    opd/judge_s_p50, _p95       seconds    one turn's votes
    opd/score_s_p50, _p95       seconds    one turn's teacher rows

An accepted hint reached the quorum and is no leak, whether or not it could be scored. What has nothing to be computed
from (a mean gap without a scored token) is left out: it is not 0.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentic_opd.types import TurnOutcome


@dataclass(frozen=True, slots=True)
class EpisodeStats:
    """What one episode adds to the metrics: one outcome a turn, one gap (nats) a scored token, seconds a request."""

    outcomes: tuple[TurnOutcome, ...]
    hints: int
    sampled_tokens: int
    gaps: tuple[float, ...]
    judge_s: tuple[float, ...]
    score_s: tuple[float, ...]


def aggregate(episodes: Sequence[EpisodeStats], noise_floors: Sequence[float | None] = ()) -> dict[str, float]:
    """Return the metrics of the table above over `episodes`; `noise_floors` has one entry a group, None if unknown."""
    counts = Counter(outcome for episode in episodes for outcome in episode.outcomes)
    turns, hints = counts.total(), sum(episode.hints for episode in episodes)
    sampled = sum(episode.sampled_tokens for episode in episodes)
    gaps = [gap for episode in episodes for gap in episode.gaps]
    floors = [floor for floor in noise_floors if floor is not None]

    metrics: dict[str, float] = {f"opd/outcome/{outcome.value}": counts[outcome] for outcome in TurnOutcome}
    metrics["opd/total_hints"] = hints
    metrics["opd/total_scored_turns"] = counts[TurnOutcome.SCORED]
    if episodes:
        metrics["opd/mean_hints_per_rollout"] = hints / len(episodes)
        metrics["opd/mean_turns_scored"] = counts[TurnOutcome.SCORED] / len(episodes)
    if turns:
        metrics["opd/hint_rate"] = hints / turns
    if sampled:
        metrics["opd/scored_token_fraction"] = len(gaps) / sampled
    if gaps:
        metrics["opd/gap_mean"] = float(np.mean(gaps))
        metrics["opd/gap_std"] = float(np.std(gaps))
    if floors:
        metrics["opd/noise_floor"] = max(floors)
    metrics |= _percentiles("opd/judge_s", [s for episode in episodes for s in episode.judge_s])
    metrics |= _percentiles("opd/score_s", [s for episode in episodes for s in episode.score_s])
    return metrics


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {f"{name}_p{q}": float(np.percentile(seconds, q)) for q in (50, 95)}
