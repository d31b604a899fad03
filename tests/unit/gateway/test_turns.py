"""A session's tree of turns, as sequences. Literal ids: turn t of prompt p samples the ids 10 t, 10 t + 1."""

from dataclasses import replace
from typing import Any, Literal

import pytest

from agentic_opd.core.types import IGNORED, ContextTurn, Turn
from agentic_opd.gateway.turns import Branch, Feedback, RecordedTurn, TurnTree, branches, trace_of
from agentic_opd.rollout.conversation import Completion


def turn(tree: TurnTree, turn_id: int, parent: int | None, **more: Any) -> RecordedTurn:
    """A turn behind `parent`: two tokens of prompt, two sampled ones; a user's message and the assistant's."""
    path = tree.path(parent) if parent is not None else ()
    start = (path[-1].span.end if path else 0) + 2
    index = more.pop("index", (path[-1].span.message_index if path else -1) + 2)
    said = more.pop(
        "messages", ({"role": "user", "content": f"u{turn_id}"}, {"role": "assistant", "content": f"a{turn_id}"})
    )
    made = RecordedTurn(
        turn_id=turn_id,
        parent=parent,
        messages=said,
        prompt_ids=(1, 2),
        completion=Completion((10 * turn_id, 10 * turn_id + 1), (-0.5, -0.25)),
        span=Turn(start, start + 2, start, start - 1, index, weight_version=turn_id),
        turn_type=more.pop("turn_type", "main"),
        tools=(),
        sampling={},
        altered=more.pop("altered", ()),
    )
    tree.add(made)
    return made


def made(tree: TurnTree, **options: Any) -> list[Branch]:
    return branches(tree, **options)


def learned(branch: Branch) -> list[int]:
    return [token for token in branch.trace.masks_T if token != IGNORED]


def contents(branch: Branch) -> list[str]:
    return [message["content"] for message in branch.trace.messages]


def test_one_branch_is_the_whole_conversation() -> None:
    tree = TurnTree()
    turn(tree, 1, None)
    turn(tree, 2, 1)
    (branch,) = made(tree, feedback="Well done.")
    trace = branch.trace
    assert trace.tokens_T == (1, 2, 10, 11, 1, 2, 20, 21)
    assert trace.masks_T == (-100, -100, 10, 11, -100, -100, 20, 21)
    assert trace.logprobs_T == (1.0, 1.0, -0.5, -0.25, 1.0, 1.0, -0.5, -0.25)
    assert contents(branch) == ["u1", "a1", "u2", "a2", "Well done."]
    assert (trace.weight_version, trace.context_turns) == (1, ())


@pytest.mark.parametrize(
    ("reward", "of_turns", "failed"),
    [
        (None, {}, None),
        (1.0, {}, False),
        (0.0, {}, True),
        (-1.0, {}, True),
        (1.0, {1: [Feedback(-1.0, None)]}, True),
        (None, {1: [Feedback(None, "No, the other file.")]}, True),
        (None, {1: [Feedback(1.0, "Good.")]}, False),
    ],
)
def test_a_branch_failed_by_its_rewards_and_comments(reward: float | None, of_turns: Any, failed: bool | None) -> None:
    tree = TurnTree()
    turn(tree, 1, None)
    turn(tree, 2, 1)
    (branch,) = made(tree, reward=reward, of_turns=of_turns)
    assert branch.failed is failed


def test_a_shared_turn_is_learned_from_in_the_first_branch_only() -> None:
    tree = TurnTree()
    turn(tree, 1, None)
    turn(tree, 2, 1)
    turn(tree, 3, 1)
    first, second = made(tree)
    assert (learned(first), learned(second)) == ([10, 11, 20, 21], [30, 31])
    assert second.trace.tokens_T == (1, 2, 10, 11, 1, 2, 30, 31)
    assert second.trace.logprobs_T[2:4] == (1.0, 1.0)
    assert second.trace.context_turns == (ContextTurn(1, "shared"),)
    assert [one.start for one in second.trace.turns] == [6]


def test_a_shared_turn_goes_with_the_branch_that_is_learned_from() -> None:
    """The side turn came first, but what the user said to turn 1 is in the other branch."""
    tree = TurnTree()
    turn(tree, 1, None)
    turn(tree, 2, 1, turn_type="side")
    turn(tree, 3, 1)
    (branch,) = made(tree)
    assert contents(branch) == ["u1", "a1", "u3", "a3"]


@pytest.mark.parametrize("kind", ["side", "altered"])
def test_a_last_turn_that_is_context_is_left_out_but_not_what_led_to_it(kind: Literal["side", "altered"]) -> None:
    tree = TurnTree()
    turn(tree, 1, None)
    turn(tree, 2, 1, **({"turn_type": "side"} if kind == "side" else {"altered": ("top_k",)}))
    (branch,) = made(tree)
    assert branch.trace.tokens_T == (1, 2, 10, 11)
    assert contents(branch) == (["u1", "a1"] if kind == "side" else ["u1", "a1", "u2"])


def test_altered_turns_are_context_unless_they_are_wanted() -> None:
    tree = TurnTree()
    turn(tree, 1, None, altered=("top_k",))
    turn(tree, 2, 1)
    (branch,) = made(tree)
    assert (learned(branch), branch.trace.context_turns) == (
        [20, 21],
        (ContextTurn(1, "altered_sampling", ("top_k",)),),
    )
    (branch,) = made(tree, learn_from_altered=True)
    assert (learned(branch), branch.trace.context_turns) == ([10, 11, 20, 21], ())


def test_what_the_client_brought_is_context() -> None:
    tree = TurnTree()
    texts = [("user", "u0"), ("assistant", "a0"), ("user", "u1"), ("assistant", "a1")]
    one = turn(tree, 1, None, messages=tuple({"role": role, "content": text} for role, text in texts))
    tree.turns[1] = replace(one, span=Turn(2, 4, 2, 1, 3))
    (branch,) = made(tree)
    assert branch.trace.context_turns == (ContextTurn(1, "not_sampled"),)
    assert learned(branch) == [10, 11]


def said(*contents: str) -> tuple[dict[str, str], ...]:
    """What users (u...) and assistants (a...) said."""
    return tuple({"role": "user" if text[0] == "u" else "assistant", "content": text} for text in contents)


REWRITTEN = {
    "the turn is left out": (None, said("u1", "u wrong", "a2"), ["u wrong"]),
    "the turn has another text": (
        None,
        said("u1", "a rewritten", "u wrong", "u really", "a2"),
        ["u wrong", "u really"],
    ),
    "another turn follows, too": (None, said("u1", "a rewritten", "u wrong", "a more", "u2", "a2"), ["u wrong"]),
    "the history differs before it": (None, said("u other", "a1", "u wrong", "a2"), []),
    "the same is asked again": (None, said("u1", "a2"), []),
}


@pytest.mark.parametrize(("parent", "messages", "answer"), REWRITTEN.values(), ids=REWRITTEN)
def test_a_turn_that_comes_back_otherwise_is_answered_by_what_follows(
    parent: int | None, messages: Any, answer: list[str]
) -> None:
    tree = TurnTree()
    turn(tree, 1, None)
    turn(tree, 2, parent, messages=messages, index=len(messages) - 1)
    first, second = made(tree)
    assert contents(first) == ["u1", "a1", *answer]
    assert (learned(first), learned(second)) == ([10, 11], [20, 21])
    assert contents(second) == [message["content"] for message in messages]


def test_it_is_so_behind_a_shared_turn() -> None:
    tree = TurnTree()
    turn(tree, 1, None)
    turn(tree, 2, 1)
    turn(tree, 3, 1, messages=said("u2", "u wrong", "a3"), index=4)
    first, _ = made(tree)
    assert contents(first) == ["u1", "a1", "u2", "a2", "u wrong"]


def test_of_two_answers_to_one_prompt_the_later_one_is_meant() -> None:
    tree = TurnTree()
    turn(tree, 1, None, messages=said("u1", "a1"))
    turn(tree, 2, None, messages=said("u1", "a2"))
    turn(tree, 3, None, messages=said("u1", "a rewritten", "u wrong", "a3"), index=3)
    assert [contents(branch)[2:] for branch in made(tree)] == [[], ["u wrong"], ["u wrong", "a3"]]


def test_feedback_belongs_to_the_turn_that_was_finished_last() -> None:
    tree = TurnTree()
    turn(tree, 1, None)
    turn(tree, 2, None)
    first, second = made(tree, feedback="No.")
    assert (contents(first), contents(second)) == (["u1", "a1"], ["u2", "a2", "No."])


def test_nothing_to_learn_from_is_no_branch() -> None:
    tree = TurnTree()
    turn(tree, 1, None, turn_type="side")
    assert made(tree) == []


def test_a_path_knows_all_that_was_sampled() -> None:
    tree = TurnTree()
    turn(tree, 1, None, turn_type="side")
    turn(tree, 2, 1)
    assert trace_of(tree.path(2)).masks_T == (-100, -100, 10, 11, -100, -100, 20, 21)
    assert [one.turn_id for one in tree.leaves()] == [2]
