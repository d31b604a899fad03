"""Samples of inspect's logs (`*.eval`, a zip of samples, and `*.json`) -> sessions. Pure.

A sample has `messages`; long texts are `attachment://` names of `attachments`. A large sample of a zip is in pieces:
the sample without its lists, and the lists' parts. The tools are those of the last event of a model whose answer is in
the sample: other models grade it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agentic_opd.logs.messages import LogNote
from agentic_opd.logs.session import (
    Counts,
    Draft,
    Record,
    Session,
    called,
    member,
    not_learned,
    objects,
    read_content,
    text_id,
    unknown,
)

_ATTACHMENT = "attachment://"
_MOST_NESTED = 100
_SHELL, _LISTS = "sample.json", ("messages", "events", "attachments")
_CUT_OFF = ("max_tokens", "model_length", "content_filter")
"""Reasons for the end of an answer that is not whole."""


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
            messages = objects(_resolved(sample.get("messages"), texts))
            events = [event for event in objects(sample.get("events")) if event.get("event") == "model"]
            draft.tools = _resolved(_tools(events, messages), texts)
            cut_off = {_answer_id(event) for event in events if _stop_reason(event) in _CUT_OFF}
            for message in messages:
                _add(draft, message, is_cut_off=message.get("id") is not None and message.get("id") in cut_off)
            yield from draft.ended()


# ---------------------------------------------------------------------------------------------------------- its pieces


def pieces(names: Iterable[str]) -> list[str]:
    """Return those files of a sample's folder that `joined` reads: `sample.json` and `LIST/START.json`."""
    return [name for name in names if name == _SHELL or _start(name) is not None]


def joined(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sample whose pieces these are, by name; empty without `sample.json`."""
    shell = members.get(_SHELL)
    if not isinstance(shell, dict):
        return {}
    lists = {
        name: [element for piece in _in_order(members, name) if isinstance(piece, list) for element in piece]
        for name in _LISTS
    }
    pool, ranges = lists["messages"], shell.get("message_refs")
    messages = [
        message
        for span in (ranges if isinstance(ranges, list) else ())
        if isinstance(span, list) and len(span) == 2 and all(isinstance(end, int) and end >= 0 for end in span)
        for message in pool[span[0] : span[1]]
    ]
    attachments = {str(index): text for index, text in enumerate(lists["attachments"])}
    return {**shell, "messages": messages, "events": lists["events"], "attachments": attachments}


def _in_order(members: Mapping[str, Any], name: str) -> list[Any]:
    named = [piece for piece in members if piece.startswith(f"{name}/")]
    return [members[piece] for piece in sorted(named, key=lambda piece: _start(piece) or 0)]


def _start(name: str) -> int | None:
    """Return the index at which a piece of a list begins; None for other files."""
    folder, _, file = name.partition("/")
    number = file.removesuffix(".json")
    return int(number) if folder in _LISTS and number.isascii() and number.isdecimal() and len(number) < 10 else None


# --------------------------------------------------------------------------------------------------------- its messages


def _tools(events: Sequence[Record], messages: Sequence[Record]) -> Sequence[Any]:
    ids = {message.get("id") for message in messages if message.get("role") == "assistant" and message.get("id")}
    answers = [event for event in events if _answer_id(event) in ids] or events
    return next((tools for event in reversed(answers) if (tools := objects(event.get("tools")))), ())


def _choice(event: Record) -> Any:
    return next(iter(objects(member(event, "output", "choices"))), None)


def _answer_id(event: Record) -> str | None:
    answer_id = member(_choice(event), "message", "id")
    return answer_id if isinstance(answer_id, str) else None


def _stop_reason(event: Record) -> object:
    return member(_choice(event), "stop_reason")


def _resolved(value: Any, attachments: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a value with the texts of its attachments; deeper values stay as they are."""
    if isinstance(value, str) and value.startswith(_ATTACHMENT):
        return attachments.get(value.removeprefix(_ATTACHMENT), value)
    if depth < _MOST_NESTED and isinstance(value, list):
        return [_resolved(element, attachments, depth + 1) for element in value]
    if depth < _MOST_NESTED and isinstance(value, dict):
        return {key: _resolved(element, attachments, depth + 1) for key, element in value.items()}
    return value


def _add(draft: Draft, message: Record, *, is_cut_off: bool) -> None:
    role, counts = message.get("role"), draft.counts
    content = read_content(message.get("content") or "", counts)
    if role == "assistant":
        calls = objects(message.get("tool_calls"))
        named = ((call.get("id"), call.get("function"), call.get("arguments")) for call in calls)
        answer = {"role": role, "content": content, "tool_calls": called(named, counts)}
        draft.add(_with_note(answer, message, calls, is_cut_off))
    elif role == "tool":
        # A model is shown the error in place of the content, but for one of older versions.
        error, kind = member(message, "error", "message"), member(message, "error", "type")
        result = error if isinstance(error, str) and error and not (content and kind == "output_limit") else content
        draft.add({"role": role, "tool_call_id": text_id(message.get("tool_call_id")), "content": result})
    elif role in ("system", "user"):
        draft.add({"role": role, "content": content})
    else:
        counts[unknown("messages", role)] += 1


def _with_note(answer: dict[str, Any], message: Record, calls: Sequence[Record], is_cut_off: bool) -> dict[str, Any]:
    """Return an answer with the reason why it is not learned, if there is one."""
    if message.get("source") == "input":
        return not_learned(answer, LogNote.PROMPT)
    if any(call.get("parse_error") for call in calls):  # Its arguments are not those that the model wrote.
        return not_learned(answer, LogNote.ARGUMENTS)
    return not_learned(answer, LogNote.STOPPED) if is_cut_off else answer
