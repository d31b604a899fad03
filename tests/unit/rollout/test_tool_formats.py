"""Tool calls are read from text by the formats that vLLM knows, with no token of their own."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from renderers import ToolCallParseStatus as Status

from agentic_opd.rollout.tool_formats import FORMATS, WRITTEN, instructions

WEATHER = ("weather", {"city": "Paris", "days": 2})
TIME = ("time", {"zones": ["CET", "}"], "exact": True})
ONE = '{"name": "weather", "arguments": {"city": "Paris", "days": 2}}'
TWO = '{"name": "time", "arguments": {"zones": ["CET", "}"], "exact": true}}'


TWO_CALLS = [
    ("hermes", f"I look.<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{TWO}</tool_call>\n", "I look."),
    ("hermes", f"<tool_call>{ONE}</tool_call> and <tool_call>{TWO}", ""),
    ("longcat", f"<longcat_tool_call>{ONE}</longcat_tool_call><longcat_tool_call>{TWO}</longcat_tool_call>", ""),
    ("granite", f"<|tool_call|>[{ONE}, {TWO}]", ""),
    ("granite", f"So: <tool_call> [{ONE}, {TWO}]", "So: "),
    ("granite-20b-fc", f"<function_call> {ONE}\n<function_call> {TWO}", ""),
    ("jamba", f"<tool_calls>[\n{ONE},\n{TWO}\n]</tool_calls>", ""),
    ("phi4_mini_json", f"functools[{ONE}, {TWO}]", ""),
    ("internlm", f"a<|action_start|><|plugin|>\n{ONE}<|action_end|><|action_start|><|plugin|>{TWO}", "a"),
    ("xlam", f"[{ONE}, {TWO}]", ""),
    ("xlam", f"[\n  {ONE},\n  {TWO}\n]", ""),
    ("xlam", f"```\n[\n  {ONE},\n  {TWO}\n]\n```", ""),
    ("xlam", f"Here:```json\n[{ONE}, {TWO}]\n```", "Here:"),
    ("llama3_json", f"{ONE.replace('arguments', 'parameters')}; {TWO}", ""),
    ("llama3_json", f"Now <|python_tag|>{ONE};{TWO}", "Now "),
    ("llama3_json", f'{{"type": "function", {ONE[1:]}; {{"arguments": {json.dumps(TIME[1])}, "name": "time"}}', ""),
    ("mistral", f"[TOOL_CALLS][{ONE}, {TWO}]", ""),
    ("mistral", f"Ok[TOOL_CALLS]weather{json.dumps(WEATHER[1])}[TOOL_CALLS]time[ARGS]{json.dumps(TIME[1])}", "Ok"),
    ("pythonic", "[weather(city='Paris', days=2), time(zones=['CET', '}'], exact=True)]", ""),
    ("pythonic", ' [weather(city="Paris", days=2), time(zones=["CET", "}"], exact=true)]\n', ""),
    ("llama4_pythonic", "<|python_start|>[weather(city='Paris', days=2), time(zones=['CET','}'], exact=True)]", ""),
    ("lfm2", "<|tool_call_start|>[weather(city='Paris', days=2), time(zones=['CET', '}'], exact=True)]", ""),
    (
        "olmo3",
        "Hm.<function_calls>\nweather(city='Paris', days=2)\ntime(zones=['CET', '}'], exact=True)\n</function_calls>",
        "Hm.",
    ),
]
"""Name, text and content; the calls are `WEATHER` and `TIME`."""


@pytest.mark.parametrize(("name", "text", "content"), TWO_CALLS)
def test_two_calls_are_read(name: str, text: str, content: str) -> None:
    read = FORMATS[name](text)
    assert [(call.name, call.arguments) for call in read.calls] == [WEATHER, TIME]
    assert {call.status for call in read.calls} == {Status.OK}
    assert read.content == content


@pytest.mark.parametrize("text", ['f(code="""a\n  b""")', '  f(\n    code="a\\n  b",\n  )\n', '[f(code="""a\n  b""")]'])
def test_a_call_between_marks_may_have_several_lines(text: str) -> None:
    (call,) = FORMATS["olmo3"](f"<function_calls>\n{text}\n</function_calls>").calls
    assert (call.name, call.arguments) == ("f", {"code": "a\n  b"})


@pytest.mark.parametrize(
    ("name", "text", "status"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {\n</tool_call>', Status.INVALID_JSON),
        ("hermes", '<tool_call>{"name": "f", "argum', Status.UNCLOSED_BLOCK),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', Status.MISSING_NAME),
        ("hermes", "<tool_call>[1]</tool_call>", Status.MALFORMED_STRUCTURE),
        ("hermes", "<tool_call>" + "[" * 100_000, Status.UNCLOSED_BLOCK),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}', Status.INVALID_JSON),
        ("mistral", '[TOOL_CALLS]f{"a": ', Status.INVALID_JSON),
        ("pythonic", "[f(1)]", Status.MALFORMED_STRUCTURE),
        ("pythonic", "[f(a=1, g", Status.MALFORMED_STRUCTURE),
        ("pythonic", "[f(a=__import__('os'))]", Status.MALFORMED_STRUCTURE),
        ("pythonic", "[f(" + "(" * 10_000, Status.MALFORMED_STRUCTURE),
    ],
)
def test_a_broken_call_says_how(name: str, text: str, status: Status) -> None:
    (call,) = FORMATS[name](text).calls
    assert call.status is status
    assert call.raw


@pytest.mark.parametrize(
    "text",
    [
        *("", "Done.", "[1, 2]", 'A set: {"a": 1}', "if a < b: f(x)", "see [the page](a.md)", "functools"),
        *('{"name": "Ann", "age": 3}', '{"type": "object", "properties": {"name": {"type": "string"}}}'),
    ],
)
def test_text_without_a_call_stays_text(text: str) -> None:
    assert {name: one(text) for name, one in FORMATS.items()} == dict.fromkeys(FORMATS, (text, []))


@given(text=st.text(alphabet=st.sampled_from("[](){}<>|\"'=,:_ \nfa1\\`") | st.characters()))
def test_no_text_is_too_odd(text: str) -> None:
    for one in FORMATS.values():
        one(text)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
@given(arguments=st.dictionaries(st.from_regex(r"[a-z][a-z_]{0,5}x", fullmatch=True), JSON_VALUES, max_size=3))
def test_what_is_written_is_read_back(name: str, arguments: dict[str, Any]) -> None:
    written = WRITTEN[name]
    (call,) = FORMATS[name](written("do_it", arguments)).calls
    assert (call.name, call.arguments, call.status) == ("do_it", arguments, Status.OK)
    tool = {"type": "function", "function": {"name": "do_it", "description": "Does it.", "parameters": {}}}
    assert "do_it" in instructions(written, [tool])


def test_objects_in_objects_are_read_a_bounded_number_of_times() -> None:
    call = '{"name": "f", "parameters": {}}'
    assert [one.name for one in FORMATS["llama3_json"](f'{{"name": "x", "of": {call}}}').calls] == ["f"]
    tree = '{"name": "a", "children": [' * 400 + '"' + "x" * 1_000_000 + '"' + "]}" * 400
    start = time.process_time()
    assert FORMATS["llama3_json"](tree) == (tree, [])
    assert time.process_time() - start < 2, "it takes a tenth of a second, and several if each object is read"


def test_more_values_of_python_than_the_event_loop_has_time_for_are_malformed() -> None:
    text = f"f(content={'a, b=[(' * 2_000!r})"
    assert FORMATS["pythonic"](f"[{text}]").calls[0].arguments == {"content": "a, b=[(" * 2_000}
    assert [one.status for one in FORMATS["pythonic"](f"[{'f(a=1), ' * 1_300}]").calls] == [Status.OK] * 1_300
    (call,) = FORMATS["pythonic"](f"[{'f(a=1), ' * 1_400}]").calls
    assert call.status is Status.MALFORMED_STRUCTURE
