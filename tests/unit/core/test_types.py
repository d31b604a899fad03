from typing import Any

import numpy as np
import pytest

from agentic_opd.core.errors import AlignmentError, ServerUnreachableError
from agentic_opd.core.types import (
    ContextTurn,
    DistillArrays,
    Episode,
    Reward,
    StopReason,
    Task,
    TeacherRequest,
    TeacherRows,
    ToolCall,
    Trace,
    Turn,
    Verification,
    VerifyOutcome,
    Vote,
    check_lengths,
)

TASK = Task("t", "Write f.", "assert f() == 1")
CHAT = ({"role": "user", "content": "Write f."}, {"role": "assistant", "content": "Done."})


def trace(**changes: Any) -> Trace:
    """
    position   0  1  2 | 3  4
    tokens     1  2  3 |10 11
    """
    fields: dict[str, Any] = {
        "messages": CHAT,
        "tokens_T": (1, 2, 3, 10, 11),
        "masks_T": (-100, -100, -100, 10, 11),
        "logprobs_T": (1.0, 1.0, 1.0, -0.5, -0.7),
        "turns": (Turn(3, 5, 2, 1, 1),),
    }
    return Trace(**{**fields, **changes})


def episode(**changes: Any) -> Episode:
    fields: dict[str, Any] = {"task": TASK, "traces": (trace(),), "stop_reason": StopReason.FINISHED}
    return Episode(**{**fields, **changes})


def test_lengths_are_named_when_they_differ() -> None:
    check_lengths("x", a=2, b=2)
    with pytest.raises(AlignmentError, match=r"x: lengths differ \(a=2, b=3, c=2\)"):
        check_lengths("x", a=2, b=3, c=2)


@pytest.mark.parametrize("name", ["task_id", "prompt", "hidden_tests"])
def test_a_task_without_its_texts_is_refused(name: str) -> None:
    fields = {"task_id": "t", "prompt": "p", "hidden_tests": "h"}
    with pytest.raises(AlignmentError, match=f"{name} is empty"):
        Task(**{**fields, name: "  "})


def test_a_tool_call_has_arguments_or_an_error() -> None:
    ToolCall("a", "terminal", {}, "{}")
    ToolCall("a", "", None, "{", "not JSON")
    for arguments, error in ((None, None), ({}, "not JSON")):
        with pytest.raises(AlignmentError, match="tool call 'a'"):
            ToolCall("a", "terminal", arguments, "{}", error)


@pytest.mark.parametrize("bad", [(3, 3, 2, 1), (3, 5, 4, 1), (3, 5, 1, 2), (3, 5, 2, 0)])
def test_a_turns_places_are_in_order(bad: tuple[int, int, int, int]) -> None:
    with pytest.raises(AlignmentError, match="expected 0 < last_user_end <= assistant_open <= start < end, got"):
        Turn(*bad, message_index=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs_T": (1.0,)}, r"tokens=5, masks=5, logprobs=1"),
        ({"turns": (Turn(3, 6, 2, 1, 1),)}, "turn ends at 6, but there are 5 tokens"),
        ({"turns": (Turn(2, 5, 2, 1, 1),)}, r"the mask does not cover the turn \[2, 5\)"),
        ({"turns": (Turn(3, 5, 2, 1, 0),)}, "message 0 is not the assistant's"),
    ],
)
def test_a_trace_that_does_not_add_up_is_refused(changes: dict[str, Any], message: str) -> None:
    assert trace().turns[0].end == 5
    with pytest.raises(AlignmentError, match=message):
        trace(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop_reason": StopReason.SERVER_ERROR}, "with error None"),
        ({"error": ServerUnreachableError("gone")}, "stop reason"),
        ({"changes": (frozenset[int](),) * 2}, r"turns=1, changes=2"),
    ],
)
def test_an_episode_that_does_not_add_up_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AlignmentError, match=message):
        episode(**changes)


def test_a_trace_may_learn_from_fewer_turns() -> None:
    less = trace().learning_from((), (ContextTurn(1, "shared"),))
    assert (less.masks_T, less.logprobs_T) == ((-100,) * 5, (1.0,) * 5)
    assert (less.tokens_T, less.turns, less.context_turns) == (trace().tokens_T, (), (ContextTurn(1, "shared"),))
    assert trace().learning_from(trace().turns, ()) == trace()


def test_an_episode_of_two_traces_has_the_turns_of_both_and_the_oldest_weights() -> None:
    first, last = (trace(turns=(Turn(3, 5, 2, 1, 1, weight_version=version),)) for version in (7, 4))
    both = episode(traces=(first, last))
    assert both.turns == both.recording.turns == first.turns + last.turns
    assert (both.weight_version, both.messages, both.recording.name) == (4, CHAT, "t")
    assert (episode().weight_version, episode(traces=()).messages) == (None, ())


def test_a_verification_counts_its_checks() -> None:
    assert Verification(VerifyOutcome.RAN, 3, 4, "", "").correctness == 0.75
    for passed, total in ((5, 4), (-1, 4), (0, 0)):
        with pytest.raises(AlignmentError, match=f"got {passed} of {total}"):
            Verification(VerifyOutcome.RAN, passed, total, "", "")


def test_a_hint_belongs_to_a_positive_vote() -> None:
    for decision, hint in ((1, None), (-1, "a hint"), (None, "a hint")):
        with pytest.raises(AlignmentError, match="a hint belongs to decision 1"):
            Vote(decision, hint, "")  # type: ignore[arg-type]


@pytest.mark.parametrize("num_scored", [0, 3, 4])
def test_a_teacher_request_scores_some_but_not_all_tokens(num_scored: int) -> None:
    with pytest.raises(AlignmentError, match=f"{num_scored} of 3 tokens to score"):
        TeacherRequest((1, 2, 3), num_scored, 1, ())


def test_teacher_rows_have_one_shape() -> None:
    actual, ids, logprobs = np.zeros(2, np.float32), np.zeros((2, 3), np.int32), np.zeros((2, 3), np.float32)
    TeacherRows(actual, ids, logprobs)
    with pytest.raises(AlignmentError, match=r"ids of shape \(2, 3\), logprobs of shape \(2, 2\)"):
        TeacherRows(actual, ids, logprobs[:, :2])
    with pytest.raises(AlignmentError, match=r"actual=1, top=2"):
        TeacherRows(actual[:1], ids, logprobs)


def test_distillation_arrays_pair_ids_and_logprobs() -> None:
    DistillArrays([[], [1, 2]], [[], [-0.1, -3.0]])
    with pytest.raises(AlignmentError, match="token_ids=2, logprobs=1"):
        DistillArrays([[], []], [[]])
    with pytest.raises(AlignmentError, match="distill row 1: lengths differ"):
        DistillArrays([[], [1, 2]], [[], [-0.1]])


@pytest.mark.parametrize("task_id", [None, 7, 1.5, b"t"])
def test_a_tasks_id_is_a_text(task_id: Any) -> None:
    with pytest.raises(AlignmentError, match=r"its id is of type \w+, expected a text"):
        Task(task_id, "Write f.")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e9, 1.1, -0.1])
@pytest.mark.parametrize("part", ["correctness", "efficiency", "tool_usage", "total"])
def test_the_parts_of_a_reward_are_between_0_and_1(part: str, number: float) -> None:
    parts: Any = {"correctness": 1.0, "efficiency": 0.5, "tool_usage": 0.5, "total": 0.7 + 0.15 + 0.15}
    assert Reward(**parts).total == 1.0
    with pytest.raises(AlignmentError, match=f"reward: {part} is .*, expected 0 to 1"):
        Reward(**{**parts, part: number})
