"""Programs that hold the conversations of episodes, as they are: the policy behind a Unix socket, a key for each (I/O).

    program in its sandbox -> 127.0.0.1 -> the socket -> its capture -> the policy's server

What a program asks becomes a session, as with the gateway; of its branches the one with most sampled tokens that can be
learned from is the episode. The environment decides how is sampled: a request's `temperature`, `top_p` and `seed` do
not count, nor what it calls the model. A turn changed what is judged if the files were others at the next request.
"""

import asyncio
import secrets
import socket
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fastapi import Request
from renderers import Renderer

from agentic_opd.core.errors import AgentError, ConfigError, ServerError
from agentic_opd.core.types import Episode, ProgramRun, StopReason, Task, World
from agentic_opd.core.types import Session as WorldSession
from agentic_opd.gateway.errors import RefusedError
from agentic_opd.gateway.policy import SamplingServer
from agentic_opd.gateway.request import Asked
from agentic_opd.gateway.sampler import CONTEXT_FULL, Answer, Sampler
from agentic_opd.gateway.serve import WebServer
from agentic_opd.gateway.sessions import Session, Sessions
from agentic_opd.gateway.telemetry import Telemetry
from agentic_opd.gateway.turns import RecordedTurn, branches
from agentic_opd.gateway.web import ChatRoutes, bearer, chat_app, digest_of_key, no_key
from agentic_opd.rollout.config import RolloutConfig
from agentic_opd.rollout.loop import verified
from agentic_opd.sandboxes.folders import PrivateFolder
from agentic_opd.sandboxes.program import SOCKET_NAME, Program, socket_mount
from agentic_opd.sandboxes.protocol import Mount

_SESSION = "episode"
_MAX_BODY_BYTES = 8 * 2**20
_MAX_CHOICES = 16
_OURS = ("temperature", "top_p", "seed")
"""Parameters of a request that the environment decides."""
_ATTEMPTS = 2
"""A program may fail to start; one that never asks anything is not started a third time."""


class ProgramSession(WorldSession, Protocol):
    """One episode's place in a world in which a program can run."""

    async def run_program(self, program: Program) -> ProgramRun:
        """Run a program to its end. Raises SandboxError if the place itself does not work."""
        ...

    async def digest(self) -> str:
        """Stands for everything that is judged; another text if something of it changed."""
        ...


@runtime_checkable
class ProgramWorld(World, Protocol):
    """A world in which programs can run."""

    def program_session(self, task: Task, mounts: Sequence[Mount]) -> AbstractAsyncContextManager[ProgramSession]:
        """As `session`; `mounts` are what is seen of this machine besides."""
        ...


@dataclass(slots=True, eq=False)
class _Capture:
    """What one program has asked so far."""

    session: Session
    key: str
    sampling: Mapping[str, float]
    """What the environment decides of it, as vLLM names it."""
    learn_from_altered: bool
    """Turns that a request's own parameters drew from another distribution are part of the episode too."""
    requests: int = 0
    refused: StopReason | None = None
    """Why it got no further answer."""
    failure: ServerError | None = None
    """Why its last request was not answered, if that was the policy's server's fault."""
    changing: set[int] = field(default_factory=set[int])
    """Turns after which the files were others than before."""
    _digest: str | None = None
    _since: list[int] = field(default_factory=list[int])
    """Turns that were finished since the files were looked at."""

    def saw(self, digest: str | None) -> None:
        """The files were looked at; None: they were not, for the program asked past its forwarder."""
        if digest is None:
            return
        if self._digest not in (None, digest):
            self.changing.update(self._since)
        self._digest = digest
        self._since.clear()

    def finished(self, turn_id: int) -> None:
        """A turn was finished."""
        self._since.append(turn_id)

    def asked(self, asked: Asked, max_tokens: int) -> Asked:
        """The request as the environment has it sampled, `max_tokens` long at most."""
        rest = {name: value for name, value in asked.sampling.items() if name not in _OURS}
        most = min(asked.max_tokens or max_tokens, max_tokens)
        return replace(asked, sampling={**rest, **self.sampling}, max_tokens=most, session=_SESSION, group=None)

    def episode(self, task: Task, stop: StopReason, run: ProgramRun | None = None) -> Episode | None:
        """The sequence with most to learn from as an episode; None if there is nothing."""
        turns = self.session.tree.turns
        found = branches(
            self.session.tree, task.task_id, stop, learn_from_altered=self.learn_from_altered, is_one_taken=True
        )
        if not found:
            return None

        def size(turn_ids: Iterable[int]) -> int:
            return sum(len(turns[turn_id].completion.token_ids) for turn_id in turn_ids)

        best = max(found, key=lambda branch: size(branch.turn_ids))
        others = [left for branch in found if (left := {*branch.turn_ids} - {*best.turn_ids})]
        changes = [frozenset((0,) if turn in self.changing else ()) for turn in best.turn_ids]
        left_out = {"other_sequences": len(others), "other_tokens": size(set[int]().union(*others))}
        return replace(
            best.episode,
            task=task,
            changes=tuple(changes) if self._digest is not None else (),
            tool_calls=1,
            tool_errors=int(stop is not StopReason.FINISHED),
            program=run and replace(run, **left_out),
        )


class Programs:
    """Runs programs on tasks, each before a capture of its own. `start` makes one that is ready."""

    def __init__(
        self,
        config: RolloutConfig,
        world: World,
        servers: Sequence[SamplingServer],
        renderer: Renderer,
        tokenizer: Any,
    ) -> None:
        """Prepare.

        Args:
            config: The settings of the rollouts; `agent_command` is given.
            world: Where programs run, and who verifies what they leave behind.
            servers: The policy's.
            renderer: Writes the conversations.
            tokenizer: The policy's.

        Raises:
            ConfigError: no program can run in the world.
            ServerMismatchError: a server can't stream.
        """
        if not isinstance(world, ProgramWorld):
            raise ConfigError(f"{type(world).__name__} has no program_session, so env.agent_command can't run in it")
        for server in servers:
            server.check()
        assert config.agent_command is not None
        self.model, self.tokenizer, self.telemetry = servers[0].info.model, tokenizer, Telemetry()
        self._config, self._command, self._world = config, config.agent_command, world
        self._servers = {server.url: server for server in servers}
        self._sessions = Sessions(max_open=2**30)
        self._sampler = Sampler(renderer, tokenizer, self.telemetry, self._keep)
        self._captures: dict[str, _Capture] = {}
        self._folder = PrivateFolder()
        routes = ChatRoutes(self, self._owner, max_body_bytes=_MAX_BODY_BYTES, max_choices=_MAX_CHOICES)
        self._server = WebServer(chat_app(routes, ""))
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            SandboxError: the temporary directory refuses a socket.
        """
        listeners: list[socket.socket] = []

        def listen(folder: Path) -> None:
            # Sandboxes see the inner folder as users of their own; the outer one keeps this machine's others out.
            (folder / "door").mkdir(mode=0o755)
            listener = socket.socket(socket.AF_UNIX)
            listeners.append(listener)
            path = folder / "door" / SOCKET_NAME
            listener.bind(str(path))
            path.chmod(0o666)
            listener.listen(1024)

        await self._folder.make(listen)
        self._serving = asyncio.create_task(self._server.serve(listeners))

    async def close(self) -> None:
        """Stop listening."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        self._sampler.close()
        await self._folder.remove()

    async def run_episode(
        self, task: Task, server_url: str, *, temperature: float, learn_from_altered: bool = False
    ) -> Episode:
        """Run the program on `task`, verify what it left behind, and reward it.

        Its one "tool call" is the program itself: it worked if the program ended by itself with exit code 0.

        Args:
            task: What is to be done.
            server_url: Which of the servers samples its turns.
            temperature: How they are sampled, with the settings' `top_p`.
            learn_from_altered: Take turns too that the program had sampled from a changed distribution.

        Returns:
            A verified and rewarded episode, or one whose `error` says how the policy server failed.

        Raises:
            AgentError: nothing that it did can be learned from.
            SandboxError: the world itself does not work, which a fresh session has shown.
        """
        mounts = [socket_mount(self._folder.path / "door")]
        mounts += [Mount(path.absolute(), str(path.absolute())) for path in self._config.agent_mounts]
        sampling, world = {"temperature": temperature, "top_p": self._config.top_p}, self._world
        attempt = 0
        while True:
            attempt += 1
            with self._capture(server_url, sampling, learn_from_altered) as capture:
                rollout = _ProgramRollout(task, capture, self._program(task, capture.key))
                try:
                    return await verified(task, rollout, world.program_session(task, mounts), world, self._config)
                except AgentError:
                    if capture.requests or attempt == _ATTEMPTS:
                        raise

    async def answer(self, asked: Asked, owner: str) -> Answer:
        """Answer a program's request; see `Gateway.answer`.

        Raises:
            RefusedError: it can't be answered, or the episode has had its turns.
            ServerError: the policy's server did not do its part.
        """
        capture, config = self._captures.get(owner), self._config
        if capture is None:
            raise RefusedError(409, "the episode is over", code="session_ended")
        if capture.requests >= config.max_turns:
            capture.refused = StopReason.MAX_TURNS
            message = f"this episode has had its {config.max_turns} turns (env.max_turns)"
            raise RefusedError(403, message, code="max_turns")
        capture.requests += 1
        asked, session = capture.asked(asked, config.max_tokens_per_turn), capture.session
        server = self._servers[session.row.server]
        context = min(server.info.max_model_len, config.max_token_length)
        session.begin()
        try:
            self._sampler.check_size(asked, context)
            talk, path = await self._sampler.prompted(self._sessions.place(owner, asked), asked)
            events = self._sampler.sampled(asked, session, server, talk, path, context=context)
            async with aclosing(events):
                async for event in events:
                    yield event
            capture.failure = None
        except RefusedError as error:
            if error.code == CONTEXT_FULL:
                capture.refused = StopReason.CONTEXT_FULL
            raise
        except ServerError as error:
            capture.failure = error
            raise
        finally:
            session.end(time.time())

    async def _keep(self, session: Session, turn: RecordedTurn) -> None:
        altered = tuple(name for name in turn.altered if name not in _OURS)
        self._sessions.add(session, replace(turn, altered=altered))
        self._captures[session.row.owner].finished(turn.turn_id)

    async def _owner(self, request: Request) -> str:
        """Whose request it is, by its key; what it says of the files is noted.

        Raises:
            RefusedError: 401, it is nobody's.
        """
        owner = digest_of_key(bearer(request))
        capture = self._captures.get(owner)
        if capture is None:
            raise await no_key(request)
        capture.saw(request.headers.get("X-Workspace"))
        return owner

    @contextmanager
    def _capture(self, server_url: str, sampling: Mapping[str, float], learn_from_altered: bool) -> Generator[_Capture]:
        key = secrets.token_urlsafe(32)
        owner = digest_of_key(key)
        session = self._sessions.open(owner, _SESSION, server_url, time.time())
        self._captures[owner] = _Capture(session, key, sampling, learn_from_altered)
        try:
            yield self._captures[owner]
        finally:
            self._sessions.remove(session)
            del self._captures[owner]

    def _program(self, task: Task, key: str) -> Program:
        config = self._config
        return Program(self._command, task.prompt, key, self.model, config.agent_timeout_s, config.agent_variables)


@dataclass(frozen=True, slots=True)
class _ProgramRollout:
    """A program as a `rollout.loop.Rollout`."""

    task: Task
    capture: _Capture
    program: Program

    async def run(self, session: ProgramSession) -> Episode:
        """Run the program, and take what it asked as the episode.

        Raises:
            AgentError: there is nothing to take.
        """
        capture = self.capture
        run = await session.run_program(self.program)
        await capture.session.quiet.wait()
        capture.saw(await session.digest())
        if capture.failure is not None:
            return Episode(self.task, (), (), (), (), (), StopReason.SERVER_ERROR, error=capture.failure)
        episode = capture.episode(self.task, _stop_of(run, capture.refused), run)
        if episode is None:
            asked = f"{capture.requests} requests" if capture.requests else "no request"
            how = f"stopped for its {run.stopped} limit" if run.stopped else f"exit code {run.exit_code}"
            raise AgentError(
                f"env.agent_command made {asked} on task {self.task.task_id!r}, of which nothing can be learned "
                f"({how}). It printed: {run.output[-1000:]!r}"
            )
        return episode

    def so_far(self, stop: StopReason) -> Episode | None:
        """See `Rollout.so_far`."""
        return self.capture.episode(self.task, stop)


def _stop_of(run: ProgramRun, refused: StopReason | None) -> StopReason:
    """Why the episode ended; what was refused is why the program ended as it did."""
    if refused is not None:
        return refused
    if run.stopped == "time":
        return StopReason.AGENT_TIMEOUT
    return StopReason.FINISHED if run.stopped is None and run.exit_code == 0 else StopReason.AGENT_FAILED
