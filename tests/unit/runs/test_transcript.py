"""Conversations that are read from their tokens, for chat templates of several kinds."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.types import Message
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.conversation import Completion, Conversation
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.runs.transcript import TranscriptReader
from agentic_opd.wire.group import ScoredRollout
from tests.support.places import MODEL, ROOT

SYSTEM: Message = {"role": "system", "content": "Be brief."}
ASKED: Message = {"role": "user", "content": "Do it,\n\nplease."}
AGAIN: Message = {"role": "user", "content": "It is wrong."}
RESULT: Message = {"role": "tool", "content": "error: line 2", "tool_call_id": "call_0_0", "name": "terminal"}

END = "<|im_end|>"
HEADERS = "{% for m in messages %}<|im_start|>{{ m.role }}<|im_start|>\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
"""As Llama 3's: nothing behind the closing token."""
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>"
    "{% else %}<|im_start|>{{ m.content }}<tool_call>{% endif %}{% endfor %}"
)
"""As Mistral's: all roles but the assistant's look the same, and nothing opens an answer."""
TEMPLATES = {
    "chatml": None,
    "headers": HEADERS + "{% if add_generation_prompt %}<|im_start|>assistant<|im_start|>\n\n{% endif %}",
    "brackets": BRACKETS,
}


def chat_of(name: str) -> ChatFormat:
    tokenizer: Any = AutoTokenizer.from_pretrained(ROOT / MODEL)
    tokenizer.chat_template = TEMPLATES[name] or tokenizer.chat_template
    return ChatFormat(load_renderer(tokenizer, "default", {"tool_parser": "hermes"}), tokenizer, ())


def talked(chat: ChatFormat, start: list[Message], answer: Message, end: str = END) -> Conversation:
    conversation = Conversation(chat, start)
    for text, following in ((f"One.{end}", [answer]), (f"Two: 2.{END}", [])):
        conversation.prompt()
        ids = chat.tokenizer.encode(text, add_special_tokens=False)
        conversation.add(Completion(tuple(ids), (-0.25,) * len(ids), "stop" if end else "length"))
        conversation.answer(following)
    return conversation


def rollout_of(conversation: Conversation) -> ScoredRollout:
    trace = conversation.trace()
    return ScoredRollout(trace.tokens_T, trace.masks_T, trace.logprobs_T, 1.0)


@pytest.mark.parametrize("answer", [AGAIN, RESULT], ids=["user", "tool"])
@pytest.mark.parametrize("start", [[ASKED], [SYSTEM, ASKED]], ids=["", "system"])
@pytest.mark.parametrize("name", ["chatml", "headers"])
def test_messages_and_turns_are_those_of_the_conversation(name: str, start: list[Message], answer: Message) -> None:
    chat = chat_of(name)
    conversation = talked(chat, start, answer)
    trace = TranscriptReader(chat).trace(rollout_of(conversation))
    assert trace.turns == tuple(conversation.turns)
    assert [(one["role"], one["content"]) for one in trace.messages] == [
        (one["role"], one["content"]) for one in conversation.messages
    ]


def test_roles_that_look_the_same_are_the_users() -> None:
    chat = chat_of("brackets")
    conversation = talked(chat, [ASKED], AGAIN)
    trace = TranscriptReader(chat).trace(rollout_of(conversation))
    assert [turn.start for turn in trace.turns] == [turn.start for turn in conversation.turns]
    assert [turn.last_user_end for turn in trace.turns] == [turn.last_user_end for turn in conversation.turns]
    assert [one["role"] for one in trace.messages] == ["user", "assistant", "user", "assistant"]


def test_a_turn_that_was_cut_off_is_closed_by_the_template() -> None:
    chat = chat_of("chatml")
    conversation = talked(chat, [ASKED], AGAIN, end="")
    trace = TranscriptReader(chat).trace(rollout_of(conversation))
    assert [turn.start for turn in trace.turns] == [turn.start for turn in conversation.turns]
    assert trace.turns[0].truncated
    assert trace.messages[2] == AGAIN


@pytest.mark.parametrize("name", ["chatml", "headers"])
def test_a_turn_that_the_mask_leaves_out_is_context(name: str) -> None:
    chat = chat_of(name)
    conversation = talked(chat, [ASKED], AGAIN)
    rollout, end = rollout_of(conversation), conversation.turns[0].end
    masks, logprobs = [-100] * end + [*rollout.masks_T[end:]], [1.0] * end + [*rollout.logprobs_T[end:]]
    trace = TranscriptReader(chat).trace(ScoredRollout(rollout.tokens_T, masks, logprobs, 1.0))
    assert trace.turns == tuple(conversation.turns[1:])
    assert [one["content"] for one in trace.messages] == [one["content"] for one in conversation.messages]
    assert [(one.message_index, one.why) for one in trace.context_turns] == [(1, "not_sampled")]


def test_what_follows_the_last_turn_is_read_too() -> None:
    chat = chat_of("chatml")
    rollout = rollout_of(talked(chat, [ASKED], AGAIN))
    tail = chat.tokenizer.encode("\n<|im_start|>user\nThanks.<|im_end|>\n", add_special_tokens=False)
    masks, logprobs = [*rollout.masks_T, *(-100 for _ in tail)], [*rollout.logprobs_T, *(1.0 for _ in tail)]
    longer = ScoredRollout([*rollout.tokens_T, *tail], masks, logprobs, 1.0)
    trace = TranscriptReader(chat).trace(longer)
    assert trace.messages[-1] == {"role": "user", "content": "Thanks."}
    assert len(trace.turns) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("What is it? ", "'What is it? ', open no assistant's message"),
        ("<|im_start|>user\nHi<|im_end|>\n", "'<|im_start|>user\\nHi<|im_end|>\\n', open no assistant's message"),
    ],
)
def test_tokens_of_no_template_are_named(text: str, said: str) -> None:
    chat = chat_of("chatml")
    prompt = chat.tokenizer.encode(text, add_special_tokens=False)
    turn = chat.tokenizer.encode("It is this.<|im_end|>", add_special_tokens=False)
    rollout = ScoredRollout(
        [*prompt, *turn], [*(-100 for _ in prompt), *turn], [*(1.0 for _ in prompt), *(-0.5 for _ in turn)], 1.0
    )
    with pytest.raises(AlignmentError) as caught:
        TranscriptReader(chat).trace(rollout)
    assert str(caught.value) == f"turn 1: the {len(prompt)} tokens before it, {said}"
