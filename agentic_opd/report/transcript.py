"""Labels for the text between turns (by message) and within turns (tool calls, reasoning). Pure.

The text is decoded from the tokens that the model read; the messages only determine the labels.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from agentic_opd.core.text import without_control_tokens
from agentic_opd.core.types import ContextTurn, WhyContext


class Passage(NamedTuple):
    """A piece of context.

    `role` is a message's role, `template` for text that the chat template added, or `context` if messages and template
    can't be told apart. `unseen` marks a message after the last token.
    """

    role: str
    text: str
    name: str | None = None
    unseen: bool = False


class Region(NamedTuple):
    """Tokens `[start, end)` of a turn that are a tool call (`call`) or reasoning (`think`)."""

    kind: str
    start: int
    end: int


_MARKS = (
    ("think", "<think>", "</think>"),
    ("call", "<tool_call>", "</tool_call>"),
    ("call", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("call", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),  # noqa: RUF001 - the family's own letters
    ("call", "<|channel|>commentary to=", "<|call|>"),
    ("call", "[TOOL_CALLS]", None),
    ("call", "<|python_tag|>", None),
)
"""Markers of tool calls and reasoning in the model families: kind, opening, and closing (None: the turn's end)."""
_REGION = re.compile(
    "|".join(f"{re.escape(a)}.*?(?:{re.escape(b)}|$)" if b else f"{re.escape(a)}.*$" for _, a, b in _MARKS), re.S
)


_WHY: Mapping[WhyContext, str] = {
    "not_sampled": "its text is the client's",
    "shared": "another sequence of the session has it too, and is learned from there",
    "side": "a side turn",
    "altered_sampling": "its distribution was changed by",
}


def message_text(message: Mapping[str, Any]) -> str:
    """Return a message's content as text; content other than text as JSON."""
    content = message.get("content")
    return content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)


def split_messages(
    messages: Sequence[Mapping[str, Any]], num_turns: int, context: Mapping[int, ContextTurn] | None = None
) -> list[tuple[Mapping[str, Any] | None, list[Mapping[str, Any]]]]:
    """Split the messages into those before each turn and those after the last.

    Assistant messages in `context`, by their index, are treated like messages of other roles; their `name` gives the
    reason. `num_turns` is the number of the others.

    Returns:
        `num_turns + 1` pairs: the assistant message that the stretch follows (None for the first), and the stretch's
        messages. All pairs are empty if the number of assistant messages does not match.
    """
    stretches: list[tuple[Mapping[str, Any] | None, list[Mapping[str, Any]]]] = [(None, [])]
    context = context or {}
    for index, message in enumerate(messages):
        if index in context:
            turn = context[index]
            parameters = f" {', '.join(turn.altered)}" if turn.altered else ""
            name = f"not learned from here: {_WHY[turn.why]}{parameters}"
            stretches[-1][1].append({**message, "name": name})
        elif message.get("role") == "assistant":
            stretches.append((message, []))
        else:
            stretches[-1][1].append(message)
    return stretches if len(stretches) == num_turns + 1 else [(None, []) for _ in range(num_turns + 1)]


def context_parts(text: str, messages: Sequence[Mapping[str, Any]], control: Collection[str] = ()) -> list[Passage]:
    """Label the pieces of `text`, the decoded tokens of one stretch, by the messages that it contains, in order.

    Control tokens (texts in `control`) within a message's content are looked for in the broken form that the model
    read. If a message can't be found verbatim, the whole text is one part. Without text (the stretch comes after the
    last token) the messages are the parts.
    """
    if not text:
        return [Passage(str(message.get("role")), message_text(message), _name(message), True) for message in messages]
    parts: list[Passage] = []
    end = 0
    for message in messages:
        content = message_text(message).strip()
        start = text.find(content, end)
        if start < 0:
            content = without_control_tokens(control, content)
            start = text.find(content, end)
        if start < 0 or not content:
            return [Passage("context", text)]
        parts += [
            Passage("template", text[end:start]),
            Passage(str(message.get("role")), content, _name(message)),
        ]
        end = start + len(content)
    return [part for part in (*parts, Passage("template", text[end:])) if part.text]


def called_names(message: Mapping[str, Any] | None) -> list[str]:
    """Return the names of the tools that an assistant message calls."""
    calls = message.get("tool_calls") if message is not None else None
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [str(function.get("name")) for function in functions if isinstance(function, dict)]


def regions(token_texts: Sequence[str]) -> list[Region]:
    """Find tool calls and reasoning in a turn by the markers of the model families."""
    ends = [0]
    for text in token_texts:
        ends.append(ends[-1] + len(text))
    spans: list[Region] = []
    token = 0
    for match in _REGION.finditer("".join(token_texts)):
        while token < len(token_texts) and ends[token + 1] <= match.start():
            token += 1
        start = token
        while token < len(token_texts) and ends[token] < match.end():
            token += 1
        kind = next(kind for kind, opening, _ in _MARKS if match.group().startswith(opening))
        if token > start:
            spans.append(Region(kind, start, token))
    return spans


def _name(message: Mapping[str, Any]) -> str | None:
    name = message.get("name")
    return name if isinstance(name, str) else None
