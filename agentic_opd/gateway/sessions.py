"""Open sessions, and the assignment of requests to them.

A request finds its session by the client's name for it, by the messages that it extends, or by what lasts of them (see
`history_index`). A request never continues a session of another owner.
"""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from agentic_opd.core.types import Message
from agentic_opd.distill.records import DistilledTurn
from agentic_opd.gateway.errors import ClientError
from agentic_opd.gateway.history_index import Found, HistoryIndex, PlainIndex
from agentic_opd.gateway.journal import SessionRow
from agentic_opd.gateway.request import REFERENCE, Asked, prompt_key, with_messages
from agentic_opd.gateway.turns import Feedback, Follows, Path, RecordedTurn, TurnTree
from agentic_opd.rollout.conversation_index import ConversationIndex, identity


@dataclass(slots=True, eq=False)
class OpenSession:
    row: SessionRow
    used: float
    """Time of the last answer's end, or of opening, by `time.monotonic` (s): the clock of days may be set meanwhile."""
    tree: TurnTree = field(default_factory=TurnTree)
    judged: dict[int, asyncio.Task[DistilledTurn]] = field(default_factory=dict[int, asyncio.Task[DistilledTurn]])
    """Tasks that judge turns whose next state has arrived, by turn id."""
    feedback: dict[int, list[Feedback]] = field(default_factory=dict[int, list[Feedback]])
    """Feedback of the client for single turns, by turn id."""
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
        self._under_way += 1
        self.quiet.clear()

    def end(self, now: float) -> None:
        """Record the end of a request at time `now` (`time.monotonic`, s)."""
        self._under_way -= 1
        self.used = now
        if not self._under_way:
            self.quiet.set()


class Place(NamedTuple):
    """The position of a request in a session."""

    session: OpenSession | None
    """None: a new session must be opened."""
    path: Path | tuple[()]
    """The turns that the request continues; empty: its prompt is rendered anew."""
    new: Sequence[Message]
    """The messages after the path."""
    is_rewritten: bool = False
    """Whether the request changed the text or the tools of a known session's history."""
    follows: Follows | None = None
    """The turn that the request answers although its prompt is rendered anew."""
    parent: str | None = None
    """Id of the session under which a new one is opened."""
    name: str | None = None
    """Name of a new session."""


class TurnKey(NamedTuple):
    session_id: str
    turn_id: int


class Sessions:
    """All open sessions, indexed by name and by their messages."""

    def __init__(self, max_open: int, num_keys: int = 1) -> None:
        """Start without sessions. Half of `max_open` is divided among `num_keys` keys, the other half is for any."""
        self._max_open, self._num_keys = max_open, num_keys
        self._own = max(1, max_open // (2 * num_keys))
        """Number of sessions that each key can always open."""
        self._of_owner = Counter[str]()
        self._by_id: dict[str, OpenSession] = {}
        self._on_server = Counter[str]()
        self._by_name: dict[tuple[str, str], OpenSession] = {}
        self._by_answer: dict[tuple[str, str], TurnKey] = {}
        self._index = ConversationIndex[TurnKey]()
        self._histories = HistoryIndex[TurnKey]()
        self._plain = PlainIndex[TurnKey]()

    def __iter__(self) -> Iterator[OpenSession]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def num_on(self, server: str) -> int:
        """Return the number of open sessions whose turns a server samples."""
        return self._on_server[server]

    def named(self, owner: str, name: str) -> OpenSession | None:
        """Return the client's open session with this name or id; None if there is none."""
        session = self._by_name.get((owner, name)) or self._by_id.get(name)
        return session if session is not None and session.row.owner == owner else None

    def answered(self, owner: str, answer_id: str) -> TurnKey | None:
        """Return the client's turn that an answer with this id gave; None if no open session has it."""
        return self._by_answer.get((owner, answer_id))

    def continued(self, owner: str, asked: Asked) -> Asked | None:
        """Return the request with the answers that it continues or refers to; None if one is in no open session."""
        keys = {answer_id: self.answered(owner, answer_id) for answer_id in asked.answers}
        paths = {answer_id: self.path(key) for answer_id, key in keys.items() if key is not None}
        if len(paths) < len(keys):
            return None
        previous = keys.get(asked.previous or "")
        return with_answers(asked, paths, previous and previous.session_id)

    def under(self, session: OpenSession) -> list[OpenSession]:
        """Return the open sessions of a session's sub-agents."""
        return [one for one in self if one.row.parent == session.session_id]

    def path(self, key: TurnKey) -> Path:
        return self._tree(key).path(key.turn_id)

    def place(self, owner: str, asked: Asked) -> Place:
        """Find a request's position. If several turns fit, one without a continuation is preferred, then the newest."""
        own, agent = asked.session, asked.client.agent_session
        name = own or agent
        named = None if name is None else self.named(owner, name)
        if name is not None and named is None:
            parent = asked.client.parent and self.named(owner, asked.client.parent)
            return Place(None, (), asked.messages, parent=parent.session_id if parent else None, name=name)
        family = set[str]() if named is None else {named.session_id}
        if named is not None and own is None:
            family.update(one.session_id for one in self.under(named))

        def is_meant(key: TurnKey) -> bool:
            session = self._by_id[key.session_id]
            return key.session_id in family if named is not None else not session.is_ending

        if asked.prompt is not None:
            return self._plain_place(owner, asked, named, is_meant)
        scope = _scope(owner, asked.prompt_key)
        match = self._index.find(asked.identities, scope=scope, accept=is_meant)
        rest = asked.messages[match.length :]
        if match.known and not _has_turn(rest):
            key = self._best(match.known)
            return Place(self._by_id[key.session_id], self.path(key), rest)
        found = self._histories.find(asked.messages, asked.identities, scope=owner.encode(), accept=is_meant)
        if found is not None and found.position > match.length:
            key = self._meant(found)
            if key is not None:
                return self._following(key, asked, found)
        if match.known:
            return Place(self._by_id[self._best(match.known).session_id], (), asked.messages, True)
        if named is not None and own is None and named.tree.is_of_another(asked.tools, asked.messages):
            return Place(None, (), asked.messages, parent=named.session_id)
        return Place(named, (), asked.messages, named is not None and _has_turn(asked.messages))

    def _following(self, key: TurnKey, asked: Asked, found: Found[TurnKey]) -> Place:
        """Return the place of a request whose messages behind `found` answer a turn of another text or prompt."""
        session, messages, start = self._by_id[key.session_id], asked.messages, found.position
        stop = next((i for i in range(start, len(messages)) if messages[i]["role"] == "assistant"), len(messages))
        last = self.path(key)[-1].messages[-2:-1]
        is_whole = key in (*found.said, *found.prompt)
        is_gone = is_whole and any(identity(message) not in asked.identities for message in last)
        if stop == len(messages) and stop - start > 1 and is_gone and _is_alike(last[0], messages[-1]):
            stop -= 1  # The client adds such a message to each request and takes it away again.
        return Place(session, (), messages, True, Follows(key.turn_id, start, stop))

    def _plain_place(
        self, owner: str, asked: Asked, named: OpenSession | None, accept: Callable[[TurnKey], bool]
    ) -> Place:
        """Find the position of a prompt that the client rendered, by the text that it begins with."""
        text = asked.messages[0]["content"]
        length, known = self._plain.find(text, scope=owner, accept=accept)
        if not known:
            return Place(named, (), asked.messages)
        key = self._best(known)
        rest: Message = {"role": "user", "content": text[length:]}
        return Place(self._by_id[key.session_id], self.path(key), (rest,))

    def _best(self, known: Sequence[TurnKey]) -> TurnKey:
        return min(known, key=lambda key: (self._tree(key).is_continued(key.turn_id), -key.turn_id))

    def _meant(self, found: Found[TurnKey]) -> TurnKey | None:
        """Return the turn that a changed history answers; None if it may be one of several sessions.

        A turn that nothing continues yet is preferred.
        """
        if found.said:
            return self._best(found.said)
        close = [known for known in (found.own, found.prompt) if known]
        loose = [[key for key in known if not self._tree(key).is_continued(key.turn_id)] for known in close]
        known = next(filter(None, [*loose, *close]))
        return self._best(known) if len({key.session_id for key in known}) == 1 else None

    def open(
        self,
        owner: str,
        name: str | None,
        server: str,
        now: float,
        group: str | None = None,
        parent: str | None = None,
    ) -> OpenSession:
        """Open a session; `group` is the client's name of its group, `parent` the id of the session above it.

        Raises:
            ClientError: 429, too many sessions are open.
        """
        self._check_room(owner)
        row = SessionRow(
            f"session-{uuid.uuid4().hex}", owner, name, server, opened=now, used=now, group_name=group, parent=parent
        )
        return self.restore(row, ())

    def _check_room(self, owner: str) -> None:
        """Raise ClientError (429) if a client can't open another session."""
        own, used = self._of_owner[owner], len(self._by_id)
        used_by_others = sum(min(count, self._own) for other, count in self._of_owner.items() if other != owner)
        kept = max(0, self._own * (self._num_keys - 1) - used_by_others)
        if used >= self._max_open:
            why = f"{used} sessions are open"
        elif own >= self._own and used + kept >= self._max_open:
            why = f"{own} sessions of this key are open, and the last {kept} are kept for other keys"
        else:
            return
        todo = "end some (POST /sessions/NAME/end), or raise env.max_open_sessions"
        raise ClientError(429, f"{why}: {todo}", code="too_many_sessions")

    def restore(
        self,
        row: SessionRow,
        turns: Sequence[RecordedTurn],
        feedback: Mapping[int, Sequence[Feedback]] | None = None,
    ) -> OpenSession:
        """Add an open session with its turns and their feedback, for example from the journal."""
        session = OpenSession(row, time.monotonic() - max(0.0, time.time() - row.used))
        session.feedback = {turn_id: [*given] for turn_id, given in (feedback or {}).items()}
        self._by_id[row.session_id] = session
        self._on_server[row.server] += 1
        self._of_owner[row.owner] += 1
        if row.name is not None:
            self._by_name[row.owner, row.name] = session
        for turn in turns:
            self.add(session, turn)
        return session

    def add(self, session: OpenSession, turn: RecordedTurn) -> None:
        session.tree.add(turn)
        key, owner = TurnKey(session.session_id, turn.turn_id), session.row.owner
        before = None if turn.parent is None else TurnKey(session.session_id, turn.parent)
        if turn.answer_id:
            self._by_answer.setdefault((owner, turn.answer_id), key)
        if turn.is_plain:
            text = "".join(message["content"] for one in session.tree.path(turn.turn_id) for message in one.messages)
            self._plain.add(key, text, scope=owner)
            return
        scope = _scope(owner, prompt_key(turn.tools, turn.template))
        self._index.add(key, turn.messages, before, scope=scope)
        self._histories.add(key, turn.messages, before, scope=owner.encode())

    def remove(self, session: OpenSession) -> None:
        if self._by_id.pop(session.session_id, None) is not None:
            self._on_server[session.row.server] -= 1
            self._of_owner[session.row.owner] -= 1
        owner = session.row.owner
        name = (owner, session.row.name or "")
        if self._by_name.get(name) is session:
            del self._by_name[name]
        for turn_id, turn in session.tree.turns.items():
            key = TurnKey(session.session_id, turn_id)
            self._by_answer.pop((owner, turn.answer_id), None)
            for index in (self._index, self._histories, self._plain):
                index.discard(key)

    def _tree(self, key: TurnKey) -> TurnTree:
        return self._by_id[key.session_id].tree


def with_answers(asked: Asked, paths: Mapping[str, Path], session: str | None) -> Asked:
    """Return the request with the answers that it refers to, behind the conversation that it continues.

    `paths` has the path to the turn of each answer in `asked.answers`; `session` is the id of the session that it
    continues.

    Raises:
        ClientError: 400, two references to one answer are apart, or no turn can follow the conversation.
    """
    if not asked.answers:
        return asked
    if len({*asked.answers}) < len(asked.answers):
        raise ClientError(400, f"{asked.at}: an answer is referred to in two places", asked.at)
    answers = {answer_id: path[-1].messages[-1] for answer_id, path in paths.items()}
    messages = [answers[message[REFERENCE]] if REFERENCE in message else message for message in asked.messages]
    if asked.previous is None:
        return with_messages(asked, messages)
    path, count = paths[asked.previous], asked.num_instructions
    history = [message for turn in path for message in turn.messages][path[0].num_instructions :]
    named = replace(asked, session=asked.session or session)
    return with_messages(named, (*messages[:count], *history, *messages[count:]))


def unknown_answer(answer_id: str, asked: Asked) -> ClientError:
    """Return the error of a request that continues an answer which its client did not receive, or refers to it."""
    if answer_id != asked.previous:
        return ClientError(404, f"{asked.at}: there is no item of an answer {answer_id[:80]!r}", asked.at)
    message = f"previous_response_id: there is no answer {answer_id[:80]!r}"
    return ClientError(404, message, "previous_response_id", "previous_response_not_found")


def _has_turn(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "assistant" for message in messages)


def _is_alike(one: Message, other: Message) -> bool:
    """Return whether two user messages begin alike, as a client's notes to the model do."""
    return one["role"] == other["role"] == "user" and one["content"][:16] == other["content"][:16]


def _scope(owner: str, key: bytes) -> bytes:
    """Return the scope of an index look-up: the owner and the tools, because a prompt begins with its tools."""
    return key + owner.encode()
