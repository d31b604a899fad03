"""A grammar of tool calls in the model's own format, as one of vLLM's structural tags. Pure.

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
    tags = [
        {
            "type": "tag",
            "begin": f"{form.before_name}{tool['name']}{form.before_arguments}",
            "content": {"type": "json_schema", "json_schema": tool.get("parameters") or {"type": "object"}},
            "end": form.end,
        }
        for tool in (tool["function"] for tool in tools)
        if choice.name in (None, tool["name"])
    ]
    if is_forced:
        is_one = choice.kind == "named" or not choice.is_parallel
        wanted = {"type": "tags_with_separator", "tags": tags, "separator": _BETWEEN_CALLS, "at_least_one": True}
        wanted["stop_after_first"] = is_one
    else:
        wanted = {"type": "triggered_tags", "triggers": [form.before_name], "tags": tags, "stop_after_first": True}
    return json.dumps({"type": "structural_tag", "format": wanted})
