"""EpisodeStats of many episodes -> the opd/ metrics of a logging step. Pure.

`OPD_METRICS` says what each is. A metric that can't be computed (a mean gap without a scored token) is left out: it is
not 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from agentic_opd.core.metric import Metric, percentiles
from agentic_opd.core.precision import root_mean_square
from agentic_opd.core.types import TurnOutcome, Vote
from agentic_opd.wire.counts import TurnCounts
from agentic_opd.wire.group import ControlKind, ControlReading, GroupDistillation, TurnRecord

_OUTCOMES = {
    TurnOutcome.SCORED: "turns with a hint whose tokens the teacher scored",
    TurnOutcome.NO_NEXT_STATE: "turns that nothing answered, so that nobody was asked",
    TurnOutcome.VOTE_FAILED: "turns without a quorum for a hint: mostly turns that nothing is wrong with",
    TurnOutcome.JUDGE_ERROR: "turns whose judge failed, or gave no vote that could be read",
    TurnOutcome.LEAKED: "turns whose hint repeated hidden test code, and was dropped",
    TurnOutcome.TOO_LONG: "turns that together with their hint do not fit the teacher's context",
    TurnOutcome.SCORING_ERROR: "turns with a hint that the teacher gave no usable rows for",
}

OPD_METRICS = (
    *(Metric(f"opd/outcome/{outcome.value}", "turns", text) for outcome, text in _OUTCOMES.items()),
    Metric(
        "opd/total_hints", "hints", "accepted hints: the quorum was reached and it does not leak a test, scored or not"
    ),
    Metric("opd/total_scored_turns", "turns", "scored turns"),
    Metric("opd/mean_hints_per_rollout", "hints", "accepted hints an episode"),
    Metric("opd/mean_turns_scored", "turns", "scored turns an episode"),
    Metric("opd/hint_rate", "share", "accepted hints of all turns"),
    Metric("opd/hint_chars", "characters", "mean length of an accepted hint"),
    Metric(
        "opd/vote_agreement",
        "share",
        "of a judged turn's readable votes, the share that agrees with the majority of them; mean over the turns with "
        "a readable vote. 1: all agree; 0.5: half of them each way",
    ),
    Metric("opd/votes_readable", "share", "votes that could be read, of all votes that came back"),
    Metric("opd/scored_token_fraction", "share", "scored tokens of all sampled tokens"),
    Metric(
        "opd/gap_mean",
        "nats",
        "teacher minus student at the scored tokens, mean. The student is the policy without the hint, by the weights "
        "that the teacher read with",
    ),
    Metric("opd/gap_std", "nats", "its standard deviation (of the tokens at hand, not of a sample)"),
    Metric("opd/gap_positive_share", "share", "scored tokens that the teacher finds likelier than the student did"),
    Metric("opd/gap_mean_reasoning", "nats", "mean of the gap at scored tokens of reasoning. Left out without any"),
    Metric("opd/gap_mean_answer", "nats", "the same at all other scored tokens, where reasoning is scored too"),
    *(Metric(f"opd/gap_p{q}", "nats", f"{q}th percentile of the gap") for q in (5, 50, 95)),
    Metric("opd/gap_distance_mean", "nats", "mean of the gap's absolute value"),
    Metric(
        "opd/control_gap_mean",
        "nats",
        "mean distance between the teacher's logprobs of a scored token under the hint and under the control hint: as "
        "large as opd/gap_distance_mean or larger if what the hint says matters, near 0 if any hint would do. Left out "
        "with control: none, as all control metrics",
    ),
    Metric(
        "opd/control_fallbacks",
        "turns",
        "scored turns whose control is the neutral hint because no accepted hint fitted",
    ),
    Metric(
        "opd/control_missing_share",
        "share",
        "entries of scored rows that are not among the control's most likely tokens, and have no logprob there (null)",
    ),
    Metric(
        "opd/rebased_share",
        "share",
        "scored turns whose gap is measured from a second reading, because the weights changed since they were "
        "sampled, or with gap_baseline: teacher",
    ),
    Metric("opd/gap_rms", "nats", "root mean square of the gap: what to compare with opd/noise_rms"),
    Metric(
        "opd/noise_rms", "nats", "root mean square of the gaps without a hint, over the groups where they were measured"
    ),
    Metric(
        "opd/noise_floor", "nats", "the largest of these gaps: it grows with their number, and is an unlikely token's"
    ),
    Metric(
        "opd/teacher_entropy",
        "nats",
        "entropy of a scored row: its entries, and one tail bin for the rest of the vocabulary (so it is a lower bound "
        "of the whole distribution's); mean over the scored rows",
    ),
    Metric("opd/teacher_topk_mass", "share", "probability that the entries of a scored row hold together; mean"),
    *(Metric(f"opd/judge_s_p{q}", "seconds", f"one turn's votes, {q}th percentile") for q in (50, 95)),
    *(Metric(f"opd/score_s_p{q}", "seconds", f"one turn's teacher rows, {q}th percentile") for q in (50, 95)),
    Metric(
        "opd/scored_tokens_per_s",
        "tokens/s",
        "scored tokens, by the seconds in which at least one of the step's scoring requests was under way",
    ),
    Metric(
        "opd/prefix_cache_hit_share",
        "share",
        "tokens of the scoring requests that the server had in its cache. Left out without the plugin",
    ),
)


@dataclass(frozen=True, slots=True)
class ControlStats:
    """What a turn's control adds to the metrics: a distance (nats) a token, and the row entries without a logprob."""

    fell_back: bool
    """It is another control than the settings ask for."""
    distances: tuple[float, ...]
    entries: int
    missing: int


@dataclass(frozen=True, slots=True)
class ScoreStats:
    """What scoring a turn adds to the metrics: a gap, an entropy (nats) and a mass a token; what was read, and when.

    `start_s` is on a clock of its own (monotonic); `cached_tokens` is None if the server does not say.
    """

    gaps: tuple[float, ...]
    entropies: tuple[float, ...]
    masses: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int | None
    start_s: float
    seconds: float
    control: ControlStats | None = None
    """None if the settings ask for none."""
    reasoning_tokens: int = 0
    """How many of the first entries are reasoning."""


@dataclass(frozen=True, slots=True)
class TurnStats:
    """What one turn adds to the metrics; None if it did not come so far."""

    record: TurnRecord
    judge_s: float | None = None
    scored: ScoreStats | None = None


@dataclass(frozen=True, slots=True)
class EpisodeStats:
    """What one episode adds to the metrics."""

    sampled_tokens: int
    turns: tuple[TurnStats, ...]


def row_stats(logprobs_RK: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Entropy (nats) and mass of each written row, [R] and [R], from the logprobs of its K entries.

    The entropy is that of K + 1 bins: the entries, and the tail that is left of 1.
    """
    logprobs = np.asarray(logprobs_RK, np.float64)
    masses_R = np.minimum(np.exp(logprobs).sum(axis=1), 1.0)
    tails_R = 1.0 - masses_R
    tail_terms_R = -tails_R * np.log(np.where(tails_R > 0, tails_R, 1.0))
    entropies_R = -(np.exp(logprobs) * logprobs).sum(axis=1) + tail_terms_R
    return tuple(entropies_R.tolist()), tuple(masses_R.tolist())


def control_stats(control: ControlReading, logprobs_RK: Sequence[Sequence[float]], wanted: ControlKind) -> ControlStats:
    """What the control of a scored turn adds; `logprobs_RK` are the teacher's rows, `wanted` what was asked for."""
    both = zip(logprobs_RK, control.logprobs_RK, strict=True)
    return ControlStats(
        fell_back=control.kind != wanted,
        distances=tuple(abs(hinted[0] - own[0]) for hinted, own in both if own[0] is not None),
        entries=sum(map(len, control.logprobs_RK)),
        missing=sum(row.count(None) for row in control.logprobs_RK),
    )


def aggregate(episodes: Sequence[EpisodeStats], groups: Sequence[GroupDistillation] = ()) -> dict[str, float]:
    """Return the metrics of `OPD_METRICS` over the `episodes` of these groups."""
    turns, counts = [turn for episode in episodes for turn in episode.turns], TurnCounts()
    counts.add(turn.record for turn in turns)
    floors = [group.noise_floor for group in groups if group.noise_floor is not None]
    squares = [group.noise_rms for group in groups if group.noise_rms is not None]

    metrics: dict[str, float] = {f"opd/outcome/{outcome.value}": counts.outcomes[outcome] for outcome in TurnOutcome}
    metrics["opd/total_hints"] = counts.hints
    metrics["opd/total_scored_turns"] = counts.scored
    if episodes:
        metrics["opd/mean_hints_per_rollout"] = counts.hints / len(episodes)
        metrics["opd/mean_turns_scored"] = counts.scored / len(episodes)
    if turns:
        metrics["opd/hint_rate"] = counts.hints / counts.turns
    if counts.hints:
        metrics["opd/hint_chars"] = fmean(len(turn.record.hint) for turn in turns if turn.record.hint is not None)
    if floors:
        metrics["opd/noise_floor"] = max(floors)
    if squares:
        metrics["opd/noise_rms"] = root_mean_square(squares)
    metrics |= _vote_metrics([turn.record.votes for turn in turns if turn.record.votes])
    if counts.scored:
        rebased = sum(turn.record.baseline_logprobs is not None for turn in turns)
        metrics["opd/rebased_share"] = rebased / counts.scored
    metrics |= percentiles("opd/judge_s", [turn.judge_s for turn in turns if turn.judge_s is not None])
    scored = [turn.scored for turn in turns if turn.scored is not None]
    sampled = sum(episode.sampled_tokens for episode in episodes)
    return metrics | _score_metrics(scored, sampled)


def _vote_metrics(judged: Sequence[Sequence[Vote]]) -> dict[str, float]:
    """Metrics of the votes, those of each judged turn together."""
    decisions = [[vote.decision for vote in votes if vote.decision is not None] for votes in judged]
    agreements = [max(row.count(1), row.count(-1)) / len(row) for row in decisions if row]
    asked = sum(map(len, judged))
    metrics = {"opd/vote_agreement": fmean(agreements)} if agreements else {}
    return metrics | ({"opd/votes_readable": sum(map(len, decisions)) / asked} if asked else {})


def _score_metrics(scored: Sequence[ScoreStats], sampled_tokens: int) -> dict[str, float]:
    gaps = [gap for turn in scored for gap in turn.gaps]
    metrics = {"opd/scored_token_fraction": len(gaps) / sampled_tokens} if sampled_tokens else {}
    if not gaps:
        return metrics
    metrics["opd/gap_mean"] = float(np.mean(gaps))
    reasoning = [gap for turn in scored for gap in turn.gaps[: turn.reasoning_tokens]]
    answers = [gap for turn in scored for gap in turn.gaps[turn.reasoning_tokens :]]
    if reasoning:
        kinds = {"reasoning": reasoning, "answer": answers}
        metrics |= {f"opd/gap_mean_{kind}": fmean(of_kind) for kind, of_kind in kinds.items() if of_kind}
    metrics["opd/gap_std"] = float(np.std(gaps))
    metrics["opd/gap_positive_share"] = fmean(gap > 0 for gap in gaps)
    metrics |= percentiles("opd/gap", gaps, (5, 50, 95))
    metrics["opd/gap_rms"] = root_mean_square(gaps)
    metrics["opd/gap_distance_mean"] = fmean(map(abs, gaps))
    metrics["opd/teacher_entropy"] = fmean(entropy for turn in scored for entropy in turn.entropies)
    metrics["opd/teacher_topk_mass"] = fmean(mass for turn in scored for mass in turn.masses)
    metrics |= percentiles("opd/score_s", [turn.seconds for turn in scored])
    busy_s = _covered((turn.start_s, turn.start_s + turn.seconds) for turn in scored)
    if busy_s > 0:
        metrics["opd/scored_tokens_per_s"] = len(gaps) / busy_s
    metrics |= _control_metrics([turn.control for turn in scored if turn.control is not None])
    said = [(turn.cached_tokens, turn.prompt_tokens) for turn in scored if turn.cached_tokens is not None]
    if said:
        metrics["opd/prefix_cache_hit_share"] = sum(cached for cached, _ in said) / sum(read for _, read in said)
    return metrics


def _control_metrics(controls: Sequence[ControlStats]) -> dict[str, float]:
    if not controls:
        return {}
    metrics: dict[str, float] = {"opd/control_fallbacks": sum(control.fell_back for control in controls)}
    if distances := [distance for control in controls for distance in control.distances]:
        metrics["opd/control_gap_mean"] = fmean(distances)
        entries, missing = (
            sum(counts) for counts in zip(*((one.entries, one.missing) for one in controls), strict=True)
        )
        metrics["opd/control_missing_share"] = missing / entries
    return metrics


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of `spans`."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
