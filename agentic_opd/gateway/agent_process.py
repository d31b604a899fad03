"""Episodes of unmodified agent programs, which reach the policy through a Unix socket with a key each (I/O).

    program in its sandbox -> 127.0.0.1 -> the socket -> its capture -> the policy's server

The requests of a program form a session, as in the gateway. Commands written by the policy run in the same sandbox,
have the same key and may send requests too. The episode therefore starts with a request sent before the policy's first
answer. Of the session's branches with such a start, the one with the most learnable turns (then tokens) is the episode.
All requests count, in `max_turns` and in the reward. The environment sets `temperature`, `top_p` and `seed`; the
request's values and its model name are ignored.

At each request the judged files are read from outside of the sandbox's processes. A difference is attributed to the
last turn of the episode before the reading.
"""

import asyncio
import contextlib
import secrets
import socket
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from renderers import Renderer
from starlette.requests import Request as HttpRequest

from agentic_opd.core.errors import AgentError, ConfigError, SandboxError, ServerError
from agentic_opd.core.types import Episode, Message, ProgramRun, StopReason, Task, World, WorldSession
from agentic_opd.gateway.errors import ClientError
from agentic_opd.gateway.exchange import Answer, Exchange, ServerLimits
from agentic_opd.gateway.journal import SessionRow
from agentic_opd.gateway.keys import bearer, digest_of_key, no_key
from agentic_opd.gateway.request import Request, prompt_key
from agentic_opd.gateway.sampler import CONTEXT_FULL, Prompted, Sampler
from agentic_opd.gateway.serve import WebServer
from agentic_opd.gateway.sessions import OpenSession, Placed, Sessions
from agentic_opd.gateway.telemetry import Telemetry
from agentic_opd.gateway.turns import RecordedTurn, branches
from agentic_opd.gateway.web import ChatRoutes, chat_app
from agentic_opd.plugin.client import PluginClient
from agentic_opd.rollout.config import RolloutConfig
from agentic_opd.rollout.conversation_index import identity
from agentic_opd.rollout.loop import verified
from agentic_opd.sandboxes.folders import PrivateFolder
from agentic_opd.sandboxes.program import SOCKET_NAME, Program, socket_mount
from agentic_opd.sandboxes.protocol import Mount
from agentic_opd.worlds.authors import Authors

_SESSION = "episode"
_MAX_BODY_BYTES = 8 * 2**20
_MAX_CHOICES = 16
_ATTEMPTS = 2
"""Maximum number of starts: a program that ends without any request is started once more."""


class ProgramSession(WorldSession, Protocol):
    """The session of one episode in a world that can run programs."""

    async def run_program(self, program: Program) -> ProgramRun:
        """Run a program to its end. Raises SandboxError if the sandbox itself fails."""
        ...

    async def judged_files(self) -> Mapping[str, bytes]:
        """Return the judged files in their current state; the program may be running."""
        ...


@runtime_checkable
class ProgramWorld(World, Protocol):
    """A world that can run programs."""

    @property
    def runs_programs(self) -> bool:
        """Whether its verdict is about a sandbox's files, so that a program has something to act on."""
        ...

    def program_session(self, task: Task, mounts: Sequence[Mount]) -> AbstractAsyncContextManager[ProgramSession]:
        """Open a session as `session` does; `mounts` are additional paths of this machine that the program sees."""
        ...


class _Files:
    """Attribution of changes of the judged files to the turns of a program."""

    def __init__(self, task: Task) -> None:
        self._authors = Authors(task.prompt)
        self._session: ProgramSession | None = None
        self._lock = asyncio.Lock()
        self._turns_before: list[int] = []
        """For each change, the id of the last turn finished before it was seen; 0: no turn."""

    async def begin(self, session: ProgramSession) -> None:
        """Read the files before the program starts; later differences count as changes."""
        self._authors.set_baseline(await session.judged_files())
        self._session = session

    async def look(self, last_turn: int) -> None:
        """Read the files, and record a difference as made after `last_turn` (0 before the first turn)."""
        if self._session is None:
            return
        async with self._lock:
            files = await self._session.judged_files()
            if await asyncio.to_thread(self._authors.changed, files):
                self._turns_before.append(last_turn)

    def changes_of(self, turn_ids: Sequence[int], line: Collection[int]) -> tuple[list[int], frozenset[int] | None]:
        """Return the turns that changed the files, and which of these changes are still in the files.

        Returns:
            Turn ids, and `Verification.made_by` (indices into these ids); None without a change.
        """
        authors = [max((turn for turn in line if turn <= before), default=0) for before in self._turns_before]
        changing = [turn for turn in turn_ids if turn in authors]
        left = {authors[change] for change in self._authors.left()}
        indices = frozenset(index for index, turn in enumerate(changing) if turn in left)
        return changing, indices if changing else None


@dataclass(slots=True, eq=False)
class _Capture:
    """The requests of one program so far."""

    sampler: Sampler
    limits: ServerLimits
    key: str
    server_url: str
    learn_from_altered: bool
    """Whether to learn also from turns whose request changed the sampling distribution."""
    files: _Files
    max_turns: int
    """Maximum number of requests."""
    session: OpenSession = field(init=False)
    exchange: Exchange = field(init=False)
    requests: int = 0
    refused: StopReason | None = None
    """The limit that a refused request exceeded; None: no request exceeded a limit."""
    failure: ServerError | None = None
    """The policy server's error in the last request; None without one."""
    last_turn: int = 0
    """Id of the turn finished last; 0 before the first."""
    made_by: frozenset[int] | None = None
    """Of the last built episode; see `Verification.made_by`."""
    _roots: set[int] = field(default_factory=set[int])
    """Ids of the first turns of the sequences that may become the episode."""
    _rooted: Counter[bytes] = field(default_factory=Counter[bytes])
    """Remaining number of answers that belong to `_roots`, by their prompt."""

    def __post_init__(self) -> None:
        sessions = Sessions([self.server_url], max_open=1)
        self.session = sessions.open(digest_of_key(self.key), _SESSION)
        self.exchange = Exchange(sessions, self.sampler, self.limits, self._keep)

    async def answer(self, request: Request, owner: str) -> Answer:
        """Answer a request, and count it for the episode.

        Raises:
            ClientError: the request can't be answered, or the episode has used up its turns.
            ServerError: the policy's server failed.
        """
        if self.requests >= self.max_turns:
            self.refused = StopReason.MAX_TURNS
            message = f"this episode has had its {self.max_turns} turns (env.max_turns)"
            raise ClientError(403, message, code="max_turns")
        try:
            async with aclosing(self.exchange.answer(request, owner)) as stages:
                async for stage in stages:
                    if isinstance(stage, Placed):
                        self._count(request, stage)
                        with contextlib.suppress(SandboxError):  # `run_program` raises the same error.
                            await self.files.look(self.last_turn)
                    elif not isinstance(stage, Prompted):
                        yield stage
            self.failure = None
        except ClientError as error:
            if error.code == CONTEXT_FULL:
                self.refused = StopReason.CONTEXT_FULL
            raise
        except ServerError as error:
            self.failure = error
            raise

    def _count(self, request: Request, placed: Placed) -> None:
        """Count a request; its answers may begin the episode if no answer has ended or it continues such an answer."""
        self.requests += 1
        if not self.last_turn or (placed.path and placed.path[0].turn_id in self._roots):
            self._rooted[_prompt(placed.chat.tools, placed.chat.messages)] += request.sampling.n

    async def _keep(self, row: SessionRow, turn: RecordedTurn) -> None:
        if turn.parent is None and self._rooted[prompt := _prompt(turn.tools, turn.messages[:-1])]:
            self._rooted[prompt] -= 1
            self._roots.add(turn.turn_id)
        self.last_turn = turn.turn_id

    def episode(self, task: Task, stop: StopReason, run: ProgramRun | None = None) -> Episode | None:
        """Return the sequence with the most learnable turns as an episode; None if there is nothing to learn from."""
        tree, turns = self.session.tree, self.session.tree.turns
        all_branches = branches(tree, learn_from_altered=self.learn_from_altered, is_one_taken=True)
        rooted = [branch for branch in all_branches if tree.path(branch.turn_ids[0])[0].turn_id in self._roots]
        if not rooted:
            return None

        def size(turn_ids: Iterable[int]) -> int:
            return sum(len(turns[turn_id].completion.token_ids) for turn_id in turn_ids)

        best = max(rooted, key=lambda branch: (len(branch.turn_ids), size(branch.turn_ids)))
        left_out_turns = [left for branch in all_branches if (left := {*branch.turn_ids} - {*best.turn_ids})]
        left_out = {"other_sequences": len(left_out_turns), "other_tokens": size(set[int]().union(*left_out_turns))}
        paths = [{turn.turn_id for turn in tree.path(leaf.turn_id)} for leaf in tree.leaves()]
        line = set[int]().union(*(path for path in paths if best.turn_ids[-1] in path))
        changing, self.made_by = self.files.changes_of(best.turn_ids, line)
        return Episode(
            task=task,
            traces=(best.trace,),
            stop_reason=stop,
            changes=tuple(frozenset((0,) if turn in changing else ()) for turn in best.turn_ids),
            tool_calls=1,
            tool_errors=int(stop is not StopReason.FINISHED),
            requests=self.requests,
            program=run and replace(run, **left_out),
        )


def _prompt(tools: Sequence[dict[str, Any]], messages: Sequence[Message]) -> bytes:
    return prompt_key(tools, {}) + b"".join(map(identity, messages))


class AgentProcess:
    """Runs `agent.command` on tasks and captures the requests of each run. Call `start` before the first episode."""

    def __init__(
        self,
        config: RolloutConfig,
        world: World,
        servers: Sequence[PluginClient],
        renderer: Renderer,
        tokenizer: Any,
    ) -> None:
        """Check the world and the servers, and build the web application.

        Raises:
            ConfigError: the world can't run programs.
            ServerMismatchError: a server can't stream.
        """
        if not isinstance(world, ProgramWorld) or not world.runs_programs:
            raise ConfigError(
                f"{type(world).__name__} has no sandbox for env.agent.command: no hook of the world has a parameter "
                "`sandbox` or `files`"
            )
        for server in servers:
            server.check_streams()
        assert config.agent.command is not None
        self.model, self.tokenizer, self.telemetry = servers[0].info.model, tokenizer, Telemetry()
        self._config, self._world = config, world
        self._sampler = Sampler(servers, renderer, tokenizer, self.telemetry)
        self._captures: dict[str, _Capture] = {}
        self._folder = PrivateFolder()
        routes = ChatRoutes(self, self._owner, max_body_bytes=_MAX_BODY_BYTES, max_choices=_MAX_CHOICES)
        self._server = WebServer(chat_app(routes, ""))
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        listeners: list[socket.socket] = []

        def listen(folder: Path) -> None:
            # Sandboxes open the inner folder under other user ids; the outer one keeps other users of this machine out.
            (folder / "socket").mkdir(mode=0o755)
            listener = socket.socket(socket.AF_UNIX)
            listeners.append(listener)
            path = folder / "socket" / SOCKET_NAME
            listener.bind(str(path))
            path.chmod(0o666)
            listener.listen(1024)

        await self._folder.make(listen)
        self._serving = asyncio.create_task(self._server.serve(listeners))

    async def close(self) -> None:
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        self._sampler.close()
        await self._folder.remove()

    async def run_episode(
        self, task: Task, server_url: str, *, temperature: float, learn_from_altered: bool = False
    ) -> Episode:
        """Run the program on `task`, verify the resulting files, and compute the reward.

        The program counts as the only tool call, without error if it ended by itself with exit code 0.

        Returns:
            A verified and rewarded episode, or an unverified one with the policy server's failure in `error`.

        Raises:
            AgentError: the episode holds nothing to learn from.
            SandboxError: the world itself fails, as a fresh session has shown.
        """
        mounts = [socket_mount(self._folder.path / "socket")]
        mounts += [Mount(path.absolute(), str(path.absolute())) for path in self._config.agent.mounts]
        parameters = {"temperature": temperature, "top_p": self._config.top_p, "seed": None}
        limits = ServerLimits(self._config.max_token_length, self._config.max_tokens_per_turn, parameters, _SESSION)
        world, attempt = self._world, 0
        while True:
            attempt += 1
            with self._capture(task, server_url, limits, learn_from_altered) as capture:
                try:
                    run, episode_so_far = partial(self._run, task, capture), partial(capture.episode, task)
                    session = world.program_session(task, mounts)
                    episode = await verified(run, episode_so_far, session, task, world, self._config)
                    if episode.verification is None:
                        return episode
                    return replace(episode, verification=replace(episode.verification, made_by=capture.made_by))
                except AgentError:
                    if capture.requests or attempt == _ATTEMPTS:
                        raise

    async def answer(self, request: Request, owner: str) -> Answer:
        """Answer a program's request; see `_Capture.answer`."""
        async with aclosing(self._capture_of(owner).answer(request, owner)) as events:
            async for event in events:
                yield event

    async def count(self, request: Request, owner: str) -> int:
        return await self._capture_of(owner).exchange.count(request, owner)

    def _capture_of(self, owner: str) -> _Capture:
        capture = self._captures.get(owner)
        if capture is None:
            raise ClientError(409, "the episode is over", code="session_ended")
        return capture

    @property
    def max_model_len(self) -> int:
        longest = max(server.info.max_model_len for server in self._sampler.servers.values())
        return min(longest, self._config.max_token_length)

    async def _owner(self, http: HttpRequest) -> str:
        """Return the digest of the request's key, which identifies its episode."""
        owner = digest_of_key(bearer(http))
        if owner not in self._captures:
            raise await no_key(http, bearer(http))
        return owner

    @contextmanager
    def _capture(
        self, task: Task, server_url: str, limits: ServerLimits, learn_from_altered: bool
    ) -> Generator[_Capture]:
        key, max_turns = secrets.token_urlsafe(32), int(task.limits.get("max_turns", self._config.max_turns))
        capture = _Capture(self._sampler, limits, key, server_url, learn_from_altered, _Files(task), max_turns)
        owner = digest_of_key(key)
        self._captures[owner] = capture
        try:
            yield capture
        finally:
            del self._captures[owner]

    async def _run(self, task: Task, capture: _Capture, session: ProgramSession) -> Episode:
        """Run the program, and build the episode from its requests.

        Raises:
            AgentError: its requests hold nothing to learn from.
        """
        await capture.files.begin(session)
        run = await session.run_program(self._program(task, capture.key))
        await capture.session.quiet.wait()
        await capture.files.look(capture.last_turn)
        if capture.failure is not None:
            return Episode(task, (), StopReason.SERVER_ERROR, error=capture.failure)
        episode = capture.episode(task, _stop_of(run, capture.refused), run)
        if episode is None:
            count = f"{capture.requests} requests" if capture.requests else "no request"
            how = f"stopped for its {run.stopped} limit" if run.stopped else f"exit code {run.exit_code}"
            raise AgentError(
                f"env.agent.command made {count} on task {task.task_id!r}, without a turn to learn from ({how}). "
                f"It printed: {run.output[-1000:]!r}"
            )
        return episode

    def _program(self, task: Task, key: str) -> Program:
        config = self._config.model_copy(update=dict(task.limits))
        assert config.agent.command is not None
        return Program(
            config.agent.command,
            task.prompt,
            key,
            self.model,
            config.agent.timeout_s,
            config.agent.variables,
            pythons=[str(path.absolute() / "bin" / "python3") for path in config.agent.mounts],
        )


def _stop_of(run: ProgramRun, refused: StopReason | None) -> StopReason:
    """Return why the episode ended; a refused request takes precedence, because the program ended in reaction to it."""
    if refused is not None:
        return refused
    if run.stopped == "time":
        return StopReason.AGENT_TIMEOUT
    return StopReason.FINISHED if run.stopped is None and run.exit_code == 0 else StopReason.AGENT_FAILED
