"""A conversation grows by what is sampled and by what answers it, and by nothing else:

prompt        S U A            S: system, U: user, A: the assistant's opening
completion          R R
next prompt   S U A R R T A    T: what answered
"""

from dataclasses import replace
from typing import Any

import pytest

from agentic_opd.core.errors import AlignmentError, RendererError
from agentic_opd.core.types import Message
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.conversation import Completion, Conversation
from agentic_opd.rollout.conversation_index import ConversationIndex, Match, identity
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.worlds.coding.tools import TOOL_SPECS

START: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "Write f."}]
MORE: Message = {"role": "user", "content": "More."}


class ChangingRenderer:
    """Extends prompts as its renderer does, but rewrites one known id."""

    def __init__(self, renderer: Any) -> None:
        self.renderer = renderer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.renderer, name)

    def bridge_to_next_turn(self, *args: Any, **kwargs: Any) -> Any:
        rendered = self.renderer.bridge_to_next_turn(*args, **kwargs)
        rendered.token_ids[2] = 0
        return rendered


def begin(tokenizer: Any, renderer: Any = None, start: list[Message] = START) -> Conversation:
    renderer = renderer or load_renderer(tokenizer, "qwen3", {"enable_thinking": False})
    return Conversation(ChatFormat(renderer, tokenizer, TOOL_SPECS), start)


def said(conversation: Conversation, text: str, version: int | None = None) -> Completion:
    ids = conversation.chat.tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
    return Completion(tuple(ids), (-0.25,) * len(ids), weight_version=version)


def test_it_grows_by_prompt_completion_and_answer(tokenizer: Any) -> None:
    conversation = begin(tokenizer)
    first = [*conversation.prompt()]
    done = said(conversation, "Done.")
    conversation.add(done)
    conversation.answer([MORE])
    second = [*conversation.prompt()]
    assert second[: len(first) + len(done.token_ids)] == [*first, *done.token_ids]
    assert tokenizer.decode(second[conversation.turns[-1].end :]).startswith("\n<|im_start|>user\nMore.")
    assert conversation.trace().tokens_T == (*first, *done.token_ids), (
        "a prompt that nothing was sampled from is left out"
    )
    conversation.add(said(conversation, "Yes."))
    record = conversation.trace()
    spans = [range(turn.start, turn.end) for turn in conversation.turns]
    sampled = {position for span in spans for position in span}
    assert [len(spans[0]), spans[0].start, spans[1].start] == [len(done.token_ids), len(first), len(second)]
    for position, (token, mask, logprob) in enumerate(
        zip(record.tokens_T, record.masks_T, record.logprobs_T, strict=True)
    ):
        assert (mask, logprob) == ((token, -0.25) if position in sampled else (-100, 1.0))
    assert [message["content"] for message in conversation.messages] == ["s", "Write f.", "Done.", "More.", "Yes."]


def test_an_answer_after_a_look_at_the_prompt_is_in_the_next_one(tokenizer: Any) -> None:
    conversation = begin(tokenizer)
    conversation.add(said(conversation, "Done."))
    conversation.answer([MORE])
    conversation.prompt()
    conversation.answer([{"role": "user", "content": "Now."}])
    text = tokenizer.decode(conversation.prompt())
    assert text.count("More.") == text.count("Now.") == 1


def test_each_turns_weights_are_remembered_and_the_oldest(tokenizer: Any) -> None:
    conversation, seen = begin(tokenizer), []
    for version in (None, 7, 4, 9, None):
        conversation.add(said(conversation, "Done.", version))
        conversation.answer([MORE])
        seen.append(conversation.trace().weight_version)
    assert seen == [None, 7, 4, 4, 4]
    assert [turn.weight_version for turn in conversation.turns] == [None, 7, 4, 9, None]


def test_a_renderer_that_changes_known_ids_is_refused(tokenizer: Any) -> None:
    conversation = begin(tokenizer, ChangingRenderer(load_renderer(tokenizer, "qwen3", {"enable_thinking": False})))
    conversation.add(said(conversation, "Done."))
    before = conversation.trace()
    conversation.answer([MORE])
    with pytest.raises(RendererError, match=rf"token 2 of the {len(before.tokens_T)} .*got \[0, .*expected \["):
        conversation.prompt()
    assert conversation.trace() == replace(before, messages=(*before.messages, MORE))


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [((5, 6), (-0.1,)), ((), ()), ((5, 6), (-0.1, -9999.0)), ((5, 6), (-0.1, float("nan"))), ((5, 6), (0.0, -1e39))],
)
def test_a_completion_holds_a_logprob_for_each_of_its_tokens(ids: Any, logprobs: Any) -> None:
    with pytest.raises(AlignmentError, match=r"token_ids=2, logprobs=1|no token|token 1 has the logprob"):
        Completion(ids, logprobs)


def test_a_fork_goes_its_own_way(tokenizer: Any) -> None:
    conversation = begin(tokenizer)
    fork = conversation.fork()
    conversation.add(said(conversation, "A."))
    fork.add(said(fork, "B."))
    assert [one.messages[-1]["content"] for one in (conversation, fork)] == ["A.", "B."]
    assert tokenizer.decode(fork.trace().tokens_T).endswith("B.<|im_end|>")


def found(index: ConversationIndex[Any], messages: list[Message], **options: Any) -> Match[Any]:
    return index.find([*map(identity, messages)], **options)


def test_messages_find_the_longest_conversation_that_they_continue(tokenizer: Any) -> None:
    index, conversation, other = ConversationIndex[Conversation](), begin(tokenizer), begin(tokenizer, start=[MORE])
    for one in (conversation, other):
        one.add(said(one, "Done."))
        index.add(one, one.messages)
    longer = conversation.fork()
    longer.answer([MORE])
    longer.add(said(longer, "Yes."))
    index.add(longer, longer.messages[len(conversation.messages) :], conversation)
    assert found(index, [*conversation.messages, MORE]) == (3, [conversation])
    assert found(index, [*longer.messages, MORE]) == (5, [longer])
    assert found(index, [*longer.messages, MORE], accept=lambda one: one is not longer) == (3, [conversation])
    assert found(index, [MORE, {"role": "assistant", "content": "Done.", "tool_calls": None}, MORE]) == (2, [other])
    assert found(index, conversation.messages) == (3, [conversation]), "the assistant takes another turn"
    assert found(index, [*START, {"role": "assistant", "content": "Done!"}, MORE]) == (0, ())
    assert found(index, [*conversation.messages, MORE], scope=b"another key") == (0, ())
    index.discard(longer)
    assert found(index, [*longer.messages, MORE]) == (3, [conversation])


CALL = {"id": "call_2_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": [2]}'}}
TURN = {"role": "assistant", "content": "I call f.", "reasoning_content": "Hm.", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({"reasoning_content": None}, True),
        ({"content": " I call f.\n"}, True),
        ({"content": [{"type": "text", "text": "I call f."}]}, True),
        ({"refusal": None, "annotations": []}, True),
        ({"tool_calls": [CALL | {"id": "another"}]}, True),
        ({"tool_calls": [CALL | {"function": {"name": "f", "arguments": '{"b":[2],"a":1}'}}]}, True),
        ({"tool_calls": [CALL | {"function": {"name": "f", "arguments": {"b": [2], "a": 1}}}]}, True),
        ({"tool_calls": [CALL | {"function": {"name": "f", "arguments": '{"b":[3],"a":1}'}}]}, False),
        ({"tool_calls": None}, False),
        ({"content": "I call  f."}, False),
        ({"content": None}, False),
    ],
)
def test_a_message_is_the_same_however_an_agent_writes_it_back(change: dict[str, Any], is_same: bool) -> None:
    index = ConversationIndex[int]()
    index.add(1, [*START, TURN])
    assert found(index, [*START, TURN | change, MORE]).values == ([1] if is_same else ())


def test_a_null_content_is_an_empty_one() -> None:
    index = ConversationIndex[int]()
    index.add(1, [*START, TURN | {"content": ""}])
    assert found(index, [*START, TURN | {"content": None}, MORE]).values == [1]


def test_a_restored_conversation_goes_on_as_the_first_one_does(tokenizer: Any) -> None:
    conversation = begin(tokenizer)
    conversation.add(said(conversation, "Done.", 3))
    again = Conversation.restored(conversation.chat, conversation.trace())
    for one in (conversation, again):
        one.answer([MORE])
        one.add(said(one, "Yes.", 5))
    assert again.trace() == conversation.trace()
    assert again.trace().weight_version == 3
