"""The formats of `rollout.tool_formats` are those that vLLM's own parsers of these names read."""

import json
from typing import Any

import pytest

from tests.unit.conftest import make_tokenizer
from tests.unit.rollout.test_tool_formats import TIME, TWO_CALLS, WEATHER

_MARKS = ("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<tool_calls>", "</tool_calls>")
_MARKS += ("<longcat_tool_call>", "</longcat_tool_call>", "<|tool_call_start|>", "<|tool_call_end|>")
"""Some of its parsers want them as tokens."""
_NOT_READ = {
    "internlm": "one call only",
    "phi4_mini_json": "no list within a list",
    "mistral [TOOL_CALLS][{": "with a tokenizer of before version 11 only",
    "pythonic  [": "no space before the list",
}
"""What its parsers read otherwise than here."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_vllm_reads_the_same_calls() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    tokenizer: Any = make_tokenizer.__wrapped__()
    tokenizer.add_tokens([*_MARKS], special_tokens=True)
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name, _ in (WEATHER, TIME)]
    request = ChatCompletionRequest(messages=[], model="m", tools=tools)
    for name, text, _ in TWO_CALLS:
        if any(f"{name} {text}".startswith(start) for start in _NOT_READ):
            continue
        parser: Any = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
        read = parser.extract_tool_calls(text, request=request)
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in read.tool_calls]
        assert calls == [WEATHER, TIME], (name, text)
