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
    member,
    not_learned,
    objects,
    read_content,
    unknown,
)

_REASONING = ("reasoning_content", "reasoning", "thinking_blocks", "reasoning_details")
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
        return
    if draft.last is not None and _is_cut_off(response):
        draft.last.message.update(not_learned(draft.last.message, LogNote.STOPPED))


def _is_cut_off(response: Record) -> bool:
    """Return whether an answer ended at a limit, or was filtered."""
    choice = next(iter(objects(response.get("choices"))), response)
    reason = choice.get("finish_reason") or choice.get("stop_reason")
    return reason in ("length", "max_tokens", "content_filter") or response.get("status") in ("incomplete", "failed")


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
                {**choice, "message": {**choice["message"], "role": "assistant"}}
                for choice in chat_body(events)["choices"]
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
    names = ("tool_calls", "function_call", "tool_call_id", "name", "refusal", *_REASONING)
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
    """Return whether records are the results of an evaluation with verifiers, or its episodes of traces."""
    names = {"prompt", "completion", "reward"}
    return any(
        (names <= record.keys() and ("example_id" in record or "task" in record or "answer" in record))
        or any(map(_is_trace, _traces(record)))
        for record in records
    )


def _traces(record: Record) -> list[Record]:
    return objects(record.get("traces")) or [record]


def _is_trace(record: Record) -> bool:
    return "task" in record and any(member(node, "message", "role") for node in objects(record.get("nodes")))


def verifiers_sessions(records: Iterable[Record], counts: Counts) -> Iterator[Session]:
    """Yield the conversation of each result, and of each branch of a trace.

    The tools of a result are those of `tool_defs`, or of `info`.
    """
    for number, record in enumerate(records, start=1):
        traces = _traces(record)
        if any(map(_is_trace, traces)):
            for trace in traces:
                yield from _trace_sessions(trace, counts)
            continue
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
        last = draft.last
        if record.get("is_truncated") is True and last is not None and last.message["role"] == "assistant":
            last.message.update(not_learned(last.message, LogNote.STOPPED))
        yield from draft.ended()


def _trace_sessions(trace: Record, counts: Counts) -> Iterator[Session]:
    """Yield a conversation for each leaf of a trace's tree of messages; `parent` is an index into its `nodes`."""
    if member(trace, "agent", "trainable") is False:
        counts[LeftOut.NOT_TRAINED] += 1
        return
    nodes, calls = trace.get("nodes"), objects(trace.get("calls"))
    nodes = nodes if isinstance(nodes, list) else []
    parents = [member(node, "parent") for node in nodes]
    cut_off = {call.get("node") for call in calls if call.get("finish_reason") == "length"}
    for leaf in sorted({*range(len(nodes))} - {parent for parent in parents if isinstance(parent, int)}):
        draft = Draft(counts, f"trace {str(trace.get('id'))[:40]}", trace.get("tools"))
        draft.begin(None, member(trace, "timing", "start"))
        for index in _path(parents, leaf):
            message = member(nodes[index], "message")
            if not isinstance(message, Mapping):
                counts[LeftOut.NO_MESSAGE] += 1
                continue
            before = draft.last
            _add_message(draft, message)
            if draft.last is None or draft.last is before:
                continue
            reason = LogNote.STOPPED if index in cut_off else None
            if member(nodes[index], "sampled") is False:
                reason = LogNote.PROMPT
            if reason is not None:
                draft.last.message.update(not_learned(draft.last.message, reason))
            if message.get("provider_state") and not message.get("reasoning_content"):
                counts[LeftOut.HIDDEN_REASONING] += 1
        yield from draft.ended()


def _path(parents: Sequence[object], leaf: int) -> list[int]:
    """Return the indices from the root to a leaf, parents before their children."""
    path, index = list[int](), leaf
    while True:
        path.append(index)
        parent = parents[index]
        if not isinstance(parent, int) or not 0 <= parent < index:
            return path[::-1]
        index = parent


def _messages(value: object) -> list[Mapping[str, Any]]:
    """Return a list of objects, also from JSON text."""
    if isinstance(value, str) and value[:1] == "[":
        try:
            value = read_json(value)
        except (ValueError, RecursionError):
            return []
    return objects(value)
