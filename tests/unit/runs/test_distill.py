"""Turns that are found again in a rollout of any origin; the picture is test_conversation's:

tokens        S U A R R T A R R      S, U, T: prompts, A: the assistant's opening, R: sampled
masks         . . . R R . . R R
"""

from dataclasses import replace
from typing import Any

import pytest

from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.types import IGNORED, Message, sampled_spans
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.conversation import Completion, Conversation
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.runs.distill import trace_of, traces_of
from agentic_opd.wire.group import ScoredRollout
from agentic_opd.worlds.coding.tools import TOOL_SPECS

START: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "Write f."}]
MORE: Message = {"role": "user", "content": "More."}


@pytest.fixture
def chat(tokenizer: Any) -> ChatFormat:
    return ChatFormat(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer, TOOL_SPECS)


def talked(chat: ChatFormat) -> Conversation:
    conversation = Conversation(chat, START)
    for text, answer in (("one", [MORE]), ("two", [])):
        conversation.prompt()
        ids = chat.tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
        conversation.add(Completion(tuple(ids), (-0.25,) * len(ids)))
        conversation.answer(answer)
    return conversation


def rollout_of(conversation: Conversation) -> ScoredRollout:
    trace = conversation.trace()
    return ScoredRollout(trace.tokens_T, trace.masks_T, trace.logprobs_T, 1.0, messages=conversation.messages)


def test_spans_are_runs_of_sampled_positions() -> None:
    assert sampled_spans([-100, 5, 6, -100, 7]) == [(1, 3), (4, 5)]
    assert sampled_spans([-100, -100]) == []


def test_turns_are_found_again(chat: ChatFormat) -> None:
    conversation = talked(chat)
    trace = trace_of(rollout_of(conversation), chat)
    assert trace.turns == tuple(conversation.turns)
    assert trace.messages == tuple(conversation.messages)


def test_what_the_template_writes_after_the_stop_token_may_be_in_the_mask(chat: ChatFormat) -> None:
    conversation = talked(chat)
    rollout, end = rollout_of(conversation), conversation.turns[0].end
    masks, logprobs = list(rollout.masks_T), list(rollout.logprobs_T)
    masks[end], logprobs[end] = rollout.tokens_T[end], -0.1
    longer = ScoredRollout(rollout.tokens_T, masks, logprobs, 1.0, messages=conversation.messages)
    assert [turn.end for turn in trace_of(longer, chat).turns] == [end + 1, conversation.turns[1].end]


def test_a_stop_token_may_stand_once_more_behind_the_sampled_one(chat: ChatFormat) -> None:
    conversation = talked(chat)
    rollout, (first, second) = rollout_of(conversation), conversation.turns
    end = first.end
    stop = rollout.tokens_T[end - 1]
    longer = ScoredRollout(
        [*rollout.tokens_T[:end], stop, *rollout.tokens_T[end:]],
        [*rollout.masks_T[:end], IGNORED, *rollout.masks_T[end:]],
        [*rollout.logprobs_T[:end], 1.0, *rollout.logprobs_T[end:]],
        1.0,
        messages=conversation.messages,
    )
    trace = trace_of(longer, chat)
    assert trace.tokens_T == tuple(longer.tokens_T)
    places = ("start", "end", "assistant_open", "last_user_end")
    assert trace.turns == (first, replace(second, **{name: getattr(second, name) + 1 for name in places}))


def test_earlier_messages_that_were_not_sampled_are_context(chat: ChatFormat) -> None:
    conversation = talked(chat)
    # As the template writes them, for a first prompt is rendered as a whole.
    tokens = chat.first_prompt(conversation.messages[:-1]).token_ids
    ids = conversation.trace().tokens_T[conversation.turns[1].start :]
    masks = (IGNORED,) * len(tokens) + ids
    logprobs = tuple(1.0 if mask == IGNORED else -0.5 for mask in masks)
    trace = trace_of(ScoredRollout(tokens + ids, masks, logprobs, 0.0, messages=conversation.messages), chat)
    assert [turn.message_index for turn in trace.turns] == [4]
    assert [(turn.message_index, turn.why) for turn in trace.context_turns] == [(2, "not_sampled")]


def test_other_messages_than_the_tokens_say_where_they_part(chat: ChatFormat) -> None:
    rollout = rollout_of(talked(chat))
    other = [*START[:1], {"role": "user", "content": "Write g."}, *(rollout.messages or ())[2:]]
    wrong = ScoredRollout(rollout.tokens_T, rollout.masks_T, rollout.logprobs_T, 1.0, messages=other)
    with pytest.raises(AlignmentError, match=r"turn 1: its messages render to .* the same up to position"):
        trace_of(wrong, chat)
    few = replace(rollout, messages=rollout.messages[:3])
    with pytest.raises(AlignmentError, match="2 sampled spans for 1 assistant messages"):
        trace_of(few, chat)


def test_a_conversation_in_text_has_the_ids_of_one_that_was_sampled(chat: ChatFormat) -> None:
    conversation = talked(chat)
    (trace,) = traces_of(conversation.messages, chat)
    assert trace.tokens_T == conversation.trace().tokens_T
    assert trace.turns == tuple(conversation.turns)
    with pytest.raises(AlignmentError, match="the assistant says nothing"):
        traces_of(START, chat)
