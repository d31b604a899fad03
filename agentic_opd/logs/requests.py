"""Logs of requests to a model, lists of messages, and verifiers' results -> sessions. Pure.

A request and its answer stand in `request` and `response`, or in one object: of OpenAI's chat completions, of its
Responses API, or of Anthropic's messages. An answer that was streamed may be the text of its events. A request repeats
the earlier ones of its session: `without_repeats` keeps the longest. Anthropic's and OpenAI's messages without a
request are rows of `messages`, which `read_log` reads.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agentic_opd.core.answer_streams import chat_body, messages_body, responses_body, stream_events
from agentic_opd.core.text import read_json
from agentic_opd.logs.messages import LogNote
from agentic_opd.logs.responses import add_items
from agentic_opd.logs.session import (
    Counts,
    Draft,
    LeftOut,
    Record,
    Session,
    objects,
    read_content,
    unknown,
)

_REQUESTS, _RESPONSES = ("request", "request_body", "body", "input"), ("response", "response_body", "output")
_BODIES = ("body", "body_raw")


def is_request_log(records: Sequence[Record]) -> bool:
    """Return whether records are requests, most of them with their answers."""
    return any(_response(record) and _request(record) for record in records)


def request_sessions(records: Iterable[Record], counts: Counts) -> Iterator[Session]:
    """Yield the conversation of each request with its answer; a request whose answer can't be read ends before it."""
    messages_by_id = dict[str, list[dict[str, Any]]]()
    for record in records:
        request, response = _request(record), _response(record)
        previous = request.get("previous_response_id")
        if not request:
            counts[unknown("records", record.get("type"))] += 1
        elif previous is not None and (not isinstance(previous, str) or previous not in messages_by_id):
            counts[LeftOut.NO_BEGINNING] += 1
        else:
            draft = Draft(counts, tools=request.get("tools") or request.get("functions") or ())
            draft.begin(None, record.get("timestamp") or record.get("created_at") or record.get("logged_at"))
            for message in messages_by_id[previous] if isinstance(previous, str) else ():
                draft.add(message)
            _add_request(draft, request)
            _add_response(draft, response)
            if isinstance(response_id := response.get("id"), str):
                messages_by_id[response_id] = draft.messages()
            yield from draft.ended()


def _add_request(draft: Draft, request: Record) -> None:
    for name in ("system", "instructions"):
        if request.get(name) and draft.last is None:
            draft.add({"role": "system", "content": read_content(request[name], draft.counts)})
    if isinstance(prompt := request.get("messages", request.get("input")), str):
        draft.add({"role": "user", "content": prompt})
    elif "messages" in request:
        for message in objects(prompt):
            _add_message(draft, message)
    else:
        add_items(draft, objects(prompt))


def _add_response(draft: Draft, response: Record) -> None:
    if _is_items(response.get("output")):
        add_items(draft, objects(response["output"]))
    elif message := _answer(response):
        _add_message(draft, message)
    else:
        draft.counts[LeftOut.NO_ANSWER] += 1


def _request(record: Record) -> Record:
    """Return the request of a record, empty without one."""
    values = [_object(record.get(name)) for name in _REQUESTS]
    candidates = (*values, *(_object(value.get("body")) for value in values), record)
    return next((value for value in candidates if value.get("messages") or value.get("input")), {})


def _response(record: Record) -> Record:
    """Return the answer of a record, empty without one that can be read."""
    values = [_object(record.get(name)) for name in _RESPONSES]
    bodies = [_object(value.get(name)) for value in values for name in _BODIES]
    streams = (record.get(name) for name in _RESPONSES)
    streamed = map(_streamed, (*streams, *(value.get(name) for value in values for name in _BODIES)))
    candidates = (*values, *bodies, record, *streamed)
    return next((value for value in candidates if _answer(value) or _is_items(value.get("output"))), {})


def _is_items(output: object) -> bool:
    return any(item.get("type") in ("message", "function_call", "reasoning") for item in objects(output))


def _object(value: object) -> Record:
    """Return an object, also from JSON text; empty for anything else."""
    if isinstance(value, str) and value[:1] == "{":
        try:
            value = read_json(value)
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, dict) else {}


def _streamed(text: object) -> Record:
    """Return the body of an answer from the text of its events; empty for anything else."""
    if not isinstance(text, str) or not text.startswith(("event:", "data:")):
        return {}
    try:
        events = [*stream_events(text.encode(errors="replace"))]
        if any("choices" in event for event in events):
            choices = [
                {"message": {**choice["message"], "role": "assistant"}} for choice in chat_body(events)["choices"]
            ]
            return {"choices": choices}
        is_message = any(event.get("type") == "message_start" for event in events)
        return (messages_body if is_message else responses_body)(events)
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError):
        return {}


def _answer(response: Record) -> Record | None:
    """Return the message of an answer, None without one: of a chat completion, or of Anthropic's messages."""
    choices = objects(response.get("choices"))
    if choices and isinstance(message := choices[0].get("message"), dict):
        return message
    is_message = response.get("role") == "assistant" and isinstance(response.get("content"), list)
    return response if is_message and ("stop_reason" in response or response.get("type") == "message") else None


def _add_message(draft: Draft, message: Record) -> None:
    names = ("tool_calls", "function_call", "tool_call_id", "name", "reasoning_content", "reasoning", "refusal")
    content = read_content(message.get("content") or "", draft.counts)
    fields = {name: message[name] for name in names if message.get(name)}
    role = message.get("role")
    if role in ("system", "developer", "user", "assistant", "tool", "function"):
        draft.add({"role": role, "content": content, **fields})
    else:
        draft.counts[unknown("messages", role)] += 1


# -------------------------------------------------------------------------------------------------- a list of messages


def is_message_list(records: Sequence[Record]) -> bool:
    """Return whether records are the messages of one conversation: a JSON array of them, or a line each."""
    return len(records) > 1 and all(
        record.get("role") in ("system", "developer", "user", "assistant", "tool") and "content" in record
        for record in records
    )


def message_list_sessions(records: Iterable[Record], counts: Counts) -> Iterator[Session]:
    """Yield the conversation whose messages the records are."""
    draft = Draft(counts)
    for record in records:
        _add_message(draft, record)
    yield from draft.ended()


# ------------------------------------------------------------------------------------------------------------ verifiers


def is_verifiers(records: Sequence[Record]) -> bool:
    """Return whether records are the results of an evaluation with verifiers."""
    names = {"prompt", "completion", "reward"}
    return any(
        names <= record.keys() and ("example_id" in record or "task" in record or "answer" in record)
        for record in records
    )


def verifiers_sessions(records: Iterable[Record], counts: Counts) -> Iterator[Session]:
    """Yield the conversation of each result; the tools are those of `tool_defs`, or of `info`."""
    for number, record in enumerate(records, start=1):
        prompt, completion = (_messages(record.get(name)) for name in ("prompt", "completion"))
        if not prompt or not completion:
            counts[LeftOut.TEXT_PROMPT] += 1
            continue
        info = _object(record.get("info"))
        tools = (
            record.get("tool_defs") or record.get("oai_tools") or info.get("oai_tools") or info.get("tool_defs") or ()
        )
        draft = Draft(counts, f"result {number}", _messages(tools))
        for message in prompt:
            _add_message(draft, message)
        draft.restart(draft.messages(), LogNote.PROMPT)
        for message in completion:
            _add_message(draft, message)
        yield from draft.ended()


def _messages(value: object) -> list[Mapping[str, Any]]:
    """Return a list of objects, also from JSON text."""
    if isinstance(value, str) and value[:1] == "[":
        try:
            value = read_json(value)
        except (ValueError, RecursionError):
            return []
    return objects(value)
