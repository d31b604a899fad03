import pytest

from agentic_opd.distill.metrics import EpisodeStats, aggregate
from agentic_opd.types import TurnOutcome

Out = TurnOutcome
FIRST = EpisodeStats((Out.SCORED, Out.VOTE_FAILED), 1, 10, (1.0, 3.0), (0.1, 0.3), (0.5,))
SECOND = EpisodeStats((Out.SCORED, Out.TOO_LONG, Out.LEAKED), 2, 10, (2.0, 2.0), (0.2, 0.2, 0.2), (1.5,))


def test_metrics_of_two_episodes() -> None:
    metrics = aggregate([FIRST, SECOND], [None, 1e-6, 3e-6])
    assert metrics == pytest.approx(
        {
            "opd/outcome/scored": 2,
            "opd/outcome/no_next_state": 0,
            "opd/outcome/vote_failed": 1,
            "opd/outcome/judge_error": 0,
            "opd/outcome/leaked": 1,
            "opd/outcome/too_long": 1,
            "opd/outcome/scoring_error": 0,
            "opd/total_hints": 3,
            "opd/total_scored_turns": 2,
            "opd/mean_hints_per_rollout": 1.5,
            "opd/mean_turns_scored": 1.0,
            "opd/hint_rate": 0.6,
            "opd/scored_token_fraction": 0.2,
            "opd/gap_mean": 2.0,
            "opd/gap_std": 0.5**0.5,
            "opd/noise_floor": 3e-6,
            "opd/judge_s_p50": 0.2,
            "opd/judge_s_p95": 0.28,
            "opd/score_s_p50": 1.0,
            "opd/score_s_p95": 1.45,
        }
    )


def test_outcomes_add_up_to_the_turns() -> None:
    metrics = aggregate([FIRST, SECOND])
    assert sum(value for name, value in metrics.items() if name.startswith("opd/outcome/")) == 5


def test_what_can_not_be_computed_is_left_out() -> None:
    nothing = {f"opd/outcome/{outcome.value}": 0 for outcome in TurnOutcome}
    assert aggregate([]) == {**nothing, "opd/total_hints": 0, "opd/total_scored_turns": 0}
    unscored = aggregate([EpisodeStats((Out.JUDGE_ERROR,), 0, 4, (), (), ())], [None])
    assert unscored["opd/scored_token_fraction"] == 0
    assert not {"opd/gap_mean", "opd/gap_std", "opd/noise_floor", "opd/judge_s_p50"} & unscored.keys()
