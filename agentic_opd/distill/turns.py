"""Episode -> HindsightPairs: each assistant turn, as text, with what answered it.

In: an `Episode`. Out: one `HindsightPair` a turn, in order; `next_state` is None if nothing answered. Pure.
"""

import json
from collections.abc import Sequence
from typing import Any, Literal

from agentic_opd.core.text import cut_middle
from agentic_opd.core.types import Episode, HindsightPair, Message

Role = Literal["tool", "user", "verdict"]


def hindsight_pairs(episode: Episode, max_next_state_chars: int) -> list[HindsightPair]:
    """Pair every turn of `episode` with its next state.

    The next state of a turn is the tool results and the user's reply between it and the next assistant message. The
    last turn is answered by the hidden tests' verdict, which follows its tool results if there are any (an episode
    that was cut while the agent was still working). The pair's role is that of the last part.

    Args:
        episode: A finished episode; its messages may lack `content`.
        max_next_state_chars: Longer next states are cut in the middle.

    Returns:
        One pair for each of `episode.turns`, in the same order.
    """
    task_text = next((message_text(m) for m in episode.messages if m["role"] == "user"), episode.task.prompt)
    pairs: list[HindsightPair] = []
    for index, turn in enumerate(episode.turns):
        message = episode.messages[turn.message_index]
        is_last = index == len(episode.turns) - 1
        verdict = episode.verification.report if is_last and episode.verification else ""
        parts = _next_state_parts(message, _answers(episode.messages, turn.message_index), verdict)
        text = cut_middle("\n\n".join(text for _, text in parts), max_next_state_chars) if parts else None
        role: Role | None = parts[-1][0] if parts else None
        pairs.append(HindsightPair(index, task_text, turn_text(message), text, role))
    return pairs


def turn_text(message: Message) -> str:
    """Write an assistant message for a reader: its text, then each tool call with its arguments line by line."""
    parts = [message_text(message).strip()]
    parts += [_call_text(call) for call in message.get("tool_calls") or ()]
    return "\n\n".join(part for part in parts if part) or "[empty turn]"


def message_text(message: Message) -> str:
    """Return a message's content as text: "" if it is missing or null, the text parts if it is a list."""
    content: Any = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def shown_text(episode: Episode) -> str:
    """Everything that the agent read or wrote: prompts, the files it was given, tool results, its own turns."""
    parts = [episode.task.prompt, *episode.task.files.values()]
    parts += [turn_text(m) if m["role"] == "assistant" else message_text(m) for m in episode.messages]
    return "\n".join(parts)


def _answers(messages: Sequence[Message], index: int) -> list[Message]:
    """The messages between the assistant's at `index` and its next one."""
    following: list[Message] = []
    for message in messages[index + 1 :]:
        if message["role"] == "assistant":
            break
        following.append(message)
    return following


def _next_state_parts(turn: Message, answers: Sequence[Message], verdict: str) -> list[tuple[Role, str]]:
    results = [m for m in answers if m["role"] == "tool"]
    texts = [message_text(m) for m in results]
    if len(results) > 1:
        names = {call.get("id"): _call_name(call) for call in turn.get("tool_calls") or ()}
        labels = [m.get("name") or names.get(m.get("tool_call_id")) or "tool" for m in results]
        joined = "\n\n".join(f"[{label}]\n{text}" for label, text in zip(labels, texts, strict=True))
    else:
        joined = "".join(texts)
    replies = "\n\n".join(message_text(m) for m in answers if m["role"] == "user")
    parts: list[tuple[Role, str]] = [("tool", joined if any(texts) else ""), ("user", replies), ("verdict", verdict)]
    return [(role, text) for role, text in parts if text.strip()]


def _call_name(call: dict[str, Any]) -> str:
    return call.get("function", {}).get("name") or "broken tool call"


def _call_text(call: dict[str, Any]) -> str:
    function = call.get("function", {})
    raw = function.get("arguments")
    try:
        arguments = json.loads(raw) if isinstance(raw, str) else raw
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict) or not function.get("name"):
        return f"[broken tool call]\n{raw or ''}"
    return "\n".join([f"[{function['name']}]", *(_argument_text(key, value) for key, value in arguments.items())])


def _argument_text(key: str, value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{key}:\n{text}" if "\n" in text else f"{key}: {text}"
