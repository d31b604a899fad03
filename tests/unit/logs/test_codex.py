"""Codex' rollouts: kinds of calls, compactions, rollbacks, the format of older versions."""

import json
from collections import Counter
from typing import Any

from agentic_opd.logs.codex import is_codex, sessions
from agentic_opd.logs.messages import NOT_LEARNED, LogNote, read_log
from agentic_opd.logs.session import LeftOut, Session

from .samples import codex


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "response_item", "payload": {"type": kind, **fields}}


def said(role: str, text: str) -> dict[str, Any]:
    return item("message", role=role, content=[{"type": "input_text", "text": text}])


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "event_msg", "payload": {"type": kind, **fields}}


def texts(session: Session) -> list[str]:
    return [message["content"] for message in read_log(session.fields(), ()).messages]


def read(*records: dict[str, Any]) -> tuple[list[Session], Counter[str]]:
    counts = Counter[str]()
    return list(sessions(records, counts)), counts


def test_every_kind_of_call_has_its_result() -> None:
    (session,), counts = read(
        said("user", "Go."),
        item("custom_tool_call", name="apply_patch", call_id="1", input="*** Begin"),
        item("local_shell_call", call_id="2", action={"type": "exec", "command": ["ls"]}),
        item("web_search_call", action={"type": "search"}),
        item("custom_tool_call_output", call_id="1", output=[{"type": "input_text", "text": "done"}]),
        item("function_call_output", call_id="2", output={"content": "a.py", "success": True}),
        said("assistant", "Done."),
    )
    log = read_log(session.fields(), ())
    calls = [call["function"] for call in log.messages[1]["tool_calls"]]
    assert [(call["name"], call["arguments"]) for call in calls] == [
        ("apply_patch", '{"input": "*** Begin"}'),
        ("local_shell", '{"command": ["ls"]}'),
    ]
    assert [message["content"] for message in log.messages[2:4]] == ["done", "a.py"]
    assert not +log.notes
    assert counts == {"calls that the provider ran (web search)": 1}


def test_reasoning_that_can_be_read_is_the_answers() -> None:
    (session,), counts = read(
        said("user", "Go."),
        item("reasoning", summary=[{"type": "summary_text", "text": "Hm."}], encrypted_content="x"),
        item("reasoning", summary=[], encrypted_content="x"),
        said("assistant", "Done."),
    )
    assert read_log(session.fields(), ()).messages[1] == {
        "role": "assistant",
        "content": "Done.",
        "reasoning_content": "Hm.",
    }
    assert counts == {LeftOut.HIDDEN_REASONING: 1}


def test_a_compaction_begins_the_next_conversation_with_its_replacement() -> None:
    before = (said("user", "Go."), said("assistant", "Done."))
    after = (said("user", "On."), said("assistant", "More."))
    replacement = [said("user", "Go.")["payload"], said("user", "Summary.")["payload"]]
    for payload, kept in (
        ({"message": "", "replacement_history": replacement}, ["Go.", "Summary."]),
        ({"message": "Summary."}, ["Go.", "Summary."]),
    ):
        (first, second), _ = read(*before, {"type": "compacted", "payload": payload}, *after)
        assert texts(first) == ["Go.", "Done."]
        assert texts(second) == [*kept, "On.", "More."]


def test_a_rollback_takes_turns_back() -> None:
    (first, second), _ = read(
        said("user", "Go."),
        said("assistant", "Left."),
        said("user", "On."),
        said("assistant", "Further."),
        event("thread_rolled_back", num_turns=1),
        said("user", "Back."),
        said("assistant", "Right."),
    )
    assert texts(first) == ["Go.", "Left.", "On.", "Further."]
    assert texts(second) == ["Go.", "Left.", "Back.", "Right."]


def test_an_answer_that_was_stopped_is_not_learned() -> None:
    (session,), _ = read(said("user", "Go."), said("assistant", "I l"), event("turn_aborted", reason="interrupted"))
    assert session.messages[1][NOT_LEARNED] is LogNote.STOPPED


def test_words_of_another_agent_are_a_users() -> None:
    communication = {"author": "/root/a", "recipient": "/root", "content": "I am done.", "trigger_turn": True}
    for record in (
        {"type": "inter_agent_communication", "payload": communication},
        said("assistant", json.dumps(communication)),
    ):
        (session,), counts = read(said("user", "Go."), said("assistant", "Wait."), record, said("assistant", "Good."))
        assert [message["role"] for message in session.messages] == ["user", "assistant", "user", "assistant"]
        assert texts(session) == ["Go.", "Wait.", "I am done.", "Good."]
        assert not +counts


def test_a_tool_of_a_server_has_the_servers_name_in_front() -> None:
    (session,), counts = read(
        said("user", "Go."),
        item("additional_tools", role="developer", tools=[]),
        item("function_call", name="search", namespace="mcp__files__", call_id="1", arguments="{}"),
        item("function_call_output", call_id="1", output="a.py"),
        item("mcp_call", id="2", name="read", arguments="{}", output="x = 1"),
    )
    log = read_log(session.fields(), ())
    names = [call["function"]["name"] for message in log.messages for call in message.get("tool_calls", ())]
    assert names == ["mcp__files__search", "read"]
    assert not +log.notes
    assert counts == {LeftOut.BOOKKEEPING: 1}


def test_rollouts_of_older_versions_have_the_items_as_lines() -> None:
    head = {"id": "s", "timestamp": "2025-06-01T00:00:00Z", "instructions": None, "git": {}}
    items = [record["payload"] for record in codex() if record["type"] == "response_item"]
    old = [head, {"record_type": "state"}, *items]
    assert is_codex(old)
    (session,), counts = read(*old)
    (new,), _ = read(*(record for record in codex() if record["type"] != "session_meta"))
    assert session.messages == new.messages
    assert counts[LeftOut.BOOKKEEPING] == 2
