"""Open sessions, and the assignment of requests to them.

A request finds its session by the client's name for it, by the ids of the tool calls in its messages, by the messages
that it extends, or by what lasts of them (see `history_index`). A request never continues a session of another owner.
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
    _pending: Counter[int | None] = field(default_factory=Counter[int | None])
    """Number of requests that are being answered, by the turn that they continue or follow."""

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

    def begin(self, before: int | None) -> None:
        """Record the beginning of a request; `before` is the id of the turn that it continues or follows, if any."""
        self._pending[before] += 1
        self.quiet.clear()

    def end(self, before: int | None, now: float) -> None:
        """Record the end of a request at time `now` (`time.monotonic`, s)."""
        self._pending[before] -= 1
        self._pending = +self._pending
        self.used = now
        if not self._pending:
            self.quiet.set()

    def is_continued(self, turn_id: int) -> bool:
        """Return whether another turn continues or follows this one, or will once its request is answered."""
        return turn_id in self._pending or self.tree.is_continued(turn_id)


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

    @property
    def before(self) -> int | None:
        """The id of the turn that the request continues or follows; None if there is none."""
        return self.path[-1].turn_id if self.path else self.follows and self.follows.turn_id


class TurnKey(NamedTuple):
    session_id: str
    turn_id: int


class CalledTurn(NamedTuple):
    """The turn whose tool calls a request holds last, known by their ids."""

    key: TurnKey
    position: int
    """Number of the request's messages up to and including the turn; up to its results if the turn is left out."""


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
        self._by_call: dict[tuple[str, str], TurnKey | None] = {}
        """Turns by owner and tool call id; None for an id of several turns, as in journals of earlier versions."""
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

    def forget_answer(self, owner: str, answer_id: str) -> None:
        """Find the client's turn by the id of its answer no more."""
        self._by_answer.pop((owner, answer_id), None)

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

    def with_dropped_texts(self, owner: str, asked: Asked) -> Asked:
        """Return the request with the texts of the turns of which the client sent only the tool calls back."""
        messages = [self._with_dropped_text(owner, message) for message in asked.messages]
        return with_messages(asked, messages) if messages != [*asked.messages] else asked

    def _with_dropped_text(self, owner: str, message: Message) -> Message:
        calls = message.get("tool_calls", ())
        keys = {self._by_call.get((owner, call.get("id", ""))) for call in calls}
        if (
            message["role"] != "assistant"
            or message["content"].strip()
            or len(keys) != 1
            or (key := keys.pop()) is None
        ):
            return message
        sampled = self._tree(key).turns[key.turn_id].messages[-1]
        is_same = identity({**message, "content": sampled["content"]}) == identity(sampled)
        return {**message, "content": sampled["content"]} if is_same else message

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
        place = self._place_by_messages(owner, asked, is_meant)
        if place is not None:
            return place
        if named is not None and own is None and named.tree.is_of_another(asked.tools, asked.messages):
            return Place(None, (), asked.messages, parent=named.session_id)
        return Place(named, (), asked.messages, named is not None and _has_turn(asked.messages))

    def _place_by_messages(self, owner: str, asked: Asked, accept: Callable[[TurnKey], bool]) -> Place | None:
        """Return the position of a request by the turns in its history; None if it holds no accepted turn."""
        called = self._called(owner, asked, accept)

        def is_behind_call(key: TurnKey) -> bool:
            if called is None:
                return accept(key)
            is_in_session = key.session_id == called.key.session_id and accept(key)
            return is_in_session and called.key.turn_id in self._tree(key).line(key.turn_id)

        scope = _scope(owner, asked.prompt_key)
        match = self._index.find(asked.identities, scope=scope, accept=is_behind_call)
        rest = asked.messages[match.length :]
        if match.values and not _has_turn(rest):
            key = self._best(match.values)
            return Place(self._by_id[key.session_id], self.path(key), rest)
        found = self._histories.find(asked.messages, asked.identities, scope=owner.encode(), accept=is_behind_call)
        if called is not None and (found is None or found.position < called.position):
            found = Found[TurnKey](called.position)
        if found is not None and found.position > match.length:
            key = called.key if called is not None and called.position == found.position else self._meant(found)
            if key is not None:
                return self._following(key, asked, found)
        if match.values:
            return Place(self._by_id[self._best(match.values).session_id], (), asked.messages, True)
        return None

    def _called(self, owner: str, asked: Asked, accept: Callable[[TurnKey], bool]) -> CalledTurn | None:
        """Return the accepted turn whose call ids are the last ones in the request; None if it holds no known id."""
        last: CalledTurn | None = None
        for index in range(len(asked.messages) - 1, -1, -1):
            message = asked.messages[index]
            is_turn = message["role"] == "assistant"
            call_ids = [call.get("id") for call in message.get("tool_calls", ())] or [message.get("tool_call_id")]
            keys = [self._by_call.get((owner, call_id)) for call_id in call_ids if call_id is not None]
            key = next((key for key in keys if key is not None and accept(key)), None)
            if key is None:
                continue
            if last is not None and key != last.key:
                return last
            last = CalledTurn(key, index + is_turn)
            if is_turn:
                return last
        return last

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
        return min(known, key=lambda key: (self._is_continued(key), -key.turn_id))

    def _meant(self, found: Found[TurnKey]) -> TurnKey | None:
        """Return the turn that a changed history answers; None if it may be one of several sessions.

        A turn that nothing continues yet is preferred.
        """
        if found.said:
            return self._best(found.said)
        close = [known for known in (found.own, found.prompt) if known]
        loose = [[key for key in known if not self._is_continued(key)] for known in close]
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
        for call in turn.messages[-1].get("tool_calls", ()):
            call_key = (owner, call["id"])
            self._by_call[call_key] = None if call_key in self._by_call else key
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
            for call in turn.messages[-1].get("tool_calls", ()):
                self._by_call.pop((owner, call["id"]), None)
            for index in (self._index, self._histories, self._plain):
                index.discard(key)

    def _tree(self, key: TurnKey) -> TurnTree:
        return self._by_id[key.session_id].tree

    def _is_continued(self, key: TurnKey) -> bool:
        return self._by_id[key.session_id].is_continued(key.turn_id)


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
