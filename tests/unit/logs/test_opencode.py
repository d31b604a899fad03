"""OpenCode's sessions: exported, in files, in a database; compactions, errors, calls that never ended."""

import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.logs.files import find_logs
from agentic_opd.logs.messages import LogNote, read_log
from agentic_opd.logs.opencode import sessions
from agentic_opd.logs.session import LeftOut

from .samples import opencode


def parts_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for message in document["messages"] for part in message["parts"]]


def in_files(folder: Path, document: dict[str, Any], layout: str) -> Path:
    session = {**document["info"], "projectID": "p"}
    files = {f"session/p/{session['id']}.json": session}
    for message in document["messages"]:
        name = message["info"]["id"]
        files[f"message/s/{name}.json"] = message["info"]
        for part in message["parts"]:
            place = {"new": f"part/{name}", "flat": "part", "old": f"session/part/s/{name}"}[layout]
            files[f"{place}/{part['id']}.json"] = {"sessionID": "s", **part}
    for name, value in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(value, indent=1 if layout == "old" else None))
    return folder


def in_database(path: Path, document: dict[str, Any]) -> Path:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE session (id TEXT, title TEXT)")
        database.execute("CREATE TABLE message (id TEXT, session_id TEXT, data TEXT)")
        database.execute("CREATE TABLE part (id TEXT, message_id TEXT, session_id TEXT, data TEXT)")
        database.execute("INSERT INTO session VALUES ('s', 'Files')")
        for message in document["messages"]:
            info = {key: value for key, value in message["info"].items() if key not in ("id", "sessionID")}
            database.execute("INSERT INTO message VALUES (?, 's', ?)", (message["info"]["id"], json.dumps(info)))
        for part in parts_of(document):
            data = {key: value for key, value in part.items() if key not in ("id", "messageID")}
            database.execute(
                "INSERT INTO part VALUES (?, ?, 's', ?)", (part["id"], part["messageID"], json.dumps(data))
            )
    database.close()
    return path


@pytest.mark.parametrize("layout", ["new", "flat", "old", "database"])
def test_every_place_of_a_session_gives_the_exported_one(layout: str, tmp_path: Path) -> None:
    document = opencode()
    (exported,) = sessions([document], Counter())
    if layout == "database":
        in_database(tmp_path / "opencode.db", document)
    else:
        in_files(tmp_path, document, layout)
    found = find_logs([tmp_path])
    (entry,) = found.sessions
    assert entry.session.messages == list(exported.messages)
    assert not found.skipped
    assert found.tallies["OpenCode"].answers == 3


def test_parts_without_their_message_are_counted(tmp_path: Path) -> None:
    document = opencode()
    folder = in_files(tmp_path, document, "new")
    (folder / "message/s/m4.json").unlink()
    tally = find_logs([tmp_path]).tallies["OpenCode"]
    assert tally.answers == 2
    assert tally.left_out[LeftOut.OTHER_PART] == 2


def test_a_compaction_begins_the_next_conversation_with_its_summary() -> None:
    document = opencode()
    user, answer = document["messages"][2:]
    summary = {
        "info": {"id": "m5", "role": "assistant", "summary": True},
        "parts": [{"type": "text", "text": "It went."}],
    }
    marker = {"info": {"id": "m4b", "role": "user"}, "parts": [{"type": "compaction", "auto": True}]}
    document["messages"] += [marker, summary, user, answer]
    first, second = sessions([document], Counter())
    assert first.messages[-2]["role"] == "assistant"
    log = read_log(second.fields(), ())
    assert [message["content"] for message in log.messages[:2]] == ["What did we do so far?", "It went."]
    assert log.context == {1: LogNote.SUMMARY}


def test_calls_that_failed_or_never_ended() -> None:
    document = opencode()
    _, answer = document["messages"][:2]
    answer["info"]["error"] = {"name": "MessageAbortedError"}
    answer["parts"] = [
        {"type": "tool", "callID": "1", "tool": "bash", "state": {"status": "error", "input": {}, "error": "no"}},
        {"type": "tool", "callID": "2", "tool": "bash", "state": {"status": "running", "input": {}}},
    ]
    (session,) = sessions([document], Counter())
    log = read_log(session.fields(), ())
    assert log.messages[2]["content"] == "no"
    assert log.messages[3]["content"] == "[Tool execution was interrupted]"
    assert not log.notes[LogNote.CALL_WITHOUT_RESULT]
    assert log.context == {1: LogNote.STOPPED}


def test_a_compaction_keeps_the_messages_from_its_tail_on() -> None:
    document = opencode()
    summary = {
        "info": {"id": "m6", "role": "assistant", "summary": True},
        "parts": [{"type": "text", "text": "It went."}],
    }
    marker = {
        "info": {"id": "m5", "role": "user"},
        "parts": [{"type": "compaction", "auto": True, "tail_start_id": "m3"}],
    }
    after = [
        {"info": {"id": f"n{number}", "role": role}, "parts": [{"type": "text", "text": text}]}
        for number, (role, text) in enumerate([("user", "On."), ("assistant", "Done.")])
    ]
    document["messages"] += [marker, summary, *after]
    _, second = sessions([document], Counter())
    log = read_log(second.fields(), ())
    assert [message["content"] for message in log.messages] == [
        *("No, count the folders too.", "Two files and no folder."),
        *("What did we do so far?", "It went.", "On.", "Done."),
    ]
    assert log.context == {1: LogNote.REPEATED, 3: LogNote.SUMMARY}


def test_a_file_whose_text_is_in_the_prompt_leaves_the_answer_learned() -> None:
    document = opencode()
    file = {"type": "file", "mime": "text/plain", "url": "file:///w/a.py"}
    document["messages"][0]["parts"].append(file)
    (session,) = sessions([document], Counter())
    assert not read_log(session.fields(), ()).context
    document["messages"][0]["parts"].append({**file, "mime": "image/png"})
    (session,) = sessions([document], Counter())
    assert read_log(session.fields(), ()).context == {1: LogNote.ANSWERS_MEDIA}


@pytest.mark.parametrize("end", [{"type": "step-finish", "reason": "length"}, "pending"])
def test_a_step_that_was_cut_off_is_not_learned(end: Any) -> None:
    document = opencode()
    parts = document["messages"][1]["parts"]
    if end == "pending":
        parts[2]["state"] = {"status": "pending", "input": {}, "raw": '{"comm'}
    else:
        parts[3] = end
    (session,) = sessions([document], Counter())
    assert read_log(session.fields(), ()).context == {1: LogNote.STOPPED}


def test_a_database_of_another_program_is_skipped(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "other.db") as database:
        database.execute("CREATE TABLE cookies (name TEXT)")
    database.close()
    assert list(find_logs([tmp_path]).skipped) == [
        "a database that is not OpenCode's; a gateway's journal is read if it is named itself"
    ]
