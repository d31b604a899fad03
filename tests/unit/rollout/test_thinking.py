"""Models that think: what is sampled between <think> and </think> stays where it was sampled.

first prompt   S S U U A              A: the assistant's opening, with <think> where the template opens it
completion                T T T R E   T: reasoning, a part of the sampled turn; R: the answer; E: the stop token
next prompt    S S U U A  T T T R E  O O A
"""

from typing import Any

import pytest

from agentic_opd.core.types import Message
from agentic_opd.rollout.chat import Chat
from agentic_opd.rollout.conversation import Completion, Conversation
from agentic_opd.rollout.renderer import check_round_trip, load_renderer, reasoning_warning
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


def chat_of(tokenizer: Any, name: str = "qwen3", **options: Any) -> Chat:
    return Chat(load_renderer(tokenizer, name, options), tokenizer, TOOL_SPECS)


def sampled(talk: Conversation, text: str, finish_reason: str = "stop") -> tuple[Message, list[int]]:
    """The message that a turn of this text becomes, and all ids up to its end."""
    known = talk.prompt()
    ids = tuple(talk.chat.tokenizer.encode(text, add_special_tokens=False))
    expected = [*known, *ids]
    return talk.add(Completion(ids, (-0.1,) * len(ids), finish_reason)).message, expected


@pytest.mark.parametrize("answer", [TOOL, USER], ids=lambda message: message["role"])
def test_reasoning_is_told_apart_and_stays_in_every_later_prompt(tokenizer: Any, answer: Message) -> None:
    """Also when a user speaks, where the model's own template would drop it: sampled ids are never taken back."""
    talk = Conversation(chat_of(tokenizer), START)
    message, known = sampled(talk, f"<think>\nI should look.\n</think>\n\nNow.{CALL}<|im_end|>")
    assert (message["reasoning_content"], message["content"]) == ("I should look.", "Now.")
    talk.answer([answer])
    assert talk.prompt()[: len(known)] == known
    assert talk.record().masks_T[-1] == known[-1]
    assert "I should look." in tokenizer.decode([token for token in talk.record().masks_T if token >= 0])


def test_reasoning_that_was_cut_off_is_closed_in_the_next_prompt(tokenizer: Any) -> None:
    talk = Conversation(chat_of(tokenizer), START)
    message, known = sampled(talk, "<think>\nI should", "length")
    assert (message["content"], message["reasoning_content"].strip()) == ("", "I should")
    talk.answer([USER])
    assert tokenizer.decode(talk.prompt()[len(known) :]).startswith("</think><|im_end|>")


FAMILIES = ["qwen3", "qwen3.5", "glm-4.5", "glm-5", "glm-5.1"]


@pytest.mark.parametrize("answer", [TOOL, USER], ids=lambda message: message["role"])
@pytest.mark.parametrize("text", ["<think>\nI should", "<think>", "Now. <think>a</think> <think>b"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_stop_token_inside_open_reasoning_is_a_turns_end(
    family_tokenizer: Any, name: str, text: str, answer: Message
) -> None:
    """What follows is what follows a turn that closed its reasoning; what was sampled stays as it is."""
    stop = "<|user|>" if name.startswith("glm") else "<|im_end|>"

    def following(text: str) -> list[int]:
        talk = Conversation(chat_of(family_tokenizer, name), START)
        _, known = sampled(talk, text + stop)
        talk.answer([answer])
        prompt = talk.prompt()
        assert prompt[: len(known)] == known
        return prompt[len(known) :]

    assert following(text) == following(f"{text}</think>")


@pytest.mark.parametrize("name", FAMILIES)
def test_families_that_think_pass_the_check_of_the_start(family_tokenizer: Any, name: str) -> None:
    """GLM closes no turn of its own: the next message's role does."""
    check_round_trip(chat_of(family_tokenizer, name))


def test_a_template_that_drops_reasoning_is_warned_of_at_the_start(tokenizer: Any) -> None:
    appending, tokenizer.chat_template = tokenizer.chat_template, STRIPPING
    try:
        said = reasoning_warning(chat_of(tokenizer, "default", tool_parser="qwen3"))
        assert said is not None
        assert "drops earlier reasoning" in said
        assert "env.renderer" in said
        assert reasoning_warning(chat_of(tokenizer, "default", tool_parser="qwen3", enable_thinking=False)) is None
        assert reasoning_warning(chat_of(tokenizer)) is None
    finally:
        tokenizer.chat_template = appending
    assert reasoning_warning(chat_of(tokenizer, "default", tool_parser="qwen3")) is None
