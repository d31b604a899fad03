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
from agentic_opd.rollout.metrics import (
    TRAIN_METRICS,
    episode_metrics,
    group_metrics,
    repetition,
    repetitions,
    train_metrics,
)

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
            "train/stop/terminated": 0,
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
    of_some = {"train/rollouts", "train/left_out_tokens", "train/over_calling", "train/repetition", "train/pass@<k>"}
    assert metrics.keys() | of_some | if_any == described, "what is logged is described, and nothing else"


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


def test_pass_at_k_of_groups() -> None:
    # Of 6 pairs of 4 rollouts, 5 hold one of two that passed; the group of two counts for k = 1 and 2 alone.
    groups = [[True, True, False, False], [False, False]]
    assert group_metrics(groups) == pytest.approx(
        {"train/pass@1": 0.25, "train/pass@2": 5 / 12, "train/pass@4": 1.0}, abs=1e-12
    )
    assert set(group_metrics([[True] * 20])) == {f"train/pass@{k}" for k in (1, 2, 4, 8)}
    assert group_metrics([[True] + [False] * 9])["train/pass@8"] == pytest.approx(0.8)
    assert group_metrics([]) == group_metrics([[]]) == {}


def test_repetition_is_the_share_of_n_grams_that_occurred_before() -> None:
    assert repetition([1, 2, 3, 4, 5], n=2) == 0
    assert repetition([1, 2, 1, 2, 1], n=2) == 0.5  # 12 21 12 21: two of four.
    assert repetition([7] * 11, n=2) == 0.9
    assert repetition([7] * 19) == 0.9  # Ten 10-grams, all the same.
    assert repetition([*range(12), *range(12)]) == pytest.approx(3 / 15)
    with pytest.raises(ValueError, match="at least 10 tokens, got 9"):
        repetition([7] * 9)


def test_repetition_of_episodes_is_the_mean_over_turns_that_are_long_enough() -> None:
    tokens = (0, *[7] * 19, 0, *range(10), 0, 7, 7)
    turns = (Turn(1, 20, 1, 1, 1), Turn(21, 31, 21, 21, 2), Turn(32, 34, 32, 32, 3))
    messages = ({"role": "user", "content": "u"}, *({"role": "assistant", "content": "a"},) * 3)
    masks = tuple(-100 if index in (0, 20, 31) else token for index, token in enumerate(tokens))
    trace = Trace(messages, tokens, masks, tuple(1.0 if mask == -100 else -0.5 for mask in masks), turns)
    long = replace(EPISODES[0], traces=(trace,))
    assert repetitions(long) == [0.9, 0.0]
    assert train_metrics([long, EPISODES[1]])["train/repetition"] == 0.45


def test_over_calling_is_of_tasks_that_need_no_call() -> None:
    needless = replace(TASK, needs_no_call=True)
    called, silent = (replace(EPISODES[0], task=needless, tool_calls=number) for number in (2, 0))
    assert train_metrics([called, silent, silent, silent, *EPISODES])["train/over_calling"] == 0.25
    assert "train/over_calling" not in train_metrics(EPISODES)
