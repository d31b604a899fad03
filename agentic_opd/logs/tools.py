"""Tools in the forms of OpenAI, Anthropic, Gemini, Bedrock and MCP -> tools in OpenAI's chat form. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from agentic_opd.core.columnar import check_nesting, is_padded, unpadded_tools
from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.text import read_json

_SCHEMA_FIELDS = ("parameters", "input_schema", "inputSchema", "parametersJsonSchema", "parameters_json_schema")
"""Fields of a function's JSON schema: OpenAI's, Anthropic's, MCP's and Bedrock's, Gemini's."""
_PLAIN_FIELDS = ("name", "description", "strict")
"""Fields of a function that chat templates may read, beside its schema."""
_SCHEMA_KEYS = ("type", "properties", "$ref", "anyOf", "oneOf", "allOf", "additionalProperties", "required", "$schema")
_UNREAD_FIELDS = ("function", "annotations", "cache_control", "output_schema", "outputSchema", "response", "returns")
"""Objects in a function that are not the schema of its arguments."""
_GEMINI_LISTS = ("function_declarations", "functionDeclarations")


def from_text(value: Any, name: str) -> Any:
    """Return the value of JSON text; other values are unchanged.

    Raises:
        AlignmentError: the text is not JSON, or the value is nested too deeply; the error names the field `name`.
    """
    if isinstance(value, str):
        try:
            value = read_json(value)
        except (ValueError, RecursionError) as error:
            raise AlignmentError(f"{name}: a text that is not JSON: {error}") from error
    check_nesting(value, name)
    return value


def plain_tools(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Read the tools of a conversation from `tools` or the legacy `functions`; an empty list without them.

    Padding of columnar files is removed from tools that are not JSON text.

    Raises:
        AlignmentError: a tool can't be read, or has no form that the policy's chat template could show; the error
            names the field (`tools[1]`).
    """
    name = _field_of_tools(fields)
    tools = from_text(fields.get(name) or [], name)
    if not isinstance(tools, list):
        raise AlignmentError(f"{name}: expected a list of objects, got {type(tools).__name__}")
    listed = cast(list[Any], tools)
    if has_padded_tools(fields):
        listed = unpadded_tools(listed)
    declared = (
        function
        for index, tool in enumerate(listed)
        for function in _declared(from_text(tool, f"{name}[{index}]"), f"{name}[{index}]")
    )
    return [_chat_tool(tool, where) for where, tool in declared]


def has_padded_tools(fields: Mapping[str, Any]) -> bool:
    """Return whether the tools of a conversation hold padding of columnar files; JSON text holds none."""
    tools = fields.get(_field_of_tools(fields))
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in cast(list[Any], tools)):
        return False
    check_nesting(tools, "tools")
    return is_padded(cast(list[Mapping[str, Any]], tools))


def _field_of_tools(fields: Mapping[str, Any]) -> str:
    return "tools" if fields.get("tools") else "functions"


def _declared(tool: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the tool, or the functions that Gemini's tool declares, each with its place."""
    listed = [name for name in _GEMINI_LISTS if isinstance(tool, Mapping) and isinstance(tool.get(name), list)]
    if not listed:
        yield where, tool
    for name in listed:
        for index, function in enumerate(cast(list[Any], tool[name])):
            yield f"{where}.{name}[{index}]", _lower_types(function)


def _chat_tool(tool: Any, where: str) -> dict[str, Any]:
    wrapper = _without_nulls(tool)
    function = _without_nulls(wrapper.get("function", wrapper.get("toolSpec", wrapper)))
    kind: Any = wrapper.get("type")
    if kind not in (None, "function", "custom") or (kind == "custom" and not any(map(function.get, _SCHEMA_FIELDS))):
        raise AlignmentError(
            f"{where}.type: {kind!r:.40} is a tool of its provider, expected a function with a JSON schema in "
            "parameters; leave the tool out, or write it so"
        )
    if not isinstance(function.get("name"), str):
        raise AlignmentError(f"{where}: expected an object of a function with a name, got {tool!r:.80}")
    field = next((field for field in _SCHEMA_FIELDS if field in function), None)
    foreign = [key for key, value in function.items() if isinstance(value, Mapping) and key not in _UNREAD_FIELDS]
    if field is None and foreign:
        raise AlignmentError(f"{where}.{foreign[0]}: expected the JSON schema of the arguments in parameters")
    schema = {} if field is None else {"parameters": _schema(function[field], f"{where}.{field}")}
    if "function" in wrapper and field in (None, "parameters"):
        return {**wrapper, "function": function | schema}
    return {"type": "function", "function": {key: function[key] for key in _PLAIN_FIELDS if key in function} | schema}


def _without_nulls(value: Any) -> dict[str, Any]:
    """Return an object without the fields that are null; empty for anything else."""
    members = cast(Mapping[str, Any], value).items() if isinstance(value, Mapping) else ()
    return {key: member for key, member in members if member is not None}


def _schema(schema: Any, where: str) -> Any:
    """Return the JSON schema of a function's arguments; Bedrock's is in `json`, and it may be JSON text."""
    schema = from_text(schema, where)
    if isinstance(schema, Mapping) and set(cast(Mapping[str, Any], schema)) == {"json"}:
        schema = schema["json"]
    if isinstance(schema, Mapping) and _is_argument_map(cast(Mapping[str, Any], schema)):
        return _schema_of_arguments(cast(Mapping[str, Mapping[str, Any]], schema))
    if not isinstance(schema, Mapping) or (schema and not any(key in schema for key in _SCHEMA_KEYS)):
        raise AlignmentError(
            f"{where}: expected the JSON schema of an object ({{type: object, properties: ...}}), got {schema!r:.80}"
        )
    return cast(Mapping[str, Any], schema)


_PYTHON_TYPES = {
    **{"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object"},
    **dict.fromkeys(("list", "tuple", "set", "array"), "array"),
    **{name: name for name in ("string", "integer", "number", "boolean", "object")},
}
"""Python's name of a type -> JSON schema's."""


def _is_argument_map(schema: Mapping[str, Any]) -> bool:
    """Return whether an object is the arguments by name, each with a type in text, as APIGen and xLAM write them."""
    return bool(schema) and all(
        isinstance(argument, Mapping)
        and isinstance(argument.get("type"), str)
        and not {"properties", "items"} & argument.keys()
        for argument in schema.values()
    )


def _schema_of_arguments(arguments: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the JSON schema of an object with these arguments; a type that JSON schema does not have is left out."""
    properties, required = dict[str, Any](), list[str]()
    for name, argument in arguments.items():
        written = str(argument["type"]).lower()
        inner = written.removeprefix("optional[")
        kind = _PYTHON_TYPES.get(inner.partition(",")[0].partition("[")[0].strip(" ]"))
        properties[name] = {key: value for key, value in argument.items() if key != "type"}
        if kind is not None:
            properties[name] = {"type": kind} | properties[name]
        if "default" not in argument and "optional" not in written:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required}


def _lower_types(schema: Any) -> Any:
    """Return a Gemini schema with JSON schema's names of types, such as `object` for `OBJECT`."""
    if isinstance(schema, list):
        return [_lower_types(item) for item in cast(list[Any], schema)]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value.lower() if key == "type" and isinstance(value, str) else _lower_types(value)
        for key, value in cast(Mapping[str, Any], schema).items()
    }
