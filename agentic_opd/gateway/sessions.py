"""Open sessions, and the assignment of requests to them.

A request finds its session by the client's name for it, by the ids of the tool calls in its messages, by the messages
that it extends, or by the parts of them that survive a client's changes (see `history_index`). A request never
continues a session of another owner.
"""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple

from agentic_opd.core.types import Message
from agentic_opd.gateway.client import Client
from agentic_opd.gateway.errors import ClientError
from agentic_opd.gateway.history_index import HistoryIndex, HistoryMatch
from agentic_opd.gateway.journal import SessionRow, SessionState
from agentic_opd.gateway.request import REFERENCE, ChatInput, Request, prompt_key
from agentic_opd.gateway.turns import ClientReply, Feedback, TurnT, TurnTree, messages_of
from agentic_opd.gateway.under_way import RunningAnswer
from agentic_opd.rollout.conversation_index import ConversationIndex, identity

if TYPE_CHECKING:
    from agentic_opd.distill.records import DistilledTurn


@dataclass(slots=True, eq=False)
class OpenSession(Generic[TurnT]):
    row: SessionRow
    used: float
    """Time of the last answer's end, or of opening, by `time.monotonic` (s): the clock of days may be set meanwhile."""
    tree: TurnTree[TurnT] = field(default_factory=TurnTree[TurnT])
    judged: "dict[int, asyncio.Task[DistilledTurn]]" = field(default_factory=dict[int, "asyncio.Task[DistilledTurn]"])
    """Tasks that judge turns whose next state has arrived, by turn id."""
    feedback: dict[int, list[Feedback]] = field(default_factory=dict[int, list[Feedback]])
    """Feedback of the client for single turns, by turn id."""
    grouped: set[int] = field(default_factory=set[int])
    """Turns in the groups of parts of the session (`judge_every_turns`), by their ids."""
    answers: list[dict[int, RunningAnswer]] = field(default_factory=list[dict[int, RunningAnswer]])
    """Answers that are being sampled, of each request by the index of the choice."""
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

    @contextmanager
    def answering(self, turn_before: int | None) -> Generator[None]:
        """Count a request as pending in the block; `turn_before` is the id of the turn that it continues or follows."""
        self._pending[turn_before] += 1
        self.quiet.clear()
        try:
            yield
        finally:
            self._pending[turn_before] -= 1
            self._pending = +self._pending
            self.used = time.monotonic()
            if not self._pending:
                self.quiet.set()

    def is_continued(self, turn_id: int) -> bool:
        """Return whether another turn continues or follows this one, or will once its request is answered."""
        return turn_id in self._pending or self.tree.is_continued(turn_id)


@dataclass(frozen=True, slots=True)
class Placed(Generic[TurnT]):
    """The position of a request in a session."""

    session: OpenSession[TurnT]
    chat: ChatInput
    """The whole conversation."""
    path: tuple[TurnT, ...]
    """The turns that the request continues; empty: its prompt is rendered anew."""
    new_messages: Sequence[Message]
    """The messages after the path."""
    is_rewritten: bool = False
    """Whether the request changed the text or the tools of a known session's history."""
    follows: ClientReply | None = None
    """The reply to an earlier turn in a prompt that is rendered anew."""

    @property
    def turn_before(self) -> int | None:
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


class Sessions(Generic[TurnT]):
    """All open sessions, indexed by name and by their messages."""

    def __init__(
        self,
        servers: Sequence[str],
        max_open: int,
        num_keys: int = 1,
        opened_as: SessionState = SessionState.OPEN,
    ) -> None:
        """Start without sessions. Half of `max_open` is divided among `num_keys` keys, the other half is for any.

        `opened_as` is the state of new sessions.
        """
        self._opened_as = opened_as
        self._servers, self._max_open, self._num_keys = servers, max_open, num_keys
        self._share = max(1, max_open // (2 * num_keys))
        """Number of sessions that each key can always open."""
        self._of_key = Counter[str]()
        """Number of open sessions by the digest of the key, which all learners of a key share."""
        self._by_id: dict[str, OpenSession[TurnT]] = {}
        self._on_server = Counter[str]()
        self._by_name: dict[tuple[str, str], OpenSession[TurnT]] = {}
        self._by_answer: dict[tuple[str, str], TurnKey] = {}
        self._by_call: dict[tuple[str, str], TurnKey | None] = {}
        """Turns by owner and tool call id; None for an id of several turns, as in journals of earlier versions."""
        self._index = ConversationIndex[TurnKey]()
        self._histories = HistoryIndex[TurnKey]()

    def __iter__(self) -> Iterator[OpenSession[TurnT]]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def least_used_server(self) -> str:
        """Return the policy server that samples the turns of the fewest open sessions."""
        return min(self._servers, key=self._on_server.__getitem__)

    def named(self, owner: str, name: str) -> OpenSession[TurnT] | None:
        """Return the client's open session with this name or id; None if there is none."""
        session = self._by_name.get((owner, name)) or self._by_id.get(name)
        return session if session is not None and session.row.owner == owner else None

    def answered(self, owner: str, answer_id: str) -> TurnKey | None:
        """Return the client's turn that an answer with this id gave; None if no open session has it."""
        return self._by_answer.get((owner, answer_id))

    def forget_answer(self, owner: str, answer_id: str) -> None:
        """Remove an answer's id, so that no request finds the client's turn by it."""
        self._by_answer.pop((owner, answer_id), None)

    def under(self, session: OpenSession[TurnT]) -> list[OpenSession[TurnT]]:
        """Return the open sessions of a session's sub-agents."""
        return [part for part in self if part.row.parent == session.session_id]

    def path(self, key: TurnKey) -> tuple[TurnT, ...]:
        """Return a turn of an open session and the turns before it, the first one first."""
        return self._tree(key).path(key.turn_id)

    def _with_dropped_text(self, owner: str, message: Message) -> Message:
        """Return a message with the text of its turn, if the client sent only the turn's tool calls back."""
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

    def assign(self, owner: str, client: Client, chat: ChatInput, name: str | None) -> Placed[TurnT]:
        """Find the session of a request, or open one, and the turns that the request continues.

        Texts of turns that the client dropped are restored. `name` names the session; without it, an agent's id or the
        messages do. If several turns fit, one without a continuation is preferred, then the newest.

        Raises:
            ClientError: 409, the session is being ended; 429, too many sessions are open.
        """
        chat = chat.with_messages([self._with_dropped_text(owner, message) for message in chat.messages])
        session_name = name or client.agent_session
        session = None if session_name is None else self.named(owner, session_name)
        if session_name is not None and session is None:
            parent = self.named(owner, client.parent) if client.parent else None
            return self._placed_in_new(owner, client, chat, session_name, parent)
        family = set[str]() if session is None else {session.session_id}
        if session is not None and name is None:
            family.update(part.session_id for part in self.under(session))

        def is_accepted(key: TurnKey) -> bool:
            return key.session_id in family if session is not None else not self._by_id[key.session_id].is_ending

        placed = self._placed_by_messages(owner, chat, is_accepted)
        if placed is None:
            if session is None:
                return self._placed_in_new(owner, client, chat)
            if name is None and session.tree.is_of_another(chat.tools, chat.messages):
                return self._placed_in_new(owner, client, chat, parent=session)
            placed = Placed(session, chat, (), chat.messages, _has_turn(chat.messages))
        if placed.session.is_ending:
            raise ClientError(409, "the session is being ended", "session_id", "session_ended")
        return placed

    def _placed_in_new(
        self,
        owner: str,
        client: Client,
        chat: ChatInput,
        name: str | None = None,
        parent: OpenSession[TurnT] | None = None,
    ) -> Placed[TurnT]:
        return Placed(self.open(owner, name, None if parent else client.group, parent), chat, (), chat.messages)

    def _placed_by_messages(
        self, owner: str, chat: ChatInput, accept: Callable[[TurnKey], bool]
    ) -> Placed[TurnT] | None:
        """Return the position of a request by the turns in its history; None if it holds no accepted turn."""
        called = self._called(owner, chat.messages, accept)

        def is_behind_call(key: TurnKey) -> bool:
            if called is None:
                return accept(key)
            is_in_session = key.session_id == called.key.session_id and accept(key)
            return is_in_session and called.key.turn_id in self._tree(key).line(key.turn_id)

        scope = _scope(owner, chat.prompt_key)
        match = self._index.find(chat.identities, scope=scope, accept=is_behind_call)
        rest = chat.messages[match.length :]
        if match.values and not _has_turn(rest):
            key = self._best(match.values)
            return Placed(self._by_id[key.session_id], chat, self.path(key), rest)
        history = self._histories.find(chat.messages, chat.identities, scope=owner.encode(), accept=is_behind_call)
        if called is not None and (history is None or history.position < called.position):
            history = HistoryMatch[TurnKey](called.position)
        if history is not None and history.position > match.length:
            is_called = called is not None and called.position == history.position
            key = called.key if called is not None and is_called else self._answered_turn(history)
            if key is not None:
                return self._following(key, chat, history)
        if match.values:
            return Placed(self._by_id[self._best(match.values).session_id], chat, (), chat.messages, True)
        return None

    def _called(self, owner: str, messages: Sequence[Message], accept: Callable[[TurnKey], bool]) -> CalledTurn | None:
        """Return the accepted turn whose call ids are the last ones in the messages; None if they hold no known id."""
        last: CalledTurn | None = None
        for index in range(len(messages) - 1, -1, -1):
            message = messages[index]
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

    def _following(self, key: TurnKey, chat: ChatInput, match: HistoryMatch[TurnKey]) -> Placed[TurnT]:
        """Return the place of a request whose messages after `match` answer a turn of another text or prompt."""
        session, messages, start = self._by_id[key.session_id], chat.messages, match.position
        stop = next((i for i in range(start, len(messages)) if messages[i]["role"] == "assistant"), len(messages))
        last = self.path(key)[-1].messages[-2:-1]
        is_whole = key in (*match.same_texts, *match.same_prompt)
        is_gone = is_whole and any(identity(message) not in chat.identities for message in last)
        if stop == len(messages) and stop - start > 1 and is_gone and _is_alike(last[0], messages[-1]):
            stop -= 1  # The client adds such a message to each request and takes it away again.
        return Placed(session, chat, (), messages, True, ClientReply(key.turn_id, start, stop))

    def _best(self, keys: Sequence[TurnKey]) -> TurnKey:
        """Return the turn that nothing continues, or else the newest."""
        return min(keys, key=lambda key: (self._is_continued(key), -key.turn_id))

    def _answered_turn(self, match: HistoryMatch[TurnKey]) -> TurnKey | None:
        """Return the turn that a changed history answers; None if it may be one of several sessions.

        A turn that nothing continues yet is preferred.
        """
        if match.same_texts:
            return self._best(match.same_texts)
        candidates = [keys for keys in (match.same_turn, match.same_prompt) if keys]
        last_turns = [[key for key in keys if not self._is_continued(key)] for keys in candidates]
        keys = next(filter(None, [*last_turns, *candidates]))
        return self._best(keys) if len({key.session_id for key in keys}) == 1 else None

    def open(
        self, owner: str, name: str | None, group: str | None = None, parent: OpenSession[TurnT] | None = None
    ) -> OpenSession[TurnT]:
        """Open a session on the least used server; `group` is the client's name of its group.

        Raises:
            ClientError: 429, too many sessions are open.
        """
        self._check_room(owner)
        now, server = time.time(), self.least_used_server()
        row = SessionRow(
            f"session-{uuid.uuid4().hex}",
            owner,
            name,
            server,
            opened=now,
            used=now,
            state=self._opened_as,
            group_name=group,
            parent=parent and parent.session_id,
        )
        return self.restore(row, ())

    def _check_room(self, owner: str) -> None:
        """Raise ClientError (429) if a client can't open another session."""
        owner_key, used = owner.partition("/")[0], len(self._by_id)
        num_owned = self._of_key[owner_key]
        used_by_others = sum(min(count, self._share) for key, count in self._of_key.items() if key != owner_key)
        reserved = max(0, self._share * (self._num_keys - 1) - used_by_others)
        if used >= self._max_open:
            why = f"{used} sessions are open"
        elif num_owned >= self._share and used + reserved >= self._max_open:
            why = f"{num_owned} sessions of this key are open, and the last {reserved} are kept for other keys"
        else:
            return
        todo = "end some (POST /sessions/NAME/end), or raise env.max_open_sessions"
        raise ClientError(429, f"{why}: {todo}", code="too_many_sessions")

    def restore(
        self,
        row: SessionRow,
        turns: Sequence[TurnT],
        feedback: Mapping[int, Sequence[Feedback]] | None = None,
        grouped: Iterable[int] = (),
    ) -> OpenSession[TurnT]:
        """Add an open session with its turns, their feedback and those in groups, for example from the journal."""
        session = OpenSession[TurnT](row, time.monotonic() - max(0.0, time.time() - row.used))
        session.feedback = {turn_id: [*comments] for turn_id, comments in (feedback or {}).items()}
        session.grouped.update(grouped)
        self._by_id[row.session_id] = session
        self._on_server[row.server] += 1
        self._of_key[row.owner.partition("/")[0]] += 1
        if row.name is not None:
            self._by_name[row.owner, row.name] = session
        for turn in turns:
            self.add(session, turn)
        return session

    def add(self, session: OpenSession[TurnT], turn: TurnT) -> None:
        """Add an answered turn, so that later requests can continue it by its answer's id, its calls or its text."""
        session.tree.add(turn)
        key, owner = TurnKey(session.session_id, turn.turn_id), session.row.owner
        before = None if turn.parent is None else TurnKey(session.session_id, turn.parent)
        if turn.answer_id:
            self._by_answer.setdefault((owner, turn.answer_id), key)
        for call in turn.messages[-1].get("tool_calls", ()):
            call_key = (owner, call["id"])
            self._by_call[call_key] = None if call_key in self._by_call else key
        scope = _scope(owner, prompt_key(turn.tools, turn.template))
        self._index.add(key, turn.messages, before, scope=scope)
        self._histories.add(key, turn.messages, before, scope=owner.encode())

    def remove(self, session: OpenSession[TurnT]) -> None:
        """Remove a session and its turns from all indexes."""
        if self._by_id.pop(session.session_id, None) is not None:
            self._on_server[session.row.server] -= 1
            self._of_key[session.row.owner.partition("/")[0]] -= 1
        owner = session.row.owner
        name = (owner, session.row.name or "")
        if self._by_name.get(name) is session:
            del self._by_name[name]
        for turn_id, turn in session.tree.turns.items():
            key = TurnKey(session.session_id, turn_id)
            self._by_answer.pop((owner, turn.answer_id), None)
            for call in turn.messages[-1].get("tool_calls", ()):
                self._by_call.pop((owner, call["id"]), None)
            for index in (self._index, self._histories):
                index.discard(key)

    def _tree(self, key: TurnKey) -> TurnTree[TurnT]:
        return self._by_id[key.session_id].tree

    def _is_continued(self, key: TurnKey) -> bool:
        return self._by_id[key.session_id].is_continued(key.turn_id)


def with_answers(request: Request, paths: Mapping[str, Sequence[TurnT]]) -> Sequence[Message]:
    """Return the request's messages with the answers that they refer to, after the conversation that they continue.

    Args:
        request: The request.
        paths: The path to each turn whose answer it refers to, by the answer's id.

    Raises:
        ClientError: 400, an answer is referred to in two places.
    """
    ids, messages = request.answer_ids, request.chat.messages
    if not ids:
        return messages
    if len({*ids}) < len(ids):
        name = request.field_name
        raise ClientError(400, f"{name}: an answer is referred to in two places", name)
    answers = {answer_id: path[-1].messages[-1] for answer_id, path in paths.items()}
    messages = [answers[message[REFERENCE]] if REFERENCE in message else message for message in messages]
    if request.previous is None:
        return messages
    path, count = paths[request.previous], request.num_instructions
    history = messages_of(path)[path[0].num_instructions :]
    return [*messages[:count], *history, *messages[count:]]


def _has_turn(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "assistant" for message in messages)


def _is_alike(first: Message, second: Message) -> bool:
    """Return whether two user messages begin alike, as a client's notes to the model do."""
    return first["role"] == second["role"] == "user" and first["content"][:16] == second["content"][:16]


def _scope(owner: str, key: bytes) -> bytes:
    """Return the scope of an index look-up: the owner and the tools, because a prompt begins with its tools."""
    return key + owner.encode()
