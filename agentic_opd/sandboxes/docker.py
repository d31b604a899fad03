"""`DockerSandbox`: a container of Docker or podman, by their command line; its commands run one after the other.

The container has no network, a read-only root and no way to new privileges, makes the system calls of seccomp.py only,
and is limited in memory, processors and processes. The work folder, `/tmp` and the home are of memory; their sizes add
up to `disk_mb`, or to half of `memory_mb` if that is less, and their content counts as memory.

The container's first process runs as its root and waits for a line on its input; then it kills all other processes, so
none outlives its command. Commands run as an ordinary user. This process holds the input open: if it is killed, the
container ends and is removed with its files.

The engine may be on another machine (DOCKER_HOST, CONTAINER_HOST). podman's client sends it the path of the list of
system calls, not the list, so both machines must see the temporary folder; Docker's client sends the list.
"""

import asyncio
import contextlib
import math
import os
import re
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from agentic_opd.core.errors import SandboxError
from agentic_opd.sandboxes.folders import PREFIX, PrivateFolder, is_dead, owner_tag, remove_leftovers
from agentic_opd.sandboxes.host_process import (
    HOST_ENV,
    ProcessSpec,
    kill_host_process,
    run_host_process,
    start_host_process,
)
from agentic_opd.sandboxes.protocol import CommandResult, Limits, Mount, not_entered, try_out, variables
from agentic_opd.sandboxes.seccomp import container_profile

WORKDIR = "/workspace"
LABEL = "agentic-opd.owner"

_HOME = "/home/agent"
_PARTS = {WORKDIR: 2, "/tmp": 4, _HOME: 4}
"""The writable folders -> which part of the sandbox's files each may hold: one half, one fourth."""

_USER = 1000
_CPUS = 1
_OWN_PROCESSES = 8
MOST_PROCESSES = 10_000
"""All containers run as one user, so its limit says little; the container's own does."""
_ENGINE_TIMEOUT_S = 60.0
_NOT_RUN = (125, 126, 127)
"""Exit codes of a failed engine; a command may end with them too."""
_NO_SUCH_FILE = re.compile(rb"opening seccomp profile failed|statfs \S+: no such file|bind source path does not exist")
"""How podman and Docker answer a container whose profile or mount is a file that the engine can't see."""

_PASSED_ON = (
    *("HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT"),
    *("DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "CONTAINER_HOST", "CONTAINER_CONNECTION", "CONTAINERS_CONF"),
)
"""Variables that the command lines read. Do not pass this process's proxies and secrets to containers."""

PROFILE = "seccomp.json"

# Built-in commands only: no process can be started in a container that is full of them.
_KEEP = """
echo ready
while read -r line; do
  kill -s KILL -- -1 2>/dev/null
  for file in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
    [ -r "$file" ] && while read -r name value; do [ "$name" = oom_kill ] && killed=$value; done <"$file"
  done
  echo "ended ${killed:-0}"
done
"""
"""Prints `ready`, and for each input line `ended` and how often the kernel has killed for memory."""

_ENDED = re.compile(rb"ended (\d{1,9})\n")

_SHELL = """
exec 2>&1
echo 1000 >/proc/self/oom_score_adj
ulimit -c 0; ulimit -t "$1"; ulimit -v "$2"; ulimit -f "$3"; ulimit -n "$4"
input=$5; command=$6; shift 6
shell=sh; command -v bash >/dev/null && shell=bash
run() { exec env -i "$@" PATH="$PATH" "$shell" -c "$command"; }
[ "$input" = none ] && run "$@"
{ trap "" PIPE; cat 2>/dev/null; cat >/dev/null; } | run "$@"
"""
"""$1: seconds of processor time, $2: KiB of address space, $3: blocks of 512 bytes of a file, $4: open files, $5: its
input, `piped` or `none`, $6: the command, then its variables. stdout and stderr become one stream, which keeps their
order. Input that the command does not read is drained: an engine that can't write it may lose the command's output."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A container engine, by its command line."""

    argv: tuple[str, ...]

    @property
    def name(self) -> str:
        """The command line without its path, for a person."""
        return " ".join((Path(self.argv[0]).name, *self.argv[1:]))

    @property
    def env(self) -> dict[str, str]:
        """The environment of the engine's command line."""
        return HOST_ENV | {name: os.environ[name] for name in _PASSED_ON if name in os.environ}

    def process(self, *arguments: str) -> ProcessSpec:
        return ProcessSpec([*self.argv, *arguments], self.env)

    async def run(
        self,
        *arguments: str,
        timeout_s: float = _ENGINE_TIMEOUT_S,
        max_output_bytes: int = 2**22,
        stdin: bytes | None = None,
    ) -> CommandResult:
        """Run the engine with limits on its time and output."""
        spec = self.process(*arguments)
        return await run_host_process(spec, timeout_s=timeout_s, max_output_bytes=max_output_bytes, stdin=stdin)

    async def do(self, *arguments: str) -> str:
        """Run the engine and return its output.

        Raises:
            SandboxError: it failed; the message holds its output.
        """
        result = await self.run(*arguments)
        if result.exit_code != 0:
            raise self.failed(arguments[0], result)
        return result.text

    def failed(self, subcommand: str, result: CommandResult) -> SandboxError:
        why = "no answer in time" if result.timed_out else repr(result.text.strip()[-500:])
        return SandboxError(f"`{self.name} {subcommand}` failed: {why}")

    async def need_image(self, image: str, setting: str) -> None:
        """Raise SandboxError, which names the setting, unless the image is on this machine."""
        result = await self.run("image", "inspect", "--format", "{{.Id}}", image)
        if result.exit_code != 0:
            raise SandboxError(
                f"{self.failed('image inspect', result)}. Check that the engine runs and that this user may use it "
                f"(`{self.name} info`); get the image with `{self.name} pull {image}`, or name another in {setting}."
            )

    async def remove_leftovers(self) -> None:
        """Remove the containers of this machine's killed runs."""
        listed = await self.do("ps", "-a", "--filter", f"label={LABEL}", "--format", "{{.Names}}")
        dead = [name for name in listed.split() if is_dead(name.removeprefix(PREFIX))]
        if dead:
            await self.do("rm", "-f", *dead)


def container_arguments(
    name: str, image: str, limits: Limits, profile: Path, mounts: Sequence[Mount] = ()
) -> list[str]:
    """Return the arguments that run the container of a sandbox, attached to its first process."""
    memory, files = f"{limits.memory_mb}m", min(limits.disk_mb, limits.memory_mb // 2)
    folders = {path: f"rw,nosuid,nodev,exec,mode=0777,size={max(1, files // part)}m" for path, part in _PARTS.items()}
    return [
        *("run", "-i", "--rm", "--name", name, "--label", f"{LABEL}={owner_tag()}", "--pull", "never"),
        *("--network", "none", "--read-only", "--hostname", "sandbox", "--log-driver", "none", "--workdir", WORKDIR),
        *("--user", "0:0", "--cap-drop", "ALL", "--cap-add", "KILL"),
        *("--security-opt", "no-new-privileges", "--security-opt", f"seccomp={profile}"),
        *("--memory", memory, "--memory-swap", memory, "--shm-size", f"{max(1, files // 4)}m", "--cpus", str(_CPUS)),
        *("--pids-limit", str(limits.processes + _OWN_PROCESSES)),
        *(f"--ulimit={name}={limit}:{limit}" for name, limit in (("nproc", MOST_PROCESSES), ("nofile", 1024))),
        *(f"--tmpfs={path}:{options}" for path, options in folders.items()),
        *(f"--mount=type=bind,source={mount.source},target={mount.target},readonly" for mount in mounts),
        *("--entrypoint", "", image, "sh", "-c", _KEEP),
    ]


def command_arguments(name: str, limits: Limits, command: str, timeout_s: float, *, has_input: bool) -> list[str]:
    """Return the arguments that run a command in the container of a sandbox."""
    # A single process gets an error at 7/8; the limit of the whole sandbox kills.
    space_kib, file_blocks = limits.memory_mb * 2**10 * 7 // 8, limits.file_mb * 2**11
    numbers = (math.ceil(timeout_s) + 1, space_kib, file_blocks, limits.descriptors)
    environment = [f"{key}={value}" for key, value in variables(_HOME).items()]
    source = "piped" if has_input else "none"
    where = ("--user", f"{_USER}:{_USER}", "--workdir", WORKDIR, name)
    return ["exec", "-i", *where, "sh", "-c", _SHELL, "sh", *map(str, numbers), source, command, *environment]


class DockerSandbox:
    """A sandbox that is a container; see the module."""

    def __init__(self, command: str, image: str, limits: Limits | None = None, mounts: Sequence[Mount] = ()) -> None:
        self._engine, self._image, self._limits = Engine(tuple(shlex.split(command))), image, limits or Limits()
        self._mounts = mounts
        self._name = f"{PREFIX}{owner_tag()}-{secrets.token_hex(6)}"
        self._folder = PrivateFolder()
        self._keeper: asyncio.subprocess.Process | None = None
        self._kills = 0

    async def __aenter__(self) -> Self:
        entering = asyncio.create_task(self._enter())
        try:
            await asyncio.shield(entering)
        except BaseException:
            await asyncio.wait([entering])
            await self.__aexit__()
            raise
        return self

    async def _enter(self) -> None:
        await self._folder.make(_write_profile)
        await self._engine.need_image(self._image, "env.sandbox.image")
        await self._start(
            *container_arguments(self._name, self._image, self._limits, self._folder.path / PROFILE, self._mounts)
        )

    async def _start(self, *arguments: str) -> None:
        """Start the container, and wait for its first process."""
        engine = self._engine
        self._keeper = await start_host_process(engine.process(*arguments), has_input=True)
        line = await self._line()
        if line == b"ready\n":
            return
        error = engine.failed(arguments[0], CommandResult(1, line))
        if _NO_SUCH_FILE.search(line):
            raise SandboxError(
                f"{error}. The engine opens files on its own machine. If that is another one, set TMPDIR to a folder "
                "that both machines see, or use a Docker engine (DOCKER_HOST), and leave out agent.command, whose "
                "program needs a socket of this machine"
            )
        raise error

    @property
    def is_running(self) -> bool:
        return self._keeper is not None and self._keeper.returncode is None

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.shield(asyncio.create_task(self._leave()))

    async def _leave(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            assert keeper.stdin is not None
            keeper.stdin.close()
            try:
                async with asyncio.timeout(_ENGINE_TIMEOUT_S):
                    await keeper.wait()
            except TimeoutError:
                await self._engine.run("rm", "-f", self._name)
            await kill_host_process(keeper)
        await self._folder.remove()

    async def check(self) -> None:
        """Remove leftovers of killed runs and run a trivial command; see `Sandbox.check`."""
        await remove_leftovers()
        await self._engine.remove_leftovers()
        await try_out(self.run, f"{self._engine.name} does not work here with image {self._image!r}")

    async def run(self, command: str, timeout_s: float, stdin: bytes | None = None) -> CommandResult:
        if self._keeper is None:
            raise not_entered()
        arguments = self._arguments(command, timeout_s, has_input=stdin is not None)
        max_output_bytes, kills = self._limits.output_bytes, self._kills
        try:
            result = await self._engine.run(
                *arguments, timeout_s=timeout_s, max_output_bytes=max_output_bytes, stdin=stdin
            )
        finally:
            await asyncio.shield(asyncio.create_task(self._end_all()))
        await self._need_engine(result)
        return replace(result, memory_exceeded=self._kills > kills)

    async def run_beside(self, command: str, timeout_s: float) -> CommandResult:
        """Run a shell command and end nothing else; see `BusySandbox.run_beside`."""
        if self._keeper is None:
            raise not_entered()
        arguments = self._arguments(command, timeout_s, has_input=False)
        return await self._engine.run(*arguments, timeout_s=timeout_s, max_output_bytes=self._limits.output_bytes)

    def _arguments(self, command: str, timeout_s: float, *, has_input: bool) -> list[str]:
        return command_arguments(self._name, self._limits, command, timeout_s, has_input=has_input)

    async def _end_all(self, line: bytes = b"\n") -> None:
        """Kill every process but the first, and read how many the kernel has killed."""
        assert self._keeper is not None
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(line)
        answer = await self._line()
        ended = _ENDED.fullmatch(answer)
        if ended is None:
            raise self._engine.failed("run", CommandResult(1, answer or b"the container has ended"))
        self._kills = int(ended[1])

    async def _need_engine(self, result: CommandResult) -> None:
        """Raise SandboxError if the engine failed. A command's output may look so: a second one must fail too."""
        if result.exit_code in _NOT_RUN and result.text.lower().startswith(("error", "oci runtime", "docker:")):
            probe = await self._engine.run("exec", self._name, "true")
            if probe.exit_code != 0:
                raise self._engine.failed("exec", result)

    async def _line(self) -> bytes:
        """Return the next line of the first process."""
        assert self._keeper is not None
        assert self._keeper.stdout is not None
        with contextlib.suppress(TimeoutError, ValueError):
            async with asyncio.timeout(_ENGINE_TIMEOUT_S):
                return await self._keeper.stdout.readline()
        return b""


def _write_profile(folder: Path) -> None:
    (folder / PROFILE).write_text(container_profile())
