"""EpisodeStats of many episodes -> the opd/ metrics of a logging step. Pure.

`OPD_METRICS` describes each metric. A metric that can't be computed (a mean gap without a scored token) is omitted
rather than set to 0.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from statistics import fmean

import numpy as np

from agentic_opd.core.metric import Metric, percentiles
from agentic_opd.core.precision import root_mean_square
from agentic_opd.core.types import TrajectoryVoteKind, TurnOutcome
from agentic_opd.distill.records import ControlStats, EpisodeStats, ScoreStats
from agentic_opd.wire.counts import JudgeCounts, TurnCounts
from agentic_opd.wire.group import GroupDistillation, TurnRecord

_OUTCOMES = {
    TurnOutcome.SCORED: "turns with a hint whose tokens the teacher scored",
    TurnOutcome.NO_NEXT_STATE: "turns without a next state, about which the judge is not asked",
    TurnOutcome.VOTE_FAILED: "turns without a quorum for a hint: mostly turns without a mistake",
    TurnOutcome.JUDGE_ERROR: "turns whose judge failed or returned no readable vote",
    TurnOutcome.LEAKED: "turns whose hint was dropped because it repeated hidden test code",
    TurnOutcome.TOO_LONG: "turns that exceed the teacher's context together with their hint",
    TurnOutcome.SCORING_ERROR: "turns with a hint for which the teacher returned no usable rows",
    TurnOutcome.REFUTED: "turns whose hint was dropped because the policy passes less often with it (hint.proof). Left "
    "out unless hints are proven",
    TurnOutcome.UNPROVEN: "turns whose hint was dropped because replays did not show that it helps. Left out unless "
    "hints are proven",
    TurnOutcome.NOT_JUDGED: "turns of rollouts that did not fail, with judge.when: failed",
}
_VOTE_KINDS = {
    TrajectoryVoteKind.NAMED: "names turns at fault, each with a hint",
    TrajectoryVoteKind.NONE: "says that no turn is at fault",
    TrajectoryVoteKind.CONTEXT_TURN: "names a message that is context only, which is left out; its other turns count",
    TrajectoryVoteKind.UNREADABLE: "has no decision that can be read, and abstains",
    TrajectoryVoteKind.UNKNOWN_TURN: "names a turn that does not exist or is not shown in full, and abstains",
    TrajectoryVoteKind.REPEATED_TURN: "has two hints for one turn, and abstains",
    TrajectoryVoteKind.HINT_WITHOUT_TURN: "has a hint without a turn, and abstains",
    TrajectoryVoteKind.TURN_WITHOUT_HINT: "names a turn without a hint, and abstains",
    TrajectoryVoteKind.TOO_MANY_TURNS: "names more than judge.max_turns turns, and abstains",
    TrajectoryVoteKind.EVERY_TURN: "names every turn, more than judge.max_turns, and abstains",
}

_PROOF_OUTCOMES = (TurnOutcome.REFUTED, TurnOutcome.UNPROVEN)

OPD_METRICS = (
    *(Metric(f"opd/outcome/{outcome.value}", "turns", text) for outcome, text in _OUTCOMES.items()),
    Metric(
        "opd/total_hints", "hints", "accepted hints, scored or not: the quorum was reached and the hint leaks no test"
    ),
    Metric(
        "opd/proof_rollouts",
        "episodes",
        "continuations played to prove hints. Left out unless hints are proven (hint.proof)",
    ),
    Metric("opd/proof_tokens", "tokens", "tokens that the policy sampled in these continuations"),
    *(Metric(f"opd/proof_s_p{q}", "seconds", f"time for one hint's proof, {q}th percentile") for q in (50, 95)),
    Metric("opd/total_scored_turns", "turns", "scored turns"),
    Metric("opd/mean_hints_per_rollout", "hints", "accepted hints per episode"),
    Metric("opd/mean_turns_scored", "turns", "scored turns per episode"),
    Metric("opd/hint_rate", "share", "turns with an accepted hint, of all turns"),
    Metric(
        "opd/judged_share",
        "share",
        "turns about which the judge was asked, by themselves or with their rollout, of all turns: judge.when: failed "
        "lowers it. Left out if no source asks the judge",
    ),
    *(
        Metric(
            f"opd/trajectory_vote/{kind.value}",
            "votes",
            f"answers of the judge about a trajectory; such an answer {text}",
        )
        for kind, text in _VOTE_KINDS.items()
    ),
    Metric(
        "opd/trajectory_windows",
        "questions",
        "mean number of questions about a judged rollout, above 1 if rollouts exceed the judge's context. Left out, "
        "like opd/trajectory_vote/*, with judge.scope: turn",
    ),
    Metric("opd/hint_chars", "characters", "mean length of an accepted hint"),
    Metric(
        "opd/vote_agreement",
        "share",
        "share of a judged turn's readable votes that agree with their majority, mean over the turns with a "
        "readable vote, with judge.scope: trajectory over those that a vote names. 1: all agree; 0.5: the votes are "
        "split evenly",
    ),
    Metric("opd/votes_readable", "share", "readable votes, of all votes received"),
    Metric(
        "opd/step_score_hinted",
        "score",
        "mean step score of turns with an accepted hint, -1 to 1. Left out unless step_votes asks for step scores",
    ),
    Metric(
        "opd/step_score_unhinted",
        "score",
        "mean step score of the other judged turns, left out in the same cases. If it is below that of turns with a "
        "hint, the judge contradicts itself",
    ),
    Metric("opd/scored_token_fraction", "share", "scored tokens, of all sampled tokens"),
    Metric(
        "opd/gap_mean",
        "nats",
        "mean of log p_teacher - log p_student at the scored tokens. The student is the policy without the hint, "
        "with the weights that the teacher used",
    ),
    Metric("opd/gap_std", "nats", "population standard deviation of the gap"),
    Metric(
        "opd/gap_positive_share", "share", "scored tokens that are likelier under the teacher than under the student"
    ),
    Metric("opd/gap_mean_reasoning", "nats", "mean gap at scored tokens of reasoning. Left out if there are none"),
    Metric("opd/gap_mean_answer", "nats", "mean gap at all other scored tokens, if reasoning is scored too"),
    *(Metric(f"opd/gap_p{q}", "nats", f"{q}th percentile of the gap") for q in (5, 50, 95)),
    Metric(
        "opd/hint_overlap",
        "share",
        "mean overlap of the scored rows' hints with the reading without a hint. Left out unless hints were compared "
        "(hint.selection: overlap)",
    ),
    Metric(
        "opd/hints_compared",
        "hints",
        "mean number of hints that a scored turn's hint was chosen from, left out in the same cases",
    ),
    Metric("opd/gap_distance_mean", "nats", "mean absolute gap"),
    Metric(
        "opd/control_gap_mean",
        "nats",
        "mean absolute difference between the teacher's logprobs of a scored token under the hint and under the "
        "control hint: at least about opd/gap_distance_mean if the hint's content matters, near 0 if any hint would "
        "do. Left out with control: none, like all control metrics",
    ),
    Metric(
        "opd/control_fallbacks",
        "turns",
        "scored turns with the neutral hint as control, because no accepted hint fitted",
    ),
    Metric(
        "opd/control_missing_share",
        "share",
        "entries of scored rows without a control logprob (null), because they are not among the control's most "
        "likely tokens",
    ),
    Metric(
        "opd/rebased_share",
        "share",
        "scored turns whose gap is measured from a second reading, because the weights changed after sampling, or "
        "with gap_baseline: teacher",
    ),
    Metric("opd/gap_rms", "nats", "root mean square of the gap, for comparison with opd/noise_rms"),
    Metric(
        "opd/noise_rms",
        "nats",
        "root mean square of the gaps without a hint, over the groups in which they were measured",
    ),
    Metric(
        "opd/noise_floor",
        "nats",
        "largest gap without a hint: it grows with the number of gaps and belongs to an unlikely token",
    ),
    Metric(
        "opd/teacher_entropy",
        "nats",
        "mean entropy of the scored rows, with one tail bin for the rest of the vocabulary: a lower bound of the "
        "whole distribution's entropy",
    ),
    Metric(
        "opd/agreement_on_failure",
        "share",
        "scored tokens that are the hinted teacher's most likely ones, of the scored tokens of failed rollouts: at "
        "these the teacher confirms what led to the failure. Left out if no failed rollout has a scored token",
    ),
    Metric("opd/teacher_topk_mass", "share", "mean total probability of a scored row's entries"),
    *(
        Metric(f"opd/judge_s_p{q}", "seconds", f"time for the votes on one question, {q}th percentile")
        for q in (50, 95)
    ),
    Metric("opd/judge_s_per_rollout", "seconds", "time for the votes per episode, added up over its questions"),
    Metric(
        "opd/judge_read_tokens",
        "tokens",
        "tokens that the judge read per episode, as its endpoint counts them (usage.prompt_tokens): a prompt once for "
        "all votes of one request, also where it was in the server's cache. The mean is over the episodes whose "
        "tokens are all known; left out if there are none",
    ),
    Metric(
        "opd/judge_sampled_tokens",
        "tokens",
        "tokens that the judge sampled per episode (usage.completion_tokens), all votes and their reasoning; mean as "
        "above",
    ),
    Metric(
        "opd/judge_read_tokens_per_hint",
        "tokens",
        "tokens that the judge read per accepted hint, over the same episodes",
    ),
    Metric(
        "opd/judge_sampled_tokens_per_hint",
        "tokens",
        "tokens that the judge sampled per accepted hint, over the same episodes",
    ),
    Metric(
        "opd/judge_uncounted",
        "questions",
        "questions to the judge whose tokens are not known: its endpoint sends no usage, or it failed",
    ),
    *(Metric(f"opd/score_s_p{q}", "seconds", f"time for one turn's teacher rows, {q}th percentile") for q in (50, 95)),
    Metric(
        "opd/scored_tokens_per_s",
        "tokens/s",
        "scored tokens per second in which at least one of the step's scoring requests was in flight",
    ),
    Metric(
        "opd/prefix_cache_hit_share",
        "share",
        "tokens of the scoring requests that were in the server's cache. Left out without the plugin",
    ),
)


def aggregate(episodes: Sequence[EpisodeStats], groups: Sequence[GroupDistillation] = ()) -> dict[str, float]:
    """Return the metrics of `OPD_METRICS` over `episodes`, and the noise over `groups`."""
    turns, counts = [turn for episode in episodes for turn in episode.turns], TurnCounts()
    counts.add(turn.record for turn in turns)
    floors = [group.noise_floor for group in groups if group.noise_floor is not None]
    squares = [group.noise_rms for group in groups if group.noise_rms is not None]

    usual = (outcome for outcome in TurnOutcome if outcome not in _PROOF_OUTCOMES)
    metrics: dict[str, float] = {f"opd/outcome/{outcome.value}": counts.outcomes[outcome] for outcome in usual}
    if proofs := [turn.proof for turn in turns if turn.proof is not None]:
        metrics |= {f"opd/outcome/{name.value}": counts.outcomes[name] for name in _PROOF_OUTCOMES}
        metrics["opd/proof_rollouts"] = sum(proof.rollouts for proof in proofs)
        metrics["opd/proof_tokens"] = sum(proof.record.sampled_tokens for proof in proofs)
        metrics |= percentiles("opd/proof_s", [proof.seconds for proof in proofs])
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
    metrics |= _judge_metrics(episodes)
    metrics |= _step_metrics([turn.record for turn in turns])
    if counts.scored:
        rebased = sum(turn.record.baseline_logprobs is not None for turn in turns)
        metrics["opd/rebased_share"] = rebased / counts.scored
    if compared := [len(turn.record.hints) for turn in turns if turn.record.hints]:
        metrics["opd/hints_compared"] = fmean(compared)
    metrics |= _judge_costs(episodes)
    scored = [turn.scored for turn in turns if turn.scored is not None]
    sampled = sum(episode.sampled_tokens for episode in episodes)
    in_failed = [
        turn.scored for episode in episodes if episode.failed for turn in episode.turns if turn.scored is not None
    ]
    if scored_tokens := sum(len(turn.gaps) for turn in in_failed):
        metrics["opd/agreement_on_failure"] = sum(turn.agreed_tokens for turn in in_failed) / scored_tokens
    return metrics | _score_metrics(scored, sampled)


def _judge_metrics(episodes: Sequence[EpisodeStats]) -> dict[str, float]:
    """Return the share of judged turns, and the metrics of the votes on single turns and on trajectories."""
    by_turn = [episode for episode in episodes if episode.trajectory is None]
    records = [turn.record for episode in by_turn for turn in episode.turns]
    trajectories = [episode.trajectory for episode in episodes if episode.trajectory is not None]
    windows = [window for trajectory in trajectories for window in trajectory.windows]
    judged = sum(bool(record.question or record.votes) for record in records)
    judged += sum(window.last - window.first + 1 for window in windows)
    num_turns = sum(len(episode.turns) for episode in episodes)
    metrics: dict[str, float] = {}
    if judged or any(record.outcome is TurnOutcome.NOT_JUDGED for record in records):
        metrics["opd/judged_share"] = judged / num_turns

    decisions = [[vote.decision for vote in record.votes if vote.decision is not None] for record in records]
    agreements = [max(row.count(1), row.count(-1)) / len(row) for row in decisions if row]
    votes = [vote for window in windows for vote in window.votes]
    for window in windows:
        readable = [vote.turns for vote in window.votes if vote.kind.is_readable]
        counts = Counter(number for turns in readable for number in turns)
        agreements += [max(count, len(readable) - count) / len(readable) for count in counts.values()]
    if agreements:
        metrics["opd/vote_agreement"] = fmean(agreements)
    if num_votes := sum(len(record.votes) for record in records) + len(votes):
        num_readable = sum(map(len, decisions)) + sum(vote.kind.is_readable for vote in votes)
        metrics["opd/votes_readable"] = num_readable / num_votes
    if trajectories:
        kinds = Counter(vote.kind for vote in votes)
        metrics |= {f"opd/trajectory_vote/{kind.value}": kinds[kind] for kind in TrajectoryVoteKind}
        metrics["opd/trajectory_windows"] = len(windows) / len(trajectories)
    return metrics


def _judge_costs(episodes: Sequence[EpisodeStats]) -> dict[str, float]:
    """Return what the judge took, in tokens and in seconds."""
    seconds = [turn.judge_s for episode in episodes for turn in episode.turns if turn.judge_s is not None]
    seconds += [window_s for episode in episodes for window_s in episode.judge_s]
    metrics = percentiles("opd/judge_s", seconds)
    if seconds:
        metrics["opd/judge_s_per_rollout"] = sum(seconds) / len(episodes)
    costs = [JudgeCounts.of((turn.record for turn in episode.turns), episode.trajectory) for episode in episodes]
    if any(cost.questions for cost in costs):
        metrics["opd/judge_uncounted"] = sum(cost.uncounted for cost in costs)
    total, hints, counted = JudgeCounts(), 0, 0
    for episode, cost in zip(episodes, costs, strict=True):
        if not cost.uncounted:
            total.merge(cost)
            hints += sum(turn.record.hint is not None for turn in episode.turns)
            counted += 1
    if not total.questions:
        return metrics
    metrics["opd/judge_read_tokens"] = total.read_tokens / counted
    metrics["opd/judge_sampled_tokens"] = total.sampled_tokens / counted
    if hints:
        metrics["opd/judge_read_tokens_per_hint"] = total.read_tokens / hints
        metrics["opd/judge_sampled_tokens_per_hint"] = total.sampled_tokens / hints
    return metrics


def _step_metrics(records: Sequence[TurnRecord]) -> dict[str, float]:
    """Return the mean step scores of turns with and without a hint."""
    scored = [(record.hint is not None, record.step_score) for record in records if record.step_score is not None]
    hinted, unhinted = ([score for has_hint, score in scored if has_hint is is_hinted] for is_hinted in (True, False))
    metrics = {"opd/step_score_hinted": fmean(hinted)} if hinted else {}
    return metrics | ({"opd/step_score_unhinted": fmean(unhinted)} if unhinted else {})


def _score_metrics(scored: Sequence[ScoreStats], sampled_tokens: int) -> dict[str, float]:
    gaps = np.fromiter(chain.from_iterable(turn.gaps for turn in scored), np.float64)
    metrics = {"opd/scored_token_fraction": len(gaps) / sampled_tokens} if sampled_tokens else {}
    if not len(gaps):
        return metrics
    metrics["opd/gap_mean"] = float(gaps.mean())
    if any(turn.reasoning_tokens for turn in scored):
        reasoning = [gap for turn in scored for gap in turn.gaps[: turn.reasoning_tokens]]
        answers = [gap for turn in scored for gap in turn.gaps[turn.reasoning_tokens :]]
        kinds = {"reasoning": reasoning, "answer": answers}
        metrics |= {f"opd/gap_mean_{kind}": _mean(of_kind) for kind, of_kind in kinds.items() if of_kind}
    metrics["opd/gap_std"] = float(gaps.std())
    metrics["opd/gap_positive_share"] = float((gaps > 0).mean())
    metrics |= percentiles("opd/gap", gaps, (5, 50, 95))
    metrics["opd/gap_rms"] = root_mean_square(gaps)
    metrics["opd/gap_distance_mean"] = float(np.abs(gaps).mean())
    if overlaps := [overlap for turn in scored for overlap in turn.overlaps]:
        metrics["opd/hint_overlap"] = _mean(overlaps)
    metrics["opd/teacher_entropy"] = _mean(chain.from_iterable(turn.entropies for turn in scored))
    metrics["opd/teacher_topk_mass"] = _mean(chain.from_iterable(turn.masses for turn in scored))
    metrics |= percentiles("opd/score_s", [turn.seconds for turn in scored])
    busy_s = _covered((turn.start_s, turn.start_s + turn.seconds) for turn in scored)
    if busy_s > 0:
        metrics["opd/scored_tokens_per_s"] = len(gaps) / busy_s
    metrics |= _control_metrics([turn.control for turn in scored if turn.control is not None])
    prompts = [(turn.cached_tokens, turn.prompt_tokens) for turn in scored if turn.cached_tokens is not None]
    if prompts:
        metrics["opd/prefix_cache_hit_share"] = sum(cached for cached, _ in prompts) / sum(read for _, read in prompts)
    return metrics


def _mean(values: Iterable[float]) -> float:
    """Return the mean; `statistics.fmean` takes ten times as long, and there are millions of tokens."""
    return float(np.fromiter(values, np.float64).mean())


def _control_metrics(controls: Sequence[ControlStats]) -> dict[str, float]:
    if not controls:
        return {}
    metrics: dict[str, float] = {"opd/control_fallbacks": sum(control.fell_back for control in controls)}
    if distances := [distance for control in controls for distance in control.distances]:
        metrics["opd/control_gap_mean"] = fmean(distances)
        entries, missing = (
            sum(counts) for counts in zip(*((control.entries, control.missing) for control in controls), strict=True)
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
