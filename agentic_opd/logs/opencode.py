"""OpenCode's sessions, as `opencode export` writes them -> sessions. Pure.

A document is `{"info": session, "messages": [{"info": message, "parts": [...]}]}`; `stored` makes it from the files of
`~/.local/share/opencode/storage` or the rows of `opencode.db`. A message of the agent has a part for each text, thought
and call; `step-start` begins the next answer of the model. A compaction ends a conversation; the next begins with its
summary. System prompt and tools are not stored. Sessions of version 2 are read by `opencode_2`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from agentic_opd.logs import opencode_2
from agentic_opd.logs.messages import LogNote
from agentic_opd.logs.session import (
    Counts,
    Draft,
    LeftOut,
    Record,
    Session,
    called,
    member,
    not_learned,
    objects,
    text_id,
    unknown,
)

_AS_TEXT = ("text/plain", "application/x-directory")
"""Kinds of files whose text is in separate parts."""
_BOOKKEEPING = ("snapshot", "patch", "agent", "retry", "compaction")


def is_opencode(records: Sequence[Record]) -> bool:
    """Return whether records are exported sessions."""
    return any(
        isinstance(record.get("info"), dict)
        and any(
            ("parts" in message and member(message, "info", "role")) or opencode_2.is_message(message)
            for message in objects(record.get("messages"))
        )
        for record in records
    )


def sessions(records: Iterable[Record], counts: Counts) -> Iterator[Session]:
    """Yield the conversations of exported sessions: one, and one more for each compaction."""
    for record in records:
        if not any("parts" in message for message in objects(record.get("messages"))):
            yield from opencode_2.conversations(record, counts)
            continue
        draft = Draft(counts, str(member(record, "info", "id") or ""))
        draft.begin(member(record, "info", "directory"), member(record, "info", "time", "created"))
        tail_start: object = None
        for message in objects(record.get("messages")):
            draft.begin(member(message, "info", "path", "cwd"), member(message, "info", "time", "created"))
            info, parts = message.get("info"), objects(message.get("parts"))
            compactions = [part for part in parts if part.get("type") == "compaction"]
            tail_start = compactions[0].get("tail_start_id") if compactions else tail_start
            yield from _read(draft, info, parts, tail_start)
        yield from draft.ended()


def stored(session: Record, messages: Sequence[Record], parts: Sequence[Record]) -> tuple[dict[str, Any], int]:
    """Return a session as a document, and the number of parts without a message; ids are in the order of time."""
    by_message = dict[Any, list[Record]]()
    for part in sorted(parts, key=lambda part: str(part.get("id"))):
        by_message.setdefault(part.get("messageID"), []).append(part)
    ordered = sorted(messages, key=lambda message: (_created(message), str(message.get("id"))))
    read = [{"info": message, "parts": by_message.pop(message.get("id"), [])} for message in ordered]
    return {"info": session, "messages": read}, sum(map(len, by_message.values()))


def _created(message: Record) -> float:
    created = member(message, "time", "created")
    return float(created) if isinstance(created, int | float) else 0.0


def _read(draft: Draft, info: Any, parts: Sequence[Record], tail_start: object) -> Iterator[Session]:
    """Read a message; a summary keeps the messages from `tail_start` on, up to the person's that asked for it."""
    role = member(info, "role")
    if role == "user":
        draft.add({"role": "user", "content": _prompt(parts, draft.counts)}, member(info, "id"))
    elif role == "assistant":
        first = draft.last
        for step in _steps(parts, draft.counts):
            _add_step(draft, step, is_stopped=bool(member(info, "error")))
        if member(info, "summary") is True:
            texts = [part["text"] for part in parts if part.get("type") == "text" and isinstance(part.get("text"), str)]
            draft.last = first
            yield from draft.ended()
            draft.restart_at(tail_start, (), but=1)
            draft.add({"role": "user", "content": "What did we do so far?"})
            draft.add(not_learned({"role": "assistant", "content": "\n".join(texts)}, LogNote.SUMMARY))
    else:
        draft.counts[unknown("messages", role)] += 1


def _prompt(parts: Sequence[Record], counts: Counts) -> list[dict[str, Any]]:
    content = list[dict[str, Any]]()
    for part in parts:
        kind = part.get("type")
        if kind == "text" and isinstance(part.get("text"), str) and not part.get("ignored"):
            content.append({"type": "text", "text": part["text"]})
        elif kind == "file" and part.get("mime") in _AS_TEXT:
            counts[LeftOut.BOOKKEEPING] += 1
        elif kind == "file":
            content.append({"type": "file"})
        elif kind == "subtask":
            content.append({"type": "text", "text": str(part.get("prompt") or part.get("description") or "")})
        elif kind != "text":
            counts[LeftOut.BOOKKEEPING if kind in _BOOKKEEPING else unknown("parts", kind)] += 1
    return content


def _steps(parts: Sequence[Record], counts: Counts) -> Iterator[list[Record]]:
    """Yield the parts of each answer of the model; its `step-finish` says why it ended."""
    step = list[Record]()
    for part in parts:
        kind = part.get("type")
        if kind == "step-start":
            yield step
            step = []
        elif kind == "step-finish":
            counts[LeftOut.BOOKKEEPING] += 1
            step.append(part)
        elif kind in ("text", "reasoning", "tool", "file"):
            step.append(part)
        else:
            counts[LeftOut.BOOKKEEPING if kind in _BOOKKEEPING else unknown("parts", kind)] += 1
    yield step


def _add_step(draft: Draft, step: Sequence[Record], *, is_stopped: bool) -> None:
    content, tools = list[dict[str, Any]](), list[Record]()
    for part in step:
        kind, text = part["type"], part.get("text")
        if kind == "tool":
            tools.append(part)
        elif kind == "step-finish":
            is_stopped = is_stopped or part.get("reason") in opencode_2.CUT_OFF
        elif kind == "file":
            draft.counts[LeftOut.NO_TEXT_PART] += 1
        elif isinstance(text, str) and text:
            content.append({"type": kind, "text": text} if kind == "text" else {"type": "thinking", "thinking": text})
    calls = called(
        ((part.get("callID"), part.get("tool"), member(part, "state", "input")) for part in tools), draft.counts
    )
    if not content and not calls:
        return
    answer = {"role": "assistant", "content": content, "tool_calls": calls}
    is_stopped = is_stopped or any(member(part, "state", "status") == "pending" for part in tools)
    draft.add(not_learned(answer, LogNote.STOPPED) if is_stopped else answer)
    for part in tools:
        if isinstance(part.get("tool"), str):
            output = _output(part)
            media = [{"type": "file"} for _ in objects(member(part, "state", "attachments"))]
            parts = [{"type": "text", "text": output if isinstance(output, str) else str(output)}, *media]
            draft.add({"role": "tool", "tool_call_id": text_id(part.get("callID")), "content": parts})


def _output(part: Record) -> object:
    """Return the result of a call as the model reads it."""
    state = part.get("state")
    if member(state, "status") in ("pending", "running"):
        return "[Tool execution was interrupted]"
    is_interrupted = member(state, "metadata", "interrupted") is True
    options = (
        member(state, "output"),
        member(state, "metadata", "output") if is_interrupted else None,
        member(state, "error"),
    )
    return next((output for output in options if output), "")
