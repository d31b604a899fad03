"""Episode -> HindsightPairs: each assistant turn as text, with the evidence that followed it.

In: an `Episode`. Out: one `HindsightPair` per turn, in order; its evidence is empty if nothing followed. Pure.

    turn 0: write   turn 1: run   turn 2: patch, run   turn 3: "Done."     verdict: failed
    |- tool         |- tool       |- tool              |- verdict (its first line: is the claim true?)
    |- later (1)                  |- verdict
    |- verdict (unless the patch replaced all of it)

With `next_state` (the published method), a turn's evidence is its next state, plus the verdict for the last turn.
With `delayed`, the results of later turns up to the next change are added for a turn that made a change. Each turn
whose change remains in the judged result also gets the verdict. If it is unknown which changes remain, the turn of the
last change gets the verdict. If it is unknown which calls made changes, as in a gateway's conversations, every tool
call counts as a change.
"""

import json
from collections.abc import Sequence
from typing import Any, Literal

from agentic_opd.core.text import cut_middle, read_json
from agentic_opd.core.types import Episode, Evidence, EvidenceKind, HindsightPair, Message

Hindsight = Literal["delayed", "next_state"]


def hindsight_pairs(
    episode: Episode,
    max_next_state_chars: int,
    hindsight: Hindsight = "delayed",
    *,
    max_later_turns: int = 4,
    max_later_chars: int = 2000,
    reads_reasoning: bool = False,
) -> list[HindsightPair]:
    """Pair every turn of `episode` with its evidence.

    Args:
        episode: A finished episode; its messages may lack `content`.
        max_next_state_chars: Maximum length of a next state, a verdict and a reasoning; longer ones are cut in the
            middle.
        hindsight: Which evidence a turn gets; see the module's docstring.
        max_later_turns: Maximum number of later turns whose results are evidence of a turn.
        max_later_chars: Maximum length of all later results of a turn together, the earliest first.
        reads_reasoning: Put a turn's reasoning before its text.

    Returns:
        One pair for each of `episode.turns`, in the same order.
    """
    asked = [message_text(message) for message in episode.messages if message["role"] == "user"]
    shown = sum(message["role"] == "user" for message in episode.task.examples)
    task_text = asked[shown] if len(asked) > shown and not episode.task.messages else episode.task.prompt
    verdicts = _verdicts(episode, hindsight)
    pairs: list[HindsightPair] = []
    for index, turn in enumerate(episode.turns):
        message = episode.messages[turn.message_index]
        evidence = _next_state(episode, index, max_next_state_chars)
        if hindsight == "delayed":
            evidence += _later(episode, index, max_later_turns, max_later_chars)
        if index in verdicts:
            evidence.append(Evidence("verdict", cut_middle(verdicts[index], max_next_state_chars)))
        text = turn_text(message)
        reasoning = (message.get("reasoning_content") or "").strip() if reads_reasoning else ""
        if reasoning:
            text = f"[reasoning]\n{cut_middle(reasoning, max_next_state_chars)}\n\n[answer]\n{text}"
        pairs.append(HindsightPair(index, task_text, text, tuple(evidence)))
    return pairs


def turn_text(message: Message) -> str:
    """Return an assistant message as text: its content, then each tool call with one line per argument."""
    parts = [message_text(message).strip()]
    parts += [_call_text(call) for call in message.get("tool_calls") or ()]
    return "\n\n".join(part for part in parts if part) or "[empty turn]"


def message_text(message: Message) -> str:
    """Return a message's content as text: "" if it is missing or null, the joined text parts if it is a list."""
    content: Any = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def shown_text(episode: Episode) -> str:
    """Return all text that the agent read or wrote: prompt, task files, messages, turns and reasoning."""
    parts = [episode.task.prompt, *episode.task.files.values()]
    parts += [json.dumps(tool, ensure_ascii=False) for tool in episode.task.tools or ()]
    parts += [turn_text(m) if m["role"] == "assistant" else message_text(m) for m in episode.messages]
    parts += [thought for m in episode.messages if (thought := m.get("reasoning_content"))]
    return "\n".join(parts)


def makers(episode: Episode) -> list[int]:
    """Return the indices of the turns whose changes remain in the judged result; see the module's docstring."""
    changed = [index for index in range(len(episode.turns)) for _ in _changes(episode, index)]
    made_by = None if episode.verification is None else episode.verification.made_by
    return sorted({changed[number] for number in made_by}) if made_by else changed[-1:]


def changing_calls(episode: Episode) -> list[str]:
    """Return the calls that changed the judged result, in order, as text for the judge."""
    return [
        _call_text(call)
        for index in range(len(episode.turns))
        for place, call in enumerate(_calls(episode, index))
        if place in _changes(episode, index)
    ]


# ---------------------------------------------------------------------------------------------------------- evidence


def _next_state(episode: Episode, index: int, max_chars: int) -> list[Evidence]:
    """Return the tool results and the user's reply between the turn and the next assistant message."""
    texts: list[tuple[EvidenceKind, str]] = [("tool", _tool_text(episode, index)), ("user", _user_text(episode, index))]
    return [Evidence(kind, cut_middle(text, max_chars)) for kind, text in texts if text.strip()]


def _later(episode: Episode, index: int, max_turns: int, max_chars: int) -> list[Evidence]:
    """Return the results of later turns, up to the next change of the judged result."""
    found: list[Evidence] = []
    if not _changes(episode, index):
        return found
    for later in range(index + 1, len(episode.turns)):
        changed = _changes(episode, later)
        text = _tool_text(episode, later, before=min(changed, default=None))
        text = "\n\n".join(part for part in (text, "" if changed else _user_text(episode, later)) if part.strip())
        if text and max_chars > 0 and len(found) < max_turns:
            found.append(Evidence("later", cut_middle(text, max_chars), later))
            max_chars -= len(text)
        if changed:
            break
    return found


def _changes(episode: Episode, index: int) -> frozenset[int]:
    """Return the indices of a turn's calls that changed the judged result; all of them if the world does not say."""
    return episode.changes[index] if episode.changes else frozenset(range(len(_calls(episode, index))))


def _verdicts(episode: Episode, hindsight: Hindsight) -> dict[int, str]:
    """Return the verdict text per turn index.

    A last turn without calls and without a remaining change gets only the report's first line (the count), and only if
    tests failed. That suffices to refute its claim.
    """
    if episode.verification is None or not episode.turns:
        return {}
    report, last = episode.verification.judge_report, len(episode.turns) - 1
    if hindsight == "next_state":
        return {last: report}
    verdicts = dict.fromkeys(makers(episode) or [last], report)
    if last not in verdicts and not _calls(episode, last) and episode.verification.correctness < 1:
        verdicts[last] = report.partition("\n")[0]
    return verdicts


def _calls(episode: Episode, index: int) -> Sequence[dict[str, Any]]:
    return episode.messages[episode.turns[index].message_index].get("tool_calls") or ()


def _answers(episode: Episode, index: int, role: str) -> list[Message]:
    """Return the messages of `role` between a turn and the next assistant message."""
    following: list[Message] = []
    for message in episode.messages[episode.turns[index].message_index + 1 :]:
        if message["role"] == "assistant":
            break
        following.append(message)
    return [message for message in following if message["role"] == role]


def _user_text(episode: Episode, index: int) -> str:
    return "\n\n".join(message_text(m) for m in _answers(episode, index, "user"))


def _tool_text(episode: Episode, index: int, before: int | None = None) -> str:
    """Return a turn's first `before` tool results as text, each under its tool's name if the turn has several."""
    results = _answers(episode, index, "tool")
    names = {call.get("id"): _call_name(call) for call in _calls(episode, index)}
    texts = [message_text(m) for m in results][:before]
    if len(results) == 1 or not any(texts):
        return "".join(texts)
    labels = [m.get("name") or names.get(m.get("tool_call_id")) or "tool" for m in results][:before]
    return "\n\n".join(f"[{label}]\n{text}" for label, text in zip(labels, texts, strict=True))


def _call_name(call: dict[str, Any]) -> str:
    return call.get("function", {}).get("name") or "broken tool call"


def _call_text(call: dict[str, Any]) -> str:
    function = call.get("function", {})
    raw = function.get("arguments")
    try:
        arguments = read_json(raw) if isinstance(raw, str) else raw
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict) or not function.get("name"):
        return f"[broken tool call]\n{raw or ''}"
    return "\n".join([f"[{function['name']}]", *(_argument_text(key, value) for key, value in arguments.items())])


def _argument_text(key: str, value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{key}:\n{text}" if "\n" in text else f"{key}: {text}"
