"""A grammar of tool calls in the model's own format, or of an answer by a schema, as vLLM's structural tags. Pure.

The format is taken from the renderer: a call that it writes, with its JSON arguments replaced by the tool's schema.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from agentic_opd.core.errors import RendererError
from agentic_opd.core.text import control_tokens
from agentic_opd.core.types import Message
from agentic_opd.gateway.errors import ClientError
from agentic_opd.gateway.request import ToolChoice
from agentic_opd.rollout.chat_format import ChatFormat

_NAME, _ARGUMENTS = "name_of_tool", {"argument": "mark"}
_BETWEEN_CALLS = "\n"
_THOUGHT, _THOUGHT_END = "<think>", "</think>"
_MAX_WHITESPACE = 16
"""Whitespace between two parts of JSON (characters): indented arguments fit, and a weak model comes to an end."""


class CallForm(NamedTuple):
    """How a model writes a call: three texts around the tool's name and the JSON arguments.

    `thoughts` is an empty reasoning as it is written before the first call, or empty. `marks` are the ids of the
    control tokens in all texts: parsers read these tokens, and not the same characters in other tokens.
    """

    thoughts: str
    before_name: str
    before_arguments: str
    end: str
    marks: Mapping[str, int]


def call_form(chat: ChatFormat) -> CallForm | None:
    """Return the form of calls; None if this model does not write their arguments as JSON."""
    call = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": json.dumps(_ARGUMENTS)}}
    turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        ids = chat.written([{"role": "user", "content": "u"}, turn])
    except RendererError:
        return None
    text = chat.text([token for token in ids if token not in chat.stop_token_ids])
    for spelled in (json.dumps(_ARGUMENTS), json.dumps(_ARGUMENTS, separators=(",", ":"))):
        begin, arguments, end = text.partition(spelled)
        before, name, behind = begin.partition(_NAME)
        if arguments and name:
            marks = {mark: token for token, mark in control_tokens(chat.tokenizer).items() if token in ids}
            call = before.rpartition(_THOUGHT_END)[2].lstrip()
            return CallForm(before.removesuffix(call), call, behind, end.rstrip(), marks)
    return None


def call_grammar(form: CallForm | None, tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> str:
    """Return the structural tag by which an answer calls tools as `choice` demands.

    `required` and `named` give calls and nothing else, but for reasoning; without them, calls may follow a text, and
    the first one ends an answer that may contain one only.

    Raises:
        ClientError: 400, the model's calls have no `form`.
    """
    if form is None:
        field = "tool_choice" if choice.is_forced or choice.allowed is not None else "parallel_tool_calls"
        raise ClientError(400, f"{field}: this model does not write the arguments of its calls as JSON", field)
    if choice.is_forced:
        return _structural_tag(_sequence([*_thoughts(form), _only_calls(form, tools, choice)]))
    return _structural_tag(_text_or_call(form, tools, choice))


def answer_or_calls(
    form: CallForm, tools: Sequence[Mapping[str, Any]], choice: ToolChoice, schema: Mapping[str, Any]
) -> str:
    """Return the structural tag of an answer that is JSON by `schema` or calls of tools, without other text."""
    answer = {"type": "or", "elements": [_json_by(schema), _only_calls(form, tools, choice)]}
    return _structural_tag(_sequence([*_thoughts(form), answer]))


def answer_schema(grammar: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the JSON schema of vLLM's `structured_outputs`; None if it is of another kind, such as a regex."""
    if grammar is None or len(grammar) != 1:
        return None
    if grammar.get("json_object"):
        return {"type": "object"}
    schema = grammar.get("json")
    return schema if isinstance(schema, Mapping) else None


def _thoughts(form: CallForm) -> list[dict[str, Any]]:
    """Return the part of the model's reasoning, which it may leave out where its prompt has not begun it."""
    if _THOUGHT_END not in form.marks:
        return []
    behind, end = form.thoughts.partition(_THOUGHT_END)[2], form.marks[_THOUGHT_END]
    rest = [{"type": "any_tokens", "exclude_tokens": [end]}, {"type": "token", "token": end}, _text(behind)]
    if _THOUGHT not in form.marks:
        return rest
    return [{"type": "optional", "content": _sequence([{"type": "token", "token": form.marks[_THOUGHT]}, *rest])}]


def _only_calls(form: CallForm, tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> dict[str, Any]:
    call = {"type": "or", "elements": [_sequence(parts) for parts in _calls(form, tools, choice)]}
    if choice.kind == "named" or not choice.is_parallel:
        return call
    more = {"type": "star", "content": _sequence([_text(_BETWEEN_CALLS), call])}
    return _sequence([call, more])


def _text_or_call(form: CallForm, tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> dict[str, Any]:
    """Return the format of any text with calls after it."""
    calls = _calls(form, tools, choice)
    begins_with_mark = calls[0][0]["type"] == "token"
    if begins_with_mark:
        triggered = {"type": "token_triggered_tags", "trigger_tokens": [calls[0][0]["token"]]}
    else:
        triggered = {"type": "triggered_tags", "triggers": [form.before_name]}
    tags = [
        {"type": "tag", "begin": first if begins_with_mark else first["value"], "content": _sequence(rest), "end": ""}
        for first, *rest in calls
    ]
    return {**triggered, "tags": tags, "stop_after_first": not choice.is_parallel}


def _calls(form: CallForm, tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> list[list[dict[str, Any]]]:
    """Return the parts of a call of each allowed tool: texts, control tokens and its arguments."""
    return [
        [
            *_parts(f"{form.before_name}{tool['name']}{form.before_arguments}", form.marks),
            _json_by(tool.get("parameters") or {"type": "object"}, without=form.marks),
            *_parts(form.end, form.marks),
        ]
        for tool in (tool["function"] for tool in tools)
        if choice.allows(tool["name"])
    ]


def _parts(text: str, marks: Mapping[str, int]) -> list[dict[str, Any]]:
    """Split `text` into its control tokens and the texts between them."""
    longest_first = sorted(marks, key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if marks else [text]
    return [{"type": "token", "token": marks[piece]} if piece in marks else _text(piece) for piece in pieces if piece]


def _json_by(schema: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """Return the format of JSON by `schema`; its strings must not contain the texts `without`.

    XGrammar can't exclude texts and bound a string's length at once: a schema with such a bound excludes nothing.
    """
    form = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MAX_WHITESPACE}
    has_bounds = re.search('"(min|max)Length"', json.dumps(schema))
    return {**form, "excludes": sorted(without)} if without and not has_bounds else form


def _sequence(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [*parts]}


def _text(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _structural_tag(form: Mapping[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": form})
