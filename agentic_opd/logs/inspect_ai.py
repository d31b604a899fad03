"""Samples of inspect's logs (`*.eval`, a zip of samples, and `*.json`) -> sessions. Pure.

A sample has `messages`; long texts are `attachment://` names of `attachments`. The tools are those of the last event of
a model.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agentic_opd.logs.session import (
    Counts,
    Draft,
    Record,
    Session,
    called,
    member,
    objects,
    read_content,
    text_id,
    unknown,
)

_ATTACHMENT = "attachment://"
_MOST_NESTED = 100


def is_inspect(records: Sequence[Record]) -> bool:
    """Return whether records are an evaluation's log, or its samples."""
    return any(_is_log(record) or _is_sample(record) for record in records)


def _is_log(record: Record) -> bool:
    return isinstance(member(record, "eval", "task"), str) and "status" in record


def _is_sample(record: Record) -> bool:
    return {"epoch", "messages", "input", "target"} <= record.keys()


def sessions(records: Iterable[Record], counts: Counts) -> Iterator[Session]:
    """Yield the conversation of each sample."""
    for record in records:
        for sample in [record] if _is_sample(record) else objects(record.get("samples")):
            draft = Draft(counts, f"sample {sample.get('id')} epoch {sample.get('epoch')}")
            attachments: Any = sample.get("attachments")
            texts = attachments if isinstance(attachments, dict) else {}
            draft.begin(None, sample.get("started_at") or member(record, "eval", "created"))
            draft.tools = _resolved(_tools(sample), texts)
            for message in objects(_resolved(sample.get("messages"), texts)):
                _add(draft, message)
            yield from draft.ended()


def _tools(sample: Record) -> Sequence[Any]:
    for event in reversed(objects(sample.get("events"))):
        if event.get("event") == "model":
            return objects(event.get("tools"))
    return ()


def _resolved(value: Any, attachments: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a value with the texts of its attachments; deeper values stay as they are."""
    if isinstance(value, str) and value.startswith(_ATTACHMENT):
        return attachments.get(value.removeprefix(_ATTACHMENT), value)
    if depth < _MOST_NESTED and isinstance(value, list):
        return [_resolved(element, attachments, depth + 1) for element in value]
    if depth < _MOST_NESTED and isinstance(value, dict):
        return {key: _resolved(element, attachments, depth + 1) for key, element in value.items()}
    return value


def _add(draft: Draft, message: Record) -> None:
    role, counts = message.get("role"), draft.counts
    content = read_content(message.get("content") or "", counts)
    if role == "assistant":
        calls = objects(message.get("tool_calls"))
        named = ((call.get("id"), call.get("function"), call.get("arguments")) for call in calls)
        draft.add({"role": role, "content": content, "tool_calls": called(named, counts)})
    elif role == "tool":
        error = member(message, "error", "message")
        result = error if not content and isinstance(error, str) else content
        draft.add({"role": role, "tool_call_id": text_id(message.get("tool_call_id")), "content": result})
    elif role in ("system", "user"):
        draft.add({"role": role, "content": content})
    else:
        counts[unknown("messages", role)] += 1
