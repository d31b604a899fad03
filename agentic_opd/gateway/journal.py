"""The journal: every finished turn is on disk before its answer ends, in SQLite in WAL mode (I/O).

A restarted gateway restores its open and its closed sessions from it. Only one process at a time can write a journal.
Synchronous methods block; `Journal.run` calls them on a dedicated thread, in order.
"""

import asyncio
import json
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from agentic_opd.core.errors import OutputError, WireError
from agentic_opd.core.files import check_regular
from agentic_opd.core.text import json_line, read_json
from agentic_opd.core.types import StopReason
from agentic_opd.gateway.errors import ClientError, unknown_session
from agentic_opd.gateway.foreign import ForeignTurn
from agentic_opd.gateway.turns import Feedback, RecordedTurn, TurnTree
from agentic_opd.gateway.turns import Path as TurnPath
from agentic_opd.report.curves import HintedTurns
from agentic_opd.wire.files import FileLock
from agentic_opd.wire.group import ScoredGroup

Result = TypeVar("Result")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT, server TEXT NOT NULL,
    opened REAL NOT NULL, used REAL NOT NULL, state TEXT NOT NULL,
    stop TEXT, reward REAL, feedback TEXT, group_id TEXT, error TEXT, group_name TEXT, parent TEXT
) STRICT;
CREATE TABLE IF NOT EXISTS turns (
    turn_id INTEGER PRIMARY KEY, session_id TEXT NOT NULL REFERENCES sessions, answer_id TEXT NOT NULL,
    body TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS feedback (
    turn_id INTEGER NOT NULL REFERENCES turns, reward REAL, text TEXT
) STRICT;
CREATE TABLE IF NOT EXISTS groups (
    group_id TEXT PRIMARY KEY, body BLOB NOT NULL, is_sent INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE IF NOT EXISTS parts (
    group_id TEXT PRIMARY KEY, session_id TEXT NOT NULL REFERENCES sessions, turn_ids TEXT NOT NULL,
    state TEXT NOT NULL, error TEXT
) STRICT;
CREATE TABLE IF NOT EXISTS corrections (
    group_id TEXT PRIMARY KEY, turns INTEGER NOT NULL, hints INTEGER NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS turns_of_session ON turns (session_id);
CREATE INDEX IF NOT EXISTS turns_of_answer ON turns (answer_id);
CREATE INDEX IF NOT EXISTS feedback_of_turn ON feedback (turn_id);
CREATE INDEX IF NOT EXISTS sessions_of_name ON sessions (owner, name);
CREATE INDEX IF NOT EXISTS sessions_by_use ON sessions (owner, used);
CREATE INDEX IF NOT EXISTS sessions_of_state ON sessions (state);
CREATE INDEX IF NOT EXISTS sessions_of_group ON sessions (group_id);
CREATE INDEX IF NOT EXISTS parts_of_session ON parts (session_id);
"""
_VERSION = 3
"""Version of the tables, stored in `PRAGMA user_version`."""
_TURN = TypeAdapter(RecordedTurn)
_FOREIGN = TypeAdapter(ForeignTurn)
_CLIENT_PROMPT = '"is_plain":true'
"""Field of a turn that an earlier version sampled from a prompt of `/v1/completions`."""


def turn_as_json(turn: RecordedTurn | ForeignTurn) -> str:
    """Return the stored form of a turn: one line of JSON."""
    if isinstance(turn, ForeignTurn):
        return _FOREIGN.dump_json(turn).decode()
    return _TURN.dump_json(turn, by_alias=True).decode()


class SessionState(StrEnum):
    """Progress of a session towards its group."""

    OPEN = "open"
    """It accepts requests."""
    CLOSED = "closed"
    """It ended, and its group is not written yet."""
    WRITTEN = "written"
    """Its group is in the file."""
    EMPTY = "empty"
    """It ended, and holds nothing to learn from, or nothing after its parts."""
    FAILED = "failed"
    """Its group could not be built; the column `error` holds the reason."""
    RECORDING = "recording"
    """It is open, and a foreign model answers it: its turns are text (`ForeignTurn`)."""
    RECORDED = "recorded"
    """It ended, and its turns are text. `agentic-opd distill` makes groups of it."""

    @property
    def is_foreign(self) -> bool:
        """Whether the turns are `ForeignTurn`s."""
        return self in (SessionState.RECORDING, SessionState.RECORDED)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a session ended, with the client's reward and feedback."""

    stop: StopReason
    group_id: str
    reward: float | None = None
    feedback: str | None = None


@dataclass(frozen=True, slots=True)
class SessionRow:
    session_id: str
    owner: str
    """Digest of the client's key; with learners named by a header followed by a slash and the name."""
    name: str | None
    """The client's name of the session; None: unnamed."""
    server: str
    """URL of the server that answers it: the policy's, or the upstream."""
    opened: float
    """Time of opening, in seconds since 1970."""
    used: float
    """Time of last use, in seconds since 1970."""
    state: SessionState = SessionState.OPEN
    ending: Ending | None = None
    group_name: str | None = None
    """The client's name of the session's group; None: the session forms a group by itself."""
    parent: str | None = None
    """Id of the session whose sub-agent holds this one."""


@dataclass(frozen=True, slots=True)
class SessionPart:
    """Turns of an open session that form a group (`judge_every_turns`), by their ids."""

    group_id: str
    session_id: str
    turn_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class ListedSession:
    """A session and its numbers, without a text of its turns."""

    row: SessionRow
    turns: int
    rated: int
    """Number of turns with feedback of the client."""
    corrections: HintedTurns | None
    """None: its group is not made, or was made by an earlier version."""


@dataclass(frozen=True, slots=True)
class SessionStatus:
    session_id: str
    name: str | None
    state: SessionState
    turns: int

    @classmethod
    def of(cls, row: SessionRow, turns: int) -> "SessionStatus":
        return cls(row.session_id, row.name, row.state, turns)

    def body(self) -> dict[str, Any]:
        """Return the status as clients read it."""
        name = self.name or self.session_id
        return {"session_id": name, "id": self.session_id, "state": self.state.value, "turns": self.turns}


class _Unwritten(NamedTuple):
    session: SessionRow
    turn: RecordedTurn
    written: asyncio.Future[None]


class Journal:
    def __init__(self, path: Path, *, only_read: bool = False) -> None:
        """Open the journal, or create it readable by the current user only.

        Raises:
            OutputError: another process writes the file, it can't be opened, or it has another schema version.
        """
        self.path = path
        self.problem: str | None = None
        """Why SQLite failed last; None after the next successful write."""
        self._lock: FileLock | None = None
        try:
            check_regular(path)
            if only_read:
                self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
            else:
                self._lock = FileLock(path, "env.journal_path")
                path.touch(mode=0o600)
                self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")
                self._db.execute("PRAGMA secure_delete = ON")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version not in (0, _VERSION) or (only_read and not version):
                raise OutputError(f"{str(path)!r} is a journal of version {version}; this package reads {_VERSION}")
            if not only_read:
                self._db.executescript(_SCHEMA)
                self._db.execute(f"PRAGMA user_version = {_VERSION}")
        except (OSError, sqlite3.Error, OutputError) as error:
            if self._lock is not None:
                self._lock.release()
            if isinstance(error, OutputError):
                raise
            raise OutputError(f"cannot use {str(path)!r} as a journal: {error}") from error
        self._thread = ThreadPoolExecutor(1, "journal")
        self._unwritten: list[_Unwritten] = []
        self._writing: asyncio.Task[None] | None = None

    async def run(self, call: Callable[[], Result]) -> Result:
        """Call a method of this journal on its thread. The call completes even if the caller is cancelled.

        Raises:
            OutputError: SQLite failed.
        """
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, self._called, call))

    def _called(self, call: Callable[[], Result]) -> Result:
        changes = self._db.total_changes
        try:
            result = call()
        except sqlite3.Error as error:
            self.problem = str(error)
            raise OutputError(f"cannot write the journal {str(self.path)!r}: {error}") from error
        if self._db.total_changes != changes:
            self.problem = None
        return result

    def try_again(self) -> None:
        """Write to the file without a change of its contents, to see whether the disk takes writes again."""
        self._db.execute(f"PRAGMA user_version = {_VERSION}")
        self.problem = None

    async def add_turn(self, session: SessionRow, turn: RecordedTurn) -> None:
        """Write a turn, and its session with the first turn. The write completes even if the caller is cancelled.

        Turns that finish during a write form the next batch, with one disk sync for all of them.
        """
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unwritten.append(_Unwritten(session, turn, written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_turns())
        await asyncio.shield(written)

    async def _write_turns(self) -> None:
        while self._unwritten:
            turns, self._unwritten = self._unwritten, []
            await self._write(turns)

    async def _write(self, turns: Sequence[_Unwritten]) -> None:
        """Write turns and resolve their futures. If the batch fails, each turn is written separately."""
        try:
            await self.run(partial(self.add_turns, [(unwritten.session, unwritten.turn) for unwritten in turns]))
        except Exception as error:  # noqa: BLE001 - raised in the turn's `add_turn`
            if len(turns) > 1:
                for unwritten in turns:
                    await self._write([unwritten])
            else:
                turns[0].written.set_exception(error)
        else:
            for unwritten in turns:
                unwritten.written.set_result(None)

    def add_turns(self, turns: Iterable[tuple[SessionRow, RecordedTurn | ForeignTurn]]) -> None:
        """Write turns of any sessions in one transaction."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            for session, turn in turns:
                row = (session.session_id, session.owner, session.name, session.group_name, session.parent)
                self._db.execute(
                    "INSERT INTO sessions (session_id, owner, name, group_name, parent, server, opened, used, state) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) "
                    "ON CONFLICT (session_id) DO UPDATE SET used = excluded.used",
                    (*row, session.server, session.opened, time.time(), session.state.value),
                )
                row = (turn.turn_id, session.session_id, turn.answer_id, turn_as_json(turn))
                self._db.execute("INSERT INTO turns VALUES (?, ?, ?, ?)", row)

    def add_feedback(self, turn_id: int, feedback: Feedback) -> Feedback:
        """Change the feedback for a turn; returns the new feedback, see `Feedback.changed`."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            query = "SELECT reward, text FROM feedback WHERE turn_id = ? ORDER BY rowid"
            for reward, text in self._db.execute(query, (turn_id,)).fetchall()[-1:]:
                feedback = Feedback(reward, text).changed(feedback)
            self._db.execute("DELETE FROM feedback WHERE turn_id = ?", (turn_id,))
            self._db.execute("INSERT INTO feedback VALUES (?, ?, ?)", (turn_id, feedback.reward, feedback.text))
        return feedback

    def feedback(self, session_id: str) -> dict[int, list[Feedback]]:
        """Return the feedback for a session's turns, by turn id: of each turn one, the last."""
        query = (
            "SELECT feedback.turn_id, reward, text FROM feedback JOIN turns USING (turn_id) "
            "WHERE session_id = ? ORDER BY feedback.rowid"
        )
        by_turn: dict[int, list[Feedback]] = {}
        for turn_id, reward, text in self._db.execute(query, (session_id,)):
            by_turn[turn_id] = [Feedback(reward, text)]  # Earlier versions stored each one.
        return by_turn

    def has_turn(self, session_id: str, turn_id: int) -> bool:
        query = "SELECT 1 FROM turns WHERE turn_id = ? AND session_id = ?"
        return self._db.execute(query, (turn_id, session_id)).fetchone() is not None

    def answered(self, owner: str, answer_id: str) -> tuple[SessionRow, int] | None:
        """Return the session and the turn id of the client's answer with this id."""
        query = (
            f"SELECT turn_id, {', '.join(f'sessions.{name}' for name in _COLUMNS.split(', '))} "
            "FROM turns JOIN sessions USING (session_id) WHERE owner = ? AND answer_id = ? ORDER BY turn_id"
        )
        row = self._db.execute(query, (owner, answer_id)).fetchone()
        return None if row is None else (_session(row[1:]), row[0])

    async def answer_paths(self, owner: str, answer_ids: Iterable[str]) -> dict[str, TurnPath]:
        """Return the paths to the client's turns by the ids of their answers; unknown ids are left out."""
        paths: dict[str, TurnPath] = {}
        trees: dict[str, TurnTree] = {}
        for answer_id in dict.fromkeys(answer_ids):
            answer = await self.run(partial(self.answered, owner, answer_id))
            if answer is None:
                continue
            row, turn_id = answer
            if row.session_id not in trees:
                trees[row.session_id] = TurnTree.of(await self.run(partial(self.turns, row.session_id)))
            paths[answer_id] = trees[row.session_id].path(turn_id)
        return paths

    def forget_answer(self, owner: str, answer_id: str) -> bool:
        """Remove the answer's id from the client's turns; False if there is no such answer."""
        result = self._db.execute(
            "UPDATE turns SET answer_id = '' WHERE answer_id = ? AND answer_id != '' "
            "AND session_id IN (SELECT session_id FROM sessions WHERE owner = ?)",
            (answer_id, owner),
        )
        return result.rowcount > 0

    def close_session(self, session: SessionRow) -> None:
        """Store the end of an open session with its group's name; it is then closed, or recorded if it is foreign."""
        ending = session.ending
        assert ending is not None
        state = SessionState.RECORDED if session.state.is_foreign else SessionState.CLOSED
        values = (state.value, ending.stop.value, ending.reward, ending.feedback, ending.group_id, session.group_name)
        self._db.execute(
            "UPDATE sessions SET state = ?, stop = ?, reward = ?, feedback = ?, group_id = ?, group_name = ? "
            "WHERE session_id = ? AND state IN ('open', 'recording')",
            (*values, session.session_id),
        )

    def finish_sessions(self, states: Mapping[str, SessionState], error: str | None = None) -> None:
        """Record the final states of closed sessions, by session id, in one transaction."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(
                "UPDATE sessions SET state = ?, error = ? WHERE session_id = ?",
                [(state.value, error, session_id) for session_id, state in states.items()],
            )

    def add_part(self, part: SessionPart) -> None:
        """Store a part of an open session whose group is to be made."""
        row = (part.group_id, part.session_id, json.dumps(sorted(part.turn_ids)), SessionState.CLOSED.value)
        self._db.execute("INSERT INTO parts (group_id, session_id, turn_ids, state) VALUES (?, ?, ?, ?)", row)

    def finish_part(self, group_id: str, state: SessionState, error: str | None = None) -> None:
        """Record the final state of a part."""
        self._db.execute("UPDATE parts SET state = ?, error = ? WHERE group_id = ?", (state.value, error, group_id))

    def grouped_turns(self, session_id: str) -> set[int]:
        """Return the turns in a session's parts, by their ids."""
        rows = self._db.execute("SELECT turn_ids FROM parts WHERE session_id = ?", (session_id,))
        return {turn_id for (turn_ids,) in rows for turn_id in read_json(turn_ids)}

    def unfinished_parts(self) -> list[tuple[SessionRow, SessionPart]]:
        """Return the parts whose group is not in the file, with their sessions, the oldest first."""
        query = (
            f"SELECT {', '.join(f'sessions.{name}' for name in _COLUMNS.split(', '))}, parts.group_id, turn_ids "
            "FROM parts JOIN sessions USING (session_id) WHERE parts.state = 'closed' ORDER BY parts.rowid"
        )
        return [
            (_session(row), SessionPart(group_id, row[0], frozenset(read_json(turn_ids))))
            for *row, group_id, turn_ids in self._db.execute(query)
        ]

    async def keep_group(self, group: ScoredGroup) -> None:
        """Store a scored group under its `group_id`, before it is written to the file."""
        # Not on the journal's thread: it would delay answers.
        body = await asyncio.to_thread(lambda: zlib.compress(json_line(group.to_wire()), 1))
        records = [record for rollout in group.rollouts for record in rollout.turns or ()]
        numbers = (group.group_id, len(records), sum(record.hint is not None for record in records))

        def write() -> None:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                query = "INSERT OR REPLACE INTO groups (group_id, body) VALUES (?, ?)"
                self._db.execute(query, (group.group_id, body))
                if group.distillation is not None:
                    self._db.execute("INSERT OR REPLACE INTO corrections VALUES (?, ?, ?)", numbers)

        await self.run(write)

    async def group(self, group_id: str) -> ScoredGroup | None:
        """Return a stored group; None if the journal does not hold it.

        Raises:
            OutputError: the stored group can't be read.
        """
        query = "SELECT body FROM groups WHERE group_id = ?"
        row = await self.run(lambda: self._db.execute(query, (group_id,)).fetchone())
        try:
            if row is None:
                return None
            return await asyncio.to_thread(lambda: ScoredGroup.from_wire(read_json(zlib.decompress(row[0]))))
        except (ValueError, zlib.error, WireError) as error:
            raise OutputError(f"{str(self.path)!r} holds a group {group_id} that can't be read") from error

    def group_ids(self, session_ids: Iterable[str]) -> set[str]:
        """Return the ids of the groups of ended sessions, and of parts of sessions."""
        query = (
            "SELECT group_id FROM sessions WHERE session_id = ? UNION SELECT group_id FROM parts WHERE session_id = ?"
        )
        rows = (row for name in session_ids for row in self._db.execute(query, (name, name)))
        return {group_id for (group_id,) in rows if group_id is not None}

    def with_parts(self, session_id: str) -> list[str]:
        """Return a session's id, and those of its sub-agents' sessions."""
        rows = self._db.execute("SELECT session_id FROM sessions WHERE parent = ?", (session_id,))
        return [session_id, *(part for (child,) in rows for part in self.with_parts(child))]

    def of_owner(self, owner: str) -> list[str]:
        """Return the ids of all sessions of an owner."""
        return [name for (name,) in self._db.execute("SELECT session_id FROM sessions WHERE owner = ?", (owner,))]

    def unsent_groups(self) -> list[str]:
        """Return the ids of the groups in the file that are not marked as sent, oldest first."""
        query = (
            "SELECT group_id FROM groups WHERE NOT is_sent AND ("
            "EXISTS (SELECT 1 FROM sessions WHERE sessions.group_id = groups.group_id AND state = 'written') OR "
            "EXISTS (SELECT 1 FROM parts WHERE parts.group_id = groups.group_id AND state = 'written')) ORDER BY rowid"
        )
        return [group_id for (group_id,) in self._db.execute(query)]

    def sent_group(self, group_id: str) -> None:
        """Mark a group that the trajectory API accepted or permanently refused as sent."""
        self._db.execute("UPDATE groups SET is_sent = 1 WHERE group_id = ?", (group_id,))

    def delete(self, *session_ids: str) -> None:
        """Delete sessions, their turns and their groups, and overwrite the space in the file."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            for session_id in session_ids:
                turns = "SELECT turn_id FROM turns WHERE session_id = ?"
                self._db.execute(f"DELETE FROM feedback WHERE turn_id IN ({turns})", (session_id,))
                self._db.execute("DELETE FROM turns WHERE session_id = ?", (session_id,))
                groups = (
                    "SELECT group_id FROM sessions WHERE session_id = ? UNION "
                    "SELECT group_id FROM parts WHERE session_id = ?"
                )
                for table in ("groups", "corrections"):
                    query = f"DELETE FROM {table} WHERE group_id IN ({groups})"
                    self._db.execute(query, (session_id, session_id))
                self._db.execute("DELETE FROM parts WHERE session_id = ?", (session_id,))
                self._db.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,))

    def delete_ended(self, owner: str, name: str) -> SessionRow:
        """Delete a client's latest session with this name or id, as `delete` does; returns its last state.

        Raises:
            ClientError: 404, there is none; 409, it is open, or its group is being made.
        """
        row = self.latest(owner, name)
        if row is None:
            raise unknown_session()
        if row.state in (SessionState.OPEN, SessionState.CLOSED, SessionState.RECORDING):
            message = "the session is open, or its group is being made: delete it when it has ended (its state says so)"
            raise ClientError(409, message, "session_id", "session_busy")
        self.delete(row.session_id)
        return row

    def delete_older(self, used_before: float, *states: SessionState) -> int:
        """Delete the sessions in these states that were last used before this time (seconds since 1970).

        Returns their number.
        """
        old = [row.session_id for row in self.sessions(*states) if row.used < used_before]
        self.delete(*old)
        return len(old)

    def sessions(self, *states: SessionState) -> list[SessionRow]:
        """Return the sessions in these states, in order of opening."""
        marks = ", ".join("?" for _ in states)
        query = f"SELECT {_COLUMNS} FROM sessions WHERE state IN ({marks}) ORDER BY rowid"
        return [_session(row) for row in self._db.execute(query, [state.value for state in states])]

    def listed(self, owner: str, start: int, limit: int) -> list[ListedSession]:
        """Return a client's sessions after the first `start`, the one used last first; no turn or group is read."""
        query = (
            f"SELECT {_COLUMNS}, (SELECT count(*) FROM turns WHERE turns.session_id = sessions.session_id), "
            "(SELECT count(DISTINCT turn_id) FROM turns JOIN feedback USING (turn_id) "
            f"WHERE turns.session_id = sessions.session_id), {_number('turns')}, {_number('hints')} "
            "FROM sessions WHERE owner = ? ORDER BY used DESC, rowid DESC LIMIT ? OFFSET ?"
        )
        return [
            ListedSession(_session(row), turns, rated, None if judged is None else HintedTurns(judged, hints))
            for *row, turns, rated, judged, hints in self._db.execute(query, (owner, limit, start))
        ]

    def corrections(self, owner: str, limit: int) -> list[HintedTurns]:
        """Return the numbers of a client's last sessions whose group is made, in the order of their last use."""
        query = (
            f"SELECT {_number('turns')} AS judged, {_number('hints')} FROM sessions "
            "WHERE owner = ? AND state != 'open' AND judged IS NOT NULL ORDER BY used DESC, rowid DESC LIMIT ?"
        )
        return [HintedTurns(*numbers) for numbers in self._db.execute(query, (owner, limit))][::-1]

    def states(self, owner: str) -> dict[SessionState, int]:
        """Return the number of a client's sessions in each state."""
        query = "SELECT state, count(*) FROM sessions WHERE owner = ? GROUP BY state"
        return {SessionState(state): number for state, number in self._db.execute(query, (owner,))}

    def group_ids_in_order(self, session: SessionRow) -> list[str]:
        """Return the ids of the groups that hold turns of a session: its parts', then its own."""
        query = "SELECT group_id FROM parts WHERE session_id = ? ORDER BY rowid"
        parts = [group_id for (group_id,) in self._db.execute(query, (session.session_id,))]
        return [*parts, *([session.ending.group_id] if session.ending is not None else [])]

    def latest(self, owner: str, name: str) -> SessionRow | None:
        """Return the client's latest session with this name or id."""
        query = f"SELECT {_COLUMNS} FROM sessions WHERE owner = ? AND (name = ? OR session_id = ?) ORDER BY rowid DESC"
        row = self._db.execute(query, (owner, name, name)).fetchone()
        return None if row is None else _session(row)

    def turns(self, session_id: str) -> list[RecordedTurn]:
        """Return a session's turns, in order of completion.

        Raises:
            OutputError: a stored turn can't be read.
        """
        query = "SELECT body, answer_id FROM turns WHERE session_id = ? ORDER BY turn_id"
        rows = self._db.execute(query, (session_id,))
        turns: list[RecordedTurn] = []
        try:
            for body, answer_id in rows:
                if _CLIENT_PROMPT in body:
                    raise OutputError(
                        f"{str(self.path)!r} holds a turn of {session_id} that answers a prompt of "
                        "/v1/completions, which this version does not read; choose another env.journal_path, and "
                        "keep this file for the version that wrote it"
                    )
                # A forgotten answer's id is still in the turn's body.
                turns.append(replace(_TURN.validate_json(body), answer_id=answer_id))
        except ValidationError as error:
            # Pydantic's message would quote the conversation.
            raise OutputError(f"{str(self.path)!r} holds a turn of {session_id} that can't be read") from error
        return turns

    def foreign_turns(self, session_id: str) -> list[ForeignTurn]:
        """Return the turns of a session that a foreign model answered, in order of completion.

        Raises:
            OutputError: a stored turn can't be read.
        """
        query = "SELECT body FROM turns WHERE session_id = ? ORDER BY turn_id"
        try:
            return [_FOREIGN.validate_json(body) for (body,) in self._db.execute(query, (session_id,))]
        except ValidationError as error:
            raise OutputError(f"{str(self.path)!r} holds a turn of {session_id} that can't be read") from error

    def spoken_turns(self, session: SessionRow) -> Sequence[RecordedTurn | ForeignTurn]:
        """Return the turns of any session, in order of completion; raises OutputError as `turns`."""
        read = self.foreign_turns if session.state.is_foreign else self.turns
        return read(session.session_id)

    def count_turns(self, session_id: str) -> int:
        return self._db.execute("SELECT count(*) FROM turns WHERE session_id = ?", (session_id,)).fetchone()[0]

    def last_turn_id(self) -> int:
        """Return the largest turn id; 0 without turns."""
        (last,) = self._db.execute("SELECT coalesce(max(turn_id), 0) FROM turns").fetchone()
        return last

    def close(self) -> None:
        """Write the pending turns, close the file and release its lock."""
        self._thread.shutdown()
        if self._unwritten:
            self.add_turns((unwritten.session, unwritten.turn) for unwritten in self._unwritten)
        self._db.close()
        if self._lock is not None:
            self._lock.release()


_COLUMNS = "session_id, owner, name, server, opened, used, state, stop, group_id, reward, feedback, group_name, parent"


def _number(column: str) -> str:
    """Return the SQL of a session's part of the numbers in `corrections`; NULL: they are not there."""
    sharing = "(SELECT count(*) FROM sessions AS member WHERE member.group_id = sessions.group_id)"
    of_group = f"(SELECT {column} * 1.0 / {sharing} FROM corrections WHERE corrections.group_id = sessions.group_id)"
    parts = (
        f"(SELECT sum({column}) FROM parts JOIN corrections USING (group_id) "
        "WHERE parts.session_id = sessions.session_id)"
    )
    return f"CASE WHEN {of_group} IS NULL THEN {parts} ELSE {of_group} + coalesce({parts}, 0) END"


def _session(row: Sequence[Any]) -> SessionRow:
    session_id, owner, name, server, opened, used, state, stop, group_id, reward, feedback, group_name, parent = row
    ending = None if stop is None else Ending(StopReason(stop), group_id, reward, feedback)
    return SessionRow(session_id, owner, name, server, opened, used, SessionState(state), ending, group_name, parent)
