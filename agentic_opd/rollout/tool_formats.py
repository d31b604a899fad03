"""Tool calls as text: formats of models, by the names of vLLM's tool parsers. Pure.

In: the text of a turn, including special tokens. Out: its content and a `ParsedToolCall` for each call, broken ones
included. Formats do not depend on token ids, so they work for any tokenizer, even if `<tool_call>` is several tokens.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from textwrap import dedent
from typing import Any, NamedTuple

from renderers import ParsedToolCall, ToolCallParseStatus

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
    shown = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    example = write("NAME", {"ARGUMENT": "VALUE"})
    return (
        f"# Tools\n\nYou can call these tools:\n{shown}\n\nTo call a tool, write its name and its arguments like "
        f"this:\n{example}\nThe result is the next message, in {RESULT_OPEN} and {RESULT_CLOSE}."
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
        found = opening.search(text)
        content = text if found is None else text[: found.start()]
        calls: list[ParsedToolCall] = []
        while found is not None:
            made, end = _json_calls(text, found.end(), close)
            calls += made
            found = opening.search(text, end)
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
        return [_json_call(one) for one in (value if isinstance(value, list) else [value])], end
    at = text.find(close, start) if close else len(text)
    end = len(text) if at < 0 else at
    status = ToolCallParseStatus.UNCLOSED_BLOCK if at < 0 else ToolCallParseStatus.INVALID_JSON
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
_BEGUN_OBJECT = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"(?:name|parameters|arguments)"\s*:')


def _bare_json(text: str) -> Read:
    """Parse objects in the text, as Llama 3 writes them: `{"name": ..., "parameters": {...}}; {...}`."""
    tag = text.find(_PYTHON_TAG)
    at, begin = max(tag, 0), tag
    calls: list[ParsedToolCall] = []
    while (found := _BEGUN_OBJECT.search(text, at)) is not None:
        (call,), end = _json_calls(text, found.start())
        if not _is_bare_call(call):
            at = found.end()
            continue
        begin = begin if begin >= 0 else found.start()
        calls.append(call)
        at = end
    return Read(text[:begin], calls) if calls else Read(text.replace(_PYTHON_TAG, ""), [])


def _is_bare_call(call: ParsedToolCall) -> bool:
    """Return whether an object without a mark is a call, also a broken one: an answer may be JSON with a name too."""
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


def _python_calls(body: str) -> list[ParsedToolCall]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Invalid escape sequences cause warnings.
            lines = ast.parse(body).body
        return [_python_call(one) for line in lines for one in _listed(line)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [ParsedToolCall(raw=body, status=ToolCallParseStatus.MALFORMED_STRUCTURE)]


def _listed(line: ast.stmt) -> Sequence[ast.expr]:
    """Return the elements of a list, or the one expression of a line; raise ValueError for a statement."""
    if not isinstance(line, ast.Expr):
        raise ValueError("a statement is no call")
    return line.value.elts if isinstance(line.value, ast.List | ast.Tuple) else [line.value]


def _python_call(node: ast.expr) -> ParsedToolCall:
    raw = ast.unparse(node)
    if not isinstance(node, ast.Call) or node.args or any(one.arg is None for one in node.keywords):
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.MALFORMED_STRUCTURE)
    arguments = {str(one.arg): _python_value(one.value) for one in node.keywords}
    return ParsedToolCall(raw=raw, name=ast.unparse(node.func), arguments=arguments)


def _python_value(node: ast.expr) -> Any:
    """Return a literal's value; raise ValueError for anything else."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List):
        return [_python_value(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else ast.literal_eval(key) for key in node.keys]
        return {str(key): _python_value(one) for key, one in zip(keys, node.values, strict=True)}
    return ast.literal_eval(node)


# -------------------------------------------------------------------------------------------------- values as text

_ARGUMENT = re.compile(
    r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>|<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL
)


def with_declared_types(call: ParsedToolCall, tools: Sequence[Mapping[str, Any]]) -> ParsedToolCall:
    """Return a call of Qwen3-Coder's or GLM's format with texts as they were written, and other values read as JSON.

    The parsers of `renderers` read every value as JSON: a file's content `12` is a number, and a plain text an error.
    """
    if call.status not in (ToolCallParseStatus.OK, ToolCallParseStatus.INVALID_JSON):
        return call
    functions = [tool.get("function", tool) for tool in tools]
    declared = next((one.get("parameters") for one in functions if one.get("name") == call.name), None) or {}
    arguments: dict[str, Any] = {}
    for coder_key, coder_text, glm_key, glm_text in _ARGUMENT.findall(call.raw):
        key, text = (coder_key or glm_key).strip(), coder_text or glm_text
        arguments[key] = text
        if (declared.get("properties") or {}).get(key, {}).get("type") != "string":
            with suppress(ValueError, RecursionError):
                arguments[key] = read_json(text)
    return replace(call, arguments=arguments, status=ToolCallParseStatus.OK)


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

OF_TEXT_VALUES = ("qwen3.5", "glm")
"""Parsers of `renderers` for formats that write each argument as text; see `with_declared_types`."""

WRITTEN: dict[str, Writer] = {"hermes": _hermes_call, "llama3_json": _bare_call, "pythonic": _python_text}
"""Formats that `tool_format: text` can write."""
