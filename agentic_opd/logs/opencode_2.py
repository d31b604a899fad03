"""Sessions of OpenCode 2, as `opencode export` and the table `session_message` hold them -> sessions. Pure.

A document is `{"info": session, "messages": [{"type": …, …}]}`. A message of the agent is one answer of the model, with
its calls and their results; a compaction ends a conversation. The first system prompt and the tools are not stored.
"""

import base64
from collections.abc import Iterator
from typing import Any

from agentic_opd.logs.messages import LogNote
from agentic_opd.logs.session import (
    Counts,
    Draft,
    LeftOut,
    Record,
    Session,
    by_provider,
    called,
    json_text,
    member,
    not_learned,
    objects,
    text_id,
    text_of,
    unknown,
)

CUT_OFF = ("length", "content-filter", "error")
"""Reasons for which an answer of either version is incomplete."""
_UNFINISHED = ("streaming", "pending")
_BOOKKEEPING = ("agent-switched", "model-switched", "idle")
_MEDIA = ("image/", "application/pdf")


def is_message(message: Record) -> bool:
    """Return whether a message of a document is a person's or the agent's in the form of version 2."""
    kind = message.get("type")
    has_words = (kind == "user" and isinstance(message.get("text"), str)) or (
        kind == "assistant" and isinstance(message.get("content"), list)
    )
    return has_words and "role" not in message


def conversations(record: Record, counts: Counts) -> Iterator[Session]:
    """Yield the conversations of a session: one, and one more for each compaction."""
    draft = Draft(counts, str(member(record, "info", "id") or ""))
    folder = member(record, "info", "location", "directory") or member(record, "info", "directory")
    draft.begin(folder, member(record, "info", "time", "created"))
    for message in objects(record.get("messages")):
        draft.begin(None, member(message, "time", "created"))
        kind = message.get("type")
        if kind == "assistant":
            _add_answer(draft, message)
        elif kind == "compaction" and _is_summary(message):
            yield from draft.ended()
            draft.restart([{"role": "user", "content": _summary(message)}])
        elif kind in ("user", "synthetic", "skill", "system", "shell", "location-switched"):
            if content := _read_by_agent(message, counts, is_first=draft.last is None):
                is_system = kind == "system" and draft.last is None
                draft.add({"role": "system" if is_system else "user", "content": content}, message.get("id"))
        else:
            is_known = kind in (*_BOOKKEEPING, "compaction")
            counts[LeftOut.BOOKKEEPING if is_known else unknown("messages", kind)] += 1
    yield from draft.ended()


def _is_summary(message: Record) -> bool:
    """Return whether the next answers were given behind a summary: not where a compaction failed or still ran, nor
    where the provider keeps what it compacted, which other models read whole.
    """
    is_completed = message.get("status", "completed") == "completed"
    return is_completed and isinstance(message.get("summary"), str) and not message.get("providerContext")


def _summary(message: Record) -> str:
    recent = message.get("recent")
    recent = f"\n\nLatest messages:\n\n{recent}" if isinstance(recent, str) and recent else ""
    return f"Summary of the session so far:\n\n{message['summary']}{recent}"


def _read_by_agent(message: Record, counts: Counts, *, is_first: bool) -> list[dict[str, Any]]:
    """Return what the agent reads of a message that is not its own."""
    kind, text = message.get("type"), message.get("text")
    text = text if isinstance(text, str) else ""
    if kind == "user":
        skills = [skill["text"] for skill in objects(message.get("skills")) if isinstance(skill.get("text"), str)]
        parts = [{"type": "text", "text": words} for words in (*skills, text) if words]
        return [*parts, *(part for file in objects(message.get("files")) for part in _attached(file, counts))]
    if kind == "shell":
        if member(message, "metadata", "background") is True:  # A later message has its result.
            counts[LeftOut.BOOKKEEPING] += 1
            return []
        output = member(message, "output", "output") or message.get("output")
        text = f"Shell command: {message.get('command')}\n\n{output if isinstance(output, str) else ''}"
    elif kind == "location-switched":
        text = f"The working directory is now {member(message, 'location', 'directory')}."
    elif kind == "system" and not is_first:
        text = f"<system-update>\n{text}\n</system-update>"
    return [{"type": "text", "text": text}] if text else []


def _attached(file: Record, counts: Counts) -> list[dict[str, Any]]:
    """Return a file that a person attached: its text where it is stored, a mark for media."""
    kind, data = str(file.get("mime")), file.get("data")
    if kind in ("text/plain", "application/x-directory") and isinstance(data, str):
        word = "file" if kind == "text/plain" else "directory"
        name = file.get("name") or member(file, "source", "uri") or "inline"
        description = f"\nDescription: {file['description']}" if isinstance(file.get("description"), str) else ""
        return [{"type": "text", "text": f"\n\nAttached {word}: {name}{description}\n\n{_decoded(data)}"}]
    if kind.startswith(_MEDIA) or not isinstance(data, str):
        return [{"type": "file"}]
    counts[LeftOut.BOOKKEEPING] += 1  # The agent does not read files of other kinds.
    return []


def _decoded(data: str) -> str:
    try:
        return base64.b64decode(data).decode(errors="replace")
    except ValueError:
        return ""


def _add_answer(draft: Draft, message: Record) -> None:
    content, tools, counts = list[dict[str, Any]](), list[Record](), draft.counts
    for part in objects(message.get("content")):
        kind, text = part.get("type"), part.get("text")
        if kind == "tool" and (part.get("executed") is True or member(part, "provider", "executed") is True):
            counts[by_provider(part.get("name"))] += 1
        elif kind == "tool":
            tools.append(part)
        elif kind == "text" and isinstance(text, str):
            content += [{"type": "text", "text": text}] if text else []
        elif kind == "reasoning" and isinstance(text, str) and text:
            content.append({"type": "thinking", "thinking": text})
        elif kind == "reasoning":
            counts[LeftOut.HIDDEN_REASONING] += bool(part.get("state") or part.get("providerMetadata"))
        else:
            counts[unknown("parts", kind)] += 1
    calls = called(((tool.get("id"), tool.get("name"), member(tool, "state", "input")) for tool in tools), counts)
    if not content and not calls:
        return
    answer = {"role": "assistant", "content": content, "tool_calls": calls}
    is_stopped = bool(message.get("error")) or message.get("finish") in CUT_OFF
    is_stopped = is_stopped or any(member(tool, "state", "status") in _UNFINISHED for tool in tools)
    draft.add(not_learned(answer, LogNote.STOPPED) if is_stopped else answer, message.get("id"))
    for tool in tools:
        if isinstance(tool.get("name"), str) and member(tool, "state", "status") in ("completed", "error"):
            result = _result(tool["state"], counts)
            draft.add({"role": "tool", "tool_call_id": text_id(tool.get("id")), "content": result})


def _result(state: Record, counts: Counts) -> list[dict[str, Any]]:
    """Return the result of a call as the agent reads it; an error comes before what the tool had written."""
    parts = list[dict[str, Any]]()
    if state.get("status") == "error":
        error = state.get("error")
        words = error if isinstance(error, str) else member(error, "message")
        parts.append({"type": "text", "text": words if isinstance(words, str) else json_text(error)})
    for part in objects(state.get("content")):
        if part.get("type") == "text":
            parts.append({"type": "text", "text": text_of([part])})
        elif part.get("type") == "file":
            parts.append({"type": "file"})
        else:
            counts[unknown("parts", part.get("type"))] += 1
    if not parts and state.get("structured"):
        parts.append({"type": "text", "text": json_text(state["structured"])})
    return parts
