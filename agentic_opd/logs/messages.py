"""Conversations in the formats of clients and datasets -> messages and tools in this package's format. Pure.

A row holds `messages` (or `conversations` in ShareGPT's form, or `prompt` and `completion`) and `tools`, each as JSON
or as JSON text. Supported are content in parts, refusals, reasoning in any field or in the content, calls without
arguments, the legacy `function_call`, `functions` and role `function`, Anthropic's `tool_use` and `tool_result`,
padding of columnar files, and tool results in any order. The error for unsupported input names the field.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import groupby
from typing import Any, Literal, NamedTuple, cast

from pydantic import BaseModel, ValidationError

from agentic_opd.core.attachments.messages import drop_empty_digests
from agentic_opd.core.columnar import StoredCall, unpadded_arguments
from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.media import media_word
from agentic_opd.core.text import call_arguments, read_json
from agentic_opd.core.types import Message
from agentic_opd.logs.dialects import as_text, bare_function, conversation_columns, is_missing, spoken, tool_responses
from agentic_opd.logs.secrets import masked_messages
from agentic_opd.logs.tools import from_text, has_padded_tools, plain_tools

__all__ = ["ConversationLog", "LogNote", "has_arguments", "plain_messages", "plain_tools", "read_log"]


class LogNote(StrEnum):
    """A change to a conversation, or the reason why a turn is read and not learned, in the words of the summary."""

    BEFORE_USER = "before the first user message"
    WEIGHT_0 = "of weight 0"
    PROMPT = "in the prompt of a completion"
    EMPTY = "without text or call"
    MEDIA = "with pictures or sound"
    ANSWERS_MEDIA = "that answer pictures, sound or files, which are left out"
    ARGUMENTS = "with arguments that are no JSON object"
    REASONING_IN_TEXT = "with marks of reasoning inside the text"
    CONTROL_TOKENS = "with control tokens in the text or a call"
    NO_REASONING = "without the reasoning that the prompt opens"
    NOT_READ_BACK = "that the renderer does not read back as written"
    TOO_LONG = "beyond the policy's context"
    REPEATED = "that another conversation of the logs repeats, where they are learned"
    STOPPED = "that an error or a person stopped"
    SUMMARY = "that sum up the session for the agent itself"
    DEMONSTRATION = "of a demonstration in the prompt"
    ALTERED = "that the log does not hold as the model wrote them"
    SECRET = "with a masked secret"
    REASONING = "turns learned without their reasoning, for which the prompt has no place"
    PADDING = "conversations with null padding removed"
    REORDERED = "tool results put in the order of their calls"
    RESULT_WITHOUT_CALL = "tool results without a call of their id"
    CALL_WITHOUT_RESULT = "calls without a result"
    MEDIA_LEFT_OUT = "pictures, sounds and files replaced by a word"
    MASKED = "secrets masked"

    @property
    def is_context(self) -> bool:
        """Whether it is the reason why a turn is not learned."""
        return self not in _CHANGES


_CHANGES = (
    LogNote.REASONING,
    LogNote.PADDING,
    LogNote.REORDERED,
    LogNote.RESULT_WITHOUT_CALL,
    LogNote.CALL_WITHOUT_RESULT,
    LogNote.MEDIA_LEFT_OUT,
    LogNote.MASKED,
)

NOT_LEARNED = "not_learned"
"""Field of a message in which a reader writes the reason, a `LogNote`, why a turn is read and not learned."""


@dataclass(frozen=True, slots=True)
class ConversationLog:
    """A conversation in this package's format."""

    messages: list[Message]
    context: Mapping[int, LogNote] = field(default_factory=dict[int, LogNote])
    """Index of an assistant message that is not learned -> the reason."""
    notes: Counter[LogNote] = field(default_factory=Counter[LogNote])
    """Numbers of changes."""


_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS = ("thinking", "reasoning", "redacted_thinking")


class _LoggedPart(BaseModel):
    type: Literal[
        "text",
        "input_text",
        "output_text",
        "refusal",
        "thinking",
        "reasoning",
        "redacted_thinking",
        "tool_use",
        "tool_result",
    ]
    text: str | None = None
    refusal: str | None = None
    thinking: Any = None
    reasoning: Any = None
    summary: Any = None
    id: str | None = None
    name: str | None = None
    input: str | dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None


class _Function(BaseModel):
    name: str
    """Empty where a policy made a call without one; the environment answers it with an error."""
    arguments: str | dict[str, Any] | None = None


class _Call(BaseModel):
    id: str | None = None
    function: _Function


class _LoggedMessage(BaseModel):
    """The parsed fields of a message; other fields stay unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[_LoggedPart] | None = None
    refusal: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    reasoning_text: Any = None
    reasoning_details: Any = None
    thinking: Any = None
    thinking_blocks: Any = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: _Function | None = None
    tool_call_id: str | None = None
    audio: Any = None

    def parts(self, *types: str) -> list[_LoggedPart]:
        return [] if isinstance(self.content, str) else [part for part in self.content or () if part.type in types]

    def text(self) -> str:
        """Return the text of the content; a refusal is the text of a turn that has no other."""
        content = self.content if isinstance(self.content, str) else ""
        content = content or "".join(part.text or "" for part in self.parts(*_TEXT_PARTS))
        refused = self.refusal or "".join(part.refusal or part.text or "" for part in self.parts("refusal"))
        return content if content.strip() else refused or content

    def thoughts(self) -> str | None:
        """Return the reasoning of the first field that has one, else of the content's parts."""
        of_parts = [_reasoning_text(part.model_dump()) for part in self.parts(*_REASONING_PARTS)]
        fields = (self.reasoning_content, self.reasoning, self.reasoning_text, self.thinking)
        options = (*fields, self.reasoning_details, self.thinking_blocks, of_parts)
        return next((text for text in map(_reasoning_text, options) if text), None)

    def calls(self) -> list[_Call]:
        used = [
            _Call.model_validate({"id": part.id, "function": {"name": part.name, "arguments": part.input}})
            for part in self.parts("tool_use")
        ]
        legacy = [_Call(function=self.function_call)] if self.function_call else []
        return [*(self.tool_calls or ()), *legacy, *used]


def _reasoning_text(value: Any) -> str:
    """Return the text of a reasoning field: a text, a list of blocks, or a block."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(filter(None, map(_reasoning_text, cast(list[Any], value))))
    if isinstance(value, Mapping):
        block = cast(Mapping[str, Any], value)
        names = ("thinking", "reasoning", "text", "content", "summary")
        return next((text for text in (_reasoning_text(block.get(name)) for name in names) if text), "")
    return ""


REASONING_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
)
"""Opening and closing marks of reasoning of the model families; Harmony's closes any message, and opens another."""
_FINAL_CHANNEL = "<|start|>assistant<|channel|>final<|message|>"


def split_reasoning(text: str) -> tuple[str | None, str]:
    """Return the reasoning at the beginning of an assistant's text, None without one, and the text after it.

    A closing mark without an opening one ends reasoning if a line ends after it: servers that open reasoning in the
    prompt log it so. Reasoning that is not closed is the whole text.
    """
    for opening, closing in REASONING_MARKS:
        before, mark, after = text.partition(closing)
        begins = text.lstrip().startswith(opening)
        is_closed_only = bool(mark) and opening not in before and closing != "<|end|>" and after.lstrip(" ")[:1] in "\n"
        if begins and not mark:
            return text.lstrip()[len(opening) :].strip(), ""
        if begins or is_closed_only:
            return before.lstrip().removeprefix(opening).strip(), after.lstrip().removeprefix(_FINAL_CHANNEL)
    return None, text


def has_reasoning_marks(text: str) -> bool:
    """Return whether a text holds a mark of reasoning, which a model would read as one."""
    return any(mark in text for pair in REASONING_MARKS for mark in pair if mark != "<|end|>")


# ------------------------------------------------------------------------------------------------------------- messages


def read_log(
    fields: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], *, mask_secrets: bool = True
) -> ConversationLog:
    """Read the conversation of a row.

    Args:
        fields: The row.
        tools: The tools of the conversation, which tell padding from arguments.
        mask_secrets: Replace what looks like a key by its prefix and `***` (`secrets`); such turns are not learned.

    Raises:
        AlignmentError: the row has no conversation, or a message can't be read; the error names the field
            (`messages[2].content`).
    """
    messages, context = list[Message](), dict[int, LogNote]()
    objects = list[tuple[dict[str, Any], StoredCall]]()
    notes = Counter[LogNote]()
    last_call, answers_media, was_call = "", False, False
    if system := _system(fields):
        messages.append({"role": "system", "content": system})
    for row in _rows(fields):
        message, note, number_of_media, is_call = row.message()
        try:
            parsed = _LoggedMessage.model_validate(message)
            plain_of_row = list(_plain(parsed, row.index, last_call))
        except ValidationError as error:
            raise AlignmentError(_problem(row.where, error)) from error
        if message["role"] == "assistant":
            note = note or (LogNote.ANSWERS_MEDIA if answers_media else None)
            answers_media = False
        else:
            notes[LogNote.MEDIA_LEFT_OUT] += number_of_media
            answers_media = answers_media or number_of_media > 0
        extra = {key: value for key, value in message.items() if key not in _OWN_FIELDS and _has_value(value)}
        drop_empty_digests(extra)
        is_parallel = is_call and was_call and note is None and messages[-1].get("tool_calls")
        was_call = is_call
        if is_parallel:
            messages[-1]["tool_calls"] += plain_of_row[0]["tool_calls"]
            objects += () if row.is_text else _stored_as_objects(plain_of_row[0]["tool_calls"], parsed.calls())
            continue
        for plain in plain_of_row:
            if plain["role"] == "assistant" and (why := note or _why_context(plain, extra)) is not None:
                context[len(messages)] = why
            if calls := plain.get("tool_calls"):
                last_call = calls[-1]["id"]
                objects += () if row.is_text else _stored_as_objects(calls, parsed.calls())
            messages.append(extra | plain)
    if system and messages[1:2] and messages[1]["role"] == "system":
        del messages[0]
        context = {index - 1: why for index, why in context.items()}
    is_padded = _remove_padding(objects, tools) or has_padded_tools(fields)
    notes[LogNote.PADDING] = int(is_padded)
    log = ConversationLog(messages, context, notes)
    log = _without_secrets(log) if mask_secrets else log
    return replace(log, messages=_with_ordered_results(log.messages, notes))


def _without_secrets(log: ConversationLog) -> ConversationLog:
    """Return the conversation with its secrets masked; answers that held one are not learned."""
    messages, numbers = masked_messages(log.messages)
    answers = [index for index in numbers if messages[index]["role"] == "assistant"]
    log.notes[LogNote.MASKED] = sum(numbers.values())
    return replace(log, messages=messages, context=dict.fromkeys(answers, LogNote.SECRET) | dict(log.context))


def plain_messages(messages: object, tools: Sequence[Mapping[str, Any]] = ()) -> list[Message]:
    """Read the messages of a conversation; see `read_log`."""
    return read_log({"messages": messages}, tools).messages


_CONVERSATIONS = ("messages", "conversations", "conversation")
_OWN_FIELDS = {*_LoggedMessage.model_fields}


@dataclass(frozen=True, slots=True)
class _Row:
    """A message as a row holds it."""

    where: str
    """Its field, for messages."""
    index: int
    value: Any
    is_text: bool
    """Whether it was JSON text, which is not padded."""
    is_prompt: bool = False
    """Whether it is in the prompt of a completion."""

    def message(self) -> "_ReadRow":
        """Return the message with a role and a content.

        Raises:
            AlignmentError: it is not a message.
        """
        value = from_text(self.value, self.where)
        if not isinstance(value, Mapping):
            raise AlignmentError(f"{self.where}: expected an object with a role, got {value!r:.80}")
        read = spoken(cast(Mapping[str, Any], value), self.where)
        message = dict(read.fields)
        note = LogNote.PROMPT if self.is_prompt else LogNote.ARGUMENTS if read.is_broken else None
        if isinstance(reason := message.pop(NOT_LEARNED, None), LogNote):
            note = note or reason
        message |= {key: None for key in _OWN_FIELDS & message.keys() if is_missing(message[key])}
        message["tool_calls"] = _parsed_calls(message.get("tool_calls"), f"{self.where}.tool_calls")
        message["content"], number_of_media = without_media(message.get("content"))
        if message["role"] == "assistant":
            if number_of_media or message.get("audio") is not None:
                note = note or LogNote.MEDIA
            if isinstance(content := message["content"], list):
                message["content"] = [part for part in cast(list[Any], content) if part != MEDIA_WORD]
        return _ReadRow(message, note, number_of_media, read.is_call)


class _ReadRow(NamedTuple):
    message: dict[str, Any]
    note: LogNote | None
    """The reason why it is not learned, if its form shows one."""
    number_of_media: int
    """Number of its parts that are not text and were replaced by a word."""
    is_call: bool
    """Whether it is a call in ShareGPT's form."""


MEDIA_WORD = {"type": "text", "text": "[not text: left out]"}
"""Part in place of a picture, a sound or a file."""


def without_media(content: Any) -> tuple[Any, int]:
    """Return a content with a word in place of each part that is not text, in tool results too, and their number."""
    if not isinstance(content, list):
        return content, 0
    parts, number = list[Any](), 0
    for part in cast(list[Any], content):
        kind: Any = part.get("type") if isinstance(part, Mapping) else None
        if media_word(kind) is not None:
            parts.append(MEDIA_WORD)
            number += 1
        elif kind == "tool_result":
            inner, number_inside = without_media(part.get("content"))
            parts.append({**part, "content": inner})
            number += number_inside
        else:
            parts.append(part)
    return parts, number


def _rows(fields: Mapping[str, Any]) -> Iterator[_Row]:
    """Yield the messages of a row's conversation."""
    name = next((name for name in _CONVERSATIONS if fields.get(name) is not None), None)
    values = (fields.get(field) for field in ("prompt", "completion"))  # As text, they are not a conversation.
    prompt, completion = (cast(Sequence[Any], column) if isinstance(column, list | tuple) else () for column in values)
    if name is not None:
        rows = from_text(fields[name], name)
        if not isinstance(rows, list | tuple) or not rows:
            raise AlignmentError(f"{name}: expected a list of at least one message")
        for index, value in enumerate(cast(Sequence[Any], rows)):
            is_text = isinstance(fields[name], str) or isinstance(value, str)
            yield _Row(f"{name}[{index}]", index, value, is_text)
    elif prompt and completion:
        for index, value in enumerate(prompt):
            yield _Row(f"prompt[{index}]", index, value, isinstance(value, str), is_prompt=True)
        for index, value in enumerate(completion):
            yield _Row(f"completion[{index}]", len(prompt) + index, value, isinstance(value, str))
    elif columns := conversation_columns(fields):
        if len(columns) > 1:
            raise AlignmentError(f'{", ".join(columns)}: each is a conversation; name the one to read "messages"')
        yield from _rows({"messages": fields[columns[0]]})
    else:
        names = ", ".join(map(str, fields)) or "nothing"
        raise AlignmentError(
            "tokens and messages: expected a scored group's tokens, or a conversation's list of messages; the row "
            f'holds {names}. Write a conversation as {{"messages": [{{"role": "user", "content": ...}}, '
            '{"role": "assistant", "content": ...}, ...], "tools": [...]}'
        )


def _parsed_calls(calls: Any, where: str) -> Any:
    """Return calls in OpenAI's wrapper, with those objects that are JSON text: all of them, a call, or its function."""
    are_text = isinstance(calls, str)
    read = from_text(calls or None, where)
    if not isinstance(read, list):
        return read
    parsed = list[Any]()
    for index, stored in enumerate(cast(list[Any], read)):
        call = from_text(stored, f"{where}[{index}]")
        function: Any = (call.get("function") or bare_function(call)) if isinstance(call, Mapping) else None
        if function is not None:
            is_text = are_text or isinstance(stored, str) or isinstance(function, str)
            function = from_text(function, f"{where}[{index}].function")
            call = {**call, "function": as_text(function) if is_text else function}
        parsed.append(call)
    return parsed


def _plain(parsed: _LoggedMessage, index: int, last_call: str) -> Iterator[Message]:
    """Yield the message, or several for Anthropic's results; `index` gives ids to calls without one.

    `last_call` is the id for a legacy result.
    """
    roles = {"developer": "system", "function": "tool"}
    role = roles.get(parsed.role, parsed.role)
    results = parsed.parts("tool_result")
    for result in results:
        content = _LoggedMessage.model_validate({"role": "tool", "content": result.content}).text()
        yield {"role": "tool", "content": content, "tool_call_id": result.tool_use_id or ""}
    content = parsed.text()
    if results and not content:
        return
    if role in ("tool", "user") and (responses := tool_responses(content)):
        named = {"tool_call_id": parsed.tool_call_id} if parsed.tool_call_id and len(responses) == 1 else {}
        yield from ({"role": "tool", "content": response} | named for response in responses)
        return
    message: Message = {"role": role, "content": content}
    thoughts = parsed.thoughts()
    if role == "assistant":
        inside, message["content"] = split_reasoning(content)
        if inside is not None and inside.strip() != (thoughts or "").strip():
            thoughts = f"{thoughts}\n{inside}" if thoughts else inside
    answers = last_call if parsed.role == "function" else parsed.tool_call_id
    optional = {"name": parsed.name, "tool_call_id": answers, "reasoning_content": thoughts}
    message |= {name: value for name, value in optional.items() if value is not None}
    if calls := parsed.calls():
        message["tool_calls"] = [
            {
                "id": call.id or f"call_{index}_{number}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": call_arguments(call.function.arguments)},
            }
            for number, call in enumerate(calls)
        ]
    yield message


def _stored_as_objects(
    calls: Iterable[dict[str, Any]], stored: Iterable[_Call]
) -> Iterator[tuple[dict[str, Any], StoredCall]]:
    """Yield the function of each call whose arguments were an object, and the call."""
    for call, original in zip(calls, stored, strict=True):
        arguments = original.function.arguments
        if isinstance(arguments, Mapping):
            yield call["function"], StoredCall(original.function.name, arguments)


def _remove_padding(objects: Sequence[tuple[dict[str, Any], StoredCall]], tools: Sequence[Mapping[str, Any]]) -> bool:
    """Remove padding from the arguments of functions that were stored as objects; return whether there was some."""
    values = unpadded_arguments([call for _, call in objects], tools)
    changed = [(function, new) for (function, call), new in zip(objects, values, strict=True) if new != call.arguments]
    for function, arguments in changed:
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return bool(changed)


def _has_value(value: Any) -> bool:
    """Return whether a field of no meaning to this package has a value that JSON can write."""
    return not is_missing(value) and _is_json(value)


_WEIGHTS = ("weight", "loss", "loss_scale", "train", "training")
"""Fields of a message in which OpenAI's, ms-swift's and Axolotl's files say by 0 or false that it is not trained."""


def _why_context(message: Message, extra: Mapping[str, Any]) -> LogNote | None:
    """Return the reason why an assistant's message is not learned, as far as the message alone shows it."""
    if any(extra.get(name) == 0 for name in _WEIGHTS):
        return LogNote.WEIGHT_0
    if not has_arguments(message):
        return LogNote.ARGUMENTS
    if says_nothing(message):
        return LogNote.EMPTY
    return LogNote.REASONING_IN_TEXT if has_reasoning_marks(message["content"]) else None


def says_nothing(message: Message) -> bool:
    """Return whether a message has no call, and no character that can be seen."""
    return not message.get("tool_calls") and not any(
        char.isprintable() and not char.isspace() for char in message["content"]
    )


def _system(fields: Mapping[str, Any]) -> str:
    """Return the text of a row's own system prompt, as Anthropic's requests and ShareGPT's rows hold it."""
    system: Any = fields.get("system")
    try:
        return _LoggedMessage.model_validate({"role": "system", "content": system}).text()
    except ValidationError as error:
        raise AlignmentError(_problem("system", error)) from error


# --------------------------------------------------------------------------------------------------------- tool results


def _with_ordered_results(messages: Sequence[Message], notes: Counter[LogNote]) -> list[Message]:
    """Return the messages with the results of parallel calls in the order of the calls, and count in `notes`.

    The calls are those of all assistant messages directly before the results.
    """
    ordered, calls = list[Message](), list[str]()
    for is_result, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        members = list(group)
        if is_result:
            ordered += _in_order(members, calls, notes)
            calls = []
            continue
        first = len(members)
        while first and members[first - 1]["role"] == "assistant":
            first -= 1
        notes[LogNote.CALL_WITHOUT_RESULT] += sum(len(message.get("tool_calls") or ()) for message in members[:first])
        calls = [call["id"] for message in members[first:] for call in message.get("tool_calls") or ()]
        ordered += members
    return ordered


def _in_order(results: Sequence[Message], calls: Sequence[str], notes: Counter[LogNote]) -> list[Message]:
    """Return the results that follow calls of these ids in the calls' order.

    Results without an id belong to the calls without a result, and so do results of unknown ids if there are as many
    of them. Others, such as those of a repeated id, stand after the results of all calls.
    """
    open_calls = list(range(len(calls)))
    ids = [result.get("tool_call_id") for result in results]
    by_id = dict[int, int]()
    for index, call_id in enumerate(ids):
        if named := [number for number in open_calls if calls[number] == call_id]:
            by_id[index] = named[0]
            open_calls.remove(named[0])
    unnamed = [index for index, call_id in enumerate(ids) if call_id not in calls]
    is_certain = len(unnamed) == len(open_calls) or not any(ids[index] for index in unnamed)
    number_of = by_id | (dict(zip(unnamed, open_calls, strict=False)) if is_certain else {})
    order = sorted(range(len(results)), key=lambda index: number_of.get(index, len(calls)))
    strays = [index for index in order if index not in by_id and (ids[index] or index not in number_of)]
    notes[LogNote.RESULT_WITHOUT_CALL] += len(strays)
    notes[LogNote.CALL_WITHOUT_RESULT] += len(calls) - len(number_of)
    notes[LogNote.REORDERED] += sum(index != position for position, index in enumerate(order))
    named_ids = {index: {"tool_call_id": calls[number]} for index, number in number_of.items()}
    return [results[index] | named_ids.get(index, {}) for index in order]


# ------------------------------------------------------------------------------------------------------------ arguments


def has_arguments(message: Message) -> bool:
    """Return whether the arguments of every call of a message are a JSON object, which templates require."""
    return all(_is_object(call["function"]["arguments"]) for call in message.get("tool_calls") or ())


def _is_object(arguments: Any) -> bool:
    try:
        value = read_json(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and _is_json(value)


def _is_json(value: Any) -> bool:
    """Return whether JSON can write a value; Python also reads NaN, Infinity and 1e400."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _problem(where: str, error: ValidationError) -> str:
    """Return the message of the innermost error with its field; a field with a union type has an error per type."""
    wrong = error.errors(include_url=False, include_context=False, include_input=False)
    first = max(wrong, key=lambda entry: len(entry["loc"]))
    parts = [part for part in first["loc"] if part not in _UNION_NAMES]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return f"{where}{path}: {first['msg']}"


_UNION_NAMES = ("str", "list[_LoggedPart]", "dict[str,any]")
"""Names of union members that pydantic adds to an error's location."""
