"""Recording -> TurnContexts: each turn as text with the evidence that followed it, and further data. Pure.

    turn 0: write   turn 1: run   turn 2: patch, run   turn 3: "Done."     verdict: failed
    |- tool         |- tool       |- tool              |- verdict (its first line: is the claim true?)
    |- later (1)                  |- verdict
    |- verdict (unless the patch replaced all of it)

With `next_state` (the published method), a turn's evidence is its next state, plus the verdict for the last turn.
With `delayed`, the results of later turns up to the next change are added for a turn that made a change. Each turn
whose change remains in the judged result also gets the verdict. If it is unknown which changes remain, the turn of the
last change gets the verdict. If it is unknown which calls made changes, as in a gateway's conversations, every tool
call counts as a change. A turn that repeats the one before it, with equal results, gets a sentence that says so.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from agentic_opd.core.attachments.messages import content_in_words
from agentic_opd.core.text import cut_middle, read_json
from agentic_opd.core.types import Evidence, EvidenceKind, HindsightPair, Message, Recording, Trace, Turn
from agentic_opd.distill.config import DistillConfig


@dataclass(frozen=True, slots=True)
class TurnContext:
    """A turn with its evidence, its position, and further data for judging and scoring."""

    recording: Recording
    pair: HindsightPair
    trace: Trace
    turn: Turn
    public_text: str
    """All text that the agent read or wrote; see `shown_text`."""
    siblings: Sequence[Recording] = ()
    """The other rollouts of the group."""
    failed: bool = True
    """Whether the rollout failed; see `has_failed`."""


def turn_contexts(recording: Recording, config: DistillConfig, siblings: Sequence[Recording] = ()) -> list[TurnContext]:
    """Return one context for each of `recording.turns`, in order."""
    turns_in_traces = [(trace, turn) for trace in recording.traces for turn in trace.turns]
    public_text, failed = shown_text(recording), has_failed(recording)
    return [
        TurnContext(recording, pair, trace, turn, public_text, siblings, failed)
        for pair, (trace, turn) in zip(hindsight_pairs(recording, config), turns_in_traces, strict=True)
    ]


def hindsight_pairs(recording: Recording, config: DistillConfig) -> list[HindsightPair]:
    """Pair every turn with its evidence, which is empty if nothing followed; messages may lack `content`.

    A next state, a verdict and a reasoning are cut in the middle to `hint_max_next_state_chars`.
    """
    max_chars = config.hint_max_next_state_chars
    task_text = _task_text(recording)
    verdicts = _verdicts(recording, config)
    pairs: list[HindsightPair] = []
    for index, turn in enumerate(recording.turns):
        message = recording.messages[turn.message_index]
        evidence = _next_state(recording, index, max_chars)
        if config.hindsight.evidence == "delayed":
            evidence += _repeated(recording.messages, turn.message_index)
            evidence += _later(recording, index, config.hindsight.max_turns, config.hindsight.max_chars)
        if index in verdicts:
            evidence.append(Evidence("verdict", cut_middle(verdicts[index], max_chars)))
        text = _judged_text(message, config)
        pairs.append(HindsightPair(index, task_text, text, tuple(evidence)))
    return pairs


def has_failed(recording: Recording) -> bool:
    """Return whether a rollout failed: by its own `failed`, else by its verdict.

    Without either, it counts as failed if a user said something after a turn: only the judge can tell a complaint.
    """
    if recording.failed is not None:
        return recording.failed
    if recording.verification is not None:
        return not recording.verification.all_passed
    return any(_user_text(recording.messages, turn.message_index).strip() for turn in recording.turns)


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """An assistant message and what answered it, as text for the judge."""

    turn_index: int | None
    """Index in `Recording.turns`; None: the message is context only."""
    text: str
    tool: str
    """Results of its calls."""
    user: str = ""
    """The user's reply."""


@dataclass(frozen=True, slots=True)
class WholeRollout:
    """A rollout as text for the judge: all assistant messages after the task's examples, in order."""

    task_text: str
    turns: tuple[ConversationTurn, ...]
    verdict: str | None
    """None if there is none."""


def whole_rollout(recording: Recording, config: DistillConfig) -> WholeRollout:
    """Return a rollout as text for the judge.

    Results, replies, a reasoning and the verdict are cut in the middle to `hint_max_next_state_chars`.
    """
    messages, max_chars = recording.messages, config.hint_max_next_state_chars
    index_of = {turn.message_index: index for index, turn in enumerate(recording.turns)}
    first = min([_task_position(recording) or 0, *index_of])
    turns = tuple(
        ConversationTurn(
            turn_index=index_of.get(position),
            text=_judged_text(message, config),
            tool=cut_middle(_tool_text(messages, position), max_chars),
            user=cut_middle(_user_text(messages, position), max_chars),
        )
        for position, message in enumerate(messages)
        if position >= first and message["role"] == "assistant"
    )
    verification = recording.verification
    verdict = None if verification is None else cut_middle(verification.judge_report, max_chars)
    return WholeRollout(_task_text(recording), turns, verdict)


def _task_text(recording: Recording) -> str:
    """Return the first user message after the task's examples; without one, or with own messages, its prompt."""
    position = _task_position(recording)
    if position is not None:
        return message_text(recording.messages[position])
    return recording.task.prompt if recording.task else ""


def _task_position(recording: Recording) -> int | None:
    """Return the index of the first user message after the task's examples; None without one or with own messages."""
    task = recording.task
    if task and task.messages:
        return None
    users = [index for index, message in enumerate(recording.messages) if message["role"] == "user"]
    num_examples = sum(message["role"] == "user" for message in task.examples) if task else 0
    return users[num_examples] if len(users) > num_examples else None


def _judged_text(message: Message, config: DistillConfig) -> str:
    """Return an assistant message as text for the judge, with its reasoning if that is read."""
    text = turn_text(message)
    reasoning = (message.get("reasoning_content") or "").strip() if config.judge.reads_reasoning else ""
    if not reasoning:
        return text
    return f"[reasoning]\n{cut_middle(reasoning, config.hint_max_next_state_chars)}\n\n[answer]\n{text}"


def turn_text(message: Message) -> str:
    """Return an assistant message as text: its content, then each tool call with one line per argument."""
    parts = [message_text(message).strip()]
    parts += [_call_text(call) for call in message.get("tool_calls") or ()]
    return "\n\n".join(part for part in parts if part) or "[empty turn]"


def message_text(message: Message) -> str:
    """Return a message's content as text: "" if it is missing or null, the joined text parts if it is a list.

    Each attachment is replaced by a word.
    """
    content: Any = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    if not isinstance(content, str):
        return ""
    return content_in_words(message)


def shown_text(recording: Recording) -> str:
    """Return all text that the agent read or wrote: prompt, task files, messages, turns and reasoning."""
    messages, task = recording.messages, recording.task
    parts = [task.prompt, *task.files.values()] if task else []
    parts += [json.dumps(tool, ensure_ascii=False) for tool in (task.tools if task else None) or ()]
    parts += [turn_text(m) if m["role"] == "assistant" else message_text(m) for m in messages]
    parts += [thought for m in messages if (thought := m.get("reasoning_content"))]
    return "\n".join(parts)


def author_turns(recording: Recording) -> list[int]:
    """Return the indices of the turns whose changes remain in the judged result; see the module's docstring."""
    changed = [index for index in range(len(recording.turns)) for _ in _changes(recording, index)]
    made_by = None if recording.verification is None else recording.verification.made_by
    return sorted({changed[number] for number in made_by}) if made_by else changed[-1:]


def changing_calls(recording: Recording) -> list[str]:
    """Return the calls that changed the judged result, in order, as text for the judge."""
    return [
        _call_text(call)
        for index in range(len(recording.turns))
        for position, call in enumerate(_calls(recording, index))
        if position in _changes(recording, index)
    ]


# ---------------------------------------------------------------------------------------------------------- evidence


def _next_state(recording: Recording, index: int, max_chars: int) -> list[Evidence]:
    """Return the tool results and the user's reply between the turn and the next assistant message."""
    texts: list[tuple[EvidenceKind, str]] = [
        ("tool", _tool_text(recording.messages, recording.turns[index].message_index)),
        ("user", _user_text(recording.messages, recording.turns[index].message_index)),
    ]
    return [Evidence(kind, cut_middle(text, max_chars)) for kind, text in texts if text.strip()]


def _repeated(messages: Sequence[Message], position: int) -> list[Evidence]:
    """Return a sentence about the turns directly before that made the same calls and got the same results, if any.

    A message of the user between them may ask for the repetition, so it ends the comparison.
    """
    if not _tool_text(messages, position).strip():
        return []
    exchange = _calls_and_results(messages, position)
    before = (index for index in range(position - 1, -1, -1) if messages[index]["role"] == "assistant")
    equal = takewhile(
        lambda index: not _answers(messages, index, "user") and _calls_and_results(messages, index) == exchange, before
    )
    count = sum(1 for _ in equal)
    turns = "turn" if count == 1 else f"{count} turns"
    return [Evidence("repeated", f"The {turns} before made the same calls and got the same results.")] if count else []


def _calls_and_results(messages: Sequence[Message], position: int) -> tuple[list[str], list[Message]]:
    """Return an assistant message's calls as text, and their results with their pictures, without the calls' ids."""
    calls = [_call_text(call) for call in messages[position].get("tool_calls") or ()]
    results = _answers(messages, position, "tool")
    return calls, [{key: value for key, value in m.items() if key != "tool_call_id"} for m in results]


def _later(recording: Recording, index: int, max_turns: int, max_chars: int) -> list[Evidence]:
    """Return the results of later turns, up to the next change of the judged result."""
    evidence: list[Evidence] = []
    if not _changes(recording, index):
        return evidence
    for later in range(index + 1, len(recording.turns)):
        changed, position = _changes(recording, later), recording.turns[later].message_index
        text = _tool_text(recording.messages, position, before=min(changed, default=None))
        reply = "" if changed else _user_text(recording.messages, position)
        text = "\n\n".join(part for part in (text, reply) if part.strip())
        if text and max_chars > 0 and len(evidence) < max_turns:
            evidence.append(Evidence("later", cut_middle(text, max_chars), later))
            max_chars -= len(text)
        if changed:
            break
    return evidence


def _changes(recording: Recording, index: int) -> frozenset[int]:
    """Return the indices of a turn's calls that changed the judged result; all of them if the world does not say."""
    return recording.changes[index] if recording.changes else frozenset(range(len(_calls(recording, index))))


def _verdicts(recording: Recording, config: DistillConfig) -> dict[int, str]:
    """Return the verdict text per turn index.

    A last turn without calls and without a remaining change gets only the report's first line (the count), and only if
    tests failed. That suffices to refute its claim.
    """
    if recording.verification is None or not recording.turns:
        return {}
    report, last = recording.verification.judge_report, len(recording.turns) - 1
    if config.hindsight.evidence == "next_state":
        return {last: report}
    verdicts = dict.fromkeys(author_turns(recording) or [last], report)
    if last not in verdicts and not _calls(recording, last) and not recording.verification.all_passed:
        verdicts[last] = report.partition("\n")[0]
    return verdicts


def _calls(recording: Recording, index: int) -> Sequence[dict[str, Any]]:
    return recording.messages[recording.turns[index].message_index].get("tool_calls") or ()


def _answers(messages: Sequence[Message], position: int, role: str) -> list[Message]:
    """Return the messages of `role` between an assistant message and the next one."""
    behind = (messages[index] for index in range(position + 1, len(messages)))
    following = takewhile(lambda message: message["role"] != "assistant", behind)
    return [message for message in following if message["role"] == role]


def _user_text(messages: Sequence[Message], position: int) -> str:
    return "\n\n".join(message_text(m) for m in _answers(messages, position, "user"))


def _tool_text(messages: Sequence[Message], position: int, before: int | None = None) -> str:
    """Return a turn's first `before` tool results as text, each under its tool's name if the turn has several."""
    results = _answers(messages, position, "tool")
    calls = messages[position].get("tool_calls") or ()
    names = {call.get("id"): call.get("function", {}).get("name") or "broken tool call" for call in calls}
    texts = [message_text(m) for m in results][:before]
    if len(results) == 1 or not any(texts):
        return "".join(texts)
    labels = [m.get("name") or names.get(m.get("tool_call_id")) or "tool" for m in results][:before]
    return "\n\n".join(f"[{label}]\n{text}" for label, text in zip(labels, texts, strict=True))


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
