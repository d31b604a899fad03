"""Padding of columnar files: what is told from a value, in calls and in the tools' schemas."""

from typing import Any

import pytest

from agentic_opd.core.columnar import StoredCall, unpadded_arguments, unpadded_messages, unpadded_tools

TEXT, NUMBER, OPTIONAL = {"type": "string"}, {"type": "integer"}, {"anyOf": [{"type": "integer"}, {"type": "null"}]}


def tool(name: str, properties: dict[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}


LOOK = tool("look", {"path": TEXT})
RUN = tool("run", {"command": TEXT, "timeout": OPTIONAL, "shell": {"type": "string", "nullable": True}}, ("shell",))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"path": None, "command": "ls"}, {"command": "ls"}),
        ({"path": {"a": None}, "command": "ls"}, {"command": "ls"}),
        ({"command": "ls", "timeout": None}, {"command": "ls", "timeout": None}),
        ({"command": "ls", "timeout": None, "path": None}, {"command": "ls"}),
        ({"command": "ls", "shell": None, "path": None}, {"command": "ls", "shell": None}),
        ({"command": None, "timeout": 3}, {"timeout": 3}),
        ({"path": None}, {}),
        ({"path": "a"}, {"path": "a"}),
    ],
)
def test_a_null_is_padding_where_the_schema_has_none(arguments: Any, expected: Any) -> None:
    assert unpadded_arguments([StoredCall("run", arguments)], [LOOK, RUN]) == [expected]


def test_padding_is_removed_at_every_depth() -> None:
    item = {"type": "object", "properties": {"op": TEXT, "n": NUMBER}}
    edit = tool("edit", {"steps": {"type": "array", "items": item}, "options": item, "data": {"type": "object"}})
    padded = {"steps": [{"op": "x", "n": None}, {"op": None, "n": 1}], "options": {"op": "y", "z": None}, "data": None}
    assert unpadded_arguments([StoredCall("edit", padded)], [edit]) == [
        {"steps": [{"op": "x"}, {"n": 1}], "options": {"op": "y"}}
    ]
    free = {"data": {"a": None, "b": 1}}
    assert unpadded_arguments([StoredCall("edit", free)], [edit]) == [free], (
        "an object of any keys, in a file without padding"
    )


def test_without_tools_the_calls_show_padding() -> None:
    calls = [
        StoredCall("run", {"path": None, "command": "ls", "timeout": None}),
        StoredCall("look", {"path": "a", "command": None}),
    ]
    assert unpadded_arguments(calls, None) == [{"command": "ls"}, {"path": "a"}]
    said = [StoredCall("run", {"command": "ls", "timeout": None})]
    assert unpadded_arguments(said, None) == [{"command": "ls", "timeout": None}]
    assert unpadded_arguments(said, []) == [{"command": "ls"}], "of a file: no tool allows it"


def test_schemas_are_free_of_padding() -> None:
    padded = tool(
        "run", {"command": {**TEXT, "enum": None, "default": None}, "path": None, "default": {**NUMBER, "x": None}}
    )
    padded["function"]["strict"] = None
    bare = tool("end", {"path": None, "command": {"type": None, "enum": None}})
    assert unpadded_tools([padded, bare]) == [
        tool("run", {"command": TEXT, "default": NUMBER}),
        tool("end", {}),
    ]


def test_schemas_without_padding_keep_their_nulls() -> None:
    kept = tool(
        "run", {"timeout": {**OPTIONAL, "default": None}, "mode": {"enum": ["a", None]}, "example": {"const": None}}
    )
    assert unpadded_tools([kept]) == [kept]
    padded = tool("run", {"timeout": {**OPTIONAL, "default": None, "title": None}, "mode": {"enum": ["a", None]}})
    assert unpadded_tools([padded]) == [
        tool("run", {"timeout": {**OPTIONAL, "default": None}, "mode": {"enum": ["a", None]}})
    ]


def test_messages_keep_what_is_no_call() -> None:
    call = {"name": "run", "arguments": {"path": None, "command": "ls"}}
    text = {"function": {"name": "run", "arguments": '{"path": null}'}}
    broken = [3, {"role": "user"}, {"tool_calls": "x"}, {"tool_calls": [3, text]}]
    (unpadded, *others) = unpadded_messages([{"role": "assistant", "tool_calls": [call]}, *broken], [LOOK, RUN])
    assert unpadded["tool_calls"][0]["function"]["arguments"] == {"command": "ls"}
    assert others == broken
