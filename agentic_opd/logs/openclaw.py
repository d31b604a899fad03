"""OpenClaw's and pi's sessions (`~/.openclaw/agents/*/sessions/*.jsonl`, `~/.pi/agent/sessions/**`) -> sessions. Pure.

The first line is `{"type": "session", ...}`. A line is an entry of a tree (`id`, `parentId`): a message of the roles
user, assistant and toolResult, a compaction, a summary of a branch. Version 1 has no ids and is read in order. Neither
system prompt nor tools are in the file.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from agentic_opd.logs.messages import LogNote
from agentic_opd.logs.session import (
    Counts,
    Draft,
    LeftOut,
    Record,
    Session,
    member,
    not_learned,
    read_content,
    text_id,
    unknown,
)

_BOOKKEEPING = ("session", "model_change", "thinking_level_change", "custom", "label", "session_info", "leaf")


def is_openclaw(records: Sequence[Record]) -> bool:
    """Return whether records are those of a session."""
    is_headed = any(record.get("type") == "session" and "cwd" in record for record in records[:1])
    return is_headed or (
        bool(records)
        and all(record.get("type") == "message" and member(record, "message", "role") for record in records)
    )


def sessions(records: Iterable[Record], counts: Counts) -> Iterator[Session]:
    """Yield the conversations of a session: one, and one more for each branch and each compaction."""
    draft = Draft(counts)
    for record in records:
        kind, record_id, parent = record.get("type"), record.get("id"), record.get("parentId")
        message: Any = record.get("message")
        draft.begin(record.get("cwd"), record.get("timestamp"))
        if kind == "message" and isinstance(message, dict):
            if message.get("role") != "toolResult":
                yield from draft.goes_back_to(parent)
            _add(draft, message, record_id)
        elif kind == "compaction":
            yield from draft.goes_back_to(parent)
            yield from draft.ended()
            recent = _messages_from(draft, record.get("firstKeptEntryId"))
            draft.restart([_summary(record), *recent])
            draft.mark(record_id)
        elif kind == "branch_summary":
            yield from draft.goes_back_to(parent)
            draft.add(_summary(record), record_id)
        elif kind == "custom_message":
            draft.add({"role": "user", "content": read_content(record.get("content"), counts)}, record_id)
        else:
            counts[LeftOut.BOOKKEEPING if kind in _BOOKKEEPING else unknown("records", kind)] += 1
            draft.mark(record_id, parent)
    yield from draft.ended()


def _add(draft: Draft, message: dict[str, Any], record_id: object) -> None:
    role, counts = message.get("role"), draft.counts
    if role == "assistant":
        content = read_content(message.get("content"), counts)
        if not content:
            counts[LeftOut.NOTICE] += 1
            draft.mark(record_id)
            return
        answer = {"role": role, "content": content}
        is_stopped = message.get("stopReason") in ("aborted", "error", "length")
        draft.add(not_learned(answer, LogNote.STOPPED) if is_stopped else answer, record_id)
    elif role == "toolResult":
        content = read_content(message.get("content"), counts)
        draft.add({"role": "tool", "tool_call_id": text_id(message.get("toolCallId")), "content": content}, record_id)
    elif role == "bashExecution":
        text = f"{message.get('command')}\n{message.get('output')}"
        draft.add({"role": "user", "content": text}, record_id)
    elif role in ("branchSummary", "compactionSummary"):
        draft.add(_summary(message), record_id)
    elif role in ("user", "system", "custom", "hookMessage"):
        content = read_content(message.get("content"), counts)
        draft.add({"role": role if role in ("user", "system") else "user", "content": content}, record_id)
    else:
        counts[unknown("messages", role)] += 1
        draft.mark(record_id)


def _summary(record: Record) -> dict[str, Any]:
    summary = record.get("summary")
    return {
        "role": "user",
        "content": f"Summary of the session so far:\n\n{summary if isinstance(summary, str) else ''}",
    }


def _messages_from(draft: Draft, first: object) -> list[dict[str, Any]]:
    """Return the messages from the entry `first` on; none without it."""
    node = draft.nodes.get(first) if isinstance(first, str) else None
    return [] if node is None else draft.messages()[node.depth - 1 :]
