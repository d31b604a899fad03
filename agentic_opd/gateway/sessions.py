"""Open sessions, and which of them a request belongs to.

A session is named by its client, or recognised by the messages that a request extends. Sessions of different owners
never meet.
"""

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentic_opd.core.types import Message
from agentic_opd.distill.pipeline import DistilledTurn
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
    """When it was last asked something, seconds since 1970."""
    tree: TurnTree = field(default_factory=TurnTree)
    judged: dict[int, asyncio.Task[DistilledTurn]] = field(default_factory=dict[int, asyncio.Task[DistilledTurn]])
    """What became of turns that were judged when their next state came, by their id."""
    is_ending: bool = False
    """It takes no further request; it is closed when none is under way."""
    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no request is being answered."""
    _under_way: int = 0

    def __post_init__(self) -> None:
        self.quiet.set()

    @property
    def session_id(self) -> str:
        """What the gateway calls it: no other session, of any time, has the id."""
        return self.row.session_id

    @property
    def is_free(self) -> bool:
        """No request is being answered, and nobody is ending it."""
        return self.quiet.is_set() and not self.is_ending

    def begin(self) -> None:
        """A request is being answered."""
        self._under_way += 1
        self.quiet.clear()

    def end(self, now: float) -> None:
        """An answer is over."""
        self._under_way -= 1
        self.used = now
        if not self._under_way:
            self.quiet.set()


class Place(NamedTuple):
    """Where a request belongs."""

    session: Session | None
    """None: a session is to be opened."""
    path: Path | tuple[()]
    """The turns that it goes on from; empty: it is rendered from the beginning."""
    new: Sequence[Message]
    """The messages behind the path."""
    is_rewritten: bool = False
    """The history of a known session came back with another text, or with other tools."""


class _TurnKey(NamedTuple):
    session_id: str
    turn_id: int


class Sessions:
    """All open sessions, by name and by what was said in them."""

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
        """The open session that its client calls so, or whose id it is."""
        session = self._by_name.get((owner, name)) or self._by_id.get(name)
        return session if session is not None and session.row.owner == owner else None

    def place(self, owner: str, asked: Asked) -> Place:
        """Where a request belongs; where two turns fit, the one that nothing goes on from yet is meant."""
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
        """Open a session; `group` is what its client calls the group that it is to be in.

        Raises:
            RefusedError: 429, there are too many.
        """
        if len(self._by_id) >= self._max_open:
            raise RefusedError(
                429, f"{len(self._by_id)} sessions are open; end some (env.max_open_sessions)", code="too_many_sessions"
            )
        row = SessionRow(f"session-{uuid.uuid4().hex}", owner, name, server, opened=now, used=now, group_name=group)
        return self.restore(row, ())

    def restore(self, row: SessionRow, turns: Sequence[RecordedTurn]) -> Session:
        """Take in an open session of the journal."""
        session = Session(row, row.used)
        self._by_id[row.session_id] = session
        if row.name is not None:
            self._by_name[row.owner, row.name] = session
        for turn in turns:
            self.add(session, turn)
        return session

    def add(self, session: Session, turn: RecordedTurn) -> None:
        """A turn of a session was finished."""
        session.tree.add(turn)
        before = None if turn.parent is None else _TurnKey(session.session_id, turn.parent)
        scope = _scope(session.row.owner, tools_key(turn.tools))
        self._index.add(_TurnKey(session.session_id, turn.turn_id), turn.messages, before, scope=scope)

    def remove(self, session: Session) -> None:
        """A session is over."""
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
    """A prompt begins with the tools, so other tools make another conversation."""
    return tools + owner.encode()
