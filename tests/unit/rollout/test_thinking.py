"""Models that think: what is sampled between <think> and </think> stays where it was sampled, and where the chat
template drops it from a later prompt, the rollout goes on as another sequence.

first prompt   S S U U A              A: the assistant's opening, with <think> where the template opens it
completion                T T T R E   T: reasoning, a part of the sampled turn; R: the answer; E: the stop token
after a tool   S S U U A  T T T R E  O O A
after a user   S S U U A  R E  U U A  a sequence of its own, in which R is context
"""

from copy import copy as copy_of
from typing import Any

import pytest

from agentic_opd.core.errors import RewrittenError
from agentic_opd.core.types import IGNORED, Message
from agentic_opd.logs.messages import LogNote, read_log
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.conversation import Completion, Conversation
from agentic_opd.rollout.renderer import check_round_trip, load_renderer
from agentic_opd.runs.distill import rendered_log
from agentic_opd.worlds.coding.tools import TOOL_SPECS

START: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "Write f."}]
CALL = '<tool_call>\n{"name": "terminal", "arguments": {"command": "ls"}}\n</tool_call>'
TOOL: Message = {"role": "tool", "tool_call_id": "call_2_0", "name": "terminal", "content": "ok"}
USER: Message = {"role": "user", "content": "Go on."}

STRIPPING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""As Qwen3's: reasoning stands in the turns behind the last user message, and in no earlier one."""


def chat_of(tokenizer: Any, name: str = "qwen3", **options: Any) -> ChatFormat:
    return ChatFormat(load_renderer(tokenizer, name, options), tokenizer, TOOL_SPECS)


def sampled(conversation: Conversation, text: str, finish_reason: str = "stop") -> tuple[Message, list[int]]:
    """The message that a turn of this text becomes, and all ids up to its end."""
    known = conversation.prompt()
    ids = tuple(conversation.chat.tokenizer.encode(text, add_special_tokens=False))
    expected = [*known, *ids]
    return conversation.add(Completion(ids, (-0.1,) * len(ids), finish_reason)).message, expected


def stripping(tokenizer: Any) -> Any:
    """The tokenizer with a chat template that drops reasoning."""
    copy = copy_of(tokenizer)
    copy.chat_template = STRIPPING
    return copy


THINKING = "<think>\nI should look.\n</think>\n\nNow."
DROPPING = {"qwen3": {}, "default": {"tool_parser": "qwen3", "reasoning_parser": "think"}}


@pytest.mark.parametrize("name", DROPPING)
def test_reasoning_is_told_apart_and_stays_while_tools_answer(tokenizer: Any, name: str) -> None:
    conversation = Conversation(chat_of(stripping(tokenizer), name, **DROPPING[name]), START)
    message, known = sampled(conversation, f"{THINKING}{CALL}<|im_end|>")
    assert (message["reasoning_content"].strip(), message["content"].strip()) == ("I should look.", "Now.")
    conversation.answer([TOOL])
    assert conversation.branching_prompt()[: len(known)] == known
    assert conversation.earlier == []
    (turn,) = conversation.turns
    reasoning = tokenizer.decode(conversation.trace().tokens_T[turn.start : turn.start + turn.reasoning_tokens])
    assert reasoning == "<think>\nI should look.\n</think>\n\n"


@pytest.mark.parametrize("name", DROPPING)
def test_reasoning_that_the_template_drops_makes_a_branch(tokenizer: Any, name: str) -> None:
    tokenizer = stripping(tokenizer)
    conversation = Conversation(chat_of(tokenizer, name, **DROPPING[name]), START)
    _, first = sampled(conversation, f"{THINKING}<|im_end|>")
    conversation.answer([USER])
    with pytest.raises(RewrittenError, match="reasoning of message 2"):
        conversation.prompt()
    second = conversation.branching_prompt()
    text = tokenizer.decode(second)
    assert "I should look." not in text
    assert "Now.<|im_end|>" in text
    assert text.endswith("Go on.<|im_end|>\n<|im_start|>assistant\n")
    length = len(second)
    sampled(conversation, "<think>\nSo.\n</think>\n\nDone.<|im_end|>")
    conversation.answer([USER])
    conversation.branching_prompt()
    earlier, later = conversation.traces()
    (turn,) = later.turns
    assert (len(earlier.tokens_T), len(later.tokens_T)) == (len(first), turn.end)
    assert tokenizer.decode(later.tokens_T[turn.last_user_end : length]) == "<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(later.tokens_T[turn.assistant_open : length]) == "<|im_start|>assistant\n"
    every = [token for trace in (earlier, later) for token in trace.masks_T if token != IGNORED]
    assert tokenizer.decode(every) == f"{THINKING}<|im_end|><think>\nSo.\n</think>\n\nDone.<|im_end|>", "each once"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"enable_thinking": False}, "Now.<|im_end|>"),
        ({}, "Now.<|im_end|>"),
        ({"thinking_retention": "all"}, f"{THINKING}<|im_end|>"),
    ],
    ids=["thinking off", "did not think", "told to keep it"],
)
def test_prompts_are_extended_where_no_reasoning_is_dropped(tokenizer: Any, options: Any, text: str) -> None:
    conversation = Conversation(chat_of(tokenizer, **options), START)
    _, known = sampled(conversation, text)
    conversation.answer([USER])
    assert conversation.prompt()[: len(known)] == known


def test_reasoning_that_was_cut_off_is_all_of_its_turn(tokenizer: Any) -> None:
    conversation = Conversation(chat_of(tokenizer), START)
    message, known = sampled(conversation, "<think>\nI should", "length")
    assert (message["content"], message["reasoning_content"].strip()) == ("", "I should")
    (turn,) = conversation.turns
    assert turn.reasoning_tokens == turn.end - turn.start
    conversation.answer([TOOL])
    assert tokenizer.decode(conversation.prompt()[len(known) :]).startswith("</think><|im_end|>")


FAMILIES = ["qwen3", "qwen3.5", "glm-4.5", "glm-5", "glm-5.1"]


@pytest.mark.slow
@pytest.mark.parametrize("answer", [TOOL, USER], ids=lambda message: message["role"])
@pytest.mark.parametrize("text", ["<think>\nI should", "<think>", "Now. <think>a</think> <think>b"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_stop_token_inside_open_reasoning_is_a_turns_end(
    family_tokenizer: Any, name: str, text: str, answer: Message
) -> None:
    """What follows is what follows a turn that closed its reasoning; what was sampled stays as it is."""
    stop = "<|user|>" if name.startswith("glm") else "<|im_end|>"

    def following(text: str) -> list[int]:
        conversation = Conversation(chat_of(family_tokenizer, name), START)
        _, known = sampled(conversation, text + stop)
        conversation.answer([answer])
        prompt = conversation.branching_prompt()
        if conversation.earlier:  # The template drops the reasoning from this prompt.
            return prompt
        assert prompt[: len(known)] == known
        return prompt[len(known) :]

    shorter, longer = sorted((following(text), following(f"{text}</think>")), key=len)
    assert longer[-len(shorter) :] == shorter


@pytest.mark.parametrize("name", FAMILIES)
def test_families_that_think_pass_the_check_of_the_start(family_tokenizer: Any, name: str) -> None:
    """GLM closes no turn of its own: the next message's role does."""
    check_round_trip(chat_of(family_tokenizer, name))


FOREIGN_OPENING = STRIPPING.replace("assistant\n{% if enable", "agent: <think>\n{% if enable")
"""As DeepSeek R1's: the prompt opens reasoning, behind another opening than ChatML's, and history has none."""


@pytest.mark.parametrize("parser", ["hermes", "qwen3"])
def test_reasoning_that_any_familys_prompt_opens_is_reasoning(tokenizer: Any, parser: str) -> None:
    copy = copy_of(tokenizer)
    copy.chat_template = FOREIGN_OPENING.replace("{% if m.reasoning_content and loop.index0 > ns.last %}", "{% if 0 %}")
    chat = chat_of(copy, "default", tool_parser=parser)
    check_round_trip(chat)
    message, _ = sampled(Conversation(chat, START), f"I should look.\n</think>\n\nNow.{CALL}<|im_end|>")
    assert (message["reasoning_content"].strip(), message["content"].strip()) == ("I should look.", "Now.")
    assert len(message["tool_calls"]) == 1
    answer: Message = {"role": "assistant", "content": "Two files."}
    rendered = rendered_log(read_log({"messages": [*START, answer, USER]}, ()), chat)
    assert not rendered.traces
    assert rendered.notes[LogNote.NO_REASONING] == 1
