"""The gateway: client requests -> sampled turns of sessions, each journaled before its answer ends (I/O)."""

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from renderers import Renderer

from agentic_opd.atropos.api import EnvDescription
from agentic_opd.core.attachments.files import ImageFolder
from agentic_opd.core.concurrency import to_its_end
from agentic_opd.core.errors import OPDError, OutputError, ServerMismatchError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.types import Message, StopReason
from agentic_opd.distill.alarms import live_teacher
from agentic_opd.distill.connect import PolicyEndpoint
from agentic_opd.distill.distiller import Distiller
from agentic_opd.gateway.body import ignored
from agentic_opd.gateway.choice import Finished, Piece
from agentic_opd.gateway.config import GatewayConfig
from agentic_opd.gateway.delivery import Delivery
from agentic_opd.gateway.errors import ClientError, unknown_session
from agentic_opd.gateway.exchange import Answer, Begun, Exchange, ServerLimits
from agentic_opd.gateway.groups import Closed, GroupWriter
from agentic_opd.gateway.journal import Ending, Journal, SessionPart, SessionRow, SessionState, SessionStatus
from agentic_opd.gateway.learners import LearnerFiles, no_learner
from agentic_opd.gateway.learners import learner_of as learner_name
from agentic_opd.gateway.request import Request
from agentic_opd.gateway.sampler import Prompted, Sampler
from agentic_opd.gateway.sessions import OpenSession, Placed, Sessions, TurnKey
from agentic_opd.gateway.telemetry import Telemetry
from agentic_opd.gateway.turns import Feedback, Path, answered_turns, reply_to
from agentic_opd.gateway.under_way import RunningAnswer, UnderWay, Waiting
from agentic_opd.plugin.client import PluginClient
from agentic_opd.plugin.info import check_model, fetch_info
from agentic_opd.rollout.renderer import configured_renderer, load_policy_tokenizer
from agentic_opd.settings.atropos import UNNAMED_MODEL, PolicyServerConfig
from agentic_opd.settings.fields import line_settings
from agentic_opd.wire.files import GroupFile, check_place

logger = logging.getLogger(__name__)

_CLEANING_S = 600.0
"""Minimum seconds between two removals of expired sessions from the journal."""
_ALL_ALTERED = (
    "all turns of a session were sampled otherwise than from the policy's own distribution, so nothing is learned from "
    "it; to learn from such turns too, set env.learn_from_altered_sampling"
)
_NO_NEXT_STATE = (
    "no turn of a session has a next state (a result, a next message or feedback), so hindsight learns nothing from "
    "it; some clients begin a new conversation with every request"
)
_MOST_LOOKED_AT = 16
"""Number of turns of an ended session that are searched for a next state, to log sessions without one."""
MOST_FEEDBACK = 100
"""Number of times that a client can give feedback for one turn: each is a question to the judge."""
_MOST_COUNTED = 4096
"""Number of turns, those with the latest feedback, whose feedback is counted."""
_VERSION_S = 2.0
"""Seconds that a policy server may take to name its weights for the metrics."""


class Gateway:
    """The sessions of all clients, sampled by the policy's servers. `start` connects to the servers and creates one."""

    def __init__(
        self,
        config: GatewayConfig,
        servers: Sequence[PluginClient],
        renderer: Renderer,
        tokenizer: Any,
        journal: Journal,
        writer: GroupWriter,
        telemetry: Telemetry,
        learners: LearnerFiles | None = None,
    ) -> None:
        """Restore the open and the closed sessions from the journal, and start closing idle sessions.

        `learners` are those of `writer`; None: all clients teach one policy.
        """
        self.config, self.tokenizer, self.telemetry = config, tokenizer, telemetry
        self.model = servers[0].info.model
        self.learner_folder = no_learner if learners is None else learners.folder_of
        self.journal, self.changes = journal, writer.changes
        self._journal, self._writer, self._learners = journal, writer, learners
        num_keys = len({key.get_secret_value() for key in config.api_keys})
        self._sessions = Sessions([server.url for server in servers], config.max_open_sessions, num_keys or 1)
        telemetry.open.set_function(lambda: len(self._sessions))
        self._images = ImageFolder.beside(config.data_path_to_save_groups)
        learner_of = partial(learner_name, config=config.learners)
        else_learner = config.learners.start
        self._sampler = Sampler(servers, renderer, tokenizer, telemetry, self._images, learner_of, else_learner)
        first_turn_id = journal.last_turn_id() + 1
        self._exchange = Exchange(
            self._sessions, self._sampler, ServerLimits(), journal.add_turn, journal.answer_paths, first_turn_id
        )
        for row in map(self._with_server, journal.sessions(SessionState.OPEN)):
            session_id = row.session_id
            restored = journal.turns(session_id), journal.feedback(session_id), journal.grouped_turns(session_id)
            self._sessions.restore(row, *restored)
        for row, part in journal.unfinished_parts():
            writer.submit_part(self._with_server(row), part)
        writer.restore(
            Closed(self._with_server(row), grouped=journal.grouped_turns(row.session_id))
            for row in journal.sessions(SessionState.CLOSED)
        )
        self._feedback_counts = OrderedDict[TurnKey, int]()
        self._began = time.time(), time.monotonic()
        self._idle = asyncio.create_task(self._close_idle())
        self._undo = AsyncExitStack()

    @classmethod
    async def start(cls, config: GatewayConfig, servers: Sequence[PolicyServerConfig]) -> "Gateway":
        """Connect to all servers, and detect before the first request errors that would fail every request.

        Raises:
            ConfigError, OutputError, RendererError, ServerError: a requirement is not met; the message names the fix.
        """
        check_place(config.data_path_to_save_groups, resume=True)
        async with AsyncExitStack() as undo:
            clients = [
                JsonClient(server.base_url or "", server.api_key or None, float(server.timeout), config.server_retry_s)
                for server in servers
            ]
            for client in clients:
                undo.push_async_callback(client.close)
            names = (config.tokenizer_name, servers[0].tokenizer_name, servers[0].model_name)
            tokenizer = await load_policy_tokenizer(names, clients[0])
            renderer = configured_renderer(tokenizer, config.renderer)
            images = ImageFolder.beside(config.data_path_to_save_groups)
            connected = [await _connected(client, tokenizer, images) for client in clients]
            for server, config_of_server in zip(connected, servers, strict=True):
                if config_of_server.model_name != UNNAMED_MODEL:
                    await check_model(server.http, server.info, config_of_server.model_name, "openai.model_name")
            distiller = None
            if config.opd_enabled:
                context = min(server.info.max_model_len for server in connected)
                distiller = Distiller(config, max_token_length=context, retry_s=config.server_retry_s)
                undo.push_async_callback(distiller.close)
                for server in connected:
                    server.check_caps(vocab_size=len(tokenizer), top_k=distiller.policy_top_k)
                    await distiller.connect(PolicyEndpoint.of(server), renderer, tokenizer)
            settings = {**line_settings(config), "policy_model": connected[0].info.model}
            file = GroupFile(config.data_path_to_save_groups, settings, resume=True)
            undo.callback(file.close)
            journal = Journal(config.journal)
            undo.callback(journal.close)
            telemetry = Telemetry()
            delivery = None
            if config.rollout_server_url is not None:
                if warning := live_teacher(config):
                    logger.warning("%s", warning)
                env = EnvDescription(
                    "gateway",
                    max_token_length=min(server.info.max_model_len for server in connected),
                    weight=1.0,
                    group_size=config.group_size,
                    min_batch_allocation=None,
                )
                delivery = Delivery(config.rollout_server_url, env, journal, telemetry)
                undo.push_async_callback(delivery.close)
            learners = None
            if config.learners.by != "nothing":
                check_adapters(connected)
                learners = LearnerFiles(config.learners, config.learners_folder, settings)
                undo.callback(learners.close)
            writer = GroupWriter(config, distiller, file, journal, telemetry, delivery, learners)
            undo.push_async_callback(writer.close)
            gateway = cls(config, connected, renderer, tokenizer, journal, writer, telemetry, learners)
            gateway._undo = undo.pop_all()
            return gateway

    async def close(self) -> None:
        """Stop. Open sessions stay open in the journal; the next gateway writes the groups that are still missing."""
        self._idle.cancel()
        self._sampler.close()
        await self._undo.aclose()

    async def drained(self) -> None:
        """Wait until all complete groups of closed sessions are written; see `GroupWriter.drained`."""
        await self._writer.drained()

    # ------------------------------------------------------------------------------------------------------ answers

    async def answer(self, request: Request, owner: str) -> Answer:
        """Answer a request as `Exchange.answer` does, and judge the turn that it answers.

        Each turn is in the journal before its choice's `Finished` is yielded.

        Raises:
            ClientError: the request can't be answered; the message says why.
            OutputError, ServerError: the disk or the policy's server failed.
        """
        if request.client.group is not None:
            self._check_group_size("X-Group-Id")
        session: OpenSession | None = None
        answers: dict[int, RunningAnswer] = {}
        is_whole = False
        try:
            async with aclosing(self._exchange.answer(request, owner)) as stages:
                async for stage in stages:
                    if isinstance(stage, Placed):
                        session = stage.session
                        session.answers.append(answers)
                        self._check_group(request.client.group, session)
                        continue
                    assert session is not None
                    self._follow(session, request, stage, answers)
                    if not isinstance(stage, Prompted):
                        yield stage
            is_whole = True
        finally:
            if session is not None:
                session.answers.remove(answers)
                self.changes.tell(session.row)
            if session is not None and is_whole and request.client.is_last and not session.is_ending:
                await self._close(session, StopReason.CLOSED)
            elif session is not None and is_whole and self.config.judge_every_turns:
                with session.answering(None):  # An end and a deletion wait for the part.
                    await to_its_end(self._make_part(session))
            elif session is not None and session.is_free and not session.tree.turns:
                self._sessions.remove(session)

    def _follow(
        self,
        session: OpenSession,
        request: Request,
        stage: Prompted | Begun | Piece | Finished,
        answers: dict[int, RunningAnswer],
    ) -> None:
        """Judge the turn that a prompt answers, and collect the sampled parts of `answers` for open pages."""
        if isinstance(stage, Prompted):
            reply = stage.reply
            if reply is not None and request.client.turn_type == "main":
                messages = stage.conversation.messages[reply.start : reply.stop]
                self._judge(session, session.tree.path(reply.turn_id), messages)
            answers |= {index: stage.running_answer() for index in range(request.sampling.n)}
        elif isinstance(stage, Piece):
            answers[stage.index].add(stage)
        elif isinstance(stage, Finished):
            del answers[stage.index]
        self.changes.tell(session.row)

    async def count(self, request: Request, owner: str) -> int:
        """Return the number of tokens of a request's prompt."""
        return await self._exchange.count(request, owner)

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a sequence: that of the server with the longest context."""
        return self._exchange.max_context

    async def problems(self) -> dict[str, str]:
        """Return why outputs can't be written now, by their names; those that failed last are tried again."""
        with suppress(OutputError):
            if self._journal.problem is not None:
                await self._journal.run(self._journal.try_again)
        with suppress(OutputError):
            if self._images.problem is not None:
                await asyncio.to_thread(self._images.try_again)
        outputs = {"journal": self._journal, "groups": self._writer, "pictures": self._images}
        causes = {name: output.problem for name, output in outputs.items()}
        for name, cause in causes.items():
            self.telemetry.failing.labels(name).set(cause is not None)
        return {name: cause for name, cause in causes.items() if cause is not None}

    async def read_versions(self) -> None:
        """Ask the servers which weights they have, for the metrics; those that do not answer keep their last values."""

        async def read(server: PluginClient) -> None:
            with suppress(OPDError, TimeoutError):
                async with asyncio.timeout(_VERSION_S):
                    info = await fetch_info(server.http)
                if info.weight_version is not None:
                    self.telemetry.version.labels(server.url).set(info.weight_version)

        await asyncio.gather(*map(read, self._sampler.servers.values()))

    async def recorded(self, owner: str, answer_id: str) -> tuple[SessionRow, Path]:
        """Return the path to a turn by the id of its answer, and its session; the first of several choices.

        Raises:
            ClientError: 404, this client received no answer with that id.
        """
        answer = await self._journal.run(lambda: self._journal.answered(owner, answer_id))
        paths = await self._journal.answer_paths(owner, [answer_id])
        if answer is None or answer_id not in paths:
            raise _unknown_answer(answer_id)
        return answer[0], paths[answer_id]

    async def forget(self, owner: str, answer_id: str) -> None:
        """Remove an answer: it can't be fetched or continued by its id. Its turn stays in its session.

        Raises:
            ClientError: 404, this client received no answer with that id.
            OutputError: the journal could not be written.
        """
        if not await self._journal.run(lambda: self._journal.forget_answer(owner, answer_id)):
            raise _unknown_answer(answer_id)
        self._sessions.forget_answer(owner, answer_id)

    def _judge(self, session: OpenSession, path: Path, new: Sequence[Message]) -> None:
        """Start to judge a path's last turn with its next state and its feedback, unless it is judged already.

        Without either, the next state may still come: the client let the assistant take another turn.
        """
        turn_id = path[-1].turn_id
        feedback = session.feedback.get(turn_id, ())
        evidence = [*new, *(comment.message() for comment in feedback)]
        if not evidence or (turn_id in session.judged and not feedback) or turn_id in session.tree.side_turns():
            return
        judging = self._writer.judge(session.row, path, evidence)
        if judging is not None:
            if (earlier := session.judged.get(turn_id)) is not None:
                earlier.cancel()
            session.judged[turn_id] = judging

    async def _make_part(self, session: OpenSession) -> None:
        """Make a group of an open session's turns that have a next state, if there are `judge_every_turns` of them."""
        due = answered_turns(session.tree, self.config.learn_from_altered_sampling) - session.grouped
        if session.is_ending or not self.config.opd_enabled or len(due) < self.config.judge_every_turns:
            return
        part = SessionPart(f"group-{uuid.uuid4().hex}", session.session_id, frozenset(due))
        session.grouped |= due
        try:
            await self._journal.run(partial(self._journal.add_part, part))
        except OutputError as error:
            session.grouped -= due
            logger.error("turns of an open session are judged later: %s", error)
        else:
            self._writer.submit_part(session.row, part, session.tree, session.feedback)

    def _check_group(self, group: str | None, session: OpenSession) -> None:
        """Refuse a group name that the session can't belong to, with a ClientError."""
        if group is not None and session.row.parent is None and session.row.group_name != group:
            raise ClientError(
                409,
                "the session was opened in another group, or in none (one in none may join one at its end)",
                "X-Group-Id",
            )

    def _check_end_group(self, group: str | None, row: SessionRow) -> None:
        """Refuse a group name at a session's end that the session can't belong to, with a ClientError."""
        if group is None:
            return
        self._check_group_size("group")
        if row.parent is not None:
            raise ClientError(409, "a sub-agent's session is in no group; name it when its parent ends", "group")
        if row.group_name not in (None, group):
            raise ClientError(409, "the session was opened in another group", "group")

    def _check_group_size(self, parameter: str) -> None:
        if self.config.group_size == 1:
            message = "sessions form no groups here: env.group_size of the gateway is 1"
            raise ClientError(400, message, parameter, "no_groups")

    def _with_server(self, row: SessionRow) -> SessionRow:
        """Return the session, moved to another server if its own is no longer in the settings."""
        is_known = row.server in self._sampler.servers
        return row if is_known else replace(row, server=self._sessions.least_used_server())

    # ----------------------------------------------------------------------------------------------------- sessions

    async def end(
        self,
        owner: str,
        name: str,
        reward: float | None = None,
        feedback: str | None = None,
        group: str | None = None,
    ) -> SessionStatus:
        """End a session after its pending answers. A session that was opened in no group joins `group`.

        Raises:
            ClientError: 404, this client has no open session of this name; 400, sessions form no groups here; 409,
                the session is in another group, or is a sub-agent's.
            OutputError: the end could not be written to the journal; the session stays open.
        """
        session = self._sessions.named(owner, name)
        if session is None or session.is_ending:
            raise unknown_session()
        self._check_end_group(group, session.row)
        turns = await self._close(session, StopReason.CLOSED, reward, feedback, group)
        return SessionStatus.of(replace(session.row, state=SessionState.CLOSED), turns)

    async def give_feedback(self, owner: str, name: str | None, turn: str, feedback: Feedback) -> int:
        """Record feedback for one turn, and judge the turn with it; returns the turn's id.

        Feedback for a turn that has some changes it, see `Feedback.changed`.

        Raises:
            ClientError: 404, this client has no session with such a turn; 409, the session's group is made already;
                429, the turn has got too much feedback.
            OutputError: the feedback could not be written to the journal.
        """
        key = await self._rated(owner, name, turn)
        self._count_feedback(key)
        session = self._sessions.named(owner, key.session_id)
        is_closed = session is None and not self._writer.is_changeable(*key)
        if is_closed or (session is not None and key.turn_id in session.grouped):
            raise _group_made()
        changed = await self._journal.run(partial(self._journal.add_feedback, key.turn_id, feedback))
        session = self._sessions.named(owner, key.session_id)
        if (rated := session or self._writer.closed(key.session_id)) is not None:
            self.changes.tell(rated.row)
        if session is None:  # It ended, maybe while the journal was written.
            if not self._writer.change_feedback(key.session_id, key.turn_id, changed):
                raise _group_made()
            return key.turn_id
        if key.turn_id in session.grouped:
            raise _group_made()
        session.feedback[key.turn_id] = [changed]
        session.used = time.monotonic()
        self._judge(session, self._sessions.path(key), reply_to(session.tree, session.tree.turns[key.turn_id]))
        return key.turn_id

    def _count_feedback(self, key: TurnKey) -> None:
        """Count feedback for a turn; raises ClientError (429) at the limit."""
        count = self._feedback_counts.get(key, 0)
        if count >= MOST_FEEDBACK:
            raise ClientError(
                429,
                f"this turn has received feedback {MOST_FEEDBACK} times, the maximum; the last one counts",
                "turn",
                "too_much_feedback",
            )
        self._feedback_counts[key] = count + 1
        self._feedback_counts.move_to_end(key)
        if len(self._feedback_counts) > _MOST_COUNTED:
            self._feedback_counts.popitem(last=False)

    async def _rated(self, owner: str, name: str | None, turn: str) -> TurnKey:
        """Return the turn that a client names by its answer's id, or by its own id in a session."""
        session = None if name is None else self._sessions.named(owner, name)
        session_id = session and session.session_id
        if name is not None and session_id is None:
            row = await self._journal.run(partial(self._journal.latest, owner, name))
            session_id = row and row.session_id
        if session_id is not None and turn.isdecimal() and len(turn) < 19:
            key = TurnKey(session_id, int(turn))
            is_known = partial(self._journal.has_turn, *key)
            if key.turn_id in session.tree.turns if session is not None else await self._journal.run(is_known):
                return key
        answer = await self._journal.run(partial(self._journal.answered, owner, turn))
        if answer is None:
            raise ClientError(404, "no session has such a turn", "turn", "turn_not_found")
        row, turn_id = answer
        if name is not None and row.session_id != session_id:
            raise ClientError(404, "this turn is of another session", "turn", "turn_not_found")
        return TurnKey(row.session_id, turn_id)

    def under_way(self, session: SessionRow) -> UnderWay:
        """Return the state in memory of an open session, or of a closed one whose group is not made."""
        open_session = self._sessions.named(session.owner, session.session_id)
        state = open_session or self._writer.closed(session.session_id)
        if state is None:
            return UnderWay()
        ended = {turn_id: judging for turn_id, judging in state.judged.items() if judging.done()}
        results = {
            turn_id: judging.result()
            for turn_id, judging in ended.items()
            if not judging.cancelled() and judging.exception() is None
        }
        turns = [*state.tree.turns.values()] if state.tree is not None else None
        grouped, judging = frozenset(state.grouped), frozenset(state.judged.keys() - ended.keys())
        requests = () if open_session is None else open_session.answers
        answers = [answer for by_index in requests for answer in by_index.values()]
        return UnderWay(True, turns, results, judging, grouped, answers)

    @property
    def waiting(self) -> Waiting:
        """Groups that wait for training."""
        return self._writer.waiting

    async def status(self, owner: str, name: str) -> SessionStatus:
        """Return the status of an open or ended session.

        Raises:
            ClientError: 404, the journal has no session of this client with this name or id.
        """
        session = self._sessions.named(owner, name)
        if session is not None:
            return SessionStatus.of(session.row, len(session.tree.turns))
        row = await self._journal.run(lambda: self._journal.latest(owner, name))
        if row is None:
            raise unknown_session()
        turns = await self._journal.run(lambda: self._journal.count_turns(row.session_id))
        return SessionStatus.of(row, turns)

    async def delete_ended(self, owner: str, name: str) -> str:
        """Delete an ended session from the journal permanently; returns its id. Its group stays in its file.

        Raises:
            ClientError: 404, this client has no such session; 409, it has not ended, or its group is being made.
            OutputError: the journal could not be written.
        """
        row = await self._journal.run(partial(self._journal.delete_ended, owner, name))
        self.changes.tell(row)
        return row.session_id

    async def delete(self, owner: str, name: str) -> str:
        """Delete a session of a learner and its sub-agents' sessions, and all that was learned from them.

        Without learners this is `delete_ended`. Else its rows in the journal and its groups go now, and the servers
        forget the learner's adapters. The trainer goes back to the last version that was not trained on these groups,
        and trains on the remaining ones again.

        Returns:
            The session's id.

        Raises:
            ClientError: 400, the client has no learner; 404, the client has no such session; 409, it is being ended,
                or its group is being made.
            OutputError, ServerError: a file could not be written, or a server did not forget the learner; ask again.
        """
        if self._learners is None:
            return await self.delete_ended(owner, name)
        learner = self._learner(owner)
        session = self._sessions.named(owner, name)
        row = (
            session.row if session is not None else await self._journal.run(partial(self._journal.latest, owner, name))
        )
        if row is None:
            raise unknown_session()
        await self._delete(owner, learner, await self._journal.run(partial(self._journal.with_parts, row.session_id)))
        self.changes.tell(row)
        return row.session_id

    async def delete_learner(self, owner: str) -> str:
        """Delete all sessions of a learner and every version of its adapter; otherwise as `delete`.

        Returns:
            The learner's name.
        """
        learner = self._learner(owner)
        await self._delete(owner, learner, await self._journal.run(partial(self._journal.of_owner, owner)), is_all=True)
        return learner

    def _learner(self, owner: str) -> str:
        learner = None if self._learners is None else self._learners.of(owner)
        if learner is None:
            raise ClientError(
                400,
                "this gateway has no learners (env.learners.by), and a session can't be removed from weights that "
                "all share",
                code="no_learners",
            )
        return learner

    async def _delete(self, owner: str, learner: str, session_ids: Sequence[str], *, is_all: bool = False) -> None:
        assert self._learners is not None
        opened = [session for session in self._sessions if session.row.owner == owner]
        opened = opened if is_all else [session for session in opened if session.session_id in session_ids]
        names = [*dict.fromkeys((*session_ids, *(session.session_id for session in opened)))]
        if any(session.is_ending for session in opened) or any(map(self._writer.is_in_the_making, names)):
            raise _busy_session()
        for session in opened:
            session.is_ending = True
        await asyncio.gather(*(session.quiet.wait() for session in opened))
        if any(map(self._writer.is_in_the_making, names)):  # The last answer made a part.
            for session in opened:
                session.is_ending = False
            raise _busy_session()
        for session in opened:
            for judging in session.judged.values():
                judging.cancel()
            self._sessions.remove(session)
        await to_its_end(self._deleted(learner, names, is_all))

    async def _deleted(self, learner: str, session_ids: Sequence[str], is_all: bool) -> None:
        """Remove the groups first: a deletion that is interrupted can be requested again by the session's name."""
        assert self._learners is not None
        group_ids = await self._journal.run(partial(self._journal.group_ids, session_ids))
        if is_all:
            await self._learners.remove_all(learner)
        else:
            await self._learners.remove(learner, group_ids, session_ids)
        await asyncio.gather(*(server.forget_learner(learner) for server in self._sampler.servers.values()))
        await self._journal.run(lambda: self._journal.delete(*session_ids))

    async def _close(
        self,
        session: OpenSession,
        stop: StopReason,
        reward: float | None = None,
        feedback: str | None = None,
        group: str | None = None,
    ) -> int:
        """Close a session and its sub-agents' after their pending answers; returns its number of turns."""
        session.is_ending = True
        row = replace(session.row, group_name=group or session.row.group_name)
        ending = Ending(stop, self._writer.join(row), reward, feedback)
        try:
            for part in self._sessions.under(session):
                if not part.is_ending:
                    await self._close(part, stop)
            await session.quiet.wait()
            await to_its_end(self._closed(session, replace(row, state=SessionState.CLOSED, ending=ending)))
        finally:
            if session in self._sessions:
                session.is_ending = False
                self._writer.leave(row, ending.group_id)
        return len(session.tree.turns)

    async def _closed(self, session: OpenSession, row: SessionRow) -> None:
        """Record the end in `row`, and submit the session for its group. On OutputError the session stays open."""
        assert row.ending is not None
        self._log_without_lesson(session, row.ending)
        await self._journal.run(lambda: self._journal.close_session(row))
        self._sessions.remove(session)
        self.changes.tell(row)
        self._writer.submit(Closed(row, session.tree, session.judged, session.feedback, session.grouped))

    def _log_without_lesson(self, session: OpenSession, ending: Ending) -> None:
        """Say in the log, once, why no turn of a session is learned from: all are altered, or none has a reply."""
        tree, side = session.tree, session.tree.side_turns()
        turns = [turn for turn_id, turn in tree.turns.items() if turn_id not in side]
        if not turns:
            return
        if all(turn.altered for turn in turns) and not self.config.learn_from_altered_sampling:
            names = {name for turn in turns for name in turn.altered}
            ignored("sampled with", names, _ALL_ALTERED)
        elif self.config.opd_enabled and not (ending.feedback or session.feedback):
            first = turns[:_MOST_LOOKED_AT]  # The rest of a long session is not worth the time.
            if not any(reply_to(tree, turn) for turn in first):
                ignored("sessions", ["no_next_state"], _NO_NEXT_STATE)

    async def _close_idle(self) -> None:
        idle_s, cleaned = self.config.session_idle_s, 0.0
        while True:
            await asyncio.sleep(min(5.0, idle_s / 4))
            if time.monotonic() - cleaned > _CLEANING_S:
                cleaned = time.monotonic()
                await self._remove_old()
            await self._close_older(idle_s)

    async def _close_older(self, idle_s: float) -> None:
        """Close the sessions that were used last more than `idle_s` seconds ago."""
        for session in self._sessions:
            is_idle = session.is_free and time.monotonic() - session.used > idle_s
            if is_idle and not self._sessions.under(session):  # It waits for its sub-agents.
                try:
                    await self._close(session, StopReason.IDLE)
                except OutputError as error:
                    logger.error("an idle session stays open: %s", error)

    async def _remove_old(self) -> None:
        days = self.config.keep_sessions_days
        if days is not None:
            # A clock that was set forward meanwhile makes no session older.
            now = min(time.time(), self._began[0] + time.monotonic() - self._began[1])
            before = now - days * 86400
            try:
                await self._journal.run(
                    lambda: self._journal.delete_older(before, SessionState.WRITTEN, SessionState.EMPTY)
                )
            except OutputError as error:
                logger.error("old sessions stay in the journal: %s", error)


def _unknown_answer(answer_id: str) -> ClientError:
    return ClientError(404, f"there is no answer {answer_id[:80]!r}", "response_id", "response_not_found")


def _group_made() -> ClientError:
    message = (
        "the group of this turn is made, or its session has ended with nothing to learn from: feedback changes nothing "
        "now"
    )
    return ClientError(409, message, "turn", "group_made")


def _busy_session() -> ClientError:
    message = "the session is being ended, or its group is being made: delete it when its state is written"
    return ClientError(409, message, "session_id", "session_busy")


def check_adapters(servers: Sequence[PluginClient]) -> None:
    """Refuse servers that take no adapters, with ServerMismatchError: a learner has one."""
    if without := [server.url for server in servers if not server.info.max_adapters]:
        raise ServerMismatchError(
            f"learners need adapters, and {' and '.join(without)} accepts none: start it with scripts/serve_vllm "
            "--max-lora-rank N"
        )


async def _connected(http: JsonClient, tokenizer: Any, images: ImageFolder) -> PluginClient:
    """Check a server; raises ServerMismatchError if its plugin or its tokenizer does not match."""
    server = await PluginClient.connected(http, images)
    server.check_streams()
    await server.check_tokenizer(tokenizer)
    return server
