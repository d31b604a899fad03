"""A grammar of tool calls in the model's own format, or of an answer by a schema, as vLLM's structural tags. Pure.

The format is taken from the renderer: a call that it writes, with its JSON arguments replaced by the tool's schema.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agentic_opd.core.errors import RendererError
from agentic_opd.core.types import Message
from agentic_opd.gateway.errors import ClientError
from agentic_opd.gateway.request import ToolChoice
from agentic_opd.rollout.chat_format import ChatFormat

_NAME, _ARGUMENTS = "name_of_tool", {"argument": "mark"}
_BETWEEN_CALLS = "\n"


class CallForm(NamedTuple):
    """How a model writes a call: three texts around the tool's name and the JSON arguments."""

    before_name: str
    before_arguments: str
    end: str


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
        begin, found, end = text.partition(spelled)
        before, named, behind = begin.partition(_NAME)
        if found and named:
            return CallForm(before, behind, end.rstrip())
    return None


def call_grammar(form: CallForm | None, tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> str:
    """Return the structural tag by which an answer calls tools as `choice` demands.

    `required` and `named` give calls and nothing else; without them, a call may follow a text and ends the answer.

    Raises:
        ClientError: 400, the model's calls have no `form`.
    """
    is_forced = choice.kind in ("required", "named")
    if form is None:
        field = "tool_choice" if is_forced else "parallel_tool_calls"
        raise ClientError(400, f"{field}: this model does not write the arguments of its calls as JSON", field)
    if is_forced:
        return _structural_tag(_only_calls(form, tools, choice))
    return _structural_tag(
        {
            "type": "triggered_tags",
            "triggers": [form.before_name],
            "tags": _tags(form, tools, choice),
            "stop_after_first": True,
        }
    )


def answer_or_calls(
    form: CallForm, tools: Sequence[Mapping[str, Any]], choice: ToolChoice, schema: Mapping[str, Any]
) -> str:
    """Return the structural tag of an answer that is either JSON by `schema` or calls of tools, without other text."""
    answer = {"type": "json_schema", "json_schema": schema}
    return _structural_tag({"type": "or", "elements": [answer, _only_calls(form, tools, choice)]})


def answer_schema(grammar: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the JSON schema of vLLM's `structured_outputs`; None if it is of another kind, such as a regex."""
    if grammar is None or len(grammar) != 1:
        return None
    if grammar.get("json_object"):
        return {"type": "object"}
    schema = grammar.get("json")
    return schema if isinstance(schema, Mapping) else None


def _only_calls(form: CallForm, tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> dict[str, Any]:
    return {
        "type": "tags_with_separator",
        "tags": _tags(form, tools, choice),
        "separator": _BETWEEN_CALLS,
        "at_least_one": True,
        "stop_after_first": choice.kind == "named" or not choice.is_parallel,
    }


def _tags(form: CallForm, tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> list[dict[str, Any]]:
    return [
        {
            "type": "tag",
            "begin": f"{form.before_name}{tool['name']}{form.before_arguments}",
            "content": {"type": "json_schema", "json_schema": tool.get("parameters") or {"type": "object"}},
            "end": form.end,
        }
        for tool in (tool["function"] for tool in tools)
        if choice.name in (None, tool["name"])
    ]


def _structural_tag(wanted: Mapping[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": wanted})
