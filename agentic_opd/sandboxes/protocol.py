"""The interface of every backend: a private work directory and shell commands in it, within limits.

Every command has a separate process tree: no process outlives the command that started it; only files remain. Running
TRIAL shows whether a backend works on this machine.
"""

import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TypeVar, runtime_checkable

from agentic_opd.core.errors import SandboxError
from agentic_opd.sandboxes.config import SandboxConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    memory_mb: int = 1024
    """Memory of the sandbox as a whole, in MiB: its processes, what they share, and files that lie in memory."""
    file_mb: int = 64
    """Size of each written file, in MiB."""
    processes: int = 256
    """Processes and threads of one sandbox at a time."""
    output_bytes: int = 4 * 2**20
    """Bytes of output of one command."""
    descriptors: int = 256
    """Open files of each process."""
    disk_mb: int = 512
    """Size of everything that a sandbox keeps on disk, in MiB."""

    @staticmethod
    def from_config(config: SandboxConfig) -> "Limits":
        return Limits(memory_mb=config.memory_mb, file_mb=config.file_mb, disk_mb=config.disk_mb)


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or folder of this machine that a sandbox sees read-only; it can connect to sockets in it."""

    source: Path
    target: str
    """Absolute path inside the sandbox."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command. `output` is stdout and stderr in the order in which they were written."""

    exit_code: int
    """128 + n if signal n ended it; meaningless if it was stopped (`timed_out` or `output_exceeded`)."""
    output: bytes
    timed_out: bool = False
    """It was killed at its time limit; `output` is its output until then."""
    output_exceeded: bool = False
    """It was killed because it wrote too much; `output` is the beginning."""
    memory_exceeded: bool = False
    """The sandbox exceeded its memory: all of its processes were killed."""
    stopped: bool = False
    """It was killed because a signal had stopped its first process, which nothing continues."""
    idle: bool = False
    """It was killed because its processes did nothing for longer than `idle_limit_s`."""
    disk_exceeded: bool = False
    """The sandbox exceeded its disk space: the command was killed if it still ran, and all files were removed."""

    @property
    def is_over_limit(self) -> bool:
        """Whether a limit was exceeded; then the exit code has no meaning."""
        is_over = self.timed_out or self.output_exceeded or self.memory_exceeded or self.disk_exceeded
        return is_over or self.stopped or self.idle

    @property
    def text(self) -> str:
        """The output as text; bytes that are not UTF-8 become U+FFFD."""
        return self.output.decode("utf-8", errors="replace")


class Sandbox(Protocol):
    """An isolated work directory, as an async context manager: leaving it ends every process and removes all files."""

    async def run(self, command: str, timeout_s: float, stdin: bytes | None = None) -> CommandResult:
        """Run a shell command in the work directory.

        A failed command is a result, not an error.

        Raises:
            SandboxError: The sandbox itself failed.
        """
        ...

    async def check(self) -> None:
        """Raise SandboxError, with the reason and what to do, unless a trivial command works here.

        Also remove leftovers of killed runs.
        """
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None:
        """A second call does nothing."""
        ...


@runtime_checkable
class HostedSandbox(Protocol):
    """A sandbox whose work directory is on this machine."""

    async def in_workdir(self, do: Callable[[int], T]) -> T:
        """Call `do` with a descriptor of the work directory; its errors are passed on."""
        ...


@runtime_checkable
class BusySandbox(Protocol):
    """A sandbox that ends all processes after each command, and can run one that does not."""

    async def run_beside(self, command: str, timeout_s: float) -> CommandResult:
        """As `Sandbox.run`, beside a command that may be running; nothing else is ended."""
        ...


@runtime_checkable
class AttentiveSandbox(Protocol):
    """A sandbox that sees what the processes of a command do."""

    idle_limit_s: float | None
    """Seconds that a command may spend without using a processor or waiting for one, in all. A command whose first
    process is stopped by a signal ends at once. None, at first: neither is looked at."""


@runtime_checkable
class WarmSandbox(Sandbox, Protocol):
    """A sandbox that may be entered long before its first command."""

    @property
    def is_running(self) -> bool:
        """Whether it is entered, and has not ended by itself."""
        ...


SandboxFactory = Callable[[], AbstractAsyncContextManager[Sandbox]]
"""Makes a fresh sandbox, to be entered by the caller; entering it returns the sandbox."""

TRIAL = "echo 'import sys; print(sys.version_info >= (3, 8))' | python -I - && touch .check && rm .check"
"""Runs Python, reads a pipe, and writes in the work directory."""

_TRIAL_TIMEOUT_S = 30.0
_LOST_OUTPUTS = 2
"""Trials without output that are repeated: `podman --remote` loses the output of a short command now and then
(containers/podman, issue 25855)."""


async def try_out(
    run: Callable[[str, float], Awaitable[CommandResult]], failed: str, advice: Callable[[str], str] = lambda output: ""
) -> None:
    """Run TRIAL. If it fails, the error begins with `failed` and ends with `advice` about the output.

    Raises:
        SandboxError: The trial failed.
    """
    result = await run(TRIAL, _TRIAL_TIMEOUT_S)
    for _ in range(_LOST_OUTPUTS):
        if result.timed_out or result.exit_code != 0 or result.text:
            break
        result = await run(TRIAL, _TRIAL_TIMEOUT_S)
    if result.timed_out:
        why = f"a trivial command did not end within {_TRIAL_TIMEOUT_S:g} s"
    elif result.exit_code == 0 and result.text == "True\n":
        return
    else:
        why = f"a trivial command ended with exit code {result.exit_code}, {result.text.strip()[:500]!r}"
    raise SandboxError(f"{failed}: {why}. {advice(result.text)}".removesuffix(". "))


def with_descriptor(work: Path, do: Callable[[int], T]) -> T:
    """Call `do` with a descriptor of this directory, after restoring its mode, which a command may have changed."""
    work.chmod(0o755)
    fd = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return do(fd)
    finally:
        os.close(fd)


def not_entered() -> SandboxError:
    return SandboxError("the sandbox is closed, or was not entered with `async with`")


def variables(home: str, **more: str) -> dict[str, str]:
    """Return a command's whole environment; `more` are the backend's additions."""
    return {
        "HOME": home,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "TERM": "dumb",
        **more,
    }
