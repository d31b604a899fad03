"""Run one host process with bounded time and output: argv in, CommandResult out.

The process and its group have ended when `run_host_process` returns or raises: also after a timeout, too much output,
or a cancellation.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

from agentic_opd.core.errors import SandboxError
from agentic_opd.sandboxes.activity import POLL_S, Activity, Inactivity
from agentic_opd.sandboxes.memory import MemoryLimit
from agentic_opd.sandboxes.protocol import CommandResult

_NICE = 5
"""Nice value: on a busy machine a third of the processor time of a process without it."""

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"

HOST_ENV = {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8"}
"""Environment of the program that starts a sandbox. Commands can read it in /proc/1/environ, so it holds no secrets."""


@cache
def host_python() -> Path:
    """Return the base interpreter of this virtual environment."""
    name = f"bin/python{sys.version_info.major}.{sys.version_info.minor}"
    return (Path(sys.base_prefix) / name).resolve()


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process of this machine: program and arguments, and all that it inherits. Its working directory is `/`."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=lambda: HOST_ENV)
    """Its whole environment."""
    pass_fds: Sequence[int] = ()
    """File descriptors that it inherits beside the usual three, under their numbers."""
    before_start: Callable[[], None] = lambda: None
    """Called in this thread just before it is started."""


async def run_host_process(
    spec: ProcessSpec,
    *,
    timeout_s: float,
    max_output_bytes: int,
    stdin: bytes | None = None,
    memory: MemoryLimit | None = None,
    activity: Activity | None = None,
) -> CommandResult:
    """Run a process in a new process group.

    Args:
        spec: The process.
        timeout_s: Seconds until it is killed.
        max_output_bytes: It is killed when it has written more; the rest is never held in memory.
        stdin: Its input; None is an empty one.
        memory: Its memory limit, which wraps its arguments; the process is killed when the limit is exceeded.
        activity: Whether its processes are at work; it is killed when they are not.

    Raises:
        SandboxError: The program cannot be started.
    """
    if memory is not None:
        spec = replace(spec, argv=memory.wrap([*spec.argv]))
    process = await start_host_process(spec, has_input=stdin is not None)
    output = bytearray()
    timed_out, stop = False, None
    feeding = asyncio.create_task(_feed(process, stdin))
    reading = asyncio.create_task(_read(process, output, max_output_bytes))
    try:
        async with asyncio.timeout(timeout_s):
            stop = await _watched(reading, process.pid, memory, activity)
    except TimeoutError:
        timed_out = True
    finally:
        feeding.cancel()
        exceeded = reading.done() and not reading.result()
        reading.cancel()
        await asyncio.wait([reading])
        await kill_host_process(process)
    # The kernel may have killed since the last check; asking now keeps that out of the next command's result.
    was_killed = memory is not None and memory.exceeded(process.pid)
    code = process.returncode if process.returncode is not None else -signal.SIGKILL
    return CommandResult(
        exit_code=128 - code if code < 0 else code,
        output=bytes(output),
        timed_out=timed_out,
        output_exceeded=exceeded,
        memory_exceeded=stop == "memory" or was_killed,
        stopped=stop == "stopped",
        idle=stop == "idle",
    )


async def _watched(
    reading: asyncio.Task[bool], pid: int, memory: MemoryLimit | None, activity: Activity | None
) -> Inactivity | Literal["memory"] | None:
    """Wait for the end of the process; return early, with the reason, if it must be killed."""
    while True:
        pause_s = memory.pause_s if memory is not None else POLL_S if activity is not None else None
        if (await asyncio.wait([reading], timeout=pause_s))[0]:
            return None
        # Looking takes under a millisecond; starting a thread may take 50 ms on a busy machine.
        if memory is not None and memory.exceeded(pid):
            return "memory"
        if activity is not None and (inactivity := activity.look(pid)) is not None:
            return inactivity


async def start_host_process(spec: ProcessSpec, *, has_input: bool) -> asyncio.subprocess.Process:
    """Start a process in a new session, stderr into stdout; a cancelled start leaves no process.

    Raises:
        SandboxError: The program cannot be started.
    """

    async def start() -> asyncio.subprocess.Process:
        spec.before_start()
        process = await asyncio.create_subprocess_exec(
            *spec.argv,
            stdin=asyncio.subprocess.PIPE if has_input else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(spec.env),
            cwd="/",
            start_new_session=True,
            pass_fds=spec.pass_fds,
        )
        _stand_back(process.pid)
        return process

    starting = asyncio.create_task(start())
    try:
        return await asyncio.shield(starting)
    except OSError as error:
        raise SandboxError(f"{spec.argv[0]} cannot be started: {error}") from error
    except asyncio.CancelledError:
        # If the start itself were cancelled, asyncio would kill the process but not its children.
        await kill_host_process(await starting)
        raise


def _stand_back(pid: int) -> None:
    """Give this process and the engine priority over the sandbox: delaying them delays all episodes.

    Where the kernel schedules by session (autogroup), the session's nice value decides.
    """
    with contextlib.suppress(OSError):  # The process has ended, or the kernel has no such file or refuses.
        os.setpriority(os.PRIO_PGRP, pid, _NICE)
        Path(f"/proc/{pid}/autogroup").write_text(str(_NICE))


async def _feed(process: asyncio.subprocess.Process, stdin: bytes | None) -> None:
    """Write the input; a process need not read it to its end."""
    if stdin is None or process.stdin is None:
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(stdin)
        await process.stdin.drain()
    process.stdin.close()


async def _read(process: asyncio.subprocess.Process, output: bytearray, limit: int) -> bool:
    """Read into `output` until the process has ended (True) or has written more than `limit` bytes (False)."""
    assert process.stdout is not None
    while chunk := await process.stdout.read(65536):
        output += chunk
        if len(output) > limit:
            del output[limit:]
            return False
    await process.wait()
    return True


async def kill_host_process(process: asyncio.subprocess.Process) -> None:
    """Kill the process's group and reap the process, also while this task is being cancelled."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await asyncio.shield(_reap(process))


async def _reap(process: asyncio.subprocess.Process) -> None:
    # asyncio's wait ends only when the pipe is read to its end.
    assert process.stdout is not None
    while await process.stdout.read(65536):
        pass
    await process.wait()
