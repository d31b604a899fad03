"""Two episodes whose metrics are counted by hand.

episode  turn  outcome      votes   hint   gaps      judge_s  scored in (s)  read (cached)  control
1        1     scored       + + -   "abcd" 1 3       0.1      0.0 to 0.5     20 (10)        0.5 1.5, misses 1 of 4
         2     vote_failed  - - ?                    0.3
2        1     scored       + + +   "ab"   2 -2      0.2      0.25 to 1.75   30 (20)        none fits
         2     too_long     + + +   "ab"             0.2
         3     leaked       + + -                    0.2
"""

import math

import numpy as np
import pytest

from agentic_opd.core.types import JudgeTokens, ProofVerdict, StepScore, TurnOutcome, Vote
from agentic_opd.distill.metrics import OPD_METRICS, aggregate
from agentic_opd.distill.proving import HintProof
from agentic_opd.distill.records import ControlStats, EpisodeStats, ScoreStats, TurnStats, control_stats, row_stats
from agentic_opd.wire.group import (
    ControlReading,
    GroupDistillation,
    HintReading,
    JudgedTrajectory,
    JudgedWindow,
    ProofRecord,
    TurnRecord,
)

Out = TurnOutcome
VOTES = {"+": Vote(1, "a long enough hint", "+"), "-": Vote(-1, None, "-"), "?": Vote(None, None, "?")}


def turn(
    outcome: Out,
    votes: str = "",
    hint: str | None = None,
    judge_s: float | None = None,
    scored: ScoreStats | None = None,
    baseline: tuple[float, ...] | None = None,
) -> TurnStats:
    record = TurnRecord((1, 3), outcome, "tool", tuple(VOTES[vote] for vote in votes), hint, baseline_logprobs=baseline)
    return TurnStats(record, judge_s, scored)


def measured(largest: float | None, rms: float | None) -> GroupDistillation:
    return GroupDistillation(2, noise_floor=largest, noise_rms=rms)


FIRST = EpisodeStats(
    10,
    (
        turn(
            *(Out.SCORED, "++-", "abcd", 0.1),
            ScoreStats((1.0, 3.0), (0.1, 0.2), (0.9, 0.8), 20, 10, 0.0, 0.5, ControlStats(False, (0.5, 1.5), 4, 1)),
            baseline=(-1.0, -2.0),
        ),
        turn(Out.VOTE_FAILED, "--?", None, 0.3),
    ),
)
SECOND = EpisodeStats(
    10,
    (
        turn(
            *(Out.SCORED, "+++", "ab", 0.2),
            ScoreStats((2.0, -2.0), (0.3, 0.2), (0.7, 0.6), 30, 20, 0.25, 1.5, ControlStats(True, (), 0, 0)),
        ),
        turn(Out.TOO_LONG, "+++", "ab", 0.2),
        turn(Out.LEAKED, "++-", None, 0.2),
    ),
)


def test_agreement_on_failure_is_of_the_scored_tokens_of_failed_rollouts() -> None:
    def scored(tokens: int, agreed: int) -> TurnStats:
        zeros = (0.0,) * tokens
        return turn(Out.SCORED, "+", "ab", 0.1, ScoreStats(zeros, zeros, zeros, 20, 10, 0.0, 0.5, agreed_tokens=agreed))

    failed = EpisodeStats(20, (scored(4, 3), turn(Out.VOTE_FAILED, "-"), scored(6, 1)), failed=True)
    others = [EpisodeStats(9, (scored(8, 8),), failed=known) for known in (False, None)]
    assert aggregate([failed, *others])["opd/agreement_on_failure"] == 0.4
    assert "opd/agreement_on_failure" not in aggregate(others)


def test_metrics_of_two_episodes() -> None:
    metrics = aggregate([FIRST, SECOND], [measured(None, None), measured(1e-6, 3e-7), measured(3e-6, 4e-7)])
    assert metrics == pytest.approx(
        {
            "opd/outcome/scored": 2,
            "opd/outcome/no_next_state": 0,
            "opd/outcome/vote_failed": 1,
            "opd/outcome/judge_error": 0,
            "opd/outcome/leaked": 1,
            "opd/outcome/too_long": 1,
            "opd/outcome/scoring_error": 0,
            "opd/outcome/not_judged": 0,
            "opd/judged_share": 1.0,
            "opd/total_hints": 3,
            "opd/total_scored_turns": 2,
            "opd/mean_hints_per_rollout": 1.5,
            "opd/mean_turns_scored": 1.0,
            "opd/hint_rate": 0.6,
            "opd/hint_chars": 8 / 3,
            "opd/vote_agreement": (2 / 3 + 1 + 1 + 1 + 2 / 3) / 5,
            "opd/votes_readable": 14 / 15,
            "opd/scored_token_fraction": 0.2,
            "opd/gap_mean": 1.0,
            "opd/gap_std": math.sqrt((0 + 4 + 1 + 9) / 4),
            "opd/gap_positive_share": 0.75,
            "opd/gap_p5": -1.55,
            "opd/gap_p50": 1.5,
            "opd/gap_p95": 2.85,
            "opd/gap_distance_mean": 2.0,
            "opd/control_gap_mean": 1.0,
            "opd/control_fallbacks": 1,
            "opd/control_missing_share": 0.25,
            "opd/rebased_share": 0.5,
            "opd/teacher_entropy": 0.2,
            "opd/teacher_topk_mass": 0.75,
            "opd/gap_rms": math.sqrt((1 + 9 + 4 + 4) / 4),
            "opd/noise_floor": 3e-6,
            "opd/noise_rms": math.sqrt((9e-14 + 16e-14) / 2),
            "opd/judge_s_p50": 0.2,
            "opd/judge_s_p95": 0.28,
            "opd/judge_s_per_rollout": 0.5,
            "opd/score_s_p50": 1.0,
            "opd/score_s_p95": 1.45,
            "opd/scored_tokens_per_s": 4 / 1.75,
            "opd/prefix_cache_hit_share": 0.6,
        }
    )
    of_some = {"opd/gap_mean_reasoning", "opd/gap_mean_answer", "opd/agreement_on_failure"}
    described = {metric.name for metric in OPD_METRICS}
    of_overlap = {"opd/hint_overlap", "opd/hints_compared"}
    of_steps = {"opd/step_score_hinted", "opd/step_score_unhinted"}
    of_proofs = {
        "opd/proof_rollouts",
        "opd/proof_tokens",
        "opd/proof_s_p50",
        "opd/proof_s_p95",
        "opd/outcome/refuted",
        "opd/outcome/unproven",
    }
    of_usage = {name for name in described if name.startswith("opd/judge_") and "judge_s_" not in name}
    of_trajectories = {name for name in described if name.startswith("opd/trajectory_")}
    left_out = of_some | of_overlap | of_steps | of_proofs | of_trajectories | of_usage
    assert metrics.keys() == described - left_out, "what is logged is described, and nothing else"


def judged(tokens: JudgeTokens | None, hint: str | None = None) -> TurnStats:
    outcome = Out.TOO_LONG if hint else Out.VOTE_FAILED
    return TurnStats(TurnRecord((1, 3), outcome, "tool", hint=hint, question="?", judge_tokens=tokens))


def tokens_of_the_judge(*episodes: EpisodeStats) -> dict[str, float]:
    prefix = "opd/judge_"
    return {name.removeprefix(prefix): value for name, value in aggregate(episodes).items() if name.startswith(prefix)}


def test_the_judges_tokens_are_counted_an_episode_and_a_hint() -> None:
    """The third episode asks nothing, which costs nothing; the fourth has a question of unknown tokens."""
    first = EpisodeStats(9, (judged(JudgeTokens(900, 60), "a hint"), judged(JudgeTokens(1000, 40))))
    second = EpisodeStats(9, (judged(JudgeTokens(500, 20), "a hint"),))
    third = EpisodeStats(9, (turn(Out.NO_NEXT_STATE),))
    fourth = EpisodeStats(9, (judged(JudgeTokens(9000, 9000), "a hint"), judged(None)))
    assert tokens_of_the_judge(first, second, third, fourth) == {
        "read_tokens": 800,
        "sampled_tokens": 40,
        "read_tokens_per_hint": 1200,
        "sampled_tokens_per_hint": 60,
        "uncounted": 1,
    }
    assert tokens_of_the_judge(EpisodeStats(9, (judged(JudgeTokens(900, 60)),))).keys() == {
        *("read_tokens", "sampled_tokens", "uncounted")
    }, "without a hint nothing can be said of hints"


def test_the_tokens_of_a_trajectory_are_those_of_its_windows() -> None:
    def episode(*tokens: JudgeTokens | None) -> EpisodeStats:
        windows = tuple(JudgedWindow(n, n, "?", judge_tokens=counted) for n, counted in enumerate(tokens, 1))
        turns = tuple(TurnStats(TurnRecord((1, 3), Out.TOO_LONG, "tool", hint="a hint")) for _ in windows)
        return EpisodeStats(9, turns, JudgedTrajectory(windows), tuple(0.5 for _ in windows))

    metrics = tokens_of_the_judge(episode(JudgeTokens(2000, 90)), episode(JudgeTokens(1500, 30), JudgeTokens(1000, 30)))
    assert metrics == {
        **{"s_p50": 0.5, "s_p95": 0.5, "s_per_rollout": 0.75, "uncounted": 0},
        **{"read_tokens": 2250, "sampled_tokens": 75},
        **{"read_tokens_per_hint": 1500, "sampled_tokens_per_hint": 50},
    }
    half = tokens_of_the_judge(episode(JudgeTokens(2000, 90)), episode(JudgeTokens(1500, 30), None))
    assert (half["read_tokens"], half["sampled_tokens"], half["uncounted"]) == (2000, 90, 1)


def test_tokens_that_nobody_counts_are_no_zero() -> None:
    unknown = EpisodeStats(9, (judged(None, "a hint"), judged(None)))
    assert tokens_of_the_judge(unknown, EpisodeStats(9, (turn(Out.NO_NEXT_STATE),))) == {"uncounted": 2}


def test_reasoning_and_answers_have_a_mean_gap_of_their_own() -> None:
    scores = ScoreStats((0.5, 1.5, -3.0), (0.1,) * 3, (0.9,) * 3, 9, None, 0.0, 1.0, reasoning_tokens=2)
    metrics = aggregate([EpisodeStats(9, (turn(Out.SCORED, scored=scores),))])
    assert (metrics["opd/gap_mean_reasoning"], metrics["opd/gap_mean_answer"]) == (1.0, -3.0)


def test_compared_hints_are_counted_and_the_overlap_is_that_of_the_rows() -> None:
    one, other = (HintReading(name, (5,), 1, 0.5, 0.0, 0.1) for name in ("one", "other"))
    scores = ScoreStats((0.5, 1.5), (0.1,) * 2, (0.9,) * 2, 9, None, 0.0, 1.0, overlaps=(0.25, 0.75))
    turns = [
        TurnStats(TurnRecord((1, 3), Out.SCORED, "tool", hints=hints), None, scores) for hints in ((one, other), (one,))
    ]
    metrics = aggregate([EpisodeStats(9, tuple(turns))])
    assert (metrics["opd/hints_compared"], metrics["opd/hint_overlap"]) == (1.5, 0.5)


def test_proofs_are_counted_with_what_they_cost() -> None:
    proofs = [HintProof(ProofRecord((0, 4), (4, 4), ProofVerdict.PROVEN, 1.0, (0.2, 1.0), sampled_tokens=70), 8, 1.0)]
    proofs += [HintProof(ProofRecord((2, 16), (3, 16), ProofVerdict.OPEN, 0.06, (-0.2, 0.4)), 32, 3.0)]
    outcomes = (Out.SCORED, Out.UNPROVEN)
    turns = [
        TurnStats(TurnRecord((1, 3), outcome, "tool", hint="a hint"), proof=proof)
        for outcome, proof in zip(outcomes, proofs, strict=True)
    ]
    metrics = aggregate([EpisodeStats(9, tuple(turns))])
    assert (metrics["opd/outcome/unproven"], metrics["opd/outcome/refuted"], metrics["opd/proof_rollouts"]) == (
        1,
        0,
        40,
    )
    assert (metrics["opd/proof_s_p50"], metrics["opd/proof_s_p95"], metrics["opd/proof_tokens"]) == (2.0, 2.9, 70)


def test_a_control_is_measured_at_the_sampled_tokens_and_its_gaps_are_counted() -> None:
    rows = ((-0.5, -2.0), (-1.0, None))
    control = ControlReading("neutral", "Take your time.", (5,), rows)
    found = control_stats(control, [[-0.25, -3.0], [-2.0, -0.5]], "other")
    assert found == ControlStats(fell_back=True, distances=(0.25, 1.0), entries=4, missing=1)
    assert not control_stats(control, [[-0.25, -3.0], [-2.0, -0.5]], "neutral").fell_back


def test_requests_one_after_the_other_are_busy_only_while_they_last() -> None:
    one, other = (
        EpisodeStats(5, (turn(Out.SCORED, scored=ScoreStats((1.0,), (0.0,), (1.0,), 9, None, start, 0.5)),))
        for start in (100.0, 200.0)
    )
    metrics = aggregate([one, other])
    assert metrics["opd/scored_tokens_per_s"] == 2.0
    assert "opd/prefix_cache_hit_share" not in metrics


def test_what_can_not_be_computed_is_left_out() -> None:
    nothing = {f"opd/outcome/{name}": 0 for name in TurnOutcome if name not in (Out.REFUTED, Out.UNPROVEN)}
    assert aggregate([]) == {**nothing, "opd/total_hints": 0, "opd/total_scored_turns": 0}
    unread = aggregate([EpisodeStats(4, (turn(Out.JUDGE_ERROR, "???", None, 0.1),))], [measured(None, None)])
    assert unread["opd/scored_token_fraction"] == unread["opd/votes_readable"] == 0
    absent = {"opd/gap_mean", "opd/vote_agreement", "opd/hint_chars", "opd/noise_floor", "opd/teacher_entropy"}
    assert not absent & unread.keys()


def test_a_row_has_the_entropy_of_its_entries_and_their_tail() -> None:
    """Entries 1/2 and 1/4 leave a tail of 1/4: 1.5 bits. All in one entry: no entropy, whatever rounding adds."""
    entropies, masses = row_stats(np.log([[1 / 2, 1 / 4], [1.0, math.exp(-50.0)], [1.0, 1e-5]]))
    assert entropies == pytest.approx([1.5 * math.log(2), 0.0, 1e-5 * math.log(1e5)], abs=1e-9)
    assert masses == pytest.approx([0.75, 1.0, 1.0])


def test_step_scores_of_turns_with_and_without_a_hint() -> None:
    def judged(hint: str | None, score: StepScore | None) -> TurnStats:
        outcome = Out.VOTE_FAILED if hint is None else Out.SCORED
        return TurnStats(TurnRecord((1, 3), outcome, "tool", hint=hint, step_votes=(score,), step_score=score))

    turns = (
        judged("abcd", -1),
        judged("ab", 0),
        judged(None, 1),
        judged(None, None),
        judged(None, -1),
        judged(None, 1),
    )
    metrics = aggregate([EpisodeStats(10, turns)])
    assert metrics["opd/step_score_hinted"] == -0.5
    assert metrics["opd/step_score_unhinted"] == pytest.approx(1 / 3)
    unasked = aggregate([FIRST, SECOND])
    assert not [name for name in unasked if "step_score" in name]
