from typing import Any

import pytest

from agentic_opd.core.types import StepScore, TurnOutcome
from agentic_opd.distill.alarms import (
    ABANDONED,
    ADVICE,
    REVERSED_TURNS,
    InactivityWatch,
    RepetitionWatch,
    StepScoreWatch,
    live_teacher,
)
from agentic_opd.distill.config import DistillConfig
from agentic_opd.wire.group import TurnRecord

Out = TurnOutcome


def records(*outcomes: Out, error: str | None = None) -> list[TurnRecord]:
    return [TurnRecord((1, 2), outcome, None, error=error) for outcome in outcomes]


def test_a_silence_is_named_once_and_again_after_it_was_broken() -> None:
    watch = InactivityWatch(quiet_groups=3, quiet_turns=9)
    silent = records(Out.JUDGE_ERROR, Out.JUDGE_ERROR, Out.NO_NEXT_STATE, error="HTTP 500")
    said = [watch.saw(silent) for _ in range(5)]
    assert [warning is not None for warning in said] == [False, False, True, False, False]
    warning = said[2] or ""
    assert "no token was scored in the last 3 group(s)" in warning
    assert "judge_error 6, no_next_state 3" in warning
    assert "HTTP 500" in warning
    assert watch.saw(records(Out.SCORED, Out.VOTE_FAILED)) is None
    assert [watch.saw(silent) is not None for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("outcome", [outcome for outcome in Out if outcome is not Out.SCORED])
def test_each_cause_has_its_own_advice(outcome: Out) -> None:
    warning = InactivityWatch(quiet_groups=1, quiet_turns=1).saw(records(outcome))
    assert ADVICE[outcome] in (warning or "")
    assert sum(advice in (warning or "") for advice in ADVICE.values()) == 1


def test_short_conversations_without_a_mistake_are_no_silence() -> None:
    watch = InactivityWatch(quiet_groups=2, quiet_turns=6)
    short = [watch.saw(records(Out.VOTE_FAILED)) for _ in range(5)]
    assert short == [None] * 5
    assert "no token was scored in the last 6 group(s)" in (watch.saw(records(Out.VOTE_FAILED)) or "")


def test_mistakes_that_have_disappeared_may_mean_that_right_turns_have_too() -> None:
    watch, silent = InactivityWatch(quiet_groups=1, quiet_turns=1), records(Out.VOTE_FAILED)
    assert ABANDONED not in (watch.saw(silent) or ABANDONED)
    watch.saw(records(Out.SCORED))
    assert ABANDONED in (watch.saw(silent) or "")
    watch.saw(records(Out.SCORED))
    assert ABANDONED not in (watch.saw(records(Out.JUDGE_ERROR)) or ABANDONED)


def test_a_short_run_that_scored_nothing_is_told_so_at_its_end() -> None:
    watch = InactivityWatch()
    watch.saw(records(Out.VOTE_FAILED))
    assert "the last 1 group(s)" in (watch.at_end() or "")
    assert watch.at_end() is None
    scored = InactivityWatch()
    scored.saw(records(Out.SCORED))
    scored.saw(records(Out.VOTE_FAILED))
    assert scored.at_end() is None
    assert InactivityWatch().at_end() is None


def stepped(hint: str | None, score: StepScore | None) -> TurnRecord:
    outcome = Out.VOTE_FAILED if hint is None else Out.SCORED
    return TurnRecord((1, 2), outcome, None, hint=hint, step_votes=(score,), step_score=score)


def test_step_scores_that_contradict_the_hints_are_named_once() -> None:
    # What the demo policy of the SQL world answers: it was never taught the second question.
    watch, group = StepScoreWatch(), [stepped("It needs GROUP BY city.", 1), stepped(None, -1), stepped(None, None)]
    said = [watch.saw(group) for _ in range(REVERSED_TURNS + 2)]
    assert [warning is not None for warning in said] == [False] * (REVERSED_TURNS - 1) + [True, False, False]
    assert "turns with a hint score +1.00 on average, turns without one -1.00" in (said[REVERSED_TURNS - 1] or "")


@pytest.mark.parametrize(
    ("hinted", "unhinted"),
    [((-1,), (1,)), ((-1,), (-1,)), ((0, 0, -1), (-1, 0, -1)), ((1, 1, -1, 0), (0, 0, 1, 0))],
)
def test_step_scores_that_fit_the_hints_are_not(hinted: tuple[StepScore, ...], unhinted: tuple[StepScore, ...]) -> None:
    watch = StepScoreWatch()
    group = [*(stepped("Append the word.", one) for one in hinted), *(stepped(None, one) for one in unhinted)]
    assert [watch.saw(group) for _ in range(2 * REVERSED_TURNS)] == [None] * 2 * REVERSED_TURNS


def test_without_step_votes_there_is_nothing_to_name() -> None:
    watch = StepScoreWatch()
    assert [watch.saw(records(Out.SCORED, Out.VOTE_FAILED)) for _ in range(REVERSED_TURNS)] == [None] * REVERSED_TURNS


@pytest.mark.parametrize(
    ("settings", "is_warned"),
    [
        ({}, True),
        ({"teacher": {"base_url": "http://127.0.0.1:8002/v1"}}, False),
        ({"teacher": {"weights": "ema"}}, False),
        ({"teacher": {"weights": "frozen"}}, False),
        ({"opd_enabled": False}, False),
    ],
)
def test_a_teacher_that_nothing_holds_is_warned_of(settings: dict[str, Any], is_warned: bool) -> None:
    assert (live_teacher(DistillConfig(**settings)) is not None) == is_warned


def test_repetition_is_named_once_when_the_mean_of_the_last_turns_is_above_that_of_filtered_documents() -> None:
    watch = RepetitionWatch()
    assert watch.saw([0.1] * 64) is None
    assert watch.saw([0.1] * 1000) is None
    assert watch.saw([0.1] * 63 + [0.09]) is None
    assert "64 turns, 11% of the 10-grams" in (watch.saw([0.11] * 64) or "")
    assert watch.saw([1.0] * 64) is None
    assert RepetitionWatch().saw([1.0] * 63) is None
