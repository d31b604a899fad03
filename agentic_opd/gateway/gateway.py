"""The gateway: client requests -> sampled turns of sessions, each journaled before its answer ends (I/O)."""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any

from pydantic import SecretStr
from renderers import Renderer

from agentic_opd.atropos.api import EnvDescription
from agentic_opd.core.concurrency import to_its_end
from agentic_opd.core.errors import OutputError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.types import StopReason
from agentic_opd.distill.connect import PolicyEndpoint
from agentic_opd.distill.distiller import Distiller
from agentic_opd.gateway.config import GatewayConfig
from agentic_opd.gateway.delivery import Delivery
from agentic_opd.gateway.errors import RefusedError
from agentic_opd.gateway.groups import Closed, GroupWriter
from agentic_opd.gateway.journal import Ending, Journal, SessionRow, SessionState
from agentic_opd.gateway.request import Asked
from agentic_opd.gateway.sampler import Answer, Sampler
from agentic_opd.gateway.sessions import Session, Sessions
from agentic_opd.gateway.telemetry import Telemetry
from agentic_opd.gateway.turns import RecordedTurn
from agentic_opd.plugin.client import PluginClient
from agentic_opd.rollout.renderer import configured_renderer, load_policy_tokenizer
from agentic_opd.settings.atropos import PolicyServerConfig
from agentic_opd.settings.fields import line_settings
from agentic_opd.wire.files import GroupFile

logger = logging.getLogger(__name__)

_CLEANING_S = 600.0
"""Minimum seconds between two removals of expired sessions from the journal."""


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """The status of a session, as shown to its client."""

    session_id: str
    name: str | None
    state: SessionState
    turns: int


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
    ) -> None:
        """Restore the open and the closed sessions from the journal, and start closing idle sessions."""
        self.config, self.tokenizer, self.telemetry = config, tokenizer, telemetry
        self.model = servers[0].info.model
        self._servers = {server.url: server for server in servers}
        self._journal, self._writer = journal, writer
        self._sessions = Sessions(config.max_open_sessions)
        self._sampler = Sampler(renderer, tokenizer, telemetry, self._keep, journal.last_turn_id() + 1)
        for row in map(self._with_server, journal.sessions(SessionState.OPEN)):
            self._sessions.restore(row, journal.turns(row.session_id))
        writer.restore(map(self._with_server, journal.sessions(SessionState.CLOSED)))
        self._idle = asyncio.create_task(self._close_idle())
        self._undo = AsyncExitStack()
        self._show_open()

    @classmethod
    async def start(cls, config: GatewayConfig, servers: Sequence[PolicyServerConfig]) -> "Gateway":
        """Connect to all servers, and detect before the first request errors that would fail every request.

        Raises:
            ConfigError, OutputError, RendererError, ServerError: a requirement is not met; the message names the fix.
        """
        async with AsyncExitStack() as undo:
            clients = [
                JsonClient(one.base_url or "", one.api_key or None, float(one.timeout), config.server_retry_s)
                for one in servers
            ]
            for client in clients:
                undo.push_async_callback(client.close)
            names = (config.tokenizer_name, servers[0].tokenizer_name, servers[0].model_name)
            tokenizer = await load_policy_tokenizer(names, clients[0])
            renderer = configured_renderer(tokenizer, config)
            connected = [await _connected(client, tokenizer) for client in clients]
            distiller = None
            if config.opd_enabled:
                context = min(server.info.max_model_len for server in connected)
                distiller = Distiller(config, max_token_length=context, retry_s=config.server_retry_s)
                distiller.check_kinds(())
                undo.push_async_callback(distiller.close)
                for server in connected:
                    key = SecretStr(server.http.api_key) if server.http.api_key else None
                    policy = PolicyEndpoint(server.url, server.info.model, key)
                    server.check_caps(vocab_size=len(tokenizer), top_k=distiller.policy_top_k)
                    await distiller.connect(policy, renderer, tokenizer)
            settings = {**line_settings(config), "policy_model": connected[0].info.model}
            file = GroupFile(config.data_path_to_save_groups, settings, resume=True)
            undo.callback(file.close)
            journal = Journal(config.journal)
            undo.callback(journal.close)
            telemetry = Telemetry()
            delivery = None
            if config.rollout_server_url is not None:
                env = EnvDescription(
                    "gateway",
                    max_token_length=min(server.info.max_model_len for server in connected),
                    weight=1.0,
                    group_size=config.group_size,
                    min_batch_allocation=None,
                )
                delivery = Delivery(config.rollout_server_url, env, journal, telemetry)
                undo.push_async_callback(delivery.close)
            writer = GroupWriter(config, distiller, file, journal, telemetry, delivery)
            undo.push_async_callback(writer.close)
            gateway = cls(config, connected, renderer, tokenizer, journal, writer, telemetry)
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

    async def answer(self, asked: Asked, owner: str) -> Answer:
        """Answer a request: yield `Begun`, then the choices' pieces as they are sampled, each choice's `Finished` last.

        A choice's turn is in the journal before its `Finished` is yielded. Closing the generator stops the sampling.

        Args:
            asked: The request.
            owner: Digest of the client's key.

        Raises:
            RefusedError: the request can't be answered; the message says why.
            OutputError, ServerError: the disk or the policy's server failed.
        """
        if asked.model is not None and asked.model != self.model:
            raise RefusedError(
                404,
                f"the model {asked.model[:200]!r} is not served here; {self.model!r} is",
                "model",
                "model_not_found",
            )
        self._sampler.check_size(asked, max(server.info.max_model_len for server in self._servers.values()))
        place = self._sessions.place(owner, asked)
        session = place.session
        self._check_group(asked.group, session)
        if session is not None and session.is_ending:
            raise RefusedError(409, "the session is being ended", "session_id", "session_ended")
        if session is None:
            least = min(self._servers, key=self._load_of)
            session = self._sessions.open(owner, asked.session, least, time.time(), asked.group)
        session.begin()
        self._show_open()
        is_whole = False
        try:
            talk, path = await self._sampler.prompted(place, asked)
            if place.is_rewritten or (place.path and not path):
                self.telemetry.rewritten.inc()
            if path and asked.turn_type == "main" and path[-1].turn_id not in session.judged:
                judging = self._writer.judge(session.row, path, place.new)
                if judging is not None:
                    session.judged[path[-1].turn_id] = judging
            server = self._servers[session.row.server]
            answer = self._sampler.sampled(asked, session, server, talk, path, context=server.info.max_model_len)
            async with aclosing(answer) as events:
                async for event in events:
                    yield event
            is_whole = True
        finally:
            session.end(time.time())
            if is_whole and asked.is_last and not session.is_ending:
                await self._close(session, StopReason.CLOSED)
            elif not session.tree.turns and session.is_free:
                self._sessions.remove(session)
            self._show_open()

    def _check_group(self, group: str | None, session: Session | None) -> None:
        """Refuse a group name that the session can't belong to, with a RefusedError."""
        if group is None:
            return
        if self.config.group_size == 1:
            raise RefusedError(
                400, "sessions form no groups here: env.group_size of the gateway is 1", "X-Group-Id", "no_groups"
            )
        if session is not None and session.row.group_name != group:
            raise RefusedError(409, "the session was opened in another group, or in none", "X-Group-Id")

    async def _keep(self, session: Session, turn: RecordedTurn) -> None:
        """Add a turn to the journal, then to its session."""
        await self._journal.add_turn(session.row, turn)
        self._sessions.add(session, turn)

    def _with_server(self, row: SessionRow) -> SessionRow:
        """Return the session, moved to another server if its own is no longer in the settings."""
        return row if row.server in self._servers else replace(row, server=min(self._servers, key=self._load_of))

    def _load_of(self, url: str) -> int:
        return sum(session.row.server == url for session in self._sessions)

    # ----------------------------------------------------------------------------------------------------- sessions

    async def end(
        self, owner: str, name: str, reward: float | None = None, feedback: str | None = None
    ) -> SessionStatus:
        """End a session after its pending answers.

        Args:
            owner: Digest of the client's key.
            name: The client's name of the session, or its id.
            reward: The client's reward of the session; None: not given.
            feedback: The client's final feedback, which is the next state of the last learnable turn.

        Raises:
            RefusedError: 404, this client has no open session of this name.
            OutputError: the end could not be written to the journal; the session stays open.
        """
        session = self._sessions.named(owner, name)
        if session is None or session.is_ending:
            raise _unknown_session()
        turns = await self._close(session, StopReason.CLOSED, reward, feedback)
        return SessionStatus(session.session_id, session.row.name, SessionState.CLOSED, turns)

    async def status(self, owner: str, name: str) -> SessionStatus:
        """Return the status of an open or ended session.

        Raises:
            RefusedError: 404, the journal has no session of this client with this name or id.
        """
        session = self._sessions.named(owner, name)
        if session is not None:
            return SessionStatus(session.session_id, session.row.name, SessionState.OPEN, len(session.tree.turns))
        row = await self._journal.run(lambda: self._journal.latest(owner, name))
        if row is None:
            raise _unknown_session()
        turns = await self._journal.run(lambda: self._journal.count_turns(row.session_id))
        return SessionStatus(row.session_id, row.name, row.state, turns)

    async def _close(
        self, session: Session, stop: StopReason, reward: float | None = None, feedback: str | None = None
    ) -> int:
        """Close a session after its pending answers; returns its number of turns."""
        session.is_ending = True
        ending = Ending(stop, self._writer.join(session.row), reward, feedback)
        try:
            await session.quiet.wait()
            await to_its_end(self._closed(session, ending))
        finally:
            if session in self._sessions:
                session.is_ending = False
                self._writer.leave(session.row, ending.group_id)
        return len(session.tree.turns)

    async def _closed(self, session: Session, ending: Ending) -> None:
        """Record the end, and submit the session for its group. On OutputError the session stays open."""
        row: SessionRow = replace(session.row, state=SessionState.CLOSED, ending=ending)
        await self._journal.run(lambda: self._journal.close_session(row.session_id, ending))
        self._sessions.remove(session)
        self._show_open()
        self._writer.submit(Closed(row, session.tree, session.judged))

    async def _close_idle(self) -> None:
        idle_s, cleaned = self.config.session_idle_s, 0.0
        while True:
            await asyncio.sleep(min(5.0, idle_s / 4))
            if time.monotonic() - cleaned > _CLEANING_S:
                cleaned = time.monotonic()
                await self._remove_old()
            for session in self._sessions:
                if session.is_free and time.time() - session.used > idle_s:
                    try:
                        await self._close(session, StopReason.IDLE)
                    except OutputError as error:
                        logger.error("an idle session stays open: %s", error)

    async def _remove_old(self) -> None:
        days = self.config.keep_sessions_days
        if days is not None:
            before = time.time() - days * 86400
            try:
                await self._journal.run(lambda: self._journal.delete_older(before))
            except OutputError as error:
                logger.error("old sessions stay in the journal: %s", error)

    def _show_open(self) -> None:
        self.telemetry.open.set(len(self._sessions))


def _unknown_session() -> RefusedError:
    return RefusedError(404, "there is no such session", "session_id", "session_not_found")


async def _connected(http: JsonClient, tokenizer: Any) -> PluginClient:
    """Check a server; raises ServerMismatchError if its plugin or its tokenizer does not match."""
    server = await PluginClient.connected(http)
    server.check_streams()
    await server.check_tokenizer(tokenizer)
    return server
