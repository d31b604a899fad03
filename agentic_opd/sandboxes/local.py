"""`UnsafeLocalSandbox`: plain processes of this user, in a folder of the temporary directory. No isolation.

For machines on which no other backend works, and for code that is trusted anyway. A command may read and write whatever
this user may, use the network, and signal this user's processes, those of the environment too; `/tmp` is the
machine's. What is kept: a folder, a home and a TMPDIR of its own, a fixed environment, the interpreter of this process
as `python`, limits on time, memory, file size, disk and output (none on the number of processes), and that every
process ends with its command, or with the environment if that is killed (see supervisor.py; a command that kills its
supervisor defeats this).
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Self, TypeVar

from agentic_opd.core.errors import SandboxError
from agentic_opd.sandboxes.disk import run_within
from agentic_opd.sandboxes.folders import PrivateFolder, remove_leftovers
from agentic_opd.sandboxes.host_process import (
    HOST_ENV,
    SYSTEM_PATH,
    host_python,
    kill_host_process,
    start_host_process,
)
from agentic_opd.sandboxes.protocol import CommandResult, Limits, try_out, with_descriptor
from agentic_opd.sandboxes.supervised import FOLDERS, KILLED, job_line, program, read_answer

T = TypeVar("T")

_END_S = 15.0
"""Seconds the supervisor may take to end a command's processes."""

_log = logging.getLogger(__name__)


@cache
def warn_of_risks() -> None:
    """Log, once, what this backend risks."""
    _log.warning(
        "sandbox_backend is 'unsafe-local': code that the model writes runs as your user, without isolation. It can "
        "read, change and delete your files, read your keys, use the network, and end your processes, and it can read "
        "the hidden tests while they run. Use 'bubblewrap' or 'docker' unless this machine is disposable."
    )


class UnsafeLocalSandbox:
    """A folder and plain processes; not isolated, see the module."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._folder = PrivateFolder()

    async def __aenter__(self) -> Self:
        await self._folder.make(_fill)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._folder.remove()

    async def check(self) -> None:
        """Remove what killed runs left and run a trivial command; see `Sandbox.check`."""
        await remove_leftovers()
        await try_out(self.run, "unsafe-local does not work here")

    async def run(self, command: str, timeout_s: float, stdin: bytes | None = None) -> CommandResult:
        """Run a shell command in the work directory; see `Sandbox.run`."""
        folder = str(self._folder.path)
        path = f"{host_python().parent}:{SYSTEM_PATH}"
        job = job_line(command, timeout_s, stdin, folder=folder, path=path, limits=self._limits)
        written = [self._folder.path / name for name in ("work", "tmp", "home")]
        return await run_within(_supervise(job.encode(), timeout_s, folder), written, self._limits.disk_mb)

    async def in_workdir(self, do: Callable[[int], T]) -> T:
        """Call `do` with a descriptor of the work directory; see `HostedSandbox.in_workdir`."""
        return await asyncio.to_thread(with_descriptor, self._folder.path / "work", do)


def _fill(folder: Path) -> None:
    for name in FOLDERS:
        (folder / name).mkdir()
    for name in ("python", "python3"):
        (folder / "bin" / name).symlink_to(host_python())


async def _supervise(job: bytes, timeout_s: float, folder: str) -> CommandResult:
    """Run one job under a supervisor of its own."""
    argv = [str(host_python()), "-I", "-S", "-c", program(), folder]
    process = await start_host_process(argv, HOST_ENV, "/", has_input=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(job)
            await process.stdin.drain()
        async with asyncio.timeout(timeout_s + _END_S):
            answer = await process.stdout.read()
            await process.wait()
    except TimeoutError as error:
        raise SandboxError(f"a command with {timeout_s:g} s to run could not be ended") from error
    finally:
        # Its input's end tells the supervisor to end the command; what else it started would outlive its own death.
        process.stdin.close()
        await asyncio.shield(_end(process))
    return KILLED if not answer and process.returncode != 0 else read_answer(answer)


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            await process.wait()
    await kill_host_process(process)
