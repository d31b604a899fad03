"""Requests that were passed on, with their answers -> turns of sessions in the journal (I/O).

All of it runs on the journal's thread, after an answer has ended: clients never wait for it. A request that continues a
turn begins after that turn's answer has ended, so turns are recorded in the order of the ends of their answers.
"""

import asyncio
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from agentic_opd.core.errors import OutputError
from agentic_opd.core.text import read_json
from agentic_opd.core.types import Message, StopReason
from agentic_opd.gateway.answers import ForeignAnswer, UnrecordableError, decoded, read_answers, without_media
from agentic_opd.gateway.body import PLAIN_NAME
from agentic_opd.gateway.changes import Changes
from agentic_opd.gateway.client import Client
from agentic_opd.gateway.config import GatewayConfig
from agentic_opd.gateway.errors import ClientError, unknown_session
from agentic_opd.gateway.foreign import ForeignTurn
from agentic_opd.gateway.journal import Ending, Journal, SessionRow, SessionState, SessionStatus
from agentic_opd.gateway.request import ChatInput, Request
from agentic_opd.gateway.sessions import OpenSession, Placed, Sessions, with_answers
from agentic_opd.gateway.telemetry import Telemetry
from agentic_opd.gateway.turns import Feedback, TurnTree
from agentic_opd.gateway.under_way import UnderWay, Waiting

if TYPE_CHECKING:
    from agentic_opd.gateway.protocols.base import WireProtocol

logger = logging.getLogger(__name__)

_LARGEST_BACKLOG = 256 * 2**20
"""Most bytes of requests and answers that wait to be recorded. Later ones are passed on, and not recorded."""
_CLEANING_S = 600.0
"""Minimum seconds between two removals of expired sessions from the journal."""


@dataclass(frozen=True, slots=True)
class RelayedRequest:
    """A request that was passed on, and its answer, without the headers that hold keys."""

    path: str
    """The protocol's path, such as `/v1/messages`."""
    owner: str
    client: Client
    request: bytes
    request_encoding: str
    answer: bytes
    answer_encoding: str

    @property
    def size(self) -> int:
        """Number of bytes."""
        return len(self.request) + len(self.answer)


class Recorder:
    """The sessions of all clients of an upstream, in a journal."""

    def __init__(self, config: GatewayConfig, journal: Journal, telemetry: Telemetry) -> None:
        """Restore the open sessions from the journal, and start closing idle sessions."""
        assert config.upstream is not None
        self._config, self.journal, self.telemetry = config, journal, telemetry
        self._journal, self.changes, self.model = journal, Changes(), config.upstream
        servers, state = [config.upstream], SessionState.RECORDING
        self._sessions = Sessions[ForeignTurn](servers, config.max_open_sessions, opened_as=state)
        for row in journal.sessions(SessionState.RECORDING):
            self._sessions.restore(replace(row, server=config.upstream), journal.foreign_turns(row.session_id))
        telemetry.open.set_function(lambda: len(self._sessions))
        self._turn_ids = itertools.count(journal.last_turn_id() + 1)
        self._pending = set[asyncio.Task[None]]()
        self._answering = defaultdict[tuple[str, str], set[asyncio.Future[None]]](set)
        """The answers that are being passed on, by owner and by the names of the session in their request's headers."""
        self._backlog = 0
        self._reasons = set[str]()
        """Reasons that the log has named."""
        self._closing = asyncio.create_task(self._close_idle())
        self._loading = asyncio.create_task(journal.run(load_protocols))

    async def close(self) -> None:
        """Record what has been answered. Open sessions stay open in the journal."""
        self._closing.cancel()
        await asyncio.wait((*self._pending, self._loading))

    @contextmanager
    def answering(self, owner: str, client: Client) -> Generator[None]:
        """Let the end of the session that `client` names wait for this block, in which an answer is passed on.

        A client knows that a streamed answer is over before its connection ends, and only then the answer is recorded.
        """
        over = asyncio.get_running_loop().create_future()
        keys = [(owner, name) for name in (client.session, client.agent_session) if name is not None]
        for key in keys:
            self._answering[key].add(over)
        try:
            yield
        finally:
            over.set_result(None)
            for key in keys:
                self._answering[key].discard(over)
                if not self._answering[key]:
                    del self._answering[key]

    def add(self, relayed: RelayedRequest) -> None:
        """Record a request and its answer soon. What can't be recorded is counted, and named in the log."""
        if self._backlog + relayed.size > _LARGEST_BACKLOG:
            self.leave_out("the journal is too slow")
            return
        self._backlog += relayed.size
        task = asyncio.create_task(self._add(relayed))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _add(self, relayed: RelayedRequest) -> None:
        try:
            self.changes.tell(await self._journal.run(partial(self._record, relayed)))
        except UnrecordableError as error:
            self.leave_out(error.reason, error.detail)
        except OutputError as error:
            self.leave_out("the disk refused it")
            logger.error("a turn is not recorded: %s", error)
        except Exception as error:  # noqa: BLE001 - the clients' requests go on; the text of the error may quote them
            self.leave_out("an error of the gateway", type(error).__name__)
        finally:
            self._backlog -= relayed.size

    def leave_out(self, reason: str, detail: str = "") -> None:
        """Count an answer that is not recorded; the log names each reason once."""
        self.telemetry.unrecorded.labels(reason).inc()
        if reason not in self._reasons:
            self._reasons.add(reason)
            logger.warning("an answer of the upstream is not recorded: %s%s", reason, f" ({detail})" if detail else "")

    async def problem(self) -> str | None:
        """Return why the journal can't be written now; None: it can, or can again."""
        if self._journal.problem is not None:
            with suppress(OutputError):
                await self._journal.run(self._journal.try_again)
        return self._journal.problem

    @property
    def waiting(self) -> Waiting | None:
        """None: no trainer is fed from here."""
        return None

    def under_way(self, session: SessionRow) -> UnderWay:
        """Return no state: a recorder keeps sessions in the journal only."""
        return UnderWay()

    async def give_feedback(self, owner: str, name: str | None, turn: str, feedback: Feedback) -> int:
        """Refuse feedback for a turn, with a ClientError: it is given at a session's end."""
        raise ClientError(409, "a recording gateway takes feedback at the end of a session only", "turn")

    async def drained(self) -> None:
        """Wait until all answers so far are recorded."""
        await asyncio.gather(*self._pending)

    async def end(self, owner: str, name: str, reward: float | None, feedback: str | None) -> SessionStatus:
        """End a session, after its answers that are passed on or still to be recorded.

        Raises:
            ClientError: 404, this client has no open session of this name.
            OutputError: the journal could not be written; the session stays open.
        """
        while answering := self._answering.get((owner, name)):
            await asyncio.wait(answering)
        await self.drained()

        def end() -> SessionStatus:
            session = self._sessions.named(owner, name)
            if session is None:
                raise unknown_session()
            turns = len(session.tree.turns)
            return SessionStatus.of(self._end(session, StopReason.CLOSED, reward, feedback), turns)

        session, status = self._sessions.named(owner, name), await self._journal.run(end)
        if session is not None:
            self.changes.tell(session.row)
        return status

    async def delete_ended(self, owner: str, name: str) -> str:
        """Delete an ended session from the journal permanently; returns its id; see `Gateway.delete_ended`."""
        row = await self._journal.run(partial(self._journal.delete_ended, owner, name))
        self.changes.tell(row)
        return row.session_id

    async def status(self, owner: str, name: str) -> SessionStatus:
        """Return the status of an open or ended session.

        Raises:
            ClientError: 404, the journal has no session of this client with this name or id.
        """

        def read() -> SessionStatus:
            row = self._journal.latest(owner, name)
            if row is None:
                raise unknown_session()
            return SessionStatus.of(row, self._journal.count_turns(row.session_id))

        return await self._journal.run(read)

    async def _close_idle(self) -> None:
        idle_s, cleaned = self._config.session_idle_s, 0.0
        while True:
            await asyncio.sleep(min(5.0, idle_s / 4))
            try:
                await self._journal.run(partial(self._end_older, idle_s))
                if self._config.keep_sessions_days is not None and time.monotonic() - cleaned > _CLEANING_S:
                    cleaned = time.monotonic()
                    before = time.time() - self._config.keep_sessions_days * 86400
                    await self._journal.run(partial(self._journal.delete_older, before, SessionState.RECORDED))
            except OutputError as error:
                logger.error("idle sessions stay open, and old ones in the journal: %s", error)

    def _end_older(self, idle_s: float) -> None:
        """End the sessions that were used last more than `idle_s` seconds ago, unless they wait for a sub-agent's."""
        for session in self._sessions:
            if time.monotonic() - session.used > idle_s and not self._sessions.under(session):
                self._end(session, StopReason.IDLE)

    # --------------------------------------------------------------------------------------------- the journal's thread

    def _record(self, relayed: RelayedRequest) -> SessionRow:
        """Write the turns of a request, one for each choice of the answer; returns their session.

        Raises:
            UnrecordableError: the request or the answer can't be read.
            sqlite3.Error: the disk refused it.
        """
        protocol = load_protocols()[relayed.path]
        answers = read_answers(relayed.path, decoded(relayed.answer, relayed.answer_encoding))
        kinds: list[str] = []
        try:
            body: Any = read_json(decoded(relayed.request, relayed.request_encoding))
            if protocol.history_field in body:
                body = {**body, protocol.history_field: without_media(body[protocol.history_field], kinds)}
            request = protocol.conversation(body, relayed.client)
            spoken = [(answer, _messages(protocol, answer)) for answer in answers]
            chat, previous_session = self._with_history(request, relayed.owner)
        except ClientError as error:
            name = error.param or ""
            raise UnrecordableError(
                "its conversation can't be read", name if PLAIN_NAME.fullmatch(name) else ""
            ) from error
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            raise UnrecordableError("its body can't be read") from error
        if not any(messages for _, messages in spoken):
            raise UnrecordableError("it is empty, or broke off before its first word")
        self._make_room()
        name = request.client.session or previous_session
        placed = self._sessions.assign(relayed.owner, request.client, chat, name)
        try:
            for answer, messages in spoken:
                if messages:
                    self._write(placed, request, answer, messages, kinds)
        finally:
            if not placed.session.tree.turns:
                self._sessions.remove(placed.session)
        if request.client.is_last:
            self._end(placed.session, StopReason.CLOSED)
        return placed.session.row

    def _write(
        self,
        placed: Placed[ForeignTurn],
        request: Request,
        answer: ForeignAnswer,
        messages: Sequence[Any],
        kinds: Sequence[str],
    ) -> None:
        path = placed.path
        # A request that names the answer before it holds only what is new.
        num_known = 0 if request.previous is not None else sum(len(earlier.left_out) for earlier in path)
        turn = ForeignTurn(
            turn_id=next(self._turn_ids),
            parent=path[-1].turn_id if path else None,
            messages=(*placed.new_messages, *messages),
            message_index=sum(len(earlier.messages) for earlier in path) + len(placed.new_messages) + len(messages) - 1,
            turn_type=request.client.turn_type,
            tools=placed.chat.tools,
            model=answer.model,
            finish_reason=answer.finish_reason,
            is_whole=answer.is_whole,
            usage=answer.usage,
            follows=None if path else placed.follows,
            answer_id=answer.answer_id,
            num_instructions=0 if path else request.num_instructions,
            left_out=tuple(kinds[num_known:]),
        )
        self._journal.add_turns([(placed.session.row, turn)])
        self._sessions.add(placed.session, turn)
        placed.session.used = time.monotonic()
        self.telemetry.turns.labels(turn.turn_type).inc()
        if placed.is_rewritten:
            self.telemetry.rewritten.inc()

    def _with_history(self, request: Request, owner: str) -> tuple[ChatInput, str | None]:
        """Return the whole conversation of a request, and the id of the open session that it continues by an answer."""
        paths: dict[str, Sequence[ForeignTurn]] = {}
        previous_session: str | None = None
        for answer_id in request.answer_ids:
            key = self._sessions.answered(owner, answer_id)
            if key is not None:
                paths[answer_id] = self._sessions.path(key)
                previous_session = key.session_id if answer_id == request.previous else previous_session
            elif (answer := self._journal.answered(owner, answer_id)) is not None:
                row, turn_id = answer
                paths[answer_id] = TurnTree[ForeignTurn].of(self._journal.foreign_turns(row.session_id)).path(turn_id)
            else:
                raise UnrecordableError("it continues an answer that was not recorded")
        return request.chat.with_messages(with_answers(request, paths)), previous_session

    def _make_room(self) -> None:
        """End the session that was used longest ago, if no other one can be opened."""
        sessions = [*self._sessions]
        if len(sessions) >= self._config.max_open_sessions:
            self._end(min(sessions, key=lambda session: session.used), StopReason.IDLE)

    def _end(
        self,
        session: OpenSession[ForeignTurn],
        stop: StopReason,
        reward: float | None = None,
        feedback: str | None = None,
    ) -> SessionRow:
        """Store the end of a session and its sub-agents'; the turns stay in the journal."""
        for part in self._sessions.under(session):
            self._end(part, stop)
        ending = Ending(stop, session.session_id, reward, feedback)
        row = replace(session.row, state=SessionState.RECORDED, ending=ending)
        self._journal.close_session(row)
        self._sessions.remove(session)
        return row


@cache
def load_protocols() -> Mapping[str, "WireProtocol"]:
    """Return the protocols by their paths. They take a second to import, in which requests are passed on already."""
    from agentic_opd.gateway.protocols import PROTOCOLS

    return {protocol.path: protocol for protocol in PROTOCOLS}


def _messages(protocol: "WireProtocol", answer: ForeignAnswer) -> Sequence[Message]:
    """Return the messages of an answer, the last of which is the assistant's; empty if nothing was said.

    Raises:
        ClientError: an item of the answer can't be read.
    """
    if not answer.items:
        return ()
    messages = protocol.conversation({protocol.history_field: answer.items}, Client()).chat.messages
    last = max((index for index, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    is_said = answer.finish_reason or any(
        message.get(name) for message in messages for name in ("content", "reasoning_content", "tool_calls")
    )
    return messages[: last + 1] if is_said else ()
