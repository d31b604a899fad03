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


_WRITERS = ("delivery-mirror", "gateway-injected")
"""Names of models under which OpenClaw writes answers that no model wrote."""


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
    for index, record in enumerate(records):
        kind, parent = record.get("type"), record.get("parentId")
        record_id = record.get("id", _entry(index))
        message: Any = record.get("message")
        draft.begin(record.get("cwd"), record.get("timestamp"))
        if kind == "message" and isinstance(message, dict):
            if message.get("role") != "toolResult":
                yield from draft.goes_back_to(parent)
            _add(draft, message, record_id)
        elif kind == "compaction":
            yield from draft.goes_back_to(parent)
            yield from draft.ended()
            first_kept = record.get("firstKeptEntryId", _entry(record.get("firstKeptEntryIndex")))
            draft.restart_at(first_kept, [_summary(record)])
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
        is_written = message.get("provider") == "openclaw" and message.get("model") in _WRITERS
        content = [] if is_written else read_content(message.get("content"), counts)
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
    elif role == "bashExecution" and message.get("excludeFromContext") is True:
        counts[LeftOut.BOOKKEEPING] += 1
        draft.mark(record_id)
    elif role == "bashExecution":
        draft.add({"role": "user", "content": _executed(message)}, record_id)
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


def _executed(message: Record) -> str:
    """Return what the agent reads of a command that the person ran."""
    output, code = message.get("output"), message.get("exitCode")
    block = f"```\n{output}\n```" if isinstance(output, str) and output else "(no output)"
    ending = "\n\n(command cancelled)" if message.get("cancelled") is True else ""
    if not ending and isinstance(code, int) and code != 0:
        ending = f"\n\nCommand exited with code {code}"
    return f"Ran `{message.get('command')}`\n{block}{ending}"


def _entry(index: object) -> str | None:
    """Return the id of an entry of version 1, which has none: its index in the file."""
    return f"entry {index}" if isinstance(index, int) else None
