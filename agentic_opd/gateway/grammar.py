"""A grammar of tool calls in the model's own format, as one of vLLM's structural tags. Pure.

The format is taken from the renderer: a call that it writes, with its JSON arguments replaced by the tool's schema.
"""

import json
from typing import Any

from agentic_opd.core.errors import RendererError
from agentic_opd.core.types import Message
from agentic_opd.gateway.errors import ClientError
from agentic_opd.gateway.request import ToolChoice
from agentic_opd.rollout.chat import Chat

_MARK = {"argument": "mark"}
_BETWEEN_CALLS = "\n"


def call_grammar(chat: Chat, choice: ToolChoice) -> str:
    """Return the structural tag by which an answer calls tools as `choice` demands.

    `required` and `named` give calls and nothing else; without them, a call may follow a text and ends the answer.

    Raises:
        ClientError: 400, the model's calls do not hold their arguments as JSON.
    """
    tools = [tool["function"] for tool in chat.tools if choice.name in (None, tool["function"]["name"])]
    tags = [_tag(chat, tool, choice) for tool in tools]
    if choice.kind in ("required", "named"):
        is_one = choice.kind == "named" or not choice.is_parallel
        form: dict[str, Any] = {"type": "tags_with_separator", "tags": tags, "separator": _BETWEEN_CALLS}
        form |= {"at_least_one": True, "stop_after_first": is_one}
    else:
        trigger = tags[0]["begin"].partition(tools[0]["name"])[0] or tags[0]["begin"]
        form = {"type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": True}
    return json.dumps({"type": "structural_tag", "format": form})


def _tag(chat: Chat, tool: dict[str, Any], choice: ToolChoice) -> dict[str, Any]:
    call = {"id": "call00000", "type": "function", "function": {"name": tool["name"], "arguments": json.dumps(_MARK)}}
    turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        ids = chat.written([{"role": "user", "content": "u"}, turn])
    except RendererError:
        ids = ()
    text = chat.text([token for token in ids if token not in chat.stop_token_ids])
    spelled = next((form for form in (json.dumps(_MARK), json.dumps(_MARK, separators=(",", ":"))) if form in text), "")
    begin, _, end = text.partition(spelled) if spelled else ("", "", "")
    if tool["name"] not in begin:
        field = "parallel_tool_calls" if choice.kind == "auto" else "tool_choice"
        raise ClientError(400, f"{field}: this model does not write the arguments of its calls as JSON", field)
    content = {"type": "json_schema", "json_schema": tool.get("parameters") or {"type": "object"}}
    return {"type": "tag", "begin": begin, "content": content, "end": end.rstrip()}
