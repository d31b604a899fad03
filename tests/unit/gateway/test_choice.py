"""What of an unfinished message can be shown, and that it is never taken back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentic_opd.gateway.choice import Choice, Finished, held_back
from agentic_opd.plugin.sampling import Delta, SampledToken
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.renderer import load_renderer
from tests.unit.conftest import make_tokenizer

TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}


def play(
    text: str, *, tools: bool, stop: str | None = None, chunk: int = 1, thinks: bool = False
) -> tuple[str, str, Finished]:
    """Sample `text`: the shown content and reasoning, and the whole choice."""
    tokenizer = make_tokenizer()
    renderer = load_renderer(tokenizer, "qwen3", {"enable_thinking": thinks})
    chat = ChatFormat(renderer, tokenizer, [TOOL] if tools else [])
    prompt_ids = [*chat.first_prompt([{"role": "user", "content": "u"}]).token_ids]
    ids = tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
    choice, content, reasoning = Choice(0, chat, prompt_ids, 1, keeps_stop=False), "", ""
    parts = [ids[at : at + chunk] for at in range(0, len(ids), chunk)]
    delta = Delta(0, ())
    for place, part in enumerate(parts):
        is_last = place == len(parts) - 1
        reason = "stop" if is_last else None
        delta = Delta(
            0, tuple(SampledToken(i, -0.5) for i in part), reason, stop if is_last else None, 5 if is_last else None
        )
        piece = choice.take(delta, [stop] if stop else ())
        if piece is not None:
            content, reasoning = content + piece.content, reasoning + piece.reasoning
    finished = choice.finish(delta)
    return content + finished.rest.content, reasoning + finished.rest.reasoning, finished


def test_text_and_calls() -> None:
    call = '<tool_call>\n{"name": "run", "arguments": {"code": "1"}}\n</tool_call>'
    content, _, finished = play(f"I run it.\n\n{call}", tools=True)
    assert content == finished.message["content"] == "I run it."
    assert finished.message["tool_calls"][0]["function"] == {"name": "run", "arguments": '{"code": "1"}'}
    assert (finished.finish_reason, finished.rewrote) == ("tool_calls", False)
    assert finished.completion.weight_version == 5


def test_an_answer_over_a_push_has_the_earlier_version() -> None:
    tokenizer = make_tokenizer()
    chat = ChatFormat(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer, [])
    choice = Choice(0, chat, [*chat.first_prompt([{"role": "user", "content": "u"}]).token_ids], 1, keeps_stop=False)
    ids = tokenizer.encode("ab<|im_end|>", add_special_tokens=False)
    deltas = [
        Delta(0, (SampledToken(token, -0.5),), "stop" if token == ids[-1] else None, None, version)
        for token, version in zip(ids, (5, 6, 6), strict=True)
    ]
    for delta in deltas:
        choice.take(delta)
    assert choice.finish(deltas[-1]).completion.weight_version == 5


def test_a_call_that_is_broken_is_text_that_goes_on_from_what_was_shown() -> None:
    content, _, finished = play('I run it.\n<tool_call>\n{"name": \n</tool_call>', tools=True)
    assert "tool_calls" not in finished.message
    assert content == finished.message["content"]
    assert content.startswith("I run it.")
    assert '{"name":' in content


def test_reasoning_is_apart() -> None:
    content, reasoning, finished = play("<think>\nHm, x.\n</think>\n\nIt is x.", tools=False, thinks=True)
    assert (content, reasoning) == ("It is x.", "Hm, x.")
    assert finished.message["reasoning_content"] == "Hm, x."


@settings(max_examples=40)
@given(
    text=st.text(st.sampled_from("ab <>{[`\n\t数é"), min_size=1, max_size=40),
    tools=st.booleans(),
    chunk=st.integers(1, 5),
)
def test_what_was_shown_is_the_message(text: str, tools: bool, chunk: int) -> None:
    content, reasoning, finished = play(text, tools=tools, chunk=chunk)
    assert content == finished.message["content"]
    assert reasoning == finished.message.get("reasoning_content", "")
    assert not finished.rewrote
    assert content == text.lstrip()


LATE = "a < b and this goes on for quite a while, so it is no tag"


@pytest.mark.parametrize(
    ("content", "stop", "has_tools", "shown"),
    [
        ("Hello wor", [], False, "Hello wor"),
        ("Hello \n", [], False, "Hello"),
        ("Hello \ufffd", [], False, "Hello"),
        ("Hello EN", ["END"], False, "Hello"),
        ("Hello END", ["END."], False, "Hello"),
        (LATE, [], True, LATE),
        ("Hello <tool_", [], True, "Hello"),
        ('{"name": "ru', [], True, ""),
        ('{"name": "ru', [], False, '{"name": "ru'),
        ("", ["END"], True, ""),
    ],
)
def test_text_is_held_back_while_it_may_become_something_else(
    content: str, stop: list[str], has_tools: bool, shown: str
) -> None:
    assert held_back(content, stop, has_tools=has_tools).rstrip() == shown


def test_a_stop_string_is_not_shown() -> None:
    content, _, finished = play("return x", tools=False, stop=" x")
    assert content == finished.message["content"] == "return"
