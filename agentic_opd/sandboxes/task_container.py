"""`TaskContainer`: a container of a task's own image, whose root file system is writable and whose agent may be root.

    create -> start -> commands of the agent -> stop -> start -> commands of the verifier -> removed

It has the engine's default capabilities without those for raw sockets and devices, makes the system calls of
seccomp.py's list for tasks only, and has no network unless the task asks for one. Processes may outlive a command,
since tasks are about servers too; a command that exceeds a limit takes all processes with it that were started after
the container.

An agent that is root can take over the container's first process, so nothing that must hold depends on that process:
`stop` kills the container from outside, a guard process on this machine removes it when this process ends or is killed,
and the files that decide about a verdict are read from folders of this machine (`host_folder`).

The kernel limits the memory. Where it can't, a watch does, with a warning. A watch limits the disk space.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from agentic_opd.core.errors import SandboxError
from agentic_opd.sandboxes.disk import size_mb
from agentic_opd.sandboxes.docker import LABEL, MOST_PROCESSES, PROFILE, DockerSandbox
from agentic_opd.sandboxes.folders import owner_tag
from agentic_opd.sandboxes.host_process import ProcessSpec, kill_host_process, start_host_process
from agentic_opd.sandboxes.protocol import CommandResult, Limits, Mount, not_entered
from agentic_opd.sandboxes.seccomp import container_profile
from agentic_opd.sandboxes.watch import held_by

logger = logging.getLogger(__name__)

_CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE"),
    *("SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
)
_MOST_DESCRIPTORS = 65_536
_SHARED_MB = 64
_START_S, _STOP_S = 120.0, 60.0
_DISK_PAUSE_S, _MEMORY_PAUSE_S = 0.5, 0.1
_PAUSE_FACTOR = 20
"""Shortest pause of a watch, as a multiple of its last measurement's time."""
_READY = re.compile(rb"ready (\d*)\n")

_GUARD = 'while read -r line; do :; done; exec "$@" >/dev/null 2>&1'
"""Runs its arguments when its input ends, as it does when this process is killed."""

# Built-in commands only: a container that is full of processes can start no other.
_KEEP = """
given=" "
for p in /proc/[0-9]*; do given="$given${p#/proc/} "; done
for file in /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes; do
  [ -r "$file" ] && read -r limit <"$file"
done
case "$limit" in *[!0-9]*) limit= ;; esac
echo "ready $limit"
while read -r line; do
  [ "$line" = count ] || for round in 1 2 3; do
    for p in /proc/[0-9]*; do
      p=${p#/proc/}
      case "$given" in *" $p "*) ;; *) kill -s KILL "$p" 2>/dev/null ;; esac
    done
  done
  for file in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
    [ -r "$file" ] && while read -r name value; do [ "$name" = oom_kill ] && killed=$value; done <"$file"
  done
  echo "ended ${killed:-0}"
done
"""
"""Prints `ready` and the limit on memory in bytes. A line `count` on its input makes it print `ended` and how often the
kernel has killed for memory; any other line first kills all processes that were started later than this one."""

_SHELL = """
exec 2>&1
echo 1000 2>/dev/null >/proc/self/oom_score_adj
shell=sh; command -v bash >/dev/null && shell=bash
[ "$1" = none ] && exec "$shell" -c "$2"
{ trap "" PIPE; cat 2>/dev/null; cat >/dev/null; } | exec "$shell" -c "$2"
"""
"""$1: the input, `piped` or `none`, $2: the command. See `docker.py` for the reasons."""


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """How the commands of a task run in its container."""

    workdir: str
    user: str | None = None
    """User of the commands; None: the image's."""
    cpus: float = 1.0
    has_network: bool = False
    """Whether the container has the engine's default network."""
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables, in addition to the image's."""
    folders: tuple[str, ...] = ()
    """Writable folders of this machine, by their absolute paths in the container; each is empty at first."""


class TaskContainer(DockerSandbox):
    """A sandbox that is a container of a task; see the module."""

    def __init__(self, command: str, image: str, limits: Limits, task: TaskPlace, mounts: Sequence[Mount] = ()) -> None:
        super().__init__(command, image, limits, mounts)
        self._task = task
        self._guard: asyncio.subprocess.Process | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._fault: str | None = None
        """Why a watch has ended the container."""

    @property
    def fault(self) -> str | None:
        """Why a watch has ended the container; None if none has."""
        return self._fault

    def host_folder(self, path: str) -> Path:
        """Return the folder of this machine that is `path`, one of `TaskPlace.folders`, in the container."""
        return self._folder.path / path.strip("/").replace("/", "-")

    async def stop(self) -> None:
        """End every process of the container, from outside; its files are kept.

        Raises:
            SandboxError: it still runs, or a watch has ended it.
        """
        if self._keeper is None:
            raise not_entered()
        self._unwatch()
        await self._engine.run("kill", self._name)
        try:
            async with asyncio.timeout(_STOP_S):
                await self._keeper.wait()
        except TimeoutError as error:
            raise SandboxError(f"container {self._name} does not end") from error
        finally:
            await kill_host_process(self._keeper)
        if self._fault is not None:
            raise SandboxError(self._fault)
        if (await self._inspect())["State"]["Running"]:
            raise SandboxError(f"container {self._name} still runs after `{self._engine.name} kill`")

    async def start(self) -> None:
        """Start the container again after `stop`."""
        await self._start("start", "--attach", "--interactive", self._name)

    async def run(
        self,
        command: str,
        timeout_s: float,
        stdin: bytes | None = None,
        *,
        user: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a shell command in the container as `user`; see `Sandbox.run`. Its processes may outlive it.

        Raises:
            SandboxError: The container does not work, or a watch has ended it.
        """
        if self._keeper is None:
            raise not_entered()
        has_input = stdin is not None
        arguments = self._arguments(command, timeout_s, has_input=has_input, user=user, variables=variables)
        max_output_bytes, kills, line = self._limits.output_bytes, self._kills, b"\n"
        try:
            result = await self._engine.run(
                *arguments, timeout_s=timeout_s, max_output_bytes=max_output_bytes, stdin=stdin
            )
            line = b"\n" if result.is_over_limit else b"count\n"
        finally:
            try:
                await asyncio.shield(asyncio.create_task(self._end_all(line)))
            except SandboxError as error:
                raise SandboxError(self._fault or str(error)) from error
        await self._need_engine(result)
        return replace(result, memory_exceeded=result.exit_code != 0 and self._kills > kills)

    async def check(self) -> None:
        """Remove leftovers of killed runs; images of tasks need no Python, so nothing is tried."""
        await self._engine.remove_leftovers()

    def _arguments(
        self,
        command: str,
        timeout_s: float,
        *,
        has_input: bool,
        user: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> list[str]:
        environment = {**self._task.variables, **(variables or {})}
        user = user or self._task.user
        return [
            *("exec", *(["--interactive"] if has_input else []), "--workdir", self._task.workdir),
            *(["--user", user] if user else []),
            *(f"--env={name}={value}" for name, value in environment.items()),
            *(self._name, "sh", "-c", _SHELL, "sh", "piped" if has_input else "none", command),
        ]

    async def _enter(self) -> None:
        engine = self._engine
        await self._folder.make(self._make_folders)
        await engine.need_image(self._image, "the task's [environment] docker_image")
        removal = [*engine.argv, "rm", "--force", self._name]
        guard = ProcessSpec(["sh", "-c", _GUARD, "sh", *removal], engine.env)
        self._guard = await start_host_process(guard, has_input=True)
        try:
            await self._create(has_memory_limit=True)
            await self.start()
        except SandboxError as error:
            if not re.search("cgroup|memory", str(error)):
                raise
            await engine.run("rm", "--force", self._name)
            await self._create(has_memory_limit=False)
            await self.start()

    def _make_folders(self, folder: Path) -> None:
        (folder / PROFILE).write_text(container_profile(is_task=True))
        for path in self._task.folders:
            host_folder = folder / self.host_folder(path).name
            host_folder.mkdir()
            host_folder.chmod(0o777)

    async def _create(self, *, has_memory_limit: bool) -> None:
        task, limits, memory = self._task, self._limits, f"{self._limits.memory_mb}m"
        descriptors = min(_MOST_DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        ulimits = {"nproc": MOST_PROCESSES, "nofile": descriptors, "core": 0, "fsize": limits.disk_mb * 2**20}
        await self._engine.do(
            *("create", "--interactive", "--name", self._name, "--label", f"{LABEL}={owner_tag()}"),
            *("--pull", "never", "--hostname", "task", "--log-driver", "none", "--stop-signal", "KILL"),
            *([] if task.has_network else ["--network", "none"]),
            *("--security-opt", f"seccomp={self._folder.path / PROFILE}"),
            *("--cap-drop", "ALL", *(f"--cap-add={name}" for name in _CAPABILITIES)),
            *(["--memory", memory, "--memory-swap", memory] if has_memory_limit else []),
            *("--shm-size", f"{_SHARED_MB}m", "--cpus", f"{min(task.cpus, os.cpu_count() or 1):g}"),
            *("--pids-limit", str(limits.processes)),
            *(f"--ulimit={name}={limit}:{limit}" for name, limit in ulimits.items()),
            *(f"--env={name}={value}" for name, value in task.variables.items()),
            *(f"--mount=type=bind,source={self.host_folder(path)},target={path}" for path in task.folders),
            *(f"--mount=type=bind,source={mount.source},target={mount.target},readonly" for mount in self._mounts),
            *(self._image, "sh", "-c", _KEEP),
        )

    async def _start(self, *arguments: str) -> None:
        """Start the container, and wait for its first process; its image's entrypoint may print before that."""
        engine = self._engine
        self._keeper = await start_host_process(engine.process(*arguments), has_input=True)
        output = b""
        try:
            async with asyncio.timeout(_START_S):
                while (ready := _READY.fullmatch(line := await self._line())) is None:
                    if not line:
                        raise engine.failed("start", CommandResult(1, output or b"the container has ended"))
                    output = (output + line)[-2000:]
        except TimeoutError as error:
            raise SandboxError(
                f"the container of {self._image} is not ready after {_START_S:g} s: {output!r}"
            ) from error
        is_limited = ready[1].isdigit() and int(ready[1]) <= self._limits.memory_mb * 2**20
        self._watches.append(asyncio.create_task(self._watch(is_limited, await self._inspect())))

    async def _leave(self) -> None:
        self._unwatch()
        guard, self._guard = self._guard, None
        keeper, self._keeper = self._keeper, None
        if guard is not None:
            assert guard.stdin is not None
            guard.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await guard.wait()
            await kill_host_process(guard)
        if keeper is not None:
            await kill_host_process(keeper)
        await self._folder.remove()

    async def _inspect(self, *options: str) -> dict[str, Any]:
        return json.loads(await self._engine.do("container", "inspect", *options, self._name))[0]

    # ------------------------------------------------------------------------------------------------------- watches

    def _unwatch(self) -> None:
        while self._watches:
            self._watches.pop().cancel()

    async def _watch(self, is_limited: bool, properties: dict[str, Any]) -> None:
        """End the container when it exceeds its disk space, or its memory if the kernel does not limit that."""
        upper = ((properties.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir")
        watches = [self._disk_fault(Path(upper) if upper and os.access(upper, os.R_OK | os.X_OK) else None)]
        if not is_limited:
            _warn_of_no_limit(self._engine.name)
            watches.append(self._memory_fault(properties["State"]["Pid"]))
        running = [*map(asyncio.ensure_future, watches)]
        try:
            ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            self._fault = ended.pop().result()
        except (SandboxError, OSError) as error:
            self._fault = f"the limits of the container can't be watched: {error}"
        finally:
            for watch in running:
                watch.cancel()
        await self._engine.run("kill", self._name)

    async def _disk_fault(self, upper: Path | None) -> str:
        clock, limit_mb = asyncio.get_running_loop().time, self._limits.disk_mb
        while True:
            start = clock()
            if upper is not None:
                used, _ = await size_mb([upper, self._folder.path])
            else:
                used = int((await self._inspect("--size")).get("SizeRw") or 0) // 2**20
            if used is None or used > limit_mb:
                return f"the container took {used} MiB of disk space, more than the {limit_mb} MiB of the task"
            await asyncio.sleep(max(_DISK_PAUSE_S, _PAUSE_FACTOR * (clock() - start)))

    async def _memory_fault(self, first: int) -> str:
        clock, limit_mb = asyncio.get_running_loop().time, self._limits.memory_mb
        while True:
            start = clock()
            used = await asyncio.to_thread(_held_in_namespace_of, first, limit_mb * 2**20)
            if used > limit_mb * 2**20:
                return f"the container took {used // 2**20} MiB of memory, more than the {limit_mb} MiB of the task"
            await asyncio.sleep(max(_MEMORY_PAUSE_S, _PAUSE_FACTOR * (clock() - start)))


@cache
def _warn_of_no_limit(engine: str) -> None:
    logger.warning(
        "%s can't limit the memory of containers here: a watch of this process does, and ends a container that takes "
        "more than its task may",
        engine,
    )


def _held_in_namespace_of(first: int, limit: int) -> int:
    """Return the bytes of memory of all processes in the process namespace of `first`."""
    with contextlib.suppress(OSError):
        namespace = Path(f"/proc/{first}/ns/pid").readlink()
        inside: list[int] = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (path / "ns/pid").readlink() == namespace:
                    inside.append(int(path.name))
        return held_by(inside, limit, 0)
    return 0
