"""OpenHands' events -> sessions. Pure.

Version 0 has actions and observations (`events/0.json`, `trajectory.json`, `history` in an evaluation's
`output.jsonl`); an action of the model holds the model's whole answer in `tool_call_metadata`. In logs without it, an
action is read as a call of its name. Version 1, the SDK, has events of a `kind` (`events/event-00000-*.json`). A
condensation ends a conversation; the next begins without the forgotten events.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentic_opd.logs.messages import LogNote
from agentic_opd.logs.session import (
    Counts,
    LeftOut,
    Record,
    Session,
    by_provider,
    called,
    iso_time,
    json_text,
    member,
    not_learned,
    objects,
    read_content,
    readable_tools,
    text_id,
    text_of,
    unknown,
)

_KINDS = (
    *("SystemPromptEvent", "MessageEvent", "ActionEvent", "ObservationEvent", "UserRejectObservation"),
    *("AgentErrorEvent", "Condensation", "CondensationSummaryEvent", "CondensationRequest", "PauseEvent"),
    *("ConversationStateUpdateEvent", "ConversationErrorEvent", "TokenEvent", "LLMCompletionLogEvent"),
    *("HookExecutionEvent", "StreamingDeltaEvent", "InterruptEvent", "ACPToolCallEvent"),
)
_SILENT_ACTIONS = (
    "recall",
    "change_agent_state",
    "null",
    "pause",
    "resume",
    "stop",
    "initialize",
    "condensation_request",
)
_SILENT_OBSERVATIONS = ("recall", "agent_state_changed", "null", "success", "user_rejected_state")
_OWN_ARGUMENTS = (
    *(
        "thought",
        "is_confirmed",
        "confirmation_state",
        "security_risk",
        "action_risk",
        "keep_prompt",
        "kernel_init_code",
    ),
    *(
        "action",
        "id",
        "timestamp",
        "source",
        "message",
        "blocking",
        "hidden",
        "images_urls",
        "image_urls",
        "llm_metrics",
    ),
    *("include_extra", "wait_for_response", "is_input", "is_static", "cwd", "hard_timeout", "timeout"),
)
"""Fields of an action that the model did not write."""


def is_event(record: Record) -> bool:
    """Return whether a record is an event of a session."""
    is_known = record.get("kind") in _KINDS or _is_action_or_observation(record)
    return is_known and record.get("source") in ("agent", "user", "environment", "hook")


def _is_action_or_observation(record: Record) -> bool:
    return isinstance(record.get("action", record.get("observation")), str)


def is_openhands(records: Sequence[Record]) -> bool:
    """Return whether records are events, or rows of an evaluation with a history of events."""
    if sum(map(is_event, records)) > len(records) / 2:
        return True
    histories = map(_history, records)
    return any(_is_action_or_observation(event) or is_event(event) for history in histories for event in history)


def sessions(records: Iterable[Record], counts: Counts) -> Iterator[Session]:
    """Yield the conversations of events: one, and one more for each condensation. A row with a history is a session."""
    reader = _Reader(counts)
    for record in records:
        if history := _history(record):
            reader_of_row = _Reader(counts, label=str(record.get("instance_id") or ""))
            for event in history:
                yield from reader_of_row.read(event)
            yield from reader_of_row.ended()
        else:
            yield from reader.read(record)
    yield from reader.ended()


def _history(record: Record) -> list[Record]:
    """Return the events of a row or of an export; older rows have pairs of an action and an observation."""
    history = record.get("history")
    events = list[Record]()
    for element in history if isinstance(history, list) else []:
        events += objects(element) if isinstance(element, list) else objects([element])
    exported = objects(record.get("trajectory")) or objects(record.get("events"))
    return events or [event for event in exported if "source" in event]


@dataclass
class _Reader:
    """A session while its events are read."""

    counts: Counts
    tools: object = ()
    label: str = ""
    time: str = ""
    rows: list[tuple[object, dict[str, Any]]] = field(default_factory=list[tuple[object, dict[str, Any]]])
    """Id of the event and the message it made."""
    answer_id: object = None
    open_calls: list[str] = field(default_factory=list[str])
    """Ids of calls made for actions without one, until their observations."""

    def add(self, event: Record, message: dict[str, Any]) -> None:
        self.rows.append((event.get("id"), message))

    def ended(self) -> Iterator[Session]:
        """Yield the conversation so far, if an answer is in it; count it otherwise."""
        messages = [message for _, message in self.rows]
        if any(message["role"] == "assistant" for message in messages):
            tools = readable_tools(self.tools, self.counts)
            yield Session(tuple(messages), tools, self.label, time=self.time)
        elif messages:
            self.counts[LeftOut.EMPTY] += 1

    def read(self, event: Record) -> Iterator[Session]:
        """Read an event; yield the conversation that ends with it."""
        kind = event.get("kind")
        self.time = self.time or iso_time(event.get("timestamp"))
        if kind is not None:
            yield from self._read_sdk(event, kind)
        elif isinstance(action := event.get("action"), str):
            yield from self._read_action(event, action)
        elif isinstance(observation := event.get("observation"), str):
            self._read_observation(event, observation)
        elif event.get("content") is not None and event.get("source") in ("user", None):
            self.add(event, {"role": "user", "content": read_content(event["content"], self.counts)})
        else:
            self.counts[unknown("records", event.get("type"))] += 1

    # ------------------------------------------------------------------------------------------------------- version 0

    def _read_action(self, event: Record, action: str) -> Iterator[Session]:
        arguments: Any = event.get("args") if isinstance(event.get("args"), dict) else event
        answer = member(event, "tool_call_metadata", "model_response", "choices")
        if action == "condensation":
            yield from self._condense(arguments)
        elif action == "system":
            self.tools = arguments.get("tools")
            self.add(event, {"role": "system", "content": text_of(arguments.get("content"))})
        elif action in _SILENT_ACTIONS or (event.get("source") == "environment" and action != "message"):
            self.counts[LeftOut.BOOKKEEPING] += 1
        elif answer and (message := member(objects(answer)[0] if objects(answer) else None, "message")):
            self._add_answer(event, message, member(event, "tool_call_metadata", "model_response", "id"))
        elif action == "message":
            text = {"type": "text", "text": text_of(arguments.get("content"))}
            urls = arguments.get("image_urls") or arguments.get("images_urls")
            pictures = [{"type": "image"} for _ in (urls if isinstance(urls, list) else ())]
            role = "assistant" if event.get("source") == "agent" else "user"
            self.add(event, {"role": role, "content": [text, *pictures]})
        elif event.get("source") == "user":
            text = json_text({"action": action, **_written_arguments(arguments)})
            self.add(event, {"role": "user", "content": text})
        else:
            call_id = f"event_{len(self.rows)}"
            self.open_calls.append(call_id)
            calls = called([(call_id, action, _written_arguments(arguments))], self.counts)
            thought = text_of(arguments.get("thought"))
            self.add(event, {"role": "assistant", "content": thought, "tool_calls": calls})

    def _add_answer(self, event: Record, message: Any, answer_id: object) -> None:
        """Add the answer of the model, which each of its actions holds."""
        if answer_id is not None and answer_id == self.answer_id:
            return
        self.answer_id = answer_id
        calls = (
            (call.get("id"), member(call, "function", "name"), member(call, "function", "arguments"))
            for call in objects(member(message, "tool_calls"))
        )
        read = {
            "role": "assistant",
            "content": read_content(member(message, "content") or "", self.counts),
            "tool_calls": called(calls, self.counts),
        }
        names = ("reasoning_content", "thinking_blocks")
        self.add(event, read | {name: member(message, name) for name in names if member(message, name)})

    def _read_observation(self, event: Record, observation: str) -> None:
        call_id = member(event, "tool_call_metadata", "tool_call_id")
        metadata = member(event, "extras", "metadata")
        content = f"{_prefix(metadata)}{text_of(event.get('content'))}{''.join(_terminal_lines(metadata))}"
        if isinstance(call_id, str):
            self.add(event, {"role": "tool", "tool_call_id": call_id, "content": content})
        elif observation in _SILENT_OBSERVATIONS:
            self.counts[LeftOut.BOOKKEEPING] += 1
        elif self.open_calls:
            self.add(event, {"role": "tool", "tool_call_id": self.open_calls.pop(0), "content": content})
        else:
            self.add(event, {"role": "user", "content": content})

    # ------------------------------------------------------------------------------------------------------- version 1

    def _read_sdk(self, event: Record, kind: object) -> Iterator[Session]:
        if kind == "SystemPromptEvent":
            self.tools = event.get("tools")
            self.add(
                event,
                {"role": "system", "content": text_of([event.get("system_prompt"), event.get("dynamic_context")])},
            )
        elif kind == "MessageEvent":
            message = event.get("llm_message")
            content = read_content(member(message, "content") or "", self.counts)
            extended = read_content(event.get("extended_content") or [], self.counts)
            content = [*content, *extended] if isinstance(content, list) and isinstance(extended, list) else content
            role = "assistant" if member(message, "role") == "assistant" else "user"
            self.add(event, {"role": role, "content": content} | _sdk_thoughts(message))
        elif kind == "ActionEvent":
            self._add_action(event)
        elif kind in ("ObservationEvent", "UserRejectObservation", "AgentErrorEvent"):
            content = [*self._result(event), *_parts(read_content(event.get("extended_content") or [], self.counts))]
            self.add(event, {"role": "tool", "tool_call_id": text_id(event.get("tool_call_id")), "content": content})
        elif kind == "ACPToolCallEvent":
            self.counts[by_provider(event.get("tool_kind") or "agent client protocol")] += 1
        elif kind == "Condensation":
            yield from self._condense(event)
        else:
            self.counts[LeftOut.BOOKKEEPING if kind in _KINDS else unknown("records", kind)] += 1

    def _result(self, event: Record) -> list[dict[str, Any]]:
        """Return the result of a call as the model is shown it."""
        if isinstance(reason := event.get("rejection_reason"), str):
            return _parts(f"Action rejected: {reason}")
        observation = event.get("observation")
        texts: Any = [member(observation, name) for name in ("content", "output", "text", "error", "message")]
        content: Any = next((text for text in (*texts, event.get("error")) if text), "")
        parts = _parts(read_content(content, self.counts) if isinstance(content, str | list) else json_text(content))
        metadata, is_error = member(observation, "metadata"), member(observation, "is_error") is True
        head, ending = f"{_ERROR_HEAD if is_error else ''}{_prefix(metadata)}", "".join(_terminal_lines(metadata))
        return [*(_parts(head) if head else ()), *parts, *(_parts(ending) if ending else ())]

    def _add_action(self, event: Record) -> None:
        """Add an action's call, to the answer before it if the model made both at once."""
        call = event.get("tool_call")
        function: Any = member(call, "function") or call
        name, arguments = member(function, "name") or event.get("tool_name"), member(function, "arguments")
        if arguments is None:
            arguments = {key: value for key, value in (event.get("action") or {}).items() if key != "kind"}
        calls = called([(event.get("tool_call_id"), name, arguments)], self.counts)
        answer_id = event.get("llm_response_id")
        if answer_id is not None and answer_id == self.answer_id:
            for _, message in reversed(self.rows):
                if message["role"] == "assistant":
                    message["tool_calls"] += calls
                    return
        self.answer_id = answer_id
        content = read_content(event.get("thought") or "", self.counts)
        self.add(event, {"role": "assistant", "content": content, "tool_calls": calls} | _sdk_thoughts(event))

    def _condense(self, event: Record) -> Iterator[Session]:
        """End the conversation, and begin again without the forgotten events."""
        yield from self.ended()
        start, end = event.get("forgotten_events_start_id"), event.get("forgotten_events_end_id")
        ids = event.get("forgotten_event_ids")
        forgotten = (
            set(ids) if isinstance(ids, list) and all(isinstance(name, int | str) for name in ids) else set[Any]()
        )
        if isinstance(start, int) and isinstance(end, int):
            forgotten |= {name for name, _ in self.rows if isinstance(name, int) and start <= name <= end}
        rows = [(name, not_learned(message, LogNote.REPEATED)) for name, message in self.rows if name not in forgotten]
        if isinstance(summary := event.get("summary"), str) and summary:
            offset = event.get("summary_offset")
            position = min(offset, len(rows)) if isinstance(offset, int) and offset >= 0 else len(rows)
            rows.insert(position, (None, {"role": "user", "content": summary}))
        self.rows = rows


def _written_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in _OWN_ARGUMENTS and value is not None}


def _sdk_thoughts(event: Any) -> dict[str, Any]:
    reasoning, item = member(event, "reasoning_content"), member(event, "responses_reasoning_item")
    texts = member(item, "content") or member(item, "summary")
    options = {
        "reasoning_content": reasoning if isinstance(reasoning, str) else None,
        "thinking_blocks": objects(member(event, "thinking_blocks")),
        "reasoning": [text for text in (texts if isinstance(texts, list) else ()) if isinstance(text, str)],
    }
    return {name: value for name, value in options.items() if value}


_ERROR_HEAD = "[An error occurred during execution.]\n"


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _prefix(metadata: Any) -> str:
    """Return what the model reads before the output of a command."""
    prefix = member(metadata, "prefix")
    return prefix if isinstance(prefix, str) else ""


def _terminal_lines(metadata: Any) -> Iterator[str]:
    """Yield what the model reads behind the output of a command."""
    suffix, code = member(metadata, "suffix"), member(metadata, "exit_code")
    if isinstance(suffix, str):
        yield suffix
    names = {"working_dir": "Current working directory", "py_interpreter_path": "Python interpreter"}
    for name, title in names.items():
        if isinstance(value := member(metadata, name), str) and value:
            yield f"\n[{title}: {value}]"
    if isinstance(code, int) and code != -1:
        yield f"\n[Command finished with exit code {code}]"
