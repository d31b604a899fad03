"""Items of OpenAI's Responses API -> messages in a draft. Pure.

Codex' rollouts, mini-swe-agent's Responses models and logs of requests hold such items: messages, reasoning, calls and
their outputs. Items of the agent in a row are one answer.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from agentic_opd.logs.session import (
    Draft,
    LeftOut,
    Record,
    by_provider,
    called,
    json_text,
    member,
    objects,
    read_content,
    text_id,
    text_of,
    unknown,
)

_CALLS = ("function_call", "custom_tool_call", "local_shell_call", "shell_call", "tool_search_call", "mcp_call")
_OUTPUTS = (
    *("function_call_output", "custom_tool_call_output", "local_shell_call_output", "shell_call_output"),
    "tool_search_output",
)
_BY_PROVIDER = (
    "web_search_call",
    "file_search_call",
    "image_generation_call",
    "code_interpreter_call",
    "computer_call",
)
_SILENT = ("ghost_snapshot", "reasoning", "additional_tools", "compaction_trigger")
_HIDDEN = ("compaction", "compaction_summary", "context_compaction")
ITEMS = ("message", "agent_message", *_SILENT, *_CALLS, *_OUTPUTS, *_BY_PROVIDER, *_HIDDEN)
"""Types of items that are known."""


def add_items(draft: Draft, items: Iterable[Record]) -> None:
    """Add items to a draft in their order; left-out items are counted in the draft."""
    for item in items:
        add_item(draft, item)


def add_item(draft: Draft, item: Record) -> None:
    """Add an item to a draft."""
    kind = item.get("type", "message")
    if kind == "message" and item.get("role") == "assistant":
        _add_text(_answer(draft), item.get("content"), draft)
    elif kind == "message":
        role: Any = item.get("role")
        role = role if role in ("system", "developer", "user", "tool") else "user"
        draft.add({"role": role, "content": read_content(item.get("content"), draft.counts)})
    elif kind == "agent_message":
        draft.add({"role": "user", "content": read_content(_readable_parts(item.get("content"), draft), draft.counts)})
    elif kind in _CALLS:
        _answer(draft).setdefault("tool_calls", []).extend(called([_call(item)], draft.counts))
        if kind == "mcp_call" and (result := item.get("output") or item.get("error")):
            _add_output(draft, {"type": kind, "call_id": item.get("id"), "output": result})
    elif kind in _OUTPUTS:
        _add_output(draft, item)
    elif kind == "reasoning" and (thoughts := text_of(item.get("content")) or text_of(item.get("summary"))):
        _answer(draft)["content"].append({"type": "thinking", "thinking": thoughts})
    else:
        draft.counts[_left_out(item, kind)] += 1


def _left_out(item: Record, kind: Any) -> str:
    """Return what an item counts as that adds nothing to a conversation."""
    if kind in _HIDDEN or (kind == "reasoning" and item.get("encrypted_content")):
        return LeftOut.HIDDEN_REASONING
    if kind in _BY_PROVIDER:
        return by_provider(kind.removesuffix("_call"))
    return LeftOut.BOOKKEEPING if kind in _SILENT else unknown("items", kind)


def _answer(draft: Draft) -> dict[str, Any]:
    """Return the answer that the draft ends with, or a new one."""
    last = draft.last
    if last is not None and last.message["role"] == "assistant" and isinstance(last.message["content"], list):
        return last.message
    return draft.add({"role": "assistant", "content": []})


def _add_text(answer: dict[str, Any], content: object, draft: Draft) -> None:
    text = text_of(content)
    parts = read_content(content if isinstance(content, str | list) else "", draft.counts)
    parts_without_text = [] if isinstance(parts, str) else [part for part in parts if part["type"] != "text"]
    has_text = any(part["type"] == "text" for part in answer["content"])
    answer["content"] += parts_without_text
    if text:
        answer["content"].append({"type": "text", "text": f"\n\n{text}" if has_text else text})


def _readable_parts(content: object, draft: Draft) -> list[Any]:
    parts = objects(content)
    hidden = [part for part in parts if part.get("type") == "encrypted_content"]
    draft.counts[LeftOut.HIDDEN_REASONING] += len(hidden)
    return [part for part in parts if part.get("type") != "encrypted_content"]


def _call(item: Record) -> tuple[object, object, object]:
    """Return id, name and arguments of a call. The text of a custom tool's call is its argument `input`."""
    call_id = item.get("call_id") or item.get("id")
    if item["type"] == "custom_tool_call":
        return call_id, item.get("name"), {"input": item.get("input")}
    if item["type"] in ("local_shell_call", "shell_call"):
        action: Any = item.get("action")
        names = ("command", "commands", "working_directory", "timeout_ms")
        shell = {name: action[name] for name in names if isinstance(action, Mapping) and action.get(name) is not None}
        return call_id, item["type"].removesuffix("_call"), shell
    if item["type"] == "tool_search_call":
        return call_id, "tool_search", item.get("arguments")
    name, namespace = item.get("name"), item.get("namespace")
    if isinstance(name, str) and isinstance(namespace, str) and namespace:
        name = f"{namespace.rstrip('_')}__{name.lstrip('_')}"
    return call_id, name, item.get("arguments")


def _add_output(draft: Draft, item: Record) -> None:
    output: Any = item.get("output", item.get("tools"))
    if isinstance(output, Mapping):
        output = output.get("content", [output] if "type" in output else json_text(output))
    elif isinstance(output, list) and item["type"] == "tool_search_output":
        output = json.dumps([member(tool, "name") for tool in objects(output)])
    content = read_content(output, draft.counts) if isinstance(output, str | list) else ""
    draft.add({"role": "tool", "tool_call_id": text_id(item.get("call_id")), "content": content})
