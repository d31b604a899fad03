"""OpenClaw's and pi's sessions: branches, compactions, answers that failed."""

from collections import Counter
from typing import Any

from agentic_opd.logs.messages import LogNote, read_log
from agentic_opd.logs.openclaw import is_openclaw, sessions
from agentic_opd.logs.session import LeftOut, Session

from .samples import openclaw

HEAD = {"type": "session", "version": 3, "id": "s", "cwd": "/w"}


def entry(name: str, parent: str | None, role: str, text: str, **more: Any) -> dict[str, Any]:
    message = {"role": role, "content": [{"type": "text", "text": text}] if text else [], **more}
    return {"type": "message", "id": name, "parentId": parent, "message": message}


def texts(session: Session) -> list[str]:
    return [message["content"] for message in read_log(session.fields(), ()).messages]


def read(*records: dict[str, Any]) -> tuple[list[Session], Counter[str]]:
    counts = Counter[str]()
    return list(sessions(records, counts)), counts


def test_branches_share_what_is_before_them_also_if_one_goes_on_later() -> None:
    (first, second, third), _ = read(
        HEAD,
        entry("a", None, "user", "Go."),
        entry("b", "a", "assistant", "Left."),
        entry("c", "a", "assistant", "Right."),
        entry("d", "b", "user", "On."),
        entry("e", "d", "assistant", "More."),
    )
    assert texts(first) == ["Go.", "Left."]
    assert texts(second) == ["Go.", "Right."]
    assert texts(third) == ["Go.", "Left.", "On.", "More."]


def test_a_compaction_keeps_the_entries_from_its_first_on() -> None:
    (first, second), _ = read(
        HEAD,
        entry("a", None, "user", "Go."),
        entry("b", "a", "assistant", "Left."),
        entry("c", "b", "user", "On."),
        entry("d", "c", "assistant", "Further."),
        {"type": "compaction", "id": "x", "parentId": "d", "summary": "It went.", "firstKeptEntryId": "c"},
        entry("e", "x", "user", "And?"),
        entry("f", "e", "assistant", "Done."),
    )
    assert texts(first) == ["Go.", "Left.", "On.", "Further."]
    assert texts(second) == ["Summary of the session so far:\n\nIt went.", "On.", "Further.", "And?", "Done."]
    assert read_log(second.fields(), ()).context == {2: LogNote.REPEATED}


def test_a_second_compaction_may_keep_what_the_first_kept() -> None:
    *_, last = read(
        HEAD,
        entry("a", None, "user", "Go."),
        entry("b", "a", "assistant", "Left."),
        entry("c", "b", "user", "On."),
        entry("d", "c", "assistant", "Further."),
        {"type": "compaction", "id": "x", "parentId": "d", "summary": "It went.", "firstKeptEntryId": "c"},
        entry("e", "x", "user", "And?"),
        entry("f", "e", "assistant", "Done."),
        {"type": "compaction", "id": "y", "parentId": "f", "summary": "It went well.", "firstKeptEntryId": "d"},
        entry("g", "y", "user", "Thanks."),
        entry("h", "g", "assistant", "Welcome."),
    )[0]
    head = "Summary of the session so far:\n\nIt went well."
    assert texts(last) == [head, "Further.", "And?", "Done.", "Thanks.", "Welcome."]


def test_a_compaction_of_version_1_names_the_first_entry_that_it_keeps_by_its_index() -> None:
    bare = [
        {"type": "session", "id": "s", "cwd": "/w"},
        *(
            {"type": "message", "message": {"role": role, "content": text}}
            for role, text in (("user", "Go."), ("assistant", "Left."), ("user", "On."), ("assistant", "Further."))
        ),
        {"type": "compaction", "summary": "It went.", "firstKeptEntryIndex": 3},
        {"type": "message", "message": {"role": "user", "content": "And?"}},
        {"type": "message", "message": {"role": "assistant", "content": "Done."}},
    ]
    (_, second), _ = read(*bare)
    assert texts(second) == ["Summary of the session so far:\n\nIt went.", "On.", "Further.", "And?", "Done."]


def test_a_command_of_the_person_is_read_as_the_agent_reads_it() -> None:
    command = {"role": "bashExecution", "command": "ls", "output": "a.py", "exitCode": 2}
    (session,), counts = read(
        HEAD,
        {"type": "message", "id": "a", "parentId": None, "message": command},
        {"type": "message", "id": "b", "parentId": "a", "message": {**command, "excludeFromContext": True}},
        entry("c", "b", "assistant", "Hm."),
    )
    assert texts(session) == ["Ran `ls`\n```\na.py\n```\n\nCommand exited with code 2", "Hm."]
    assert counts == {LeftOut.BOOKKEEPING: 2}


def test_what_openclaw_writes_in_the_agents_name_is_left_out() -> None:
    (session,), counts = read(
        HEAD,
        entry("a", None, "user", "Go."),
        entry("b", "a", "assistant", "Done."),
        entry("c", "b", "assistant", "Done.", provider="openclaw", model="delivery-mirror"),
    )
    assert texts(session) == ["Go.", "Done."]
    assert counts == {LeftOut.BOOKKEEPING: 1, LeftOut.NOTICE: 1}


def test_answers_that_failed_are_counted_or_not_learned() -> None:
    (session,), counts = read(
        HEAD,
        entry("a", None, "user", "Go."),
        entry("b", "a", "assistant", "", stopReason="error", errorMessage="overloaded"),
        entry("c", "b", "assistant", "I l", stopReason="aborted"),
        entry("d", "c", "user", "On."),
        entry("e", "d", "assistant", "Done.", stopReason="stop"),
        {"type": "model_change", "id": "f", "modelId": "m"},
        {"type": "hologram"},
    )
    assert read_log(session.fields(), ()).context == {1: LogNote.STOPPED}
    assert counts == {LeftOut.NOTICE: 1, LeftOut.BOOKKEEPING: 2, "records of unknown type 'hologram'": 1}


def test_sessions_without_ids_are_read_in_order() -> None:
    bare = [{key: value for key, value in record.items() if key not in ("id", "parentId")} for record in openclaw()]
    assert is_openclaw(bare)
    assert read(*bare)[0] == read(*openclaw())[0]
