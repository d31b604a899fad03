from typing import Any

import pytest
from demo_policy.tokenizer import train_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from renderers import Qwen3RendererConfig, create_renderer

from agentic_opd.core.types import Evidence, HindsightPair
from agentic_opd.distill.hints import Questions
from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks
from agentic_opd.worlds.coding.tools import TOOL_SPECS
from agentic_opd.worlds.coding.world import SYSTEM_PROMPT

pytestmark = pytest.mark.slow

TOKENIZER = train_tokenizer([task.prompt for task in builtin_tasks()], vocab_size=600)


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}


PAIR = HindsightPair(0, "Write `f(x)`.", "[terminal]\ncommand: ls", (Evidence("tool", "✓ naïve\n[exit code 1]"),))
QUESTIONS = Questions(b"secret")
ASKED = QUESTIONS.hint_messages(QUESTIONS.question(PAIR))
AGENT = [
    {"role": "system", "content": SYSTEM_PROMPT},
    {"role": "user", "content": "Write `f(x)`, größer."},
    {"role": "assistant", "content": "", "tool_calls": [call("read_file", '{"path": "a ✓"}'), call("terminal", "{}")]},
    {"role": "tool", "content": "[empty file]"},
    {"role": "tool", "content": "Error: no"},
    {"role": "assistant", "content": "Again.", "tool_calls": [call("terminal", '{"command": "ls"}')]},
    {"role": "tool", "content": "solution.py"},
    {"role": "user", "content": "[user's hint / instruction]\nStop."},
]


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        (ASKED, None),
        (AGENT, TOOL_SPECS),
        (AGENT[1:2], None),
        (AGENT[1:], TOOL_SPECS),
    ],
    ids=["judge", "agent", "user alone", "tools without system"],
)
def test_the_chat_template_writes_what_the_renderer_writes(messages: Any, tools: Any):
    renderer = create_renderer(TOKENIZER, Qwen3RendererConfig(enable_thinking=False))
    text = TOKENIZER.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    expected = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
    assert TOKENIZER.decode(expected) == text
    assert TOKENIZER.encode(text, add_special_tokens=False) == expected


@given(st.text())
def test_any_text_comes_back(text: str):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text.encode("utf-8", "replace").decode()


def test_control_tokens_are_one_token_each_and_stop_ids_are_special():
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
    assert all(len(TOKENIZER.encode(name)) == 1 for name in names)
    assert set(TOKENIZER.all_special_tokens) >= {"<|endoftext|>", "<|im_end|>"}
    assert "<tool_call>" in TOKENIZER.decode(TOKENIZER.encode("<tool_call><|im_end|>"), skip_special_tokens=True)


def test_names_are_spelled_alike_wherever_they_stand() -> None:
    spelling = train_tokenizer(["select name from orders", "name, id"] * 9, 600, words=("name", "id", "from", "select"))

    def pieces(text: str) -> list[str]:
        ids = spelling.encode(text, add_special_tokens=False)
        assert spelling.decode(ids) == text
        return [spelling.decode([token]) for token in ids]

    assert pieces("select name from orders") == ["select", " name", " from", " ", *"orders"]
    assert pieces("(orders.order_id)") == ["(", *"orders", ".", *"order", "_", "id", ")"]
    assert pieces("names Oslo 12") == [*"names", " ", *"Oslo", " ", "1", "2"]
