"""Arguments that a model writes as text have the values that vLLM's own readers of tool calls give them.

Each text of `TEXTS` is read as an argument of each schema of `SCHEMAS`, in each family's format, by the package and by
the installed vLLM. The values and their types are equal, but for those that `_ADMITTED` names.
"""

import json
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from renderers import ParsedToolCall, ToolCallParseStatus

from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.rollout.tool_formats import with_declared_types, with_types
from tests.unit.conftest import make_tokenizer

SCHEMAS: list[Any] = [
    *({"type": name} for name in ("string", "integer", "number", "boolean", "null", "array", "object")),
    *({"type": [name, "null"]} for name in ("string", "integer", "number", "boolean", "array", "object")),
    *({"type": ["integer", "string"]}, {"type": ["boolean", "number"]}, {"type": []}, {"type": ["string", "object"]}),
    *({"anyOf": [{"type": name}, {"type": "null"}]} for name in ("string", "integer", "boolean", "object")),
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    {"oneOf": [{"type": "number"}, {"enum": ["auto", None]}]},
    {"allOf": [{"type": "object"}, {"$ref": "#/$defs/A"}]},
    {"anyOf": [{"anyOf": [{"type": "boolean"}]}, {"type": "integer"}]},
    *({"enum": values} for values in (["a", "b"], [1, 2], [1.5], [True, False], [None, "a"], [[1]], [{"a": 1}], [])),
    {"type": "string", "enum": ["1", "2"]},
    {"type": "string", "enum": [1, 2]},
    *({"const": 5}, {"$ref": "#/$defs/A"}, {}, {"description": "no type"}, {"type": "string", "nullable": True}),
    {"type": "integer", "nullable": True},
    *({"type": name} for name in ("int", "Float", " bool ", "dict", "list", "str", "any", "date", "uint64", "double")),
    {"type": "array", "items": {"type": "integer"}},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}}},
]
TEXTS = [
    *(
        "1",
        "0",
        "-0",
        "-1",
        "007",
        "+5",
        "1.0",
        "1.5",
        "-0.0",
        "1e5",
        "1E-3",
        "1_000",
        "0x1F",
        "2024",
        ".5",
        "5.",
        "1,5",
    ),
    *(" 5 ", "\n5\n", "\n\n5\n\n", "5\n", "5 apples", "9" * 30, "9" * 5000, "1e999", "-1e999", "[1e999]"),
    *("True", "true", "FALSE", " true ", '"true"', "yes", "null", "None", "NULL", " null", '"null"', "nan"),
    *("NaN", "Infinity", "-Infinity", "[NaN]", '{"a": NaN}', "inf"),
    *(
        "",
        " ",
        "\n",
        "\n\n",
        "a",
        "a\nb",
        "\n  a\n  b\n",
        "\n\na\n\n",
        "\ta\t",
        "a\r\nb",
        "\u00fc\u4e2d\U0001f600",
        "\u0661\u0662",
    ),
    *(
        '"a"',
        '"1"',
        "'a'",
        "[1, 2]",
        "['a', 'b']",
        "(1, 2)",
        "{1, 2}",
        '{"a": 1}',
        "{'a': True}",
        '{"a": 1',
        "[]",
        "{}",
    ),
    *('{"a": "1", "b": [2, true]}', '["1", 2, null]', '[{"a": "5"}]', '{"a": {"b": [1.0, -0.0]}}', "[[[[1]]]]"),
    *(
        "&lt;b&gt; &amp; &#39;",
        "<b>x</b>",
        "a < b && c > d",
        "<parameter>",
        "SELECT '1'",
        r"C:\new\table",
        "b'a'",
        "1j",
        "...",
    ),
]

LOST = ("{1, 2}", "b'a'", "1j", "...", "9" * 5000)
"""Texts at which vLLM's readers of Laguna and Hunyuan 3 raise, and lose all calls of the turn."""


def tool(schema: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": schema}}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def coder(text: str) -> str:
    return f"<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>"


def glm(text: str) -> str:
    return f"f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n"


def hunyuan(text: str) -> str:
    return glm(text).replace("f\n", "f<tool_sep>\n", 1)


def minimax(text: str) -> str:
    return f'<invoke name="f">\n<parameter name="x">{text}</parameter>\n</invoke>'


Form = tuple[str, str, Callable[[str], str], str]
FORMS: list[Form] = [
    ("qwen3.5", "qwen3_coder", coder, "<tool_call>\n{}\n</tool_call>"),
    ("glm47", "glm47", glm, "<tool_call>{}</tool_call>"),
    ("laguna-xs.2", "poolside_v1", glm, "<tool_call>{}</tool_call>"),
    ("hy3", "hy_v3", hunyuan, "<tool_calls><tool_call>{}</tool_call></tool_calls>"),
    ("minimax-m2", "minimax_m2", minimax, "<minimax:tool_call>{}</minimax:tool_call>"),
]
"""The package's name of a family, vLLM's name of its reader, how an argument is written, and what surrounds a call."""
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_calls>", "</tool_calls>", "<tool_sep>")
MARKS += ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>")
MARKS += ("<|tool_call_argument_begin|>", "<|tool_call|>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
MARKS += ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|turn>", "<turn|>", "<|tool_response>")
MARKS += ("<|message_model|>", "<|content_invoke_tool_json|>", "<|end_message|>", "<|content_text|>")
MARKS += ("<|content_thinking|>", "<|content_model_end_sampling|>", "<|content_invoke_tool_text|>")

MARKS += ("<minimax:tool_call>", "</minimax:tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def values(family: str, raws: list[str], schema: Any) -> list[Any]:
    """Return the package's values of the argument `x` of each call."""
    calls = [ParsedToolCall(raw=raw, name="f", arguments={}, status=ToolCallParseStatus.OK) for raw in raws]
    return [_argument(call) for call in with_types(calls, family, [tool(schema)])]


def _argument(call: ParsedToolCall) -> Any:
    assert call.status is ToolCallParseStatus.OK
    arguments: Any = call.arguments
    return arguments["x"]


def differing(family: str, name: str, raws: Sequence[str], around: str, schema: Any) -> list[str]:
    """Return the texts that the package reads otherwise than vLLM's parser of this name, with both values."""
    theirs = of_vllm(name, "".join(map(around.format, raws)), schema)
    ours = values(family, [raw.replace("<tool_sep>", "") for raw in raws], schema)
    assert len(ours) == len(theirs) == len(raws)
    return unequal(schema, raws, ours, theirs)


def unequal(schema: Any, inputs: Sequence[Any], ours: Sequence[Any], theirs: Sequence[Any]) -> list[str]:
    """Return the inputs with different values. Values that JSON does not have are no arguments."""
    triples = zip(inputs, ours, theirs, strict=True)
    # The texts tell 1, 1.0 and True apart.
    return [
        f"{schema} {given!r}: {a!r}, vLLM {b!r}"[:300] for given, a, b in triples if repr(a) != repr(b) and is_json(b)
    ]


def of_vllm(name: str, text: str, schema: Any) -> list[Any]:
    """Return vLLM's values of the argument `x` of each call in a turn."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(messages=[], model="m", tools=[tool(schema)])
    parser: Any = ToolParserManager.get_tool_parser(name)(tokenizer(), request.tools)
    calls = parser.extract_tool_calls(text, request=request).tool_calls
    return [json.loads(call.function.arguments).get("x") for call in calls]


@cache
def tokenizer() -> Any:
    made: Any = make_tokenizer.__wrapped__()
    made.add_tokens([*MARKS], special_tokens=True)
    return made


def is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}-{form[1]}")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_value_is_that_of_vllms_reader(form: Form) -> None:
    family, name, write, around = form
    texts = [text for text in TEXTS if text not in LOST or name not in ("poolside_v1", "hy_v3")]
    wrong = [line for schema in SCHEMAS for line in differing(family, name, [*map(write, texts)], around, schema)]
    assert not wrong, "\n".join([f"{len(wrong)} differ", *wrong[:40]])


JSON_VALUES: list[Any] = [
    *(text for text in TEXTS if text not in ("<parameter>", LOST[-1])),
    1,
    0,
    -1,
    1.0,
    1.5,
    10**30,
]
JSON_VALUES += [
    True,
    False,
    None,
    [],
    {},
    [1, "2", None],
    ["a"],
    {"a": "5", "b": [1, True]},
    {"c": {"a": "1"}},
    [["1"]],
]
KIMI = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
INKLING = "<|message_model|>f<|content_invoke_tool_json|>{}<|end_message|>"
DSML = (
    '<\uff5cDSML\uff5cinvoke name="f">\n<\uff5cDSML\uff5cparameter name="x" string="false">{}'
    "</\uff5cDSML\uff5cparameter>\n</\uff5cDSML\uff5cinvoke>"
)


def gemma(value: Any) -> str:
    """Write a value as Gemma 4 does."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{gemma(item)}' for key, item in value.items())}}}"
    return f"[{','.join(map(gemma, value))}]" if isinstance(value, list) else json.dumps(value)


@pytest.mark.parametrize(
    ("family", "name", "write", "turn"),
    [
        ("kimi-k2", "kimi_k2", lambda x: KIMI.replace("{}", json.dumps({"x": x})), "{}"),
        ("granite", "granite", lambda x: json.dumps({"name": "f", "arguments": {"x": x}}) + ",", "<|tool_call|>[{}]"),
        ("mistral", "mistral", lambda x: "[TOOL_CALLS]f[ARGS]" + json.dumps({"x": x}), "{}"),
        ("gemma4", "gemma4", lambda x: f"<|tool_call>call:f{{x:{gemma(x)}}}<tool_call|>", "{}"),
        ("inkling", "inkling", lambda x: INKLING.replace("{}", json.dumps({"name": "f", "args": {"x": x}})), "{}"),
        ("deepseek-v4", "deepseek_v4", lambda x: DSML.replace("{}", json.dumps(x)), "<\uff5cDSML\uff5ctool_calls>{}"),
        (
            "hermes",
            "hermes",
            lambda x: f"<tool_call>{json.dumps({'name': 'f', 'arguments': {'x': x}})}</tool_call>",
            "{}",
        ),
        ("llama3_json", "llama3_json", lambda x: json.dumps({"name": "f", "parameters": {"x": x}}) + ";", "{}"),
    ],
)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_value_of_a_call_in_json_is_that_of_vllms_reader(
    family: str, name: str, write: Callable[[Any], str], turn: str
) -> None:
    wrong: list[str] = []
    # The package has one way for Gemma's calls and one for those of the other families; vLLM has a reader of each.
    for schema in SCHEMAS if family in ("gemma4", "kimi-k2") else SCHEMAS[::5]:
        text = turn.replace("{}", "".join(map(write, JSON_VALUES)).rstrip(",;"))
        if family == "kimi-k2":
            text = f"<|tool_calls_section_begin|>{text}<|tool_calls_section_end|>"
        calls = [ParsedToolCall(raw="", name="f", arguments={"x": value}) for value in JSON_VALUES]
        ours = [_argument(call) for call in with_types(calls, family, [tool(schema)])]
        wrong += unequal(schema, JSON_VALUES, ours, of_vllm(name, text, schema))
    assert not wrong, "\n".join([f"{len(wrong)} differ", *wrong[:40]])


@pytest.mark.parametrize("write", [coder, glm])
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "0", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "2024", "2024"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "1.0", 1),
        ({"type": "number"}, "1e-3", 0.001),
        ({"type": "integer"}, "007", 7),
        ({"type": "integer"}, "1.5", 1.5),
        ({"type": "integer"}, "None", "None"),
        ({"type": "array"}, "['a']", "['a']"),
        ({"type": "object"}, '{"a": [1, null]}', {"a": [1, None]}),
        ({"type": "object"}, '{"a": NaN}', '{"a": NaN}'),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"$ref": "#/$defs/A"}, "[1]", "[1]"),
        ({}, "12", "12"),
        ({"type": "string"}, "&lt;b&gt; \n", "&lt;b&gt; \n"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
    ],
)
def test_a_text_has_the_type_that_its_schema_declares(
    schema: Any, text: str, value: Any, write: Callable[[str], str]
) -> None:
    call = ParsedToolCall(raw=write(text), name="f", arguments={}, status=ToolCallParseStatus.OK)
    arguments: Any = with_declared_types(call, [tool(schema)]).arguments
    assert repr(arguments["x"]) == repr(value)


@pytest.mark.parametrize("text", [*LOST, "NaN", "1e999", "[NaN]"])
@pytest.mark.parametrize(("family", "write"), [("laguna-xs.2", glm), ("hy3", glm), ("qwen3.5", coder)])
def test_a_value_that_json_does_not_have_is_a_text(family: str, write: Callable[[str], str], text: str) -> None:
    assert values(family, [write(text)], {"type": "array"}) == [text]


def test_arguments_without_a_declared_type_are_texts() -> None:
    raw = (
        "<function=f><parameter=x>1</parameter>\n< parameter = y >\n 2 \n\n</ parameter ><parameter=z>{}<parameter=w>[]"
    )
    (call,) = with_types([ParsedToolCall(raw=raw, name="f")], "qwen3.5", [tool({"type": "integer"})])
    assert call.arguments == {"x": 1, "y": " 2 \n", "z": "{}"}
    unknown = with_declared_types(ParsedToolCall(raw=glm("7"), name="g"), [tool({"type": "integer"})])
    assert unknown.arguments == {"x": "7"}
    for family in ("qwen3.5", "glm-5", "hy3", "minimax-m2"):
        (call,) = with_types([ParsedToolCall(raw="f", name="f")], family, [tool({"type": "integer"})])
        assert (call.arguments, call.status) == ({}, ToolCallParseStatus.OK)


def test_each_call_of_a_minimax_block_has_its_own_arguments() -> None:
    block = minimax("1") + minimax("2").replace('"x"', "'x'")
    calls = [ParsedToolCall(raw=block, name="f", token_span=(3, 9)) for _ in range(2)]
    typed = with_types([*calls, *calls], "minimax-m2", [tool({"type": "integer"})])
    assert [call.arguments for call in typed] == [{"x": 1}, {"x": 2}] * 2


def test_a_value_that_is_not_json_breaks_no_call_of_deepseek() -> None:
    call = ParsedToolCall(raw="", name="f", arguments={"x": "True"}, status=ToolCallParseStatus.INVALID_JSON)
    (typed,) = with_types([call], "deepseek-v4", [tool({"type": "boolean"})])
    assert (typed.arguments, typed.status) == ({"x": True}, ToolCallParseStatus.OK)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3.5", "glm-5", "minimax-m2"])
@pytest.mark.parametrize(
    "piece",
    [
        *("<parameter=x>", "<parameter=", "<parameter name=", '<parameter name="x', "</parameter>", "< "),
        *("<arg_key>", "<arg_key></arg_key>", "<arg_key>x</arg_key><arg_value>"),
        *("<invoke name=", '<invoke name="f">'),
    ],
)
def test_hostile_text_is_read_in_linear_time(family: str, piece: str) -> None:
    raw = (piece * 200_000)[:200_000]
    begin = time.process_time()
    with_types([ParsedToolCall(raw=raw, name="f")], family, [tool({"type": "integer"})])
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(("family", "write"), [("qwen3.5", coder), ("glm-4.5", glm), ("glm-5", glm)])
def test_a_familys_own_renderer_reads_typed_values(
    family_tokenizer: Any, family: str, write: Callable[[str], str]
) -> None:
    chat = ChatFormat(
        load_renderer(family_tokenizer, family, {}), family_tokenizer, [tool({"type": ["boolean", "null"]})]
    )
    stop = "<|user|>" if family.startswith("glm") else "<|im_end|>"
    for text, value in (("True", True), ("null", None), ("\u00fc", "\u00fc")):
        ids = family_tokenizer.encode(f"<think>a</think><tool_call>{write(text)}</tool_call>{stop}")
        (call,) = chat.parse([], ids, 1).tool_calls
        assert (call.name, call.arguments, call.error) == ("f", {"x": value}, None)
