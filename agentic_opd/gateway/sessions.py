"""Open sessions, and the assignment of requests to them.

A request finds its session by the client's name for it, or by the messages that it extends. A request never continues a
session of another owner.
"""

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentic_opd.core.types import Message
from agentic_opd.distill.records import DistilledTurn
from agentic_opd.gateway.errors import RefusedError
from agentic_opd.gateway.journal import SessionRow
from agentic_opd.gateway.request import Asked, tools_key
from agentic_opd.gateway.turns import Path, RecordedTurn, TurnTree
from agentic_opd.rollout.conversation_index import ConversationIndex


@dataclass(slots=True, eq=False)
class Session:
    """An open session."""

    row: SessionRow
    used: float
    """Time of the last answer's end, or of opening, in seconds since 1970."""
    tree: TurnTree = field(default_factory=TurnTree)
    judged: dict[int, asyncio.Task[DistilledTurn]] = field(default_factory=dict[int, asyncio.Task[DistilledTurn]])
    """Tasks that judge turns whose next state has arrived, by turn id."""
    is_ending: bool = False
    """Whether the session refuses further requests and closes after the pending ones."""
    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no request is being answered."""
    _under_way: int = 0

    def __post_init__(self) -> None:
        self.quiet.set()

    @property
    def session_id(self) -> str:
        """The gateway's id of the session, which is never reused."""
        return self.row.session_id

    @property
    def is_free(self) -> bool:
        """Whether no request is pending and the session is not being ended."""
        return self.quiet.is_set() and not self.is_ending

    def begin(self) -> None:
        """Record the start of a request."""
        self._under_way += 1
        self.quiet.clear()

    def end(self, now: float) -> None:
        """Record the end of a request at time `now` (seconds since 1970)."""
        self._under_way -= 1
        self.used = now
        if not self._under_way:
            self.quiet.set()


class Place(NamedTuple):
    """The position of a request in a session."""

    session: Session | None
    """None: a new session must be opened."""
    path: Path | tuple[()]
    """The turns that the request continues; empty: its prompt is rendered anew."""
    new: Sequence[Message]
    """The messages after the path."""
    is_rewritten: bool = False
    """Whether the request changed the text or the tools of a known session's history."""


class _TurnKey(NamedTuple):
    session_id: str
    turn_id: int


class Sessions:
    """All open sessions, indexed by name and by their messages."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._by_id: dict[str, Session] = {}
        self._by_name: dict[tuple[str, str], Session] = {}
        self._index = ConversationIndex[_TurnKey]()

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def named(self, owner: str, name: str) -> Session | None:
        """Return the client's open session with this name or id; None if there is none."""
        session = self._by_name.get((owner, name)) or self._by_id.get(name)
        return session if session is not None and session.row.owner == owner else None

    def place(self, owner: str, asked: Asked) -> Place:
        """Find a request's position. If several turns fit, one without a continuation is preferred, then the newest."""
        named = None if asked.session is None else self.named(owner, asked.session)
        if asked.session is not None and named is None:
            return Place(None, (), asked.messages)

        def is_meant(key: _TurnKey) -> bool:
            session = self._by_id[key.session_id]
            return session is named or (named is None and not session.is_ending)

        match = self._index.find_by(asked.identities, scope=_scope(owner, asked.tools_key), accept=is_meant)
        rest = asked.messages[match.length :]
        if not match.known:
            return Place(named, (), asked.messages, named is not None and _has_turn(asked.messages))
        key = min(match.known, key=lambda key: (self._tree(key).is_extended(key.turn_id), -key.turn_id))
        session = self._by_id[key.session_id]
        if _has_turn(rest):
            return Place(session, (), asked.messages, True)
        return Place(session, session.tree.path(key.turn_id), rest)

    def open(self, owner: str, name: str | None, server: str, now: float, group: str | None = None) -> Session:
        """Open a session; `group` is the client's name of its group.

        Raises:
            RefusedError: 429, too many sessions are open.
        """
        if len(self._by_id) >= self._max_open:
            raise RefusedError(
                429, f"{len(self._by_id)} sessions are open; end some (env.max_open_sessions)", code="too_many_sessions"
            )
        row = SessionRow(f"session-{uuid.uuid4().hex}", owner, name, server, opened=now, used=now, group_name=group)
        return self.restore(row, ())

    def restore(self, row: SessionRow, turns: Sequence[RecordedTurn]) -> Session:
        """Add an open session with its turns, for example from the journal."""
        session = Session(row, row.used)
        self._by_id[row.session_id] = session
        if row.name is not None:
            self._by_name[row.owner, row.name] = session
        for turn in turns:
            self.add(session, turn)
        return session

    def add(self, session: Session, turn: RecordedTurn) -> None:
        """Add a finished turn to its session."""
        session.tree.add(turn)
        before = None if turn.parent is None else _TurnKey(session.session_id, turn.parent)
        scope = _scope(session.row.owner, tools_key(turn.tools))
        self._index.add(_TurnKey(session.session_id, turn.turn_id), turn.messages, before, scope=scope)

    def remove(self, session: Session) -> None:
        """Remove a session from all indexes."""
        self._by_id.pop(session.session_id, None)
        name = (session.row.owner, session.row.name or "")
        if self._by_name.get(name) is session:
            del self._by_name[name]
        for turn_id in session.tree.turns:
            self._index.discard(_TurnKey(session.session_id, turn_id))

    def _tree(self, key: _TurnKey) -> TurnTree:
        return self._by_id[key.session_id].tree


def _has_turn(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "assistant" for message in messages)


def _scope(owner: str, tools: bytes) -> bytes:
    """Return the scope of an index look-up: the owner and the tools, because a prompt begins with its tools."""
    return tools + owner.encode()
