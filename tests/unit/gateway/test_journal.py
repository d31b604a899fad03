"""What a journal holds is what was written, and one process writes it."""

import asyncio
import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import OutputError
from agentic_opd.core.types import StopReason, Turn, TurnOutcome
from agentic_opd.gateway.journal import Ending, Journal, SessionPart, SessionRow, SessionState
from agentic_opd.gateway.turns import Feedback, RecordedTurn
from agentic_opd.report.curves import HintedTurns
from agentic_opd.rollout.conversation import Completion
from agentic_opd.wire.group import GroupDistillation, ScoredGroup, ScoredRollout, TurnRecord

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SESSION = SessionRow("session-1", "owner", "mine", "http://127.0.0.1:1", opened=1.0, used=1.0)
TURN = RecordedTurn(
    turn_id=1,
    parent=None,
    messages=({"role": "user", "content": "é 数"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}),
    prompt_ids=(1, 2, 3),
    completion=Completion((4, 5), (-0.1, -1e-9), "length", weight_version=7),
    span=Turn(3, 5, 2, 1, 1, truncated=True, weight_version=7),
    turn_type="side",
    tools=({"type": "function", "function": {"name": "f"}},),
    sampling={"top_p": 0.5, "logit_bias": {3: 1.0}},
    altered=("top_p", "logit_bias"),
)
FINAL = (SessionState.WRITTEN, SessionState.EMPTY)


def test_turns_and_sessions_come_back_as_they_were(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    assert (tmp_path / "journal.sqlite").stat().st_mode & 0o077 == 0
    second = replace(TURN, turn_id=2, parent=1, sampling={})
    asyncio.run(journal.run(lambda: journal.add_turns([(SESSION, TURN), (SESSION, second)])))
    journal.close()
    again = Journal(tmp_path / "journal.sqlite")
    first, then = again.turns("session-1")
    # JSON has no whole numbers as keys; what was asked for is kept to be read, not to be asked again.
    assert replace(first, sampling={}) == replace(TURN, sampling={})
    assert first.sampling["logit_bias"] == {"3": 1.0}
    assert then == second
    (row,) = again.sessions(SessionState.OPEN)
    assert replace(row, used=1.0) == SESSION
    assert row.used > 1.0
    assert (again.last_turn_id(), again.count_turns("session-1")) == (2, 2)
    again.close()


def test_a_session_is_closed_once_and_found_by_its_name(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.add_turns([(SESSION, TURN)])
    ending = Ending(StopReason.CLOSED, "group-1", 0.5, "Good.")
    journal.close_session(replace(SESSION, ending=ending, group_name="a task"))
    journal.close_session(replace(SESSION, ending=Ending(StopReason.IDLE, "group-2")))
    (row,) = journal.sessions(SessionState.CLOSED)
    assert (row.ending, row.group_name) == (ending, "a task")
    journal.finish_sessions({"session-1": SessionState.WRITTEN})
    assert journal.sessions(SessionState.OPEN, SessionState.CLOSED) == []
    for name in ("mine", "session-1"):
        found = journal.latest("owner", name)
        assert found is not None
        assert found.state is SessionState.WRITTEN
        assert journal.latest("another", name) is None
    journal.close()


def test_a_group_is_kept_until_its_session_is_deleted(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    rollout = ScoredRollout([1, 2], [-100, 2], [1.0, -0.5], 0.5, messages=({"role": "user", "content": "é"},))
    group = ScoredGroup((rollout,), item_id="session-1", group_id="group-1")
    journal.add_turns([(SESSION, TURN)])
    journal.close_session(replace(SESSION, ending=Ending(StopReason.CLOSED, "group-1")))
    asyncio.run(journal.keep_group(group))
    kept = asyncio.run(journal.group("group-1"))
    assert kept is not None
    assert kept.to_wire() == group.to_wire()
    assert journal.unsent_groups() == [], "it is not in the file yet"
    journal.finish_sessions({"session-1": SessionState.WRITTEN})
    assert journal.unsent_groups() == ["group-1"]
    journal.sent_group("group-1")
    assert journal.unsent_groups() == []
    journal.delete("session-1")
    assert asyncio.run(journal.group("group-1")) is None
    journal.close()


def test_one_process_writes_a_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    with pytest.raises(OutputError, match=r"env\.journal_path"):
        Journal(tmp_path / "journal.sqlite")
    journal.close()
    Journal(tmp_path / "journal.sqlite").close()


def test_a_journal_of_another_kind_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "later.sqlite") as db:
        db.execute("PRAGMA user_version = 9")
    (tmp_path / "text.sqlite").write_text("no database, and long enough to be seen as none" * 10)
    for name, problem in (("later.sqlite", "version 9"), ("text.sqlite", "as a journal")):
        with pytest.raises(OutputError, match=problem):
            Journal(tmp_path / name)
        with pytest.raises(OutputError, match=problem):  # And its lock was given back.
            Journal(tmp_path / name)


def test_a_turn_that_cannot_be_read_is_said_without_its_text(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.add_turns([(SESSION, TURN)])
    with sqlite3.connect(tmp_path / "journal.sqlite") as db:
        db.execute("""UPDATE turns SET body = '{"secret": 1}'""")
    with pytest.raises(OutputError, match="turn of session-1") as error:
        journal.turns("session-1")
    assert "secret" not in str(error.value)
    journal.close()


def test_a_turn_of_a_prompt_that_its_client_rendered_is_refused_with_what_to_do(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.add_turns([(SESSION, TURN)])
    with sqlite3.connect(tmp_path / "journal.sqlite") as db:
        db.execute('UPDATE turns SET body = replace(body, \'"turn_id"\', \'"is_plain":true,"turn_id"\')')
    with pytest.raises(OutputError, match=r"session-1.*another env\.journal_path"):
        journal.turns("session-1")
    journal.close()


def numbered(number: int, **changes: Any) -> tuple[SessionRow, RecordedTurn]:
    row = replace(SESSION, session_id=f"session-{number}", name=f"s{number}", **changes)
    return row, replace(TURN, turn_id=number)


def scored_group(group_id: str, *hints: str | None) -> ScoredGroup:
    records = tuple(
        TurnRecord((2, 3), TurnOutcome.SCORED if hint else TurnOutcome.VOTE_FAILED, "user", hint=hint) for hint in hints
    )
    rollout = ScoredRollout([1, 1, 2], [-100, -100, 2], [1.0, 1.0, -0.5], 0.5, messages=(), turns=records)
    distillation = GroupDistillation(distill_topk=4)
    return ScoredGroup((rollout,), item_id=group_id, group_id=group_id, distillation=distillation)


def test_a_list_of_sessions_reads_no_turn_and_no_group(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    for number in range(1, 6):
        journal.add_turns([numbered(number), (numbered(number)[0], replace(TURN, turn_id=10 + number))])
    journal.add_turns([numbered(6, owner="another")])
    journal.add_feedback(2, Feedback(-1, "Not so."))
    for number, group_id in ((1, "pair"), (2, "pair"), (3, "whole")):
        journal.close_session(replace(numbered(number)[0], ending=Ending(StopReason.CLOSED, group_id)))
    asyncio.run(journal.keep_group(scored_group("pair", "Shorter.", None, None)))
    asyncio.run(journal.keep_group(scored_group("whole", "Shorter.")))
    asyncio.run(journal.keep_group(scored_group("of a part", "Shorter.", "Formal.")))
    journal.add_part(SessionPart("of a part", "session-3", frozenset({3})))
    journal.finish_sessions(dict.fromkeys(("session-1", "session-2", "session-3"), SessionState.WRITTEN))
    read = set[tuple[str | None, str | None]]()

    def authorize(action: int, first: str | None, second: str | None, *_: Any) -> int:
        if action == sqlite3.SQLITE_READ:
            read.add((first, second))
        return sqlite3.SQLITE_OK

    journal._db.set_authorizer(authorize)
    listed = journal.listed("owner", 0, 3)
    assert [session.row.session_id for session in listed] == ["session-5", "session-4", "session-3"]
    (third, *rest) = [*listed[2:], *journal.listed("owner", 3, 3)]
    assert third.corrections == HintedTurns(3, 3), "those of the session's part count too"
    assert [session.corrections for session in rest] == [HintedTurns(1.5, 0.5)] * 2, "the mean of the group's sessions"
    assert [(session.turns, session.rated) for session in rest] == [(2, 1), (2, 0)]
    assert journal.corrections("owner", 2) == [HintedTurns(1.5, 0.5), HintedTurns(3, 3)]
    assert journal.states("owner") == {SessionState.OPEN: 2, SessionState.WRITTEN: 3}
    assert {("turns", "body"), ("groups", "body"), ("feedback", "text")}.isdisjoint(read)
    journal._db.set_authorizer(None)
    row = journal.latest("owner", "session-3")
    assert row is not None
    assert journal.group_ids_in_order(row) == ["of a part", "whole"]
    journal.delete("session-3")
    assert journal.corrections("owner", 9) == [HintedTurns(1.5, 0.5)] * 2
    assert journal._db.execute("SELECT group_id FROM corrections").fetchall() == [("pair",)]
    journal.close()


def test_sessions_are_kept_as_long_as_they_are_wanted(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    for number, state in enumerate(SessionState):
        row = replace(SESSION, session_id=state.value)
        journal.add_turns([(row, replace(TURN, turn_id=number))])
        journal.finish_sessions({state.value: state})
    assert journal.delete_older(time.time() - 3600, *FINAL) == 0
    assert journal.delete_older(time.time() + 1, *FINAL) == 2
    assert {row.state for row in journal.sessions(*SessionState)} == {*SessionState} - {*FINAL}
    journal.close()


def test_turns_that_wait_at_the_same_time_are_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, batches = Journal(tmp_path / "journal.sqlite"), list[int]()
    write = journal.add_turns

    def counted(turns: Any) -> None:
        batches.append(len(turns))
        write(turns)

    monkeypatch.setattr(journal, "add_turns", counted)

    async def main() -> None:
        turns = [journal.add_turn(SESSION, replace(TURN, turn_id=number)) for number in range(2, 12)]
        await journal.add_turn(SESSION, replace(TURN, turn_id=1))
        await asyncio.gather(*turns)

    asyncio.run(main())
    assert batches == [1, 10]
    assert [turn.turn_id for turn in journal.turns(SESSION.session_id)] == list(range(1, 12))
    journal.close()


def test_a_disk_that_refuses_refuses_every_turn_that_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal.sqlite")

    def refuse(turns: Any) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    async def main() -> list[BaseException | None]:
        with monkeypatch.context() as patch:
            patch.setattr(journal, "add_turns", refuse)
            turns = [journal.add_turn(SESSION, replace(TURN, turn_id=number)) for number in range(3)]
            failed = await asyncio.gather(*turns, return_exceptions=True)
        await journal.add_turn(SESSION, replace(TURN, turn_id=9))
        return failed

    assert [type(error) for error in asyncio.run(main())] == [OutputError] * 3
    assert [turn.turn_id for turn in journal.turns(SESSION.session_id)] == [9]
    journal.close()


def test_a_turn_that_can_not_be_written_keeps_no_other_from_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    unwritable = replace(TURN, turn_id=2, messages=({"role": "user", "content": "\ud800"},))

    async def main() -> list[BaseException | None]:
        first = asyncio.create_task(journal.add_turn(SESSION, TURN))
        await asyncio.sleep(0)
        others = [journal.add_turn(SESSION, turn) for turn in (unwritable, replace(TURN, turn_id=3))]
        return await asyncio.gather(first, *others, return_exceptions=True)

    first, second, third = asyncio.run(main())
    assert (first, third) == (None, None)
    assert isinstance(second, ValueError)
    assert [turn.turn_id for turn in journal.turns(SESSION.session_id)] == [1, 3]
    journal.close()
