"""Dialects of datasets: names of speakers, texts and columns -> messages with a role and a content. Pure.

ShareGPT and its relatives write `from` and `value`, or mix them with `role` and `content`. Their speakers have names of
their own, and a call is the text of a speaker, `function_call` or `tool_call`. Hermes' datasets write results in
`<tool_response>` and `</tool_response>`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from agentic_opd.core.columnar import is_null
from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.text import read_json
from agentic_opd.logs.tools import from_text

_SPEAKER_FIELDS = ("role", "from", "sender")
_TEXT_FIELDS = ("content", "value", "text")
_CALLER = "function_call"
_SPEAKERS = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "claude", "model", "bot", "ai"), "assistant"),
    **dict.fromkeys((_CALLER, "tool_call", "tool_use"), _CALLER),
    **dict.fromkeys(("observation", "tool", "function_response", "ipython"), "tool"),
    **dict.fromkeys(("tool_response", "tool_result", "tool_results", "tool_output"), "tool"),
    **{name: name for name in ("system", "developer", "function")},
}
"""Name of a speaker, in lower case and with `_` for `-` -> the role; `_CALLER` speaks calls."""
_RESPONSE = ("<tool_response>", "</tool_response>")


@dataclass(frozen=True, slots=True)
class SpokenMessage:
    """A message with a role and a content."""

    fields: dict[str, Any]
    is_call: bool = False
    """Whether its text was calls; calls in a row are made at once."""
    is_broken: bool = False
    """Whether its text was to be calls and can't be read."""


def is_missing(value: Any) -> bool:
    """Return whether a field has no value; pandas writes NaN for it, and Arrow an object of nulls."""
    return is_null(value) or (isinstance(value, float) and value != value)


def spoken(value: Mapping[str, Any], where: str) -> SpokenMessage:
    """Return a message of any dialect with a role and a content.

    Raises:
        AlignmentError: the message has no speaker, or an unknown one.
    """
    field = _first(value, _SPEAKER_FIELDS)
    if field is None or not isinstance(value[field], str):
        raise AlignmentError(f"{where}: expected an object with a role, got {value!r:.80}")
    role = _role(value[field])
    if role is None:
        speakers = ", ".join(_SPEAKERS)
        raise AlignmentError(f"{where}.{field}: expected one of {speakers}, got {value[field]!r:.40}")
    text = _first(value, _TEXT_FIELDS)
    fields = {key: member for key, member in value.items() if key not in (field, text)}
    fields |= {"role": role, "content": None if text is None else value[text]}
    return SpokenMessage(fields) if role != _CALLER else _called(fields, where)


def _first(value: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if not is_missing(value.get(name))), None)


def _role(speaker: str) -> str | None:
    return _SPEAKERS.get(speaker.strip().lower().replace("-", "_"))


def _called(fields: dict[str, Any], where: str) -> SpokenMessage:
    """Return the message whose text is a call or a list of calls; if they can't be read, they stay its text."""
    value, fields = fields["content"], {**fields, "role": "assistant"}
    try:
        stored: Any = from_text(value, where)
    except AlignmentError:
        return SpokenMessage(fields, is_broken=True)
    calls = cast(list[Any], stored) if isinstance(stored, list) else [stored]
    functions = [bare_function(call) for call in calls]
    if not functions or None in functions:
        return SpokenMessage({**fields, "content": str(value)}, is_broken=True)
    called = [{"function": as_text(function) if isinstance(value, str) else function} for function in functions]
    return SpokenMessage({**fields, "content": None, "tool_calls": called}, is_call=True)


def bare_function(call: Any) -> dict[str, Any] | None:
    """Return the function of a call that is written without OpenAI's wrapper; None without a name."""
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        return None
    arguments = _first(cast(Mapping[str, Any], call), ("arguments", "parameters", "args", "input"))
    return {"name": call["name"], "arguments": None if arguments is None else call[arguments]}


def as_text(function: Any) -> Any:
    """Return the function of a call that was JSON text with its arguments as text, because they are not padded."""
    arguments: Any = function.get("arguments") if isinstance(function, Mapping) else None
    return {**function, "arguments": json.dumps(arguments)} if isinstance(arguments, Mapping) else function


def tool_responses(text: str) -> list[str]:
    """Return the results of a message that has only Hermes' `<tool_response>` blocks; empty for other texts."""
    opening, closing = _RESPONSE
    if not text.lstrip().startswith(opening):
        return []
    *blocks, rest = (block.strip() for block in text.split(closing))
    if rest or not blocks or not all(block.startswith(opening) for block in blocks):
        return []
    return [block.removeprefix(opening).strip() for block in blocks]


# -------------------------------------------------------------------------------------------------------------- columns


def conversation_columns(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the columns of a row that contain a conversation with an answer."""
    return [name for name, value in row.items() if _is_conversation(value)]


def _is_conversation(value: Any) -> bool:
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            value = read_json(value)
        except (ValueError, RecursionError):
            return False
    if not isinstance(value, list) or len(cast(list[Any], value)) < 2:
        return False
    roles = list(_roles(cast(list[Any], value)))
    return None not in roles and "assistant" in roles


def _roles(messages: Sequence[Any]) -> Iterator[str | None]:
    for message in messages:
        field = _first(cast(Mapping[str, Any], message), _SPEAKER_FIELDS) if isinstance(message, Mapping) else None
        speaker = None if field is None else message[field]
        has_content = field is not None and any(name in message for name in (*_TEXT_FIELDS, "tool_calls"))
        yield _role(speaker) if isinstance(speaker, str) and has_content else None
