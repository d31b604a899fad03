"""Two episodes whose metrics are counted by hand."""

from dataclasses import replace

import pytest

from agentic_opd.core.types import (
    Episode,
    NoVerdict,
    ProgramRun,
    Reward,
    StopReason,
    Task,
    Trace,
    Turn,
    Verification,
    VerifyOutcome,
)
from agentic_opd.rollout.metrics import TRAIN_METRICS, episode_metrics, train_metrics

TASK = Task("t", "Write f.", "assert f() == 1")


def episode(turns: int, passed: int, stop: StopReason, errors: int, reward: Reward) -> Episode:
    """Each turn samples two tokens after one that it did not."""
    return Episode(
        task=TASK,
        traces=(
            Trace(
                messages=({"role": "user", "content": "u"}, *({"role": "assistant", "content": "a"},) * turns),
                tokens_T=(1, 2, 3) * turns,
                masks_T=(-100, 2, 3) * turns,
                logprobs_T=(1.0, -0.1, -0.2) * turns,
                turns=tuple(Turn(3 * i + 1, 3 * i + 3, 1, 1, i + 1) for i in range(turns)),
            ),
        ),
        stop_reason=stop,
        tool_calls=3,
        tool_errors=errors,
        verification=Verification(VerifyOutcome.RAN, passed, 4, "report", "", in_process=passed == 4),
        reward=reward,
    )


EPISODES = [
    episode(1, 4, StopReason.FINISHED, 0, Reward(1.0, 0.8, 1.0, 0.97)),
    episode(3, 2, StopReason.MAX_TURNS, 2, Reward(0.5, 0.0, 0.5, 0.43)),
]


def test_metrics_of_two_episodes() -> None:
    metrics = train_metrics(EPISODES, [1.0, 2.0, 3.0], [0.0, 1.0])
    assert metrics == pytest.approx(
        {
            "train/episodes": 2,
            "train/percent_correct": 0.5,
            "train/reward": 0.7,
            "train/reward_correctness": 0.75,
            "train/reward_efficiency": 0.4,
            "train/reward_tool_usage": 0.75,
            "train/in_process": 0.5,
            "train/turns": 2,
            "train/tool_calls": 3,
            "train/tool_errors_count": 2,
            "train/completion_lengths": 4,
            "train/completion_lengths_std": 2,
            "train/completion_lengths_min": 2,
            "train/completion_lengths_max": 6,
            "train/stop/finished": 0.5,
            "train/stop/max_turns": 0.5,
            "train/stop/context_full": 0,
            "train/stop/render_error": 0,
            "train/stop/agent_failed": 0,
            "train/stop/agent_timeout": 0,
            "train/stop/sandbox_died": 0,
            "train/no_verdict": 0,
            "train/sample_s_p50": 2,
            "train/sample_s_p95": 2.9,
            "train/loop_lag_s_p50": 0.5,
            "train/loop_lag_s_p95": 0.95,
            "train/loop_lag_s_p99": 0.99,
            "train/loop_lag_s_max": 1.0,
        }
    )
    described = {metric.name for metric in TRAIN_METRICS}
    if_any = {f"train/no_verdict/{cause.value}" for cause in NoVerdict}
    assert metrics.keys() | {"train/rollouts", "train/left_out_tokens"} | if_any == described, (
        "what is logged is described, and nothing else"
    )


def without_verdict(cause: NoVerdict) -> Episode:
    verdict = Verification(VerifyOutcome.NO_VERDICT, 0, 1, "report", "", no_verdict=cause)
    return replace(EPISODES[0], verification=verdict, reward=None)


def test_episodes_without_a_verdict_are_counted_by_cause_and_in_no_other_metric() -> None:
    left_out = [without_verdict(cause) for cause in (NoVerdict.TIMEOUT, NoVerdict.NOT_RUN, NoVerdict.TIMEOUT)]
    counts = {"train/no_verdict": 3, "train/no_verdict/timeout": 2, "train/no_verdict/not_run": 1}
    assert train_metrics([*EPISODES, *left_out]) == train_metrics(EPISODES) | counts
    assert train_metrics(left_out) == {"train/episodes": 0, **counts}


def test_what_programs_sampled_in_vain_is_a_mean_over_them() -> None:
    runs = [ProgramRun(0, None, "", 1, tokens) for tokens in (10, 30)]
    programs = [replace(one, program=run) for one, run in zip(EPISODES, runs, strict=True)]
    assert episode_metrics(programs)["train/left_out_tokens"] == 20


def test_what_can_not_be_computed_is_left_out() -> None:
    assert train_metrics([], [1.0]) == {}
    assert episode_metrics([]) == {}
    assert "train/sample_s_p50" not in train_metrics(EPISODES)
