"""The hook `close`: once at each end of an episode, after the verdict, and whatever it does changes no result."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import ConfigError, OPDError, SandboxError, ServerError, WorldError
from agentic_opd.core.types import Episode, StopReason, Task, ToolCall
from agentic_opd.env.config import AgentEnvConfig
from agentic_opd.env.setup import Setup, Status, check_session
from agentic_opd.rollout.config import RolloutConfig
from agentic_opd.rollout.loop import verified
from agentic_opd.runs.config import RunConfig
from agentic_opd.runs.metric_log import RunMetrics
from agentic_opd.sandboxes.program import Program
from agentic_opd.worlds.config import WorldConfig
from agentic_opd.worlds.custom import CustomWorld, HookedSession, HookedWorld, tool

TASK = Task("t", "Do it.")


class Door(CustomWorld):
    """Records its hooks in order; `wait` runs in a thread until it is released."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.is_waiting, self.released = threading.Event(), threading.Event()

    def tasks(self) -> list[Task]:
        return [TASK]

    def start(self, task: Task) -> list[str]:
        self.events.append("start")
        return []

    @tool
    def wait(self, state: list[str]) -> str:
        """Wait in a thread."""
        self.is_waiting.set()
        self.released.wait()
        self.events.append("waited")
        return "waited"

    @tool
    def stumble(self, state: list[str]) -> str:
        """Raise."""
        raise KeyError("step")

    def verify(self, task: Task, state: list[str]) -> float:
        self.events.append("verify")
        return 1.0

    def close(self, state: list[str]) -> None:
        self.events.append("close")


class AsyncDoor(Door):
    """The same with an asynchronous hook."""

    async def close(self, state: list[str]) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self.events.append("close")


class Undecided(Door):
    """Raises in its verification."""

    def verify(self, task: Task, state: list[str]) -> float:
        self.events.append("verify")
        raise ValueError("no verdict")


def call(name: str) -> ToolCall:
    return ToolCall("c", name, {}, "{}")


def episode_of(
    world: HookedWorld, run: Callable[[HookedSession], Awaitable[StopReason]], error: Exception | None = None
) -> Awaitable[Episode]:
    """One episode through the function that the loop and `agent_command` share."""

    async def played(session: HookedSession) -> Episode:
        return Episode(TASK, (), await run(session), error=error)

    return verified(played, lambda stop: None, world.session(TASK), TASK, world, RolloutConfig())


async def silent(session: HookedSession) -> StopReason:
    return StopReason.FINISHED


async def stumbles(session: HookedSession) -> StopReason:
    await session.run_tool(call("stumble"))
    return StopReason.FINISHED


async def loses_its_server(session: HookedSession) -> StopReason:
    return StopReason.SERVER_ERROR


@pytest.mark.parametrize("kind", [Door, AsyncDoor])
@pytest.mark.parametrize(
    ("run", "error", "events"),
    [
        (silent, None, ["start", "verify", "close"]),
        (stumbles, None, ["start", "close"]),
        (loses_its_server, ServerError("down"), ["start", "close"]),
    ],
)
def test_a_state_is_closed_once_after_its_verdict_or_its_failure(
    kind: type[Door], run: Any, error: Exception | None, events: list[str]
) -> None:
    hooks = kind()
    world = HookedWorld(hooks, WorldConfig())
    failed: list[OPDError] = []

    async def ended() -> None:
        try:
            await episode_of(world, run, error)
        except OPDError as raised:
            failed.append(raised)

    asyncio.run(ended())
    assert (hooks.events, len(failed), world.close_failures) == (events, run is stumbles, 0)


def test_a_verdict_that_fails_and_a_state_without_an_episode_are_closed_too() -> None:
    hooks = Undecided()
    with pytest.raises(WorldError, match="verify raised ValueError"):
        asyncio.run(episode_of(HookedWorld(hooks, WorldConfig()), silent))  # type: ignore[arg-type]
    assert hooks.events == ["start", "verify", "close"]
    hooks = Door()
    verdict = asyncio.run(HookedWorld(hooks, WorldConfig()).verify(TASK, None))
    assert (verdict.correctness, hooks.events) == (1.0, ["start", "verify", "close"])


def test_the_state_of_a_dead_sandbox_is_closed_and_the_one_that_is_verified_in_its_place() -> None:
    hooks = Door()
    world = HookedWorld(hooks, WorldConfig())

    async def dies(session: HookedSession) -> Episode:
        raise SandboxError("the sandbox is gone")

    def so_far(stop: StopReason) -> Episode:
        return Episode(TASK, (), stop)

    episode = asyncio.run(verified(dies, so_far, world.session(TASK), TASK, world, RolloutConfig()))
    assert (episode.stop_reason, episode.reward and episode.reward.total) == (StopReason.SANDBOX_DIED, 0.0)
    assert hooks.events == ["start", "close", "start", "verify", "close"]


def test_a_cancelled_episode_is_closed_after_the_tool_that_still_runs() -> None:
    """A simulator that is closed while another thread steps it may end the whole process."""
    hooks = Door()

    async def cancelled() -> None:
        world = HookedWorld(hooks, WorldConfig())

        async def waits(session: HookedSession) -> StopReason:
            await session.run_tool(call("wait"))
            return StopReason.FINISHED

        running = asyncio.ensure_future(episode_of(world, waits))
        await asyncio.to_thread(hooks.is_waiting.wait)
        running.cancel()
        await asyncio.sleep(0)  # Into `close`, which waits for the tool's thread; cancelled again there.
        running.cancel()
        hooks.released.set()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    assert hooks.events == ["start", "waited", "close"]


def test_a_tool_beyond_its_limit_ends_before_the_state_is_closed() -> None:
    hooks = Door()

    async def ended() -> None:
        world = HookedWorld(hooks, WorldConfig(tool_timeout_s=0.05))

        async def waits(session: HookedSession) -> StopReason:
            result = await session.run_tool(call("wait"))
            assert "took longer" in result.content
            world.config = WorldConfig()
            hooks.released.set()
            return StopReason.FINISHED

        await episode_of(world, waits)

    asyncio.run(ended())
    assert sorted(hooks.events) == ["close", "start", "verify", "waited"]
    assert hooks.events[-1] == "close"


def test_a_start_that_is_cancelled_in_its_thread_is_closed() -> None:
    hooks = Door()

    def start(task: Task) -> list[str]:
        hooks.is_waiting.set()
        hooks.released.wait()
        hooks.events.append("start")
        return []

    async def cancelled() -> None:
        hooks.start = start  # type: ignore[method-assign]
        running = asyncio.ensure_future(episode_of(HookedWorld(hooks, WorldConfig()), silent))
        await asyncio.to_thread(hooks.is_waiting.wait)
        running.cancel()
        hooks.released.set()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    assert hooks.events == ["start", "close"]


@pytest.mark.parametrize("error", [KeyError("x"), StopIteration(), SystemExit(3), asyncio.CancelledError()])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_close_that_raises_is_logged_and_counted_and_changes_no_result(
    error: BaseException, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = Door()

    def close(state: list[str]) -> None:
        hooks.events.append("close")
        raise error

    async def close_async(state: list[str]) -> None:
        close(state)

    hooks.close = close_async if is_async else close  # type: ignore[method-assign, assignment]
    world = HookedWorld(hooks, WorldConfig())
    episode = asyncio.run(episode_of(world, silent))  # type: ignore[arg-type]
    assert episode.reward is not None
    assert episode.reward.correctness == 1.0
    assert (hooks.events, world.close_failures) == (["start", "verify", "close"], 1)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "world Door: close " in line
    assert "test_close.py:" in line
    assert "the result of the episode of t is unchanged" in line


@pytest.mark.parametrize("is_async", [False, True])
def test_a_close_that_never_returns_is_given_up(is_async: bool, caplog: pytest.LogCaptureFixture) -> None:
    hooks = Door()

    async def close_async(state: list[str]) -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if hooks.released.is_set():
                    return
                hooks.released.set()

    def close(state: list[str]) -> None:
        hooks.released.wait()

    hooks.close = close_async if is_async else close  # type: ignore[method-assign, assignment]
    world = HookedWorld(hooks, WorldConfig(tool_timeout_s=0.05))
    episode = asyncio.run(episode_of(world, silent))  # type: ignore[arg-type]
    hooks.released.set()
    assert episode.reward is not None
    assert (episode.reward.correctness, world.close_failures) == (1.0, 1)
    assert "close took longer than 0.05 s (env.tool_timeout_s)" in caplog.text


def test_a_cancellation_does_not_interrupt_a_close() -> None:
    hooks = Door()

    async def cancelled() -> None:
        is_closing, may_end = asyncio.Event(), asyncio.Event()

        async def close(state: list[str]) -> None:
            is_closing.set()
            await may_end.wait()
            hooks.events.append("close")

        hooks.close = close  # type: ignore[method-assign, assignment]
        running = asyncio.ensure_future(episode_of(HookedWorld(hooks, WorldConfig()), silent))
        await is_closing.wait()
        running.cancel()
        await asyncio.sleep(0)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    assert hooks.events == ["start", "verify", "close"]


def test_a_synchronous_wrapper_of_an_async_close_is_awaited() -> None:
    hooks = AsyncDoor()
    inner = hooks.close
    hooks.close = lambda state: inner(state)  # type: ignore[method-assign, assignment]
    asyncio.run(episode_of(HookedWorld(hooks, WorldConfig()), silent))  # type: ignore[arg-type]
    assert hooks.events == ["start", "verify", "close"]


class Yard(CustomWorld):
    """Closes with the sandbox and its files."""

    def __init__(self) -> None:
        self.closed: list[tuple[dict[str, bytes], str]] = []

    def tasks(self) -> list[Task]:
        return [TASK]

    def verify(self, task: Task, state: Any, files: dict[str, bytes]) -> float:
        return float(files.get("gate") == b"shut\n")

    async def close(self, state: Any, sandbox: Any, files: dict[str, bytes]) -> None:
        self.closed.append((files, (await sandbox.run("cat gate", timeout_s=10)).text))


@pytest.mark.sandbox
def test_a_close_reads_the_sandbox_and_its_files_after_a_program() -> None:
    hooks = Yard()
    world = HookedWorld(hooks, WorldConfig())
    assert world.has_sandbox

    async def run(session: HookedSession) -> Episode:
        program = Program("echo shut > gate", TASK.prompt, "key", "model", 20.0, {})
        ended = await session.run_program(program)
        assert ended.exit_code == 0, ended
        return Episode(TASK, (), StopReason.FINISHED)

    place = world.program_session(TASK, ())
    episode = asyncio.run(verified(run, lambda stop: None, place, TASK, world, RolloutConfig()))
    assert episode.verification is not None
    assert (episode.verification.correctness, hooks.closed) == (1.0, [({"gate": b"shut\n"}, "shut\n")])


def test_doctors_session_check_closes_and_warns_of_a_close_that_fails() -> None:
    hooks = Door()
    setup = Setup(AgentEnvConfig(), (), None, tasks=[TASK])
    setup.world = HookedWorld(hooks, WorldConfig())
    assert asyncio.run(check_session(setup)).status is Status.OK
    assert hooks.events == ["start", "close"]

    def close(state: list[str]) -> None:
        raise OSError("busy")

    hooks.close = close  # type: ignore[method-assign]
    note = asyncio.run(check_session(setup))
    assert note.status is Status.WARNING
    assert "close raised OSError: busy (" in note.text


def test_the_metrics_count_the_failures_since_the_last_step(tmp_path: Path) -> None:
    counts = iter((None, 0, 2, 2, 2, 3, 3))
    latest: list[int | None] = [None]
    metrics = RunMetrics(RunConfig(), lambda ids: "", list, close_failures=lambda: latest[0])
    logged: list[dict[str, float]] = []
    for count in counts:
        latest[0] = count
        logged.append(metrics.current())
        metrics.flush()
    assert logged == [{}, {}, {"train/close_failures": 2.0}, {}, {}, {"train/close_failures": 1.0}, {}]
    metrics.evaluation = {"eval/tasks": 1.0}
    assert metrics.current() == {"eval/tasks": 1.0, "train/close_failures": 0.0}


def test_a_close_with_wrong_parameters_is_refused_at_the_start() -> None:
    def close(self: Door) -> None: ...

    hooks = type("Shut", (Door,), {"close": close})()
    with pytest.raises(ConfigError, match=r"close\(\).*: too many positional arguments; expected close\(self, state\)"):
        HookedWorld(hooks, WorldConfig())


class Graded(Door):
    """Runs no call."""

    counts_calls = False


@pytest.mark.parametrize(("kind", "total"), [(Graded, 1.0), (Door, 0.85)])
def test_a_world_that_runs_no_call_takes_nothing_off_for_calls(kind: type[Door], total: float) -> None:
    world = HookedWorld(kind(), WorldConfig())

    async def played(session: HookedSession) -> Episode:
        return Episode(TASK, (), StopReason.FINISHED, tool_calls=1, tool_errors=1, broken_turns=1)

    config = RolloutConfig(max_turns=1)
    episode = asyncio.run(verified(played, lambda stop: None, world.session(TASK), TASK, world, config))
    assert episode.reward is not None
    assert episode.reward.total == pytest.approx(total)
