"""Nulls that a columnar file adds to objects of different keys, removed from calls and tool schemas. Pure.

Arrow and parquet give all objects of a column the same keys: a call of `terminal` in a file with calls of `read_file`
becomes `{"path": null, "command": "ls"}`. JSON text inside a column is not padded, so callers pass parsed objects only.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from agentic_opd.core.errors import AlignmentError

_NULLABLE = ("default", "const", "example")
"""Keys of a JSON schema whose value may be null."""
_VALUES = (*_NULLABLE, "enum", "examples")
"""Keys of a JSON schema that hold values, and no schemas."""
_UNIONS = ("anyOf", "oneOf", "allOf")
MOST_NESTED = 100
"""Deepest nesting of objects and lists in tools and calls."""

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A call of a tool with arguments that were stored as an object."""

    name: str
    arguments: Mapping[str, Any]


def unpadded_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools without padding: without nulls where a tool or a JSON schema has none.

    In padded tools `default: null` stays only if the schema allows null. Tools without such a null are unchanged.

    Raises:
        AlignmentError: a tool is nested too deeply.
    """
    check_nesting(tools, "tools")
    if not is_padded(tools):
        return [dict(tool) for tool in tools]
    return [cast(dict[str, Any], _unpadded_schema(tool)) for tool in tools]


def is_padded(tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a tool has a null where a tool or a JSON schema has none."""
    return any(map(_is_padded_schema, tools))


def check_nesting(value: object, name: str) -> None:
    """Raise AlignmentError if a value is nested deeper than `MOST_NESTED`; the error names the field `name`."""
    level: list[Any] = [value]
    for _ in range(MOST_NESTED):
        level = [
            member
            for container in level
            if isinstance(container, Mapping | list | tuple)
            for member in (container.values() if isinstance(container, Mapping) else container)
        ]
        if not level:
            return
    raise AlignmentError(f"{name}: nested deeper than {MOST_NESTED} objects and lists")


def unpadded_arguments(calls: Sequence[StoredCall], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the arguments of a conversation's calls without padding.

    A null is padding if the tool's schema does not have its key or does not allow null there. In a conversation with
    padding, a null for an optional argument is padding too. An argument of another tool that has no value but nulls
    counts as null.

    Args:
        calls: The calls in order.
        tools: The tools in OpenAI's format. A null is padding for a tool that is not listed. None: the tools are
            unknown, and the calls alone show padding, by a null for a key that only other tools have values for.
    """
    if tools is None:
        schemas = _schemas_of_calls(calls)
    else:
        functions = [cast(Schema, tool.get("function") or tool) for tool in tools]
        schemas = {str(fields.get("name")): cast(Schema, fields.get("parameters") or {}) for fields in functions}
    unknown: Schema | None = None if tools is None else {"properties": {}, "additionalProperties": False}
    call_schemas = [schemas.get(call.name, unknown) for call in calls]
    is_padded = any(
        schema is not None and _has_padding(call.arguments, schema)
        for call, schema in zip(calls, call_schemas, strict=True)
    )
    if not is_padded:
        return [dict(call.arguments) for call in calls]
    return [
        _unpadded_value(call.arguments, schema or {}) or {} for call, schema in zip(calls, call_schemas, strict=True)
    ]


def unpadded_messages(messages: Sequence[Any], tools: Sequence[Mapping[str, Any]] | None) -> list[Any]:
    """Return messages with the arguments of calls that are stored as objects without padding; see above.

    A call is in OpenAI's form, or its function alone. Other values stay unchanged.

    Raises:
        AlignmentError: a message is nested too deeply.
    """
    check_nesting(messages, "messages")
    stored = [
        (index, number, call)
        for index, message in enumerate(messages)
        if isinstance(message, Mapping) and isinstance(message.get("tool_calls"), list)
        for number, call in enumerate(cast(list[Any], message["tool_calls"]))
        if isinstance(call, Mapping)
    ]
    functions = [cast(Mapping[str, Any], call.get("function") or call) for _, _, call in stored]
    objects = [isinstance(function.get("arguments"), Mapping) for function in functions]
    calls = [
        StoredCall(str(function.get("name")), function["arguments"])
        for function, is_object in zip(functions, objects, strict=True)
        if is_object
    ]
    arguments = iter(unpadded_arguments(calls, tools))
    unpadded: list[Any] = list(messages)
    for (index, number, call), function, is_object in zip(stored, functions, objects, strict=True):
        if is_object:
            message_calls = [*unpadded[index]["tool_calls"]]
            message_calls[number] = {**call, "function": {**function, "arguments": next(arguments)}}
            unpadded[index] = {**unpadded[index], "tool_calls": message_calls}
    return unpadded


def _schemas_of_calls(calls: Sequence[StoredCall]) -> dict[str, Schema]:
    """Return a schema of each tool that has the keys for which a call has a value, or which only this tool has."""
    valued: dict[str, set[str]] = {}
    for call in calls:
        valued.setdefault(call.name, set()).update(key for key, value in call.arguments.items() if not is_null(value))
    schemas: dict[str, Schema] = {}
    for name in valued:
        foreign = {key for tool, keys in valued.items() if tool != name for key in keys} - valued[name]
        keys = {key for call in calls if call.name == name for key in call.arguments} - foreign
        schemas[name] = {"properties": {key: {} for key in keys}}
    return schemas


def is_null(value: Any) -> bool:
    """Return whether a value is null, or an object of nulls only, as some writers store a null object."""
    return value is None or (isinstance(value, Mapping) and bool(value) and all(map(is_null, value.values())))


# ---------------------------------------------------------------------------------------------------------- arguments


def _properties(schema: Schema) -> Mapping[str, Any] | None:
    """Return the properties of a schema and of its alternatives; None if it lists none, so any key is allowed."""
    listed: dict[str, Any] = {}
    for option in _options(schema):
        if isinstance(properties := option.get("properties"), Mapping):
            listed |= properties
    is_closed = schema.get("additionalProperties") is False
    return listed if listed or is_closed else None


def _options(schema: Schema) -> Iterator[Schema]:
    yield schema
    for union in _UNIONS:
        for option in cast(Iterable[Any], schema.get(union) or ()):
            if isinstance(option, Mapping):
                yield from _options(cast(Schema, option))


def _allows_null(schema: Any) -> bool:
    """Return whether a schema names null explicitly."""
    if not isinstance(schema, Mapping):
        return False
    for option in _options(cast(Schema, schema)):
        kind: Any = option.get("type")
        if kind == "null" or (isinstance(kind, list) and "null" in kind) or option.get("nullable") is True:
            return True
        if isinstance(option.get("enum"), list) and None in option["enum"]:
            return True
    return False


def _has_padding(value: Any, schema: Schema) -> bool:
    """Return whether an object holds a null where its schema has no such key or does not allow null."""
    if isinstance(value, list):
        items = _items(schema)
        return any(_has_padding(item, items) for item in cast(list[Any], value))
    properties = _properties(schema)
    if not isinstance(value, Mapping) or properties is None:
        return False
    for key, member in cast(Mapping[str, Any], value).items():
        member_schema: Any = properties.get(key)
        if (
            is_null(member)
            if key not in properties
            else member is None and bool(member_schema) and not _allows_null(member_schema)
        ):
            return True
        if isinstance(member_schema, Mapping) and _has_padding(member, cast(Schema, member_schema)):
            return True
    return False


def _unpadded_value(value: Any, schema: Schema) -> Any:
    if isinstance(value, list):
        items = _items(schema)
        return [_unpadded_value(item, items) for item in cast(list[Any], value)]
    if not isinstance(value, Mapping):
        return value
    properties = _properties(schema) or {}
    required = {key for option in _options(schema) for key in cast(Sequence[str], option.get("required") or ())}
    unpadded: dict[str, Any] = {}
    for key, member in cast(Mapping[str, Any], value).items():
        member_schema: Any = properties.get(key)
        if is_null(member) and not (key in required and _allows_null(member_schema)):
            continue
        unpadded[key] = _unpadded_value(
            member, cast(Schema, member_schema) if isinstance(member_schema, Mapping) else {}
        )
    return unpadded


def _items(schema: Schema) -> Schema:
    items = next((option["items"] for option in _options(schema) if isinstance(option.get("items"), Mapping)), {})
    return cast(Schema, items)


# -------------------------------------------------------------------------------------------------------------- schemas


def _is_padded_schema(value: Any, *, has_names: bool = False) -> bool:
    """Return whether a tool or a schema has a null as padding; the keys of `properties` are names (`has_names`)."""
    if isinstance(value, list):
        return any(map(_is_padded_schema, cast(list[Any], value)))
    if not isinstance(value, Mapping):
        return False
    for key, member in cast(Mapping[str, Any], value).items():
        if member is None and (has_names or key not in _NULLABLE):
            return True
        is_schema = has_names or key not in _VALUES
        if is_schema and _is_padded_schema(member, has_names=key == "properties" and not has_names):
            return True
    return False


def _unpadded_schema(value: Any, *, has_names: bool = False) -> Any:
    if isinstance(value, list):
        return [_unpadded_schema(item) for item in cast(list[Any], value)]
    if not isinstance(value, Mapping):
        return value
    unpadded: dict[str, Any] = {}
    for key, member in cast(Mapping[str, Any], value).items():
        holds_names = key == "properties" and not has_names
        if not is_null(member):
            is_value = key in _VALUES and not has_names
            unpadded[key] = member if is_value else _unpadded_schema(member, has_names=holds_names)
        elif holds_names:
            unpadded[key] = {}
        elif key == "default" and not has_names and _allows_null(value):
            unpadded[key] = None
    return unpadded
