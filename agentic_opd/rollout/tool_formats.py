"""Tool calls as text: formats of models, by the names of vLLM's tool parsers. Pure.

In: the text of a turn, including special tokens. Out: its content and a `ParsedToolCall` for each call, broken ones
included. Formats do not depend on token ids, so they work for any tokenizer, even if `<tool_call>` is several tokens.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from math import isfinite
from textwrap import dedent
from typing import Any, NamedTuple, cast

from renderers import ParsedToolCall, ToolCallParseStatus

from agentic_opd.core.syntax import parse_expression, parse_module
from agentic_opd.core.text import read_json

_JSON = json.JSONDecoder()


class Read(NamedTuple):
    """A turn's text without its calls, and its calls."""

    content: str
    calls: list[ParsedToolCall]


Reader = Callable[[str], Read]
Writer = Callable[[str, Mapping[str, Any]], str]
"""Writes a call of a tool, by its name, with arguments."""


def instructions(write: Writer, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the tool description for the system prompt of a model whose chat template does not support tools."""
    specifications = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    example = write("NAME", {"ARGUMENT": "VALUE"})
    return (
        f"# Tools\n\nYou can call these tools:\n{specifications}\n\nTo call a tool, write its name and its arguments "
        f"like this:\n{example}\nThe result is the next message, in {RESULT_OPEN} and {RESULT_CLOSE}."
    )


RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"


def written_result(content: str) -> str:
    """Return a tool's result as the text of a user message."""
    return f"{RESULT_OPEN}\n{content}\n{RESULT_CLOSE}"


# ------------------------------------------------------------------------------------------------------- JSON formats


def _json_after(marker: str, close: str = "") -> Reader:
    """Return a parser of an object or a list of objects after each `marker`, a pattern such as `<tool_call>`."""
    opening = re.compile(marker)

    def read(text: str) -> Read:
        match = opening.search(text)
        content = text if match is None else text[: match.start()]
        calls: list[ParsedToolCall] = []
        while match is not None:
            parsed, end = _json_calls(text, match.end(), close)
            calls += parsed
            match = opening.search(text, end)
        return Read(content, calls)

    return read


def _json_calls(text: str, start: int, close: str = "") -> tuple[list[ParsedToolCall], int]:
    """Return the calls of the JSON value at `start`, and the value's end."""
    try:
        value, end = _JSON.raw_decode(text, _skip_space(text, start))
    except (ValueError, RecursionError):
        value, end = None, start
    rest = _skip_space(text, end)
    if value is not None and (not close or rest == len(text) or text.startswith(close, rest)):
        return [_json_call(entry) for entry in (value if isinstance(value, list) else [value])], end
    close_start = text.find(close, start) if close else len(text)
    end = len(text) if close_start < 0 else close_start
    status = ToolCallParseStatus.UNCLOSED_BLOCK if close_start < 0 else ToolCallParseStatus.INVALID_JSON
    return [ParsedToolCall(raw=text[start:end].strip(), status=status)], end


def _json_call(value: Any) -> ParsedToolCall:
    raw = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict):
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.MALFORMED_STRUCTURE)
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return ParsedToolCall(raw=raw, arguments=arguments, status=ToolCallParseStatus.MISSING_NAME)
    return ParsedToolCall(raw=raw, name=name, arguments=arguments)


_PYTHON_TAG = "<|python_tag|>"
_MAX_PASSES = 16
"""Number of times that a text may be read as JSON: objects inside an object that is not a call are tried as calls."""
_BEGUN_OBJECT = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"(?:name|parameters|arguments)"\s*:')


def _bare_json(text: str) -> Read:
    """Parse objects in the text, as Llama 3 writes them: `{"name": ..., "parameters": {...}}; {...}`."""
    tag = text.find(_PYTHON_TAG)
    position, begin = max(tag, 0), tag
    calls: list[ParsedToolCall] = []
    budget = _MAX_PASSES * len(text)
    while budget >= 0 and (match := _BEGUN_OBJECT.search(text, position)) is not None:
        (call,), end = _json_calls(text, match.start())
        if not _is_bare_call(call):
            position = match.end()
            budget -= end - position
            continue
        begin = begin if begin >= 0 else match.start()
        calls.append(call)
        position = end
    return Read(text[:begin], calls) if calls else Read(text.replace(_PYTHON_TAG, ""), [])


def _is_bare_call(call: ParsedToolCall) -> bool:
    """Return whether an object without a mark is a call or a broken call; an answer may be JSON with a name as well."""
    if call.status is ToolCallParseStatus.INVALID_JSON:
        return True
    keys = _JSON.decode(call.raw).keys()
    return call.name is not None and (not keys.isdisjoint(("parameters", "arguments")) or keys <= {"type", "name"})


_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_NAME = re.compile(r"\s*([\w.\-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")


def _mistral(text: str) -> Read:
    """Parse `[TOOL_CALLS][{...}]`, and the `[TOOL_CALLS]name{...}` of later tokenizers."""
    content, *blocks = text.split(_MISTRAL)
    calls: list[ParsedToolCall] = []
    for block in blocks:
        named = _MISTRAL_NAME.match(block)
        if named is None:
            calls += _json_calls(block, 0)[0]
            continue
        try:
            arguments, _ = _JSON.raw_decode(block, named.end())
            calls.append(ParsedToolCall(raw=block.strip(), name=named[1], arguments=arguments))
        except (ValueError, RecursionError):
            calls.append(ParsedToolCall(raw=block.strip(), name=named[1], status=ToolCallParseStatus.INVALID_JSON))
    return Read(content, calls)


def _xlam(text: str) -> Read:
    """Parse a list of objects: the whole text, or the text after one of the marks that xLAM models write before it."""
    if _BEGUN_LIST.match(text):
        return Read("", _json_calls(text, 0)[0])
    return _after_xlam_mark(text)


_BEGUN_LIST = re.compile(r"\s*\[\s*\{")
_after_xlam_mark = _json_after(r"(?:<tool_call>|\[TOOL_CALLS\]|```(?:json)?|</think>)\s*(?=\[\s*\{)")


def _skip_space(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


# ----------------------------------------------------------------------------------------------------- Python's formats

_BEGUN_CALL = re.compile(r"[A-Za-z_][\w.]*\(")
_CONSTANTS = {"null": None, "true": True, "false": False}


def _pythonic(open_mark: str = "", close_mark: str = "") -> Reader:
    """Return a parser of `[name(argument=value), ...]`: the whole text, or the text between two marks.

    Between marks, the list may also be one call per line without brackets.
    """

    def read(text: str) -> Read:
        content, mark, body = text.partition(open_mark) if open_mark else ("", "", text)
        if not mark:
            content, body = "", text
        body = dedent(body.partition(close_mark)[0] if close_mark else body).strip()
        is_list = body.startswith("[")
        if not (mark or is_list) or not _BEGUN_CALL.match(body, _skip_space(body, int(is_list))):
            return Read(text, [])
        return Read(content, _python_calls(body))

    return read


_PYTHON_STRING = re.compile(r"'(?:[^'\\]|\\.)*+(?:'|\Z)|\"(?:[^\"\\]|\\.)*+(?:\"|\Z)", re.DOTALL)
"""Matches a string, closed or not: searching for the end of each unclosed one would take quadratic time."""
_MAX_PYTHON_VALUES = 4_000
"""Number of signs between values, outside of strings, that take 50 ms to parse on the event loop."""


def _python_calls(body: str) -> list[ParsedToolCall]:
    signs = _PYTHON_STRING.sub("", body)
    if sum(map(signs.count, ",([{=")) > _MAX_PYTHON_VALUES:
        return [ParsedToolCall(raw=body, status=ToolCallParseStatus.MALFORMED_STRUCTURE)]
    try:
        lines = parse_module(body).body
        return [_python_call(node) for line in lines for node in _listed(line)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [ParsedToolCall(raw=body, status=ToolCallParseStatus.MALFORMED_STRUCTURE)]


def _listed(line: ast.stmt) -> Sequence[ast.expr]:
    """Return the elements of a list, or the one expression of a line; raise ValueError for a statement."""
    if not isinstance(line, ast.Expr):
        raise ValueError("a statement is no call")
    return line.value.elts if isinstance(line.value, ast.List | ast.Tuple) else [line.value]


def _python_call(node: ast.expr) -> ParsedToolCall:
    raw = ast.unparse(node)
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.MALFORMED_STRUCTURE)
    arguments = {str(keyword.arg): _python_value(keyword.value) for keyword in node.keywords}
    return ParsedToolCall(raw=raw, name=ast.unparse(node.func), arguments=arguments)


def _python_value(node: ast.expr) -> Any:
    """Return a literal's value; raise ValueError for anything else."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List):
        return [_python_value(value) for value in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else ast.literal_eval(key) for key in node.keys]
        return {str(key): _python_value(value) for key, value in zip(keys, node.values, strict=True)}
    return ast.literal_eval(node)


# ------------------------------------------------------------------------------------------- arguments as text


def _json_value(text: str) -> Any:
    """Return a JSON text's value; raise ValueError or RecursionError for anything else, also for NaN and 1e999."""
    value = read_json(text)
    json.dumps(value, allow_nan=False)
    return value


def _null(text: str) -> None:
    if text.lower() != "null":
        raise ValueError("not null")


def _number(text: str) -> int | float:
    value = float(text)
    if not isfinite(value):
        raise ValueError("JSON has no such number")
    return int(value) if value == int(value) else value


def _boolean(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]


_READ_TYPE: dict[str, Callable[[str], Any]] = {
    "null": _null,
    "integer": int,
    "number": _number,
    "boolean": _boolean,
    "object": _json_value,
    "array": _json_value,
    "string": str,
}
"""Type of JSON Schema -> reader of a text; of several declared types, the first that fits in this order is used."""

_TYPE_NAMES = {
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "uint32", "uint64", "long", "short", "unsigned"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double"), "number"),
    **dict.fromkeys(("arr", "list", "sequence"), "array"),
    "bool": "boolean",
    "dict": "object",
}
"""Other languages' names of types -> JSON Schema's."""

_TYPE_OF_VALUE: dict[type, str] = {
    **{type(None): "null", bool: "boolean", int: "integer", float: "number"},
    **{str: "string", list: "array", dict: "object"},
}


def _declared_types(schema: Any) -> set[str]:
    """Return the types that a parameter's schema allows, by `type`, `enum`, `anyOf`, `oneOf` and `allOf`.

    Without any of these keywords it is a string, as for vLLM; `const` and `$ref` are ignored.
    """
    if not isinstance(schema, Mapping):
        return {"string"}
    fields = cast(Mapping[str, Any], schema)
    declared = fields.get("type")
    names = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else []
    types = {name for name in cast(list[Any], names) if isinstance(name, str)}
    values = fields.get("enum")
    if isinstance(values, list):
        types |= {_TYPE_OF_VALUE[type(value)] for value in cast(list[Any], values) if type(value) in _TYPE_OF_VALUE}
    for choices in (fields.get(name) for name in ("anyOf", "oneOf", "allOf")):
        for choice in cast(list[Any], choices) if isinstance(choices, list) else ():
            types |= _declared_types(choice)
    return types or {"string"}


def _typed_text(text: str, schema: Any) -> Any:
    """Return a text as a value of one of the types that its schema declares, as most of vLLM's readers do.

    A text that fits no declared type is read as JSON; one that is not JSON, or has no schema, stays a text.
    """
    if not isinstance(schema, Mapping):
        return text
    names = (name.strip().lower() for name in _declared_types(schema))
    types = {_TYPE_NAMES.get(name, name) for name in names}
    for read in (*(read for name, read in _READ_TYPE.items() if name in types), _json_value):
        with suppress(ValueError, KeyError, RecursionError):
            return read(text)
    return text


def _typed_value(value: Any, schema: Any) -> Any:
    """Return a value of a call in JSON with its declared types: `"2"` is 2 if an integer is declared, and 2 is `"2"` if
    a string is, also inside of objects and lists.
    """
    if not isinstance(schema, Mapping):
        return value
    fields = cast(Mapping[str, Any], schema)
    if isinstance(value, dict):
        return _typed_object(cast(dict[str, Any], value), fields.get("properties"))
    if isinstance(value, list):
        return [_typed_value(item, fields.get("items")) for item in cast(list[Any], value)]
    return _typed_text(value if isinstance(value, str) else json.dumps(value), fields)


def _typed_object(values: Mapping[str, Any], properties: Any) -> dict[str, Any]:
    schemas = cast(Mapping[str, Any], properties) if isinstance(properties, Mapping) else {}
    return {key: _typed_value(value, schemas.get(key)) for key, value in values.items()}


def _laguna_value(text: str, schema: Any) -> Any:
    """Return a value as vLLM's reader of Laguna's calls does: JSON, else Python's literal, unless a string is declared.

    That reader passes NaN on and loses the whole call for a set. JSON has neither, so both are texts here.
    """
    if isinstance(schema, Mapping) and cast(Mapping[str, Any], schema).get("type") == "string":
        return text
    return _literal(text.strip())


def _hunyuan_value(text: str, schema: Any) -> Any:
    """Return a value as vLLM's reader of Hunyuan 3's calls does: the declared types in another order than others."""
    fields = cast(Mapping[str, Any], schema) if isinstance(schema, Mapping) else {}
    declared = fields.get("type")
    if isinstance(declared, list):
        options: list[Any] = [{"type": name} for name in cast(list[Any], declared)]
    elif declared is not None:
        options = [fields]
    else:
        options = fields.get("anyOf") or fields.get("oneOf") or [{"type": "string"}]
    names = [option.get("type", "string") if isinstance(option, Mapping) else "string" for option in options]
    types = {_hunyuan_type(name) for name in map(str, names)} - {"null"}
    readers = [read for name, read in _READ_HUNYUAN.items() if name in types]
    if types - {*_READ_HUNYUAN, "string"}:
        readers.append(_json_value)
    for read in (*readers, str if "string" in types else _literal):
        with suppress(ValueError, KeyError, RecursionError):
            return read(text)
    return text


def _hunyuan_number(text: str) -> int | float:
    value = float(text) if {".", "e", "E"} & {*text} else int(text)
    if not isfinite(value):
        raise ValueError("JSON has no such number")
    return value


def _hunyuan_type(name: str) -> str:
    if name in _HUNYUAN_TYPES:
        return _HUNYUAN_TYPES[name]
    if name.lower().startswith(("int", "uint", "long", "short", "unsigned")):
        return "integer"
    return "number" if name.lower().startswith(("num", "float")) else name


_HUNYUAN_TYPES = {
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **{"bool": "boolean", "binary": "boolean", "double": "number", "list": "array", "dict": "object", "map": "object"},
}
_READ_HUNYUAN: dict[str, Callable[[str], Any]] = {
    "boolean": lambda text: {"true": True, "false": False}[text.lower()],
    "integer": int,
    "number": _hunyuan_number,
}


def _literal(text: str) -> Any:
    """Return a text's value as JSON, else as a literal of Python that JSON can write; else the text."""
    with suppress(ValueError, RecursionError):
        return _json_value(text)
    with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _json_value(json.dumps(ast.literal_eval(parse_expression(text.lstrip(" \t")))))
    return text


_CODER_OPEN = re.compile(r"<\s*parameter\s*=\s*+([^<>]*)>")
_MINIMAX_OPEN = re.compile(r"<\s*parameter\s+name\s*=\s*(?:\"([^\"<>]*)\"|'([^'<>]*)'|([^<>\s]+))\s*>")
_PARAMETER_CLOSE = re.compile(r"<\s*/\s*parameter\s*>")
_INVOKE = re.compile(r"<invoke name=.*?(?:</invoke>|\Z)", re.DOTALL)
_GLM_VALUE_OPEN = re.compile(r"\s*<arg_value>")


def _parameters(opening: re.Pattern[str], raw: str) -> Iterator[tuple[str, str]]:
    """Yield names and texts of `<parameter...>text</parameter>`; the next parameter ends one that is not closed."""
    openings = [*opening.finditer(raw)]
    for match, following in zip_longest(openings, openings[1:]):
        end = len(raw) if following is None else following.start()
        closing = _PARAMETER_CLOSE.search(raw, match.end(), end)
        if closing is not None or following is not None:
            name = next(filter(None, match.groups()), "").strip()
            yield name, raw[match.end() : closing.start() if closing else end]


def _coder_arguments(raw: str) -> Iterator[tuple[str, str]]:
    """Yield names and texts of Qwen3-Coder's arguments: a line break on each side belongs to the format."""
    for name, text in _parameters(_CODER_OPEN, raw):
        yield name, text.removeprefix("\n").removesuffix("\n")


def _minimax_arguments(raw: str) -> Iterator[tuple[str, str]]:
    return _parameters(_MINIMAX_OPEN, raw)


def _glm_arguments(raw: str) -> Iterator[tuple[str, str]]:
    """Yield names and texts of `<arg_key>name</arg_key><arg_value>text</arg_value>`."""
    start = raw.find("<arg_key>")
    while start >= 0 and (key_end := raw.find("</arg_key>", start)) >= 0:
        end = key_end + len("</arg_key>")
        value_open = _GLM_VALUE_OPEN.match(raw, end)
        if value_open is not None:
            value_end = raw.find("</arg_value>", value_open.end())
            if value_end < 0:
                return
            yield raw[start + len("<arg_key>") : key_end].strip(), raw[value_open.end() : value_end]
            end = value_end
        start = raw.find("<arg_key>", end)


class _TextArguments(NamedTuple):
    """How a family writes arguments as text, and how vLLM's reader of that family types them."""

    split: Callable[[str], Iterator[tuple[str, str]]]
    value: Callable[[str, Any], Any] = _typed_text


_CODER, _GLM = _TextArguments(_coder_arguments), _TextArguments(_glm_arguments)
_LAGUNA = _TextArguments(_glm_arguments, _laguna_value)

_OF_TEXT_ARGUMENTS: dict[str, _TextArguments] = {
    **dict.fromkeys(("qwen3.5", "qwen3.6", "qwen3.8", "prime-qwen3", "qwen3_coder", "qwen3_xml"), _CODER),
    **dict.fromkeys(("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), _CODER),
    **dict.fromkeys(("glm", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "glm45", "glm47"), _GLM),
    **dict.fromkeys(("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"), _LAGUNA),
    "hy3": _TextArguments(_glm_arguments, _hunyuan_value),
    "minimax-m2": _TextArguments(_minimax_arguments),
}
"""Renderer, or parser of tool calls, whose calls have arguments as text."""

_OF_TYPED_JSON = frozenset(("deepseek-v4", "kimi-k2", "kimi-k2.5", "gemma4", "inkling", "granite", "mistral"))
"""Renderers and parsers of tool calls in JSON whose readers in vLLM change values to the declared types."""


def with_types(
    calls: Sequence[ParsedToolCall], family: str, tools: Sequence[Mapping[str, Any]]
) -> list[ParsedToolCall]:
    """Return calls with their arguments' values as vLLM's reader of this family types them by the tools' schemas.

    The parsers of `renderers` read every value as JSON: a file's content `12` is a number, and a plain text an error.

    Args:
        calls: As a parser of `renderers` or a reader of `FORMATS` returns them.
        family: Name of a renderer, or of a parser of tool calls; the calls of others are returned as they are.
        tools: The tools of the prompt, as functions or in OpenAI's envelope.
    """
    form = _OF_TEXT_ARGUMENTS.get(family)
    if form is not None:
        return [with_declared_types(call, tools, form) for call in _separated(calls)]
    if family not in _OF_TYPED_JSON:
        return [*calls]
    return [_typed_json_call(call, tools, is_gemma=family == "gemma4") for call in calls]


def _typed_json_call(call: ParsedToolCall, tools: Sequence[Mapping[str, Any]], *, is_gemma: bool) -> ParsedToolCall:
    if call.status not in _READABLE or not isinstance(call.arguments, dict):
        return call
    arguments = cast(dict[str, Any], _with_scalars_as_text(call.arguments) if is_gemma else call.arguments)
    return _typed(call, _typed_object(arguments, _properties(call.name, tools)))


def _with_scalars_as_text(value: Any) -> Any:
    """Return a value with its numbers and constants as texts, as vLLM reads Gemma 4's calls before it types them."""
    if isinstance(value, dict):
        return {key: _with_scalars_as_text(item) for key, item in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [_with_scalars_as_text(item) for item in cast(list[Any], value)]
    return value if isinstance(value, str) else json.dumps(value)


def with_declared_types(
    call: ParsedToolCall, tools: Sequence[Mapping[str, Any]], form: _TextArguments | None = None
) -> ParsedToolCall:
    """Return a call whose arguments are written as text with values of the types that its tool declares.

    Without `form`, the text is read as GLM's if it begins an argument as GLM does, else as Qwen3-Coder's.
    """
    if call.status not in _READABLE:
        return call
    if form is None:
        form = _GLM if "<arg_key>" in call.raw.partition("<parameter")[0] else _CODER
    properties = _properties(call.name, tools)
    arguments = {name: form.value(text, properties.get(name)) for name, text in form.split(call.raw)}
    return _typed(call, arguments)


def _typed(call: ParsedToolCall, arguments: dict[str, Any]) -> ParsedToolCall:
    """Return the call with these arguments. It is valid, because a value that is not JSON is a text."""
    is_broken = call.status is ToolCallParseStatus.INVALID_JSON
    return replace(call, arguments=arguments, status=ToolCallParseStatus.OK if is_broken else call.status)


_READABLE = (ToolCallParseStatus.OK, ToolCallParseStatus.INVALID_JSON, ToolCallParseStatus.UNKNOWN_TOOL)


def _separated(calls: Sequence[ParsedToolCall]) -> Iterator[ParsedToolCall]:
    """Yield calls with their own text only: those of one MiniMax block share the block's."""
    invokes: list[str] = []
    block: tuple[int, int] | None = None
    for call in calls:
        if not call.raw.lstrip().startswith("<invoke name="):
            yield call
            continue
        if call.token_span != block or not invokes:
            block, invokes = call.token_span, _INVOKE.findall(call.raw)
        yield replace(call, raw=invokes.pop(0))


def _properties(name: str | None, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the schemas of a tool's parameters by their names; none for an unknown tool."""
    for tool in tools:
        function: Mapping[str, Any] = tool.get("function", tool)
        if function.get("name") == name:
            parameters = function.get("parameters")
            properties = (
                cast(Mapping[str, Any], parameters).get("properties") if isinstance(parameters, Mapping) else None
            )
            return cast(Mapping[str, Any], properties) if isinstance(properties, Mapping) else {}
    return {}


# ----------------------------------------------------------------------------------------------------------- by name


def _hermes_call(name: str, arguments: Mapping[str, Any]) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _bare_call(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


def _python_text(name: str, arguments: Mapping[str, Any]) -> str:
    return f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"


_HERMES = _json_after("<tool_call>", close="</tool_call>")
_IN_TOOL_CALLS = _json_after("<tool_calls>", close="</tool_calls>")

FORMATS: dict[str, Reader] = {
    "hermes": _HERMES,
    "qwen3_json": _HERMES,
    "granite4": _HERMES,
    "ernie45": _HERMES,
    "longcat": _json_after("<longcat_tool_call>", close="</longcat_tool_call>"),
    "granite": _json_after(r"<\|tool_call\|>|<tool_call>"),
    "granite-20b-fc": _json_after("<function_call>"),
    "internlm": _json_after(r"<\|action_start\|><\|plugin\|>", close="<|action_end|>"),
    "jamba": _IN_TOOL_CALLS,
    "hunyuan_a13b": _IN_TOOL_CALLS,
    "phi4_mini_json": _json_after(r"functools(?=\[)"),
    "xlam": _xlam,
    "llama3_json": _bare_json,
    "llama4_json": _bare_json,
    "mistral": _mistral,
    "pythonic": _pythonic(),
    "llama4_pythonic": _pythonic("<|python_start|>", "<|python_end|>"),
    "lfm2": _pythonic("<|tool_call_start|>", "<|tool_call_end|>"),
    "olmo3": _pythonic("<function_calls>", "</function_calls>"),
}
"""Name -> reader of the format."""

OF_RENDERERS = {
    "qwen3_coder": "qwen3.5",
    "qwen3_xml": "qwen3.5",
    "glm45": "glm",
    "glm47": "glm",
    "deepseek_v3": "deepseek-v3",
}
"""vLLM's name -> parser of `renderers`, which finds the format's tags by their token ids."""

WRITTEN: dict[str, Writer] = {"hermes": _hermes_call, "llama3_json": _bare_call, "pythonic": _python_text}
"""Formats that `tool_format: text` can write."""
