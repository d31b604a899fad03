"""Turns that are found again in a rollout of any origin; the picture is test_conversation's:

tokens        S U A R R T A R R      S, U, T: prompts, A: the assistant's opening, R: sampled
masks         . . . R R . . R R
"""

from dataclasses import replace
from typing import Any

import pytest

from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.types import IGNORED, Message
from agentic_opd.rollout.chat import Chat
from agentic_opd.rollout.conversation import Completion, Conversation
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.runs.distill import episode_of, episode_said, sampled_spans
from agentic_opd.wire.group import ScoredRollout
from agentic_opd.worlds.coding.tools import TOOL_SPECS

START: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "Write f."}]
MORE: Message = {"role": "user", "content": "More."}


@pytest.fixture
def chat(tokenizer: Any) -> Chat:
    return Chat(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer, TOOL_SPECS)


def talked(chat: Chat) -> Conversation:
    talk = Conversation(chat, START)
    for text, answer in (("one", [MORE]), ("two", [])):
        talk.prompt()
        ids = chat.tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
        talk.add(Completion(tuple(ids), (-0.25,) * len(ids)))
        talk.answer(answer)
    return talk


def rollout_of(talk: Conversation) -> ScoredRollout:
    record = talk.record()
    return ScoredRollout(record.tokens_T, record.masks_T, record.logprobs_T, 1.0, messages=talk.messages)


def test_spans_are_runs_of_sampled_positions() -> None:
    assert sampled_spans([-100, 5, 6, -100, 7]) == [(1, 3), (4, 5)]
    assert sampled_spans([-100, -100]) == []


def test_turns_are_found_again(chat: Chat) -> None:
    talk = talked(chat)
    episode = episode_of(rollout_of(talk), chat, "t")
    assert episode.turns == tuple(talk.turns)
    assert episode.messages == tuple(talk.messages)


def test_what_the_template_writes_after_the_stop_token_may_be_in_the_mask(chat: Chat) -> None:
    talk = talked(chat)
    rollout, end = rollout_of(talk), talk.turns[0].end
    masks, logprobs = list(rollout.masks_T), list(rollout.logprobs_T)
    masks[end], logprobs[end] = rollout.tokens_T[end], -0.1
    longer = ScoredRollout(rollout.tokens_T, masks, logprobs, 1.0, messages=talk.messages)
    assert [turn.end for turn in episode_of(longer, chat, "t").turns] == [end + 1, talk.turns[1].end]


def test_a_stop_token_may_stand_once_more_behind_the_sampled_one(chat: Chat) -> None:
    talk = talked(chat)
    rollout, (first, second) = rollout_of(talk), talk.turns
    end = first.end
    stop = rollout.tokens_T[end - 1]
    longer = ScoredRollout(
        [*rollout.tokens_T[:end], stop, *rollout.tokens_T[end:]],
        [*rollout.masks_T[:end], IGNORED, *rollout.masks_T[end:]],
        [*rollout.logprobs_T[:end], 1.0, *rollout.logprobs_T[end:]],
        1.0,
        messages=talk.messages,
    )
    episode = episode_of(longer, chat, "t")
    assert episode.tokens_T == tuple(longer.tokens_T)
    places = ("start", "end", "assistant_open", "last_user_end")
    assert episode.turns == (first, replace(second, **{name: getattr(second, name) + 1 for name in places}))


def test_earlier_messages_that_were_not_sampled_are_context(chat: Chat) -> None:
    talk = talked(chat)
    # As the template writes them, for a first prompt is rendered as a whole.
    tokens = chat.first_prompt(talk.messages[:-1]).token_ids
    ids = talk.record().tokens_T[talk.turns[1].start :]
    masks = (IGNORED,) * len(tokens) + ids
    logprobs = tuple(1.0 if mask == IGNORED else -0.5 for mask in masks)
    episode = episode_of(ScoredRollout(tokens + ids, masks, logprobs, 0.0, messages=talk.messages), chat, "t")
    assert [turn.message_index for turn in episode.turns] == [4]
    assert [(turn.message_index, turn.why) for turn in episode.context_turns] == [(2, "not_sampled")]


def test_other_messages_than_the_tokens_say_where_they_part(chat: Chat) -> None:
    rollout = rollout_of(talked(chat))
    other = [*START[:1], {"role": "user", "content": "Write g."}, *(rollout.messages or ())[2:]]
    wrong = ScoredRollout(rollout.tokens_T, rollout.masks_T, rollout.logprobs_T, 1.0, messages=other)
    with pytest.raises(AlignmentError, match=r"turn 1: its messages render to .* the same up to position"):
        episode_of(wrong, chat, "t")
    bare = ScoredRollout(rollout.tokens_T, rollout.masks_T, rollout.logprobs_T, 1.0)
    with pytest.raises(AlignmentError, match="2 sampled spans for 0 assistant messages"):
        episode_of(bare, chat, "t")


def test_a_conversation_in_text_has_the_ids_of_one_that_was_sampled(chat: Chat) -> None:
    talk = talked(chat)
    episode = episode_said(talk.messages, chat, "t")
    assert episode.tokens_T == talk.record().tokens_T
    assert episode.turns == tuple(talk.turns)
    with pytest.raises(AlignmentError, match="the assistant says nothing"):
        episode_said(START, chat, "t")
