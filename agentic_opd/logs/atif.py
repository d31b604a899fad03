"""Trajectories in ATIF, Harbor's interchange format (`agent/trajectory.json` of a trial) -> sessions. Pure.

A document has `schema_version` (`ATIF-v1.7`), `agent` with its `tool_definitions`, and `steps`: a system prompt, a
user's message, or an answer with its calls and their results. Sub-agents are documents in `subagent_trajectories`, or
files of their own. After a system step that refers to other trajectories the agent's context was summarised: the
conversation ends there, and the next begins with the prompts before the first answer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agentic_opd.logs.messages import LogNote
from agentic_opd.logs.session import (
    Counts,
    Draft,
    LeftOut,
    Record,
    Session,
    called,
    json_text,
    member,
    not_learned,
    objects,
    read_content,
    text_id,
    unknown,
)

_PARSED = frozenset(("bash_command", "mark_task_complete"))
"""Names under which Harbor writes commands that it found in the text of an agent without tools."""


def is_atif(records: Sequence[Record]) -> bool:
    """Return whether records are trajectories in ATIF."""
    return any(
        str(record.get("schema_version")).startswith("ATIF-v") and isinstance(record.get("steps"), list)
        for record in records
    )


def sessions(records: Iterable[Record], counts: Counts) -> Iterator[Session]:
    """Yield the conversations of trajectories: one, one more for each summary, and those of each sub-agent."""
    for record in records:
        if is_atif([record]):
            yield from _trajectory(record, counts)
        else:
            counts[unknown("records", record.get("schema_version", record.get("type")))] += 1


def _trajectory(record: Record, counts: Counts) -> Iterator[Session]:
    agent = record.get("agent")
    label = next((name for key in ("session_id", "trajectory_id") if isinstance(name := record.get(key), str)), "")
    draft = Draft(counts, label, member(agent, "tool_definitions"))
    prompts = list[Mapping[str, Any]]()
    for step in objects(record.get("steps")):
        source = step.get("source")
        draft.begin(None, step.get("timestamp"))
        content = read_content(step.get("message") or "", counts)
        if source == "agent":
            _add_answer(draft, step, content, _reason(step, agent))
        elif source == "system" and draft.last is not None:
            counts[LeftOut.BOOKKEEPING] += 1
            if draft.last.answers and any("subagent_trajectory_ref" in result for result in _results(step)):
                yield from draft.ended()
                draft.restart(prompts)
        elif source in ("system", "user"):
            draft.add({"role": source, "content": content})
        else:
            counts[unknown("steps", source)] += 1
        if draft.last is not None and not draft.last.answers:
            prompts = draft.messages()
    yield from draft.ended()
    for inner in objects(record.get("subagent_trajectories")):
        yield from _trajectory(inner, counts)


def _results(step: Record) -> list[Record]:
    return objects(member(step, "observation", "results"))


def _reason(step: Record, agent: object) -> LogNote | None:
    """Return why an answer is not learned, if its step says so."""
    name = str(member(agent, "name"))
    declared = {str(member(tool, "function", "name")) for tool in objects(member(agent, "tool_definitions"))}
    names = {str(call.get("function_name")) for call in objects(step.get("tool_calls"))}
    if step.get("is_copied_context") is True:
        return LogNote.REPEATED
    if "-summarization-" in name:
        return LogNote.SUMMARY
    # OpenHands' text beside a call is its own description of the call.
    is_described = name == "openhands" and bool(names) and bool(step.get("message"))
    is_altered = bool(names & (_PARSED - declared)) or is_described or step.get("llm_call_count") == 0
    return LogNote.ALTERED if is_altered else None


def _add_answer(draft: Draft, step: Record, content: str | list[dict[str, Any]], reason: LogNote | None) -> None:
    """Add an answer and the results of its calls.

    An answer without calls and results that another one follows is its beginning: Harbor writes each block of Claude
    Code's answers as a step.
    """
    raw_calls = objects(step.get("tool_calls"))
    named = ((call.get("tool_call_id"), call.get("function_name"), call.get("arguments")) for call in raw_calls)
    calls = called(named, draft.counts)
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if isinstance(content, str) and content in {_placeholder(call) for call in raw_calls}:
        parts = []
    if isinstance(thoughts := step.get("reasoning_content"), str) and thoughts:
        parts = [{"type": "thinking", "thinking": thoughts}, *parts]
    last = draft.last
    if last is not None and last.message["role"] == "assistant" and not last.message["tool_calls"]:
        message = last.message
        message["content"] += parts
        message["tool_calls"] = calls
    else:
        message = draft.add({"role": "assistant", "content": parts, "tool_calls": calls})
    if reason is not None:
        message.update(not_learned(message, reason))
    for result in _results(step):
        _add_result(draft, result)


def _placeholder(call: Record) -> str:
    """Return the text that Harbor writes for an answer without text."""
    return f"Executed {call.get('function_name')} {call.get('tool_call_id')}"


def _add_result(draft: Draft, result: Record) -> None:
    """Add the result of a call; one that names no call is what the agent reads in a user's message."""
    output = result.get("content")
    is_read = isinstance(output, str | list)
    content = read_content(output, draft.counts) if is_read else "" if output is None else json_text(output)
    call_id = text_id(result.get("source_call_id"))
    if call_id is not None:
        draft.add({"role": "tool", "tool_call_id": call_id, "content": content})
    elif content:
        draft.add({"role": "user", "content": content})
