"""Codex' rollouts (`~/.codex/sessions/**/rollout-*.jsonl`) -> sessions. Pure.

A line is `{"timestamp", "type", "payload"}`. Items of the Responses API are the payloads of `response_item`, in older
versions the lines themselves. A compaction (`compacted`) ends a conversation; the next begins with its replacement.
Events repeat the items, but for a rollback, which takes turns back. The file holds no tools, or not all. Words of other
agents are a user's.
"""

from collections.abc import Iterable, Iterator, Sequence

from agentic_opd.core.text import read_json
from agentic_opd.logs.messages import LogNote
from agentic_opd.logs.responses import ITEMS, add_item, add_items
from agentic_opd.logs.session import (
    Counts,
    Draft,
    LeftOut,
    Record,
    Session,
    member,
    not_learned,
    objects,
    text_of,
    unknown,
)

_BOOKKEEPING = ("turn_context", "world_state", "inter_agent_communication_metadata", "session_meta")


def is_codex(records: Sequence[Record]) -> bool:
    """Return whether records are those of a rollout."""
    types = ("session_meta", "response_item", "turn_context", "event_msg", "compacted")
    if any(record.get("type") in types and isinstance(record.get("payload"), dict) for record in records):
        return True
    begins = bool(records) and {"id", "timestamp"} <= records[0].keys() and "instructions" in records[0]
    return begins and any(record.get("record_type") == "state" or _is_item(record) for record in records[1:])


def sessions(records: Iterable[Record], counts: Counts) -> Iterator[Session]:
    """Yield the conversations of a rollout: one, and one more for each compaction and each rollback."""
    draft = Draft(counts)
    begun = False
    for record in records:
        kind = record.get("type")
        payload = record.get("payload")
        payload = payload if isinstance(payload, dict) else {}
        draft.begin(payload.get("cwd"), record.get("timestamp"))
        if kind == "response_item":
            add_item(draft, _said_by_agent(payload) or payload)
        elif kind == "inter_agent_communication":
            add_item(draft, {"type": "agent_message", "content": [{"type": "text", "text": payload.get("content")}]})
        elif kind == "compacted":
            yield from draft.ended()
            _compact(draft, payload)
        elif kind == "event_msg":
            yield from _event(draft, payload)
        elif kind in _BOOKKEEPING:
            counts[LeftOut.BOOKKEEPING] += 1
            instructions = member(payload, "base_instructions", "text")
            if kind == "session_meta" and not begun and isinstance(instructions, str) and instructions:
                draft.add({"role": "system", "content": instructions})
            begun = begun or kind == "session_meta"
        elif _is_item(record):
            add_item(draft, record)
        elif record.get("record_type") or {"id", "timestamp"} <= record.keys():
            counts[LeftOut.BOOKKEEPING] += 1
        else:
            counts[unknown("records", kind)] += 1
    yield from draft.ended()


def _said_by_agent(item: Record) -> Record | None:
    """Return the words of another agent that Codex wrote into an answer as JSON text; None for other items."""
    text = text_of(item.get("content")) if item.get("role") == "assistant" else ""
    if not (text.startswith("{") and '"recipient"' in text and '"author"' in text):
        return None
    try:
        communication = read_json(text)
    except (ValueError, RecursionError):
        return None
    if not {"author", "recipient", "content", "trigger_turn"} <= communication.keys():
        return None
    return {"type": "agent_message", "content": [{"type": "text", "text": communication["content"]}]}


def _is_item(record: Record) -> bool:
    return record.get("type") in ITEMS and "payload" not in record and not isinstance(record.get("message"), dict)


def _compact(draft: Draft, payload: Record) -> None:
    """Begin again with the replacement, or with the prompts so far and the summary."""
    before = draft.messages()
    system = [message for message in before[:1] if message["role"] == "system"]
    summary = {"type": "message", "role": "user", "content": payload.get("message") or ""}
    replacement = payload.get("replacement_history")
    if isinstance(replacement, list):
        draft.restart(system)
        add_items(draft, objects(replacement))
        draft.restart(draft.messages())
        if summary["content"] and not replacement:
            add_item(draft, summary)
        return
    draft.restart([*system, *(message for message in before if message["role"] == "user")])
    add_item(draft, summary)


def _event(draft: Draft, payload: Record) -> Iterator[Session]:
    draft.counts[LeftOut.BOOKKEEPING] += 1
    last = draft.last
    if payload.get("type") == "turn_aborted" and last is not None and last.message["role"] == "assistant":
        last.message.update(not_learned(last.message, LogNote.STOPPED))
    number = payload.get("num_turns")
    if payload.get("type") != "thread_rolled_back" or not isinstance(number, int) or number < 1:
        return
    yield from draft.ended()
    while draft.last is not None and number:
        message = draft.last.message
        draft.last = draft.last.before
        number -= message["role"] == "user" and not text_of(message["content"]).startswith("<")
