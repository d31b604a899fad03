"""A session of an agent as conversations in the log form, and the counts of what its reader left out. Pure.

Records are added to a `Draft` in their order; a draft becomes a `Session` where the prompt of the agent changes: at the
end, at a compaction, and where a person went back to an earlier message.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, cast

from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.media import media_word
from agentic_opd.logs.messages import NOT_LEARNED, LogNote
from agentic_opd.logs.tools import plain_tools

Record = Mapping[str, Any]
"""An object of a file: a line, an element, or the whole document."""


class LeftOut(StrEnum):
    """What a reader leaves out, in the words of the summary; `unknown` names others."""

    BROKEN_LINE = "lines that are not JSON"
    CUT_LINE = "last lines that were cut off"
    LONG_LINE = "lines longer than 64 MiB"
    NO_OBJECT = "lines that are no object"
    NO_STEP = "steps that are no object"
    BOOKKEEPING = "records without a part of the conversation"
    NOTICE = "notices of the agent in place of an answer"
    DUPLICATE_RECORD = "records that repeat another record of the file"
    DUPLICATE = "conversations that another conversation repeats"
    OWN_LOG = "conversations of which the agent's own log is among the files"
    UNLEARNED = "conversations without an answer to learn"
    EMPTY = "conversations without an answer of the agent"
    NO_TEXT_PART = "parts that hold no text or call"
    HIDDEN_REASONING = "encrypted reasoning"
    BROKEN_CALL = "calls without a name"
    TEXT_PROMPT = "rows whose prompt or completion is no list of messages"
    BRANCH = "branches of a session beyond the 256th"
    NO_ANSWER = "requests whose answer can't be read"
    NO_BEGINNING = "requests that continue an answer that is not in the file"
    NO_MESSAGE = "records without the message of their role"
    NO_FUNCTION = "tools without a schema, or that their provider runs"
    DEEP = "lines nested deeper than 100 objects and lists"
    NOT_TRAINED = "traces of agents that their run does not train"
    OTHER_PART = "files of a session without a message of theirs"


Counts = Counter[str]
"""Numbers of left-out records, by `LeftOut` or `unknown`."""


def unknown(kind: str, name: object) -> str:
    """Return the key in `Counts` of a kind of record or part that the reader does not know."""
    return f"{kind} of unknown type {str(name)[:40]!r}"


def by_provider(kind: object) -> str:
    """Return the key in `Counts` of calls that the model's provider ran."""
    return f"calls that the provider ran ({str(kind)[:40].replace('_', ' ')})"


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation in the log form, as a reader makes it."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[Any] = ()
    label: str = ""
    """Its distinction from other conversations of its file, such as the name of a sub-agent."""
    project: str = ""
    """Folder that the agent worked in, empty where the log does not say."""
    time: str = ""
    """When it began, as ISO 8601, empty where the log does not say."""

    def fields(self) -> dict[str, Any]:
        """Return it as a row of a log, with the folder and the time if it has them."""
        origin = {"project": self.project, "time": self.time}
        return {
            "messages": [*self.messages],
            "tools": [*self.tools],
            **{key: text for key, text in origin.items() if text},
        }


@dataclass(slots=True)
class _Node:
    """A message and the message before it, so that branches share the messages before them."""

    message: dict[str, Any]
    before: "_Node | None"
    depth: int
    """Number of messages up to this one."""
    answers: int
    """Number of the agent's messages up to this one."""
    record_ids: list[str] = field(default_factory=list[str])


_MOST_BRANCHES = 256
"""Conversations of one session that end where a person went back; further ones are counted."""


@dataclass
class Draft:
    """A conversation while its records are read; ids of records tell where a person went back."""

    counts: Counts
    label: str = ""
    tools: object = ()
    """The list of tools, as the log has it."""
    last: _Node | None = None
    nodes: dict[str, _Node | None] = field(default_factory=dict[str, "_Node | None"])
    """Id of a record -> the last message up to it."""
    branches: int = 0
    project: str = ""
    time: str = ""

    def begin(self, project: object, time: object) -> None:
        """Take the folder and the time of a record, unless an earlier record had them; a time may be a number."""
        if not self.project and isinstance(project, str):
            self.project = project
        if not self.time:
            self.time = iso_time(time)

    def add(self, message: Mapping[str, Any], record_id: object = None) -> dict[str, Any]:
        """Append a message and return it."""
        depth, answers = (0, 0) if self.last is None else (self.last.depth, self.last.answers)
        self.last = _Node(dict(message), self.last, depth + 1, answers + (message.get("role") == "assistant"))
        self.mark(record_id)
        return self.last.message

    def mark(self, record_id: object, before: object = None) -> None:
        """Note that a record follows the last message, or is at the position of the record `before`."""
        if isinstance(record_id, str):
            node = self.nodes.get(before, self.last) if isinstance(before, str) else self.last
            self.nodes[record_id] = node
            if node is not None:
                node.record_ids.append(record_id)

    def goes_back_to(self, record_id: object) -> Iterator[Session]:
        """Continue after the record of this id. If answers follow it, yield the conversation that ends here.

        A record that is not known changes nothing.
        """
        if not isinstance(record_id, str) or record_id not in self.nodes:
            return
        target, node = self.nodes[record_id], self.last
        depth, answers = (0, 0) if target is None else (target.depth, target.answers)
        while node is not None and node.depth > depth:
            node = node.before
        if node is target and self.last is not None and self.last.answers == answers:
            return
        yield from self.ended()
        self.last = target

    def ended(self) -> Iterator[Session]:
        """Yield the conversation so far, if an answer is in it; count it otherwise."""
        if self.last is None:
            return
        if not self.last.answers:
            self.counts[LeftOut.EMPTY] += 1
            return
        self.branches += 1
        if self.branches > _MOST_BRANCHES:
            self.counts[LeftOut.BRANCH] += 1
            return
        tools = readable_tools(self.tools, self.counts)
        yield Session(tuple(self.messages()), tools, self.label, self.project, self.time)

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages so far."""
        messages, node = list[dict[str, Any]](), self.last
        while node is not None:
            messages.append(node.message)
            node = node.before
        return messages[::-1]

    def restart(self, messages: Iterable[Mapping[str, Any]], reason: LogNote = LogNote.REPEATED) -> None:
        """Begin again with other messages, whose answers are not learned."""
        self.last = None
        for message in messages:
            self.add(not_learned(message, reason))

    def restart_at(self, record_id: object, messages: Iterable[Mapping[str, Any]], *, but: int = 0) -> None:
        """Begin again with `messages` and those from the record on, without the last `but` ones; none is learned.

        Without a message of that record in this conversation, it begins with `messages` alone.
        """
        first = self.nodes.get(record_id) if isinstance(record_id, str) else None
        recent, node = list[_Node](), self.last
        while first is not None and node is not None and node.depth >= first.depth:
            recent.append(node)
            node = node.before
        self.restart(messages)
        if first is None or not recent or recent[-1] is not first:
            return
        for entry in recent[: but - 1 if but else None : -1]:
            self.add(not_learned(entry.message, LogNote.REPEATED))
            for name in entry.record_ids:
                self.mark(name)


def not_learned(message: Mapping[str, Any], reason: LogNote) -> dict[str, Any]:
    """Return a message with the reason why it is not learned, if it is an answer without one."""
    is_learned = message.get("role") == "assistant" and NOT_LEARNED not in message
    return {**message, NOT_LEARNED: reason} if is_learned else dict(message)


# ----------------------------------------------------------------------------------------------------- parts of records


def member(record: object, *names: str) -> Any:
    """Return a value inside nested objects; None where a level is no object or has no such key."""
    for name in names:
        record = cast(Mapping[str, Any], record).get(name) if isinstance(record, Mapping) else None
    return record


def objects(value: object) -> list[Record]:
    """Return the objects in a list; empty for anything else."""
    return (
        [element for element in cast(list[Any], value) if isinstance(element, Mapping)]
        if isinstance(value, list)
        else []
    )


def text_of(content: object) -> str:
    """Return the text of a content: a text, or the texts of its parts, a line each."""
    if isinstance(content, str):
        return content
    texts = (part.get("text") for part in objects(content))
    return "\n".join(text for text in texts if isinstance(text, str))


_TEXT, _REASONING = ("text", "input_text", "output_text"), ("thinking", "reasoning")
_PROVIDERS_CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
_BY_PROVIDER = (
    *_PROVIDERS_CALLS,
    *("web_search_tool_result", "web_fetch_tool_result", "mcp_tool_result", "code_execution_tool_result"),
    *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result"),
)
"""Parts of calls that the model's provider ran, and of their results: Anthropic's; inspect's have a `tool_type`."""


def read_content(content: object, counts: Counts) -> str | list[dict[str, Any]]:
    """Return a content with the parts that a log may have; others are counted.

    `toolCall` becomes `tool_use`; a `tool_use` without a name is counted; a result that is neither text nor parts is
    written as JSON text.
    """
    if isinstance(content, str):
        return content
    parts = list[dict[str, Any]]()
    for part in cast(list[Any], content) if isinstance(content, list) else [content]:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        elif isinstance(part, Mapping):
            parts += _read_part(cast(Record, part), counts)
        elif part is not None:
            counts[unknown("parts", type(part).__name__)] += 1
    return parts


def _read_part(part: Record, counts: Counts) -> list[dict[str, Any]]:
    kind = part.get("type")
    if kind in _TEXT and isinstance(part.get("text"), str):
        return [{"type": "text", "text": part["text"]}]
    if kind in _REASONING:
        # The text of redacted reasoning is encrypted, or a word for it; inspect keeps a summary beside it.
        is_redacted = part.get("redacted") is True
        names = ("summary",) if is_redacted else (kind, "text", "summary")
        thoughts = next((part[name] for name in names if part.get(name)), "")
        if not thoughts and (is_redacted or part.get("signature")):
            counts[LeftOut.HIDDEN_REASONING] += 1
            return []
        return [{"type": "thinking", "thinking": thoughts}]
    if media_word(kind) is not None:
        return [{"type": kind}]
    if kind in ("tool_use", "toolCall") and not isinstance(part.get("tool_type"), str):
        return _call(part, counts)
    if kind in _BY_PROVIDER:
        counts[by_provider(part.get("tool_type", part.get("name", kind)))] += kind in _PROVIDERS_CALLS
        return []
    if kind == "tool_result":
        result = part.get("content")
        is_read = isinstance(result, str | list)
        read = read_content(result, counts) if is_read else "" if result is None else json_text(result)
        return [{"type": kind, "tool_use_id": text_id(part.get("tool_use_id")), "content": read}]
    counts[LeftOut.HIDDEN_REASONING if kind == "redacted_thinking" else unknown("parts", kind)] += 1
    return []


def _call(part: Record, counts: Counts) -> list[dict[str, Any]]:
    name, arguments = part.get("name"), part.get("input", part.get("arguments"))
    if not isinstance(name, str) or not name:
        counts[LeftOut.BROKEN_CALL] += 1
        return []
    return [{"type": "tool_use", "id": text_id(part.get("id")), "name": name, "input": call_input(arguments)}]


def call_input(arguments: object) -> str | Mapping[str, Any] | None:
    """Return the arguments of a call as text, as an object or None; anything else as JSON text."""
    is_read = arguments is None or isinstance(arguments, str | Mapping)
    return cast(Any, arguments) if is_read else json_text(arguments)


def readable_tools(tools: object, counts: Counts) -> list[Record]:
    """Return the tools of a list that a prompt can show; others are counted."""
    readable = list[Record]()
    for tool in objects(tools):
        try:
            plain_tools({"tools": [tool]})
        except AlignmentError:
            counts[LeftOut.NO_FUNCTION] += 1
            continue
        readable.append(tool)
    return readable


def iso_time(time: object) -> str:
    """Return a time as ISO 8601 to the second in UTC; empty for anything else.

    It may be ISO 8601, or a number since 1970: of seconds up to the year 5138, of milliseconds above.
    """
    try:
        if isinstance(time, str):
            read = datetime.fromisoformat(time)
            read = read if read.tzinfo else read.replace(tzinfo=UTC)
        elif isinstance(time, int | float) and not isinstance(time, bool):
            read = datetime.fromtimestamp(time if abs(time) < 1e11 else time / 1000, UTC)
        else:
            return ""
        return read.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return ""


def text_id(value: object) -> str | None:
    """Return an id as text, None without one."""
    return value if isinstance(value, str) else str(value) if isinstance(value, int) else None


def json_text(value: object) -> str:
    """Return a value as JSON text."""
    return json.dumps(value, ensure_ascii=False)


def called(calls: Iterable[tuple[object, object, object]], counts: Counts) -> list[dict[str, Any]]:
    """Return calls (id, name, arguments) in OpenAI's form; those without a name are counted."""
    read = list[dict[str, Any]]()
    for call_id, name, arguments in calls:
        if not isinstance(name, str) or not name:
            counts[LeftOut.BROKEN_CALL] += 1
            continue
        function = {"name": name, "arguments": call_input(arguments)}
        read.append({"id": text_id(call_id), "type": "function", "function": function})
    return read


# -------------------------------------------------------------------------------------------------------------- repeats


def without_repeats(sessions: Sequence[Session]) -> list[Session | None]:
    """Return each session with the answers that another repeats marked as not learned; None if nothing is left.

    An answer repeats another if all messages up to it are the same: in a session that was resumed or forked, in a
    request that holds the earlier ones, in a copy of a file. It is learned in the longest of the conversations that
    hold it, where what came after it is known.
    """
    chains = [_chain(session.messages) for session in sessions]
    owners = dict[bytes, int]()
    for index in sorted(range(len(sessions)), key=lambda index: (-len(chains[index]), index)):
        for digest in chains[index]:
            owners.setdefault(digest, index)
    return [_without_answers_of_others(index, sessions[index], chains[index], owners) for index in range(len(sessions))]


def _without_answers_of_others(
    index: int, session: Session, chain: Sequence[bytes], owners: Mapping[bytes, int]
) -> Session | None:
    messages = [
        message if owners[digest] == index else not_learned(message, LogNote.REPEATED)
        for message, digest in zip(session.messages, chain, strict=True)
    ]
    is_learned = any(message.get("role") == "assistant" and NOT_LEARNED not in message for message in messages)
    return replace(session, messages=messages) if is_learned else None


def _chain(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return for each message a digest of all messages up to it."""
    digest, chain = b"", list[bytes]()
    for message in messages:
        text = json.dumps(_compared(message), sort_keys=True, ensure_ascii=False, default=str)
        digest = hashlib.blake2b(digest + text.encode(errors="surrogatepass"), digest_size=16).digest()
        chain.append(digest)
    return chain


def _compared(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in the form in which it is compared: an answer and the later requests with it may differ in
    theirs.
    """
    content, calls = message.get("content"), message.get("tool_calls")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if isinstance(parts, list):
        parts = [part for part in parts if part != {"type": "text", "text": ""}]
    compared = {key: value for key, value in message.items() if key not in (NOT_LEARNED, "content", "tool_calls")}
    return compared | {"content": parts or [], "tool_calls": [_compared_call(call) for call in objects(calls)]}


def _compared_call(call: Record) -> list[Any]:
    function = call.get("function", call)
    return [call.get("id"), member(function, "name"), member(function, "arguments")]
