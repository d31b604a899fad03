"""Tools as clients and providers write them: in OpenAI's chat form, or refused by name."""

import json
from typing import Any

import pytest

from agentic_opd.core.errors import AlignmentError
from agentic_opd.logs.tools import plain_tools

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "d"}
TOOL = {"type": "function", "function": {**FUNCTION, "parameters": SCHEMA}}


@pytest.mark.parametrize(
    "tool",
    [
        TOOL,
        {**FUNCTION, "parameters": SCHEMA},
        {"type": "function", **FUNCTION, "parameters": SCHEMA},
        {**FUNCTION, "input_schema": SCHEMA},
        {"type": "custom", **FUNCTION, "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
        {**FUNCTION, "inputSchema": SCHEMA, "annotations": {"title": "F"}, "outputSchema": {"type": "object"}},
        {"toolSpec": {**FUNCTION, "inputSchema": {"json": SCHEMA}}},
        {
            "function_declarations": [
                {**FUNCTION, "parameters": json.loads(json.dumps(SCHEMA).replace('"object"', '"OBJECT"'))}
            ]
        },
        {"functionDeclarations": [{**FUNCTION, "parametersJsonSchema": SCHEMA}]},
        {**FUNCTION, "parameters": json.dumps(SCHEMA)},
        {"type": "function", "function": {**FUNCTION, "input_schema": SCHEMA}},
        {"type": None, "function": None, **FUNCTION, "input_schema": {**SCHEMA, "title": None}, "parameters": None},
    ],
    ids=lambda tool: "-".join(tool)[:40],
)
def test_every_form_of_a_function_becomes_the_chat_form(tool: dict[str, Any]) -> None:
    assert plain_tools({"tools": [tool]}) == [TOOL]
    assert plain_tools({"tools": [json.dumps(tool)]}) in ([TOOL], [with_title(None)])


def with_title(title: None) -> dict[str, Any]:
    """In JSON text a null is no padding."""
    return {**TOOL, "function": {**TOOL["function"], "parameters": {**SCHEMA, "title": title}}}


def test_a_gemini_tool_declares_several_functions() -> None:
    declared = [{"name": "a", "parameters": SCHEMA}, {"name": "b"}]
    names = [
        tool["function"]["name"] for tool in plain_tools({"tools": [{"function_declarations": declared}, FUNCTION]})
    ]
    assert names == ["a", "b", "f"]


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ({"type": "bash_20250124", "name": "bash"}, r"tools\[0\]\.type: 'bash_20250124' is a tool of its provider"),
        ({"type": "web_search"}, r"tools\[0\]\.type: 'web_search' is a tool of its provider"),
        ({"type": "custom", "name": "x", "format": {"type": "text"}}, r"tools\[0\]\.type: 'custom' is a tool"),
        (
            {"name": "f", "parameter_definitions": {"a": {}}},
            r"tools\[0\]\.parameter_definitions: expected the JSON schema",
        ),
        ({"name": "f", "inputs": {"a": {}}}, r"tools\[0\]\.inputs: expected the JSON schema"),
        (
            {"name": "f", "parameters": {"a": "str"}},
            r"tools\[0\]\.parameters: expected the JSON schema of an object",
        ),
        ({"name": "f", "input_schema": [1]}, r"tools\[0\]\.input_schema: expected the JSON schema of an object"),
        ({"google_search": {}}, r"tools\[0\]: expected an object of a function with a name"),
        ({"function_declarations": [{}]}, r"tools\[0\]\.function_declarations\[0\]: expected an object of a function"),
    ],
)
def test_what_no_template_can_show_is_refused_by_name(tool: dict[str, Any], said: str) -> None:
    with pytest.raises(AlignmentError, match=said):
        plain_tools({"tools": [tool]})


def test_arguments_by_name_with_pythons_types_become_a_schema() -> None:
    """As APIGen and xLAM write them; an argument may be called `type`."""
    arguments = {
        "type": {"type": "str", "description": "d"},
        "ids": {"type": "List[int]"},
        "day": {"type": "str, optional"},
        "size": {"type": "Optional[float]"},
        "hook": {"type": "Callable[[int], str]", "default": ""},
    }
    (tool,) = plain_tools({"tools": json.dumps([{**FUNCTION, "parameters": arguments}])})
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "type": {"type": "string", "description": "d"},
            "ids": {"type": "array"},
            "day": {"type": "string"},
            "size": {"type": "number"},
            "hook": {"default": ""},
        },
        "required": ["type", "ids"],
    }
