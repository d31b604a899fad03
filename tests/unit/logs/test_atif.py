"""Harbor's trajectories in ATIF."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.logs.atif import sessions
from agentic_opd.logs.files import find_logs
from agentic_opd.logs.messages import NOT_LEARNED, LogNote
from agentic_opd.logs.session import LeftOut, Session

from .samples import atif, claude_code

PROMPT = {"source": "user", "message": "List the files."}
LAST = {"source": "agent", "message": "Done."}


def trajectory(*steps: dict[str, Any], **agent: Any) -> dict[str, Any]:
    return {"schema_version": "ATIF-v1.7", "session_id": "s", "agent": {"name": "pi", **agent}, "steps": [*steps]}


def calling(name: str, *results: dict[str, Any], message: str = "I look.") -> dict[str, Any]:
    calls = [{"tool_call_id": "c1", "function_name": name, "arguments": {"command": "ls"}}]
    return {"source": "agent", "message": message, "tool_calls": calls, "observation": {"results": [*results]}}


def read(*documents: dict[str, Any]) -> tuple[list[Session], Counter[str]]:
    counts = Counter[str]()
    return list(sessions(documents, counts)), +counts


def reasons(session: Session) -> list[LogNote | None]:
    return [message.get(NOT_LEARNED) for message in session.messages if message["role"] == "assistant"]


def test_thinking_stays_apart_and_a_result_stands_with_its_call() -> None:
    step = {**calling("bash", {"source_call_id": "c1", "content": "a.py"}), "reasoning_content": "First, ls."}
    ((session,), _) = read(trajectory({"source": "system", "message": "Help."}, PROMPT, step, LAST))
    system, _, answer, result, last = session.messages
    assert system == {"role": "system", "content": "Help."}
    assert answer["content"] == [{"type": "thinking", "thinking": "First, ls."}, {"type": "text", "text": "I look."}]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "a.py"}
    assert reasons(session) == [None, None]
    assert last["content"] == [{"type": "text", "text": "Done."}]


@pytest.mark.parametrize(
    ("agent", "step", "reason"),
    [
        ({"name": "terminus-2"}, calling("bash_command", {"content": "a.py"}), LogNote.ALTERED),
        ({"name": "openhands"}, calling("execute_bash", {"content": "a.py"}), LogNote.ALTERED),
        ({"name": "openhands"}, calling("execute_bash", {"content": "a.py"}, message=""), None),
        ({}, {**calling("bash"), "llm_call_count": 0}, LogNote.ALTERED),
        ({}, {**calling("bash"), "is_copied_context": True}, LogNote.REPEATED),
        ({"name": "terminus-2-summarization-answers"}, {**LAST, "observation": {"results": []}}, LogNote.SUMMARY),
        ({}, calling("bash"), None),
    ],
)
def test_what_the_model_did_not_write_so_is_not_learned(
    agent: dict[str, Any], step: dict[str, Any], reason: LogNote | None
) -> None:
    ((session,), _) = read(trajectory(PROMPT, step, {"source": "user", "message": "More."}, LAST, **agent))
    assert reasons(session)[0] is reason


def test_a_declared_tool_of_such_a_name_is_a_call() -> None:
    tools = [{"type": "function", "function": {"name": "bash_command", "parameters": {"type": "object"}}}]
    ((session,), _) = read(trajectory(PROMPT, calling("bash_command"), tool_definitions=tools))
    assert reasons(session) == [None]


def test_a_result_of_no_call_is_what_the_user_says() -> None:
    step = {"source": "agent", "message": "```bash\nls\n```", "observation": {"results": [{"content": "a.py"}]}}
    ((session,), _) = read(trajectory(PROMPT, step, LAST))
    assert [message["role"] for message in session.messages] == ["user", "assistant", "user", "assistant"]


def test_a_summary_begins_the_next_conversation() -> None:
    handover = {"source": "system", "message": "Summarised.", "observation": {"results": []}}
    handover["observation"] = {"results": [{"subagent_trajectory_ref": [{"session_id": "s-summary"}]}]}
    notice = {"source": "system", "message": "Added workspace context"}
    (first, second), counts = read(
        trajectory(PROMPT, notice, LAST, handover, {"source": "user", "message": "Go on."}, LAST)
    )
    assert [message["role"] for message in first.messages] == ["user", "assistant"]
    assert [message["content"] for message in second.messages][:2] == ["List the files.", "Go on."]
    assert counts == {LeftOut.BOOKKEEPING: 2}


def test_a_sub_agent_is_a_conversation_of_its_own() -> None:
    inner = {**trajectory(PROMPT, LAST), "session_id": "inner"}
    (_, second), counts = read({**trajectory(PROMPT, LAST), "subagent_trajectories": [inner]})
    assert (second.label, counts) == ("inner", {})


def test_steps_of_unknown_source_are_counted() -> None:
    _, counts = read(trajectory(PROMPT, {"source": "hologram", "message": "?"}, LAST), {"schema_version": 3})
    assert counts == {"steps of unknown type 'hologram'": 1, "records of unknown type '3'": 1}


def test_harbors_copy_of_an_agents_own_log_is_left_out(tmp_path: Path) -> None:
    for trial, session_id in (("a", "s-atif"), ("b", "other")):
        (tmp_path / trial / "agent/sessions").mkdir(parents=True)
        document = atif() | {"session_id": session_id}
        (tmp_path / trial / "agent/trajectory.json").write_text(json.dumps(document))
    records = "".join(f"{json.dumps(record)}\n" for record in claude_code())
    (tmp_path / "a/agent/sessions/s-atif.jsonl").write_text(records)
    found = find_logs([tmp_path])
    assert [entry.name for entry in found.sessions] == ["a/agent/sessions/s-atif", "b/agent/trajectory/other"]
    assert found.tallies["ATIF"].left_out == {LeftOut.OWN_LOG: 1}


def test_a_conversation_without_an_answer_to_learn_is_counted_by_reason(tmp_path: Path) -> None:
    step = calling("bash_command", {"content": "a.py"})
    (tmp_path / "trajectory.json").write_text(json.dumps(trajectory(PROMPT, step, step, name="terminus-2")))
    found = find_logs([tmp_path])
    assert not found.sessions
    assert found.tallies["ATIF"].left_out == {LeftOut.UNLEARNED: 1, f"answers {LogNote.ALTERED}": 2}
