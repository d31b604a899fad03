"""Sessions of OpenCode 2: exported and in a database, with every kind of message."""

import base64
import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.logs.files import find_logs
from agentic_opd.logs.messages import LogNote, read_log
from agentic_opd.logs.opencode import sessions
from agentic_opd.logs.session import Counts, LeftOut, by_provider, unknown

from .samples import opencode, opencode_2
from .test_opencode import in_database


def answer_of(document: dict[str, Any], index: int = 2) -> dict[str, Any]:
    return document["messages"][index]


def shown(document: dict[str, Any], counts: Counts | None = None) -> list[list[tuple[str, str]]]:
    """Return role and text of each message of each conversation."""
    logs = [read_log(session.fields(), ()) for session in sessions([document], Counter() if counts is None else counts)]
    return [[(message["role"], message["content"]) for message in log.messages] for log in logs]


def add_newer(path: Path, document: dict[str, Any], *, has_numbers: bool) -> None:
    with sqlite3.connect(path) as database:
        number = ", seq INTEGER" if has_numbers else ""
        columns = f"id TEXT, session_id TEXT, type TEXT, time_created INTEGER, data TEXT{number}"
        database.execute(f"CREATE TABLE session_message ({columns})")
        for index, message in reversed([*enumerate(document["messages"])]):
            data = {key: value for key, value in message.items() if key not in ("id", "type")}
            row = [message["id"], "s", message["type"], 0 if has_numbers else index, json.dumps(data)]
            row += [index] if has_numbers else []
            database.execute(f"INSERT INTO session_message VALUES ({', '.join('?' * len(row))})", row)
    database.close()


def test_an_exported_session_gives_that_of_version_1() -> None:
    counts: Counts = Counter()
    (first,) = sessions([opencode()], Counter())
    (second,) = sessions([opencode_2()], counts)
    assert read_log(second.fields(), ()).messages == read_log(first.fields(), ()).messages
    assert (second.project, second.label) == ("/w", "s")
    assert counts == {LeftOut.BOOKKEEPING: 1}


@pytest.mark.parametrize("has_numbers", [True, False])
@pytest.mark.parametrize("of_version_1", [0, 2, 4])
def test_a_database_is_read_from_the_tables_with_more_answers(
    tmp_path: Path, of_version_1: int, has_numbers: bool
) -> None:
    document, path = opencode(), tmp_path / "opencode.db"
    document["messages"] = document["messages"][:of_version_1]
    in_database(path, document)
    add_newer(path, opencode_2(), has_numbers=has_numbers)
    found = find_logs([tmp_path])
    (entry,) = found.sessions
    (whole,) = sessions([opencode_2()], Counter())
    assert read_log(entry.session.fields(), ()).messages == read_log(whole.fields(), ()).messages
    assert found.tallies["OpenCode"].answers == 3


def test_what_the_agent_reads_beside_the_person() -> None:
    document, counts = opencode_2(), Counter[str]()
    document["messages"][1] |= {
        "skills": [{"name": "count", "text": "How to count."}],
        "files": [
            {"mime": "text/plain", "name": "a.txt", "data": base64.b64encode(b"one").decode()},
            {"mime": "application/zip", "name": "a.zip", "data": "AAAA"},
        ],
    }
    document["messages"][4:4] = [
        {"type": "shell", "command": "pwd", "output": {"output": "/w"}},
        {"type": "shell", "command": "make", "metadata": {"background": True}},
        {"type": "synthetic", "text": "The build ended."},
        {"type": "skill", "text": "How to list."},
        {"type": "system", "text": "Be short."},
        {"type": "location-switched", "location": {"directory": "/v"}},
        {"type": "idle"},
        {"type": "new-kind"},
    ]
    (conversation,) = shown(document, counts)
    user = [text for role, text in conversation if role == "user"]
    assert "How to count." in user[0]
    assert "Attached file: a.txt\n\none" in user[0]
    assert "\n".join(user[1:]).split("\n") == [
        *("Shell command: pwd", "", "/w", "The build ended.", "How to list."),
        *("<system-update>", "Be short.", "</system-update>", "The working directory is now /v."),
        "No, count the folders too.",
    ]
    assert counts == {LeftOut.BOOKKEEPING: 4, unknown("messages", "new-kind"): 1}


def test_a_compaction_that_ended_begins_the_next_conversation() -> None:
    document, counts = opencode_2(), Counter[str]()
    compaction = {"type": "compaction", "summary": "Two files.", "recent": "None.", "status": "completed"}
    document["messages"][4:4] = [{"type": "compaction", "status": "failed"}, compaction]
    first, second = shown(document, counts)
    assert [role for role, _ in first] == ["user", "assistant", "tool", "assistant"]
    assert second[0] == ("user", "Summary of the session so far:\n\nTwo files.\n\nLatest messages:\n\nNone.")
    assert second[-1] == ("assistant", "Two files and no folder.")
    assert counts[LeftOut.BOOKKEEPING] == 2


def test_a_compaction_that_the_provider_keeps_leaves_the_conversation_whole() -> None:
    document = opencode_2()
    document["messages"].insert(4, {"type": "compaction", "summary": "", "providerContext": [{}]})
    assert len(shown(document)) == 1


def test_results_of_calls() -> None:
    document, counts = opencode_2(), Counter[str]()
    states: list[dict[str, Any]] = [
        {"status": "error", "input": {}, "error": {"type": "unknown", "message": "no"}, "content": []},
        {"status": "completed", "input": {}, "content": [], "structured": {"lines": 2}},
        {"status": "running", "input": {}, "content": []},
    ]
    tools = [{"type": "tool", "id": str(index), "name": "bash", "state": state} for index, state in enumerate(states)]
    searched = {"type": "tool", "id": "9", "name": "web_search", "executed": True, "state": states[1]}
    thought = [{"type": "reasoning", "text": "Hm."}, {"type": "reasoning", "text": "", "state": {"signature": "x"}}]
    answer_of(document)["content"] = [*thought, *tools, searched]
    (session,) = sessions([document], counts)
    log = read_log(session.fields(), ())
    results = [message for message in session.messages if message["role"] == "tool"]
    assert [(result["tool_call_id"], result["content"][0]["text"]) for result in results] == [
        ("0", "no"),
        ("1", '{"lines": 2}'),
    ]
    assert log.messages[1]["reasoning_content"] == "Hm."
    assert counts == {LeftOut.BOOKKEEPING: 1, by_provider("web_search"): 1, LeftOut.HIDDEN_REASONING: 1}


@pytest.mark.parametrize("end", [{"finish": "length"}, {"error": {"message": "aborted"}}, "streaming"])
def test_an_answer_that_was_cut_off_is_not_learned(end: Any) -> None:
    document = opencode_2()
    if end == "streaming":
        answer_of(document)["content"][1]["state"] = {"status": "streaming", "input": '{"comm'}
    else:
        answer_of(document).update(end)
    (session,) = sessions([document], Counter())
    assert read_log(session.fields(), ()).context == {1: LogNote.STOPPED}


def test_an_attached_picture_leaves_the_answer_unlearned() -> None:
    document = opencode_2()
    document["messages"][1]["files"] = [{"mime": "image/png", "uri": "file:///w/a.png"}]
    (session,) = sessions([document], Counter())
    assert read_log(session.fields(), ()).context == {1: LogNote.ANSWERS_MEDIA}
