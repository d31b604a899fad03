"""The world of Harbor tasks: a container of the task's image, a terminal and file tools in it, and the task's tests.

    agent (its user, /tests empty) -> container stopped -> tests copied -> container started -> tests/test.sh -> reward

The tests run in the container as the agent left it, as the format wants. The stop ends every process of the agent;
/tests and /logs/verifier are emptied and filled from outside while nothing runs. An agent that is root can still
replace programs that the tests use: docs/harbor.md.
"""

import asyncio
import logging
import os
import shlex
import shutil
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentic_opd.core.errors import ConfigError, SandboxError, WorldError
from agentic_opd.core.types import Message, NoVerdict, Task, ToolCall, ToolResult, Verification, VerifyOutcome
from agentic_opd.sandboxes import pool
from agentic_opd.sandboxes.config import DockerConfig
from agentic_opd.sandboxes.docker import Engine
from agentic_opd.sandboxes.folders import remove_tree
from agentic_opd.sandboxes.protocol import Limits, Mount
from agentic_opd.sandboxes.task_container import TaskContainer, TaskPlace
from agentic_opd.sandboxes.workdir import unpacked
from agentic_opd.worlds.coding.comparable import comparable
from agentic_opd.worlds.coding.tools import TOOL_SPECS, run_tool
from agentic_opd.worlds.coding.world import ToolSession
from agentic_opd.worlds.config import WorldConfig
from agentic_opd.worlds.split import split_position, split_tasks
from agentic_opd_environments.harbor.images import Images
from agentic_opd_environments.harbor.tasks import HarborTask, read_tasks
from agentic_opd_environments.harbor.verdict import judged, spoken, without_verdict

logger = logging.getLogger(__name__)

SYSTEM_PROMPT = """\
You solve tasks on a Linux machine, with a terminal and file tools, until the task is done.

How to work:
- Read the task to its end first: what must exist in the end, where, and in which form.
- Look around before you change anything. Take small steps, and check the result of each.
- When something fails, find the cause before you go on.
- Tests that you do not see decide in the end. Do not change what the task does not ask you to change.

How to end:
- When the task is done and you have checked it, answer with one short sentence and no tool call."""

_LOGS, _TESTS, _SOLUTION = "/logs", "/tests", "/solution"
_LOG_FOLDERS = ("agent", "verifier", "artifacts")
_PROCESSES = 1024
_AGENT_TIMEOUT_S = 600.0
_READ_TIMEOUT_S = 30.0
_TESTS_ALONE = Verification(
    VerifyOutcome.CRASHED, 0, 1, "The container ended before the tests.", "The container ended before the tests."
)

# The work directory's files first, then all others that are newer than the episode. Works with busybox too.
_CHANGED = r"""
caches="-name .git -o -name __pycache__ -o -name node_modules -o -name .pytest_cache -o -name .venv"
small="-type f -size -2049"
{ [ "$PWD" = / ] || find "$PWD" -xdev \( $caches \) -prune -o $small -print
  find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /logs -o -path /tests -o -path /solution \
    -o -path /tmp -o -path /var/cache -o -path /var/lib -o -path /var/log -o -path "$PWD/*" -o $caches \) -prune \
    -o $small -newer /tests -print
} 2>/dev/null | head -n 200 | tar -cf - -T - 2>/dev/null
"""
"""Writes an archive of the files that the verdict may be about."""


def _tools() -> list[dict[str, Any]]:
    """Return the coding world's tools, described for any machine and any task."""
    tools = deepcopy(TOOL_SPECS)
    for tool in tools:
        function = tool["function"]
        for name, schema in function["parameters"]["properties"].items():
            if name == "path":
                schema["description"] = "Path of the file, absolute or relative to the current directory."
            if name == "command":
                schema["description"] = "The command line, for example: ls -la"
        if function["name"] == "terminal":
            function["description"] = (
                "Run a shell command with bash in the current directory and return what it prints, stdout and stderr "
                "together. A command that fails returns its exit code in the last line. Each call starts a new shell: "
                "files and background processes are kept, changed directories and variables are not. There is no "
                "input. A command that takes too long is stopped, with all background processes, and a long output is "
                "cut in the middle."
            )
    return tools


@dataclass(frozen=True, slots=True)
class HarborLeft:
    """The verdict on an episode, given in its container."""

    verdict: Verification


class HarborSession(ToolSession):
    """One episode's container."""

    def __init__(self, world: "HarborWorld", task: Task, container: TaskContainer) -> None:
        super().__init__(container, world.config, task)
        self._world, self._task, self._container = world, task, container
        self._has_begun = False  # The image may hold files.
        self._left_s = float(task.limits.get("agent_timeout_s", world.agent_timeout_s))
        """Seconds that commands of the agent may still take together."""

    async def run_tool(self, call: ToolCall) -> ToolResult:
        """Run one call in the container, in the time that the agent has left."""
        if self._left_s <= 0:
            return ToolResult("Error: the time of this task is used up; no command runs any more.", is_error=True)
        return await super().run_tool(call)

    async def _answer(self, call: ToolCall) -> ToolResult:
        config = self._world.config
        config = config.model_copy(update={"tool_timeout_s": min(config.tool_timeout_s, self._left_s)})
        start = time.monotonic()
        result = await run_tool(call, self._container, config)
        self._left_s -= time.monotonic() - start
        return result

    async def judged_files(self) -> dict[str, bytes]:
        """Return the files of the work directory and the others changed since the episode began, by path.

        At most 200 files of at most 1 MiB; none if the image has no `find` and `tar`.
        """
        result = await self._container.run_beside(_CHANGED, _READ_TIMEOUT_S)
        return await asyncio.to_thread(unpacked, result.output)

    async def collect(self, messages: Sequence[Message] = ()) -> HarborLeft:
        """Run the tests, and return the verdict."""
        made_by = self._authors.left() if self._authors.changes else None
        verdict = await self._world.tested(self._task, self._container, spoken(messages, self._task.prompt))
        return HarborLeft(replace(verdict, made_by=made_by))


class HarborWorld:
    """Tasks in Harbor's format; see `core.types.World` and docs/harbor.md."""

    runs_programs = True
    replayable = True

    def __init__(
        self,
        config: WorldConfig,
        folder: Path,
        network: bool = False,
        variables: Mapping[str, str] | None = None,
        keep_processes: bool = False,
        limit: int | None = None,
        skip_broken: bool = False,
    ) -> None:
        """Store the settings; nothing is started or read yet.

        Args:
            config: Settings of the environment.
            folder: A task (a folder with task.toml), or a folder with tasks at any depth.
            network: Network of the tasks whose task.toml has neither network_mode nor allow_internet.
            variables: Values of ${NAME} in the tables of variables of task.toml. The variables of this process are
                never read.
            keep_processes: Let the agent's processes run on while the tests run, for tasks about servers. Off: they
                are killed before, since such a process can forge the verdict.
            limit: Use only the first N tasks. Unset: all.
            skip_broken: Skip tasks that cannot be run, with a warning, instead of failing.

        Raises:
            ConfigError: the sandbox backend has no containers on this machine.
        """
        sandbox = config.sandbox
        if not isinstance(sandbox, DockerConfig):
            raise ConfigError(
                "the world harbor runs tasks in containers of docker or podman on this machine: set env.sandbox.type "
                f"docker (and env.sandbox.container_command for podman), got {sandbox.type}"
            )
        self.config = config
        self._folder, self._network, self._variables = folder, network, dict(variables or {})
        self._keep_processes, self._limit, self._skip_broken = keep_processes, limit, skip_broken
        self.system_prompt: str = getattr(config, "system_prompt", None) or SYSTEM_PROMPT
        self.tools: Sequence[dict[str, Any]] = _tools()
        agent = getattr(config, "agent", None)
        self.agent_timeout_s: float = _AGENT_TIMEOUT_S if agent is None else agent.timeout_s
        self._sandbox = sandbox
        self._engine = Engine(tuple(shlex.split(sandbox.container_command)))
        self._images = Images(self._engine)
        self._tasks: list[Task] = []

    def comparable(self, text: str) -> str:
        """See `core.types.ReplayableWorld` and `worlds.coding.comparable`."""
        return comparable(text)

    async def train_and_eval_tasks(self) -> tuple[list[Task], list[Task]]:
        """Return the tasks to train and to evaluate on.

        With `eval.fraction` between 0 and 1, at least one task is held out and at least one is not: if the split by
        hash leaves a side empty, the task nearest to that side is moved there. A task alone is on both, with a warning.
        """
        tasks, share, seed = await self.read_tasks(), self.config.eval.fraction, self.config.eval.seed
        train, evaluation = split_tasks(tasks, share, seed)
        if not 0 < share < 1 or (train and evaluation):
            return train, evaluation
        if len(tasks) == 1:
            logger.warning(
                "env.world.folder has one task, so env.eval.fraction %g can't hold one out: it is trained and "
                "evaluated on. Set env.eval.fraction to 0 to train on it only, or to 1 to evaluate on it only.",
                share,
            )
            return tasks, tasks
        by_position = sorted(tasks, key=lambda task: split_position(task.task_id, seed))
        moved = by_position[-1] if evaluation else by_position[0]
        rest = [task for task in tasks if task is not moved]
        return ([moved], rest) if evaluation else (rest, [moved])

    async def read_tasks(self) -> list[Task]:
        """Return all tasks of the settings."""
        tasks = await asyncio.to_thread(
            read_tasks, self._folder, self._variables, has_network=self._network, skip_broken=self._skip_broken
        )
        self._tasks = tasks[: self._limit]
        return self._tasks

    def session(self, task: Task) -> AbstractAsyncContextManager[HarborSession]:
        """Open a session in a fresh container of the task."""
        return self.program_session(task, ())

    @asynccontextmanager
    async def program_session(self, task: Task, mounts: Sequence[Mount]) -> AsyncGenerator[HarborSession]:
        """Open a session as `session` does, in a container that also sees `mounts` of this machine."""
        async with self._container(task, mounts, (_LOGS, _TESTS)) as container:
            yield HarborSession(self, task, container)

    @asynccontextmanager
    async def _container(
        self, task: Task, mounts: Sequence[Mount], folders: tuple[str, ...]
    ) -> AsyncGenerator[TaskContainer]:
        data = task.data
        assert isinstance(data, HarborTask)
        image = await self._images.of(data)
        limits = Limits(memory_mb=data.memory_mb, disk_mb=data.disk_mb, processes=_PROCESSES)
        container_settings = TaskPlace(
            workdir=data.workdir or image.workdir,
            user=data.agent_user,
            cpus=data.cpus,
            has_network=data.has_network,
            variables=data.variables,
            folders=folders,
        )
        command = self._sandbox.container_command
        in_use = pool.in_use(self.config.sandbox.max_concurrent)
        async with in_use, TaskContainer(command, image.name, limits, container_settings, mounts) as container:
            await asyncio.to_thread(_renew_logs, container.host_folder(_LOGS))
            await _wait_until_healthy(container, data)
            yield container

    async def tested(self, task: Task, container: TaskContainer, public: str) -> Verification:
        """Run the tests in a container that the agent has left; `public` is all that it has read or written."""
        data: HarborTask = task.data
        logs, tests = container.host_folder(_LOGS), container.host_folder(_TESTS)
        if not self._keep_processes:
            await container.stop()
        await asyncio.to_thread(_renew_logs, logs)
        await asyncio.to_thread(_fill, tests, data.folder / "tests")
        if not self._keep_processes:
            await container.start()
            try:
                await _wait_until_healthy(container, data)
            except WorldError as error:
                return without_verdict(NoVerdict.UNHEALTHY, str(error), "The machine was not ready for the tests.")
        variables = {"TEST_DIR": _TESTS, **data.verifier_variables}
        user, limit_s = data.verifier_user, data.verifier_timeout_s
        try:
            result = await container.run(f"{_TESTS}/test.sh", limit_s, user=user, variables=variables)
        except SandboxError as error:
            if container.fault is None:
                raise
            return without_verdict(NoVerdict.CONTAINER_ENDED, f"In the tests, {error}.", "The tests took too much.")
        secrets = {*data.verifier_variables.values()}
        return await asyncio.to_thread(judged, result, logs / "verifier", data.hidden, public, secrets)

    async def solved(self, task: Task) -> Verification:
        """Run the reference solution as the agent, then the tests.

        Raises:
            WorldError: the task has no solution, or no image.
            SandboxError: the container does not work.
        """
        data: HarborTask = task.data
        if not (data.folder / "solution" / "solve.sh").is_file():
            raise WorldError("there is no solution/solve.sh")
        async with self._container(task, (), (_LOGS, _TESTS, _SOLUTION)) as container:
            await asyncio.to_thread(_fill, container.host_folder(_SOLUTION), data.folder / "solution")
            variables = {"DEBIAN_FRONTEND": "noninteractive", **data.solution_variables}
            limit_s = float(task.limits.get("agent_timeout_s", self.agent_timeout_s))
            ran = await container.run(f"{_SOLUTION}/solve.sh", limit_s, variables=variables)
            verdict = await self.tested(task, container, task.prompt)
        end = "reached a limit" if ran.is_over_limit else f"exit code {ran.exit_code}"
        return replace(verdict, report=f"{verdict.report}\nsolve.sh: {end}\n{ran.text.strip()[-2000:]}".strip())

    async def untouched(self, task: Task) -> Verification:
        """Run the tests in a container in which nothing was done.

        Raises:
            WorldError: the task has no image.
            SandboxError: the container does not work.
        """
        async with self._container(task, (), (_LOGS, _TESTS)) as container:
            return await self.tested(task, container, task.prompt)

    async def verify(self, task: Task, left: HarborLeft | None) -> Verification:
        """Return the verdict; without a container no check has passed."""
        return _TESTS_ALONE if left is None else left.verdict

    async def check_engine(self) -> None:
        """Remove leftovers of killed runs; raise SandboxError unless the engine runs."""
        await self._engine.remove_leftovers()

    async def check(self) -> None:
        """Remove leftovers of killed runs, and start a container of the first task.

        Raises:
            SandboxError: containers do not work here.
        """
        await self.check_engine()
        if not self._tasks:
            await self.read_tasks()
        try:
            async with self._container(self._tasks[0], (), ()) as container:
                result = await container.run("true", _READ_TIMEOUT_S)
        except WorldError as error:
            raise SandboxError(str(error)) from error
        if result.exit_code != 0:
            raise SandboxError(f"a trivial command failed in a container of {self._tasks[0].task_id}: {result.text!r}")


async def _wait_until_healthy(container: TaskContainer, task: HarborTask) -> None:
    check = task.healthcheck
    if check is None:
        return
    begin, failures = time.monotonic(), 0
    while True:
        result = await container.run_beside(check.command, check.timeout_sec)
        if result.exit_code == 0 and not result.is_over_limit:
            return
        is_starting = time.monotonic() - begin < check.start_period_sec
        failures += not is_starting
        if failures >= check.retries:
            raise WorldError(f"{task.folder.name}: the health check fails: {result.text.strip()[-500:]!r}")
        await asyncio.sleep(check.start_interval_sec if is_starting else check.interval_sec)


# ---------------------------------------------------------------------------------------------- folders of this machine


def _renew_logs(logs: Path) -> None:
    """Make the folders of logs, and empty that of the verifier of the agent's files."""
    if not logs.is_dir():
        return
    _remove(logs / "verifier")
    for name in _LOG_FOLDERS:
        folder = logs / name
        if folder.is_symlink() or not folder.is_dir():
            _remove(folder)
            folder.mkdir()
            folder.chmod(0o777)


def _fill(folder: Path, source: Path) -> None:
    """Replace the content of `folder` by that of `source`; links stay links, since they mean the container's files."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        _remove(path)
    shutil.copytree(source, folder, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".harborignore"))
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            is_program = path.is_dir() or path.suffix == ".sh" or path.stat().st_mode & 0o100
            path.chmod(path.stat().st_mode | (0o755 if is_program else 0o644))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)
    if os.path.lexists(path):
        raise SandboxError(f"{path} of the agent can't be removed")
