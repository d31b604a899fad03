"""SWE-agent's (`*.traj`) and mini-swe-agent's (`*.traj.json`) trajectories -> sessions. Pure.

SWE-agent's document has a `history` of messages, with demonstrations among them; a retried run has `attempts`.
mini-swe-agent's has `messages`, in version 2 with the output items of the Responses API among them, and ends with a
message of the role `exit`, which no model read. Tools are in neither.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agentic_opd.logs.messages import LogNote
from agentic_opd.logs.responses import add_item, add_items
from agentic_opd.logs.session import (
    Counts,
    Draft,
    LeftOut,
    Record,
    Session,
    called,
    member,
    not_learned,
    objects,
    read_content,
    text_id,
    unknown,
)


def is_swe_agent(records: Sequence[Record]) -> bool:
    """Return whether a document is SWE-agent's trajectory."""
    return any(
        _is_history(record.get("history"))
        or any(_is_history(attempt.get("history")) for attempt in objects(record.get("attempts")))
        for record in records
    )


def _is_history(history: object) -> bool:
    messages = objects(history)
    return bool(messages) and all(
        "role" in message and {"agent", "message_type", "is_demo"} & message.keys() for message in messages
    )


def is_mini_swe_agent(records: Sequence[Record]) -> bool:
    """Return whether a document is mini-swe-agent's trajectory."""
    return any(
        isinstance(record.get("messages"), list)
        and (str(record.get("trajectory_format")).startswith("mini-swe-agent") or "mini_version" in _info(record))
        for record in records
    )


def _info(record: Record) -> Mapping[str, Any]:
    info = record.get("info")
    return info if isinstance(info, dict) else {}


def swe_agent_sessions(records: Iterable[Record], counts: Counts) -> Iterator[Session]:
    """Yield a conversation for each agent of each attempt of a trajectory."""
    for record in records:
        attempts = [attempt for attempt in objects(record.get("attempts")) if "history" in attempt] or [record]
        for number, attempt in enumerate(attempts, start=1):
            drafts = dict[str, Draft]()
            for message in objects(attempt.get("history")):
                agent = str(message.get("agent") or "main")
                label = f"{agent} {number}" if len(attempts) > 1 else agent
                _add_message(drafts.setdefault(agent, Draft(counts, label)), message)
            for draft in drafts.values():
                yield from draft.ended()


def mini_swe_agent_sessions(records: Iterable[Record], counts: Counts) -> Iterator[Session]:
    """Yield the conversation of a trajectory."""
    for record in records:
        draft = Draft(counts)
        for message in objects(record.get("messages")):
            if message.get("role") == "exit":
                counts[LeftOut.BOOKKEEPING] += 1
            elif message.get("object") == "response":
                add_items(draft, objects(message.get("output")))
                if message.get("status") == "incomplete" and draft.last is not None:
                    draft.last.message.update(not_learned(draft.last.message, LogNote.STOPPED))
            elif "role" not in message and "type" in message:
                add_item(draft, message)
            else:
                _add_message(draft, message)
        yield from draft.ended()


def _add_message(draft: Draft, message: Record) -> None:
    role, counts = message.get("role"), draft.counts
    if role not in ("system", "user", "assistant", "tool"):
        counts[unknown("messages", role)] += 1
        return
    read: dict[str, Any] = {"role": role, "content": read_content(message.get("content") or "", counts)}
    if role == "assistant":
        calls = objects(message.get("tool_calls"))
        read["tool_calls"] = called(
            (
                (call.get("id"), member(call, "function", "name"), member(call, "function", "arguments"))
                for call in calls
            ),
            counts,
        )
        for name in ("reasoning_content", "thinking_blocks", "reasoning"):
            if message.get(name):
                read[name] = message[name]
    ids: Any = message.get("tool_call_ids")
    if role == "tool":
        read["tool_call_id"] = text_id(
            message.get("tool_call_id") or (ids[0] if isinstance(ids, list) and ids else None)
        )
    is_demonstration = bool(message.get("is_demo")) or message.get("message_type") == "demonstration"
    if is_demonstration:
        read = not_learned(read, LogNote.DEMONSTRATION)
    elif _is_exit(message) or _is_cut_off(message):
        read = not_learned(read, LogNote.STOPPED)
    draft.add(read)


def _is_cut_off(message: Record) -> bool:
    """Return whether an answer of mini-swe-agent, which holds the whole response, ended at the limit of tokens."""
    choices = objects(member(message, "extra", "response", "choices"))
    return bool(choices) and choices[0].get("finish_reason") == "length"


_EXITS = ("Exit due to ", "Exiting due to ", "Exit forced")


def _is_exit(message: Record) -> bool:
    """Return whether SWE-agent wrote an answer itself, because it stopped the agent (context, costs, errors)."""
    action, content = message.get("action"), message.get("content")
    has_no_action = action == "" or (isinstance(action, str) and action.startswith("exit_"))
    return has_no_action and isinstance(content, str) and content.startswith(_EXITS)
