"""Run one host process with bounded time and output: argv in, CommandResult out.

Whatever happens (timeout, too much output, cancellation), the process and its group are dead when `run_host_process`
ends.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from agentic_opd.core.errors import SandboxError
from agentic_opd.sandboxes.memory import MemoryLimit
from agentic_opd.sandboxes.protocol import CommandResult

_NICE = 5
"""A third of the time that a process without it gets, where there is not enough for all."""

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"

HOST_ENV = {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8"}
"""Environment of what starts a sandbox. Commands can read it in /proc/1/environ, so the caller's must not be in it."""


@cache
def host_python() -> Path:
    """The interpreter behind this one's virtual environment."""
    name = f"bin/python{sys.version_info.major}.{sys.version_info.minor}"
    return (Path(sys.base_prefix) / name).resolve()


async def run_host_process(
    argv: Sequence[str],
    *,
    timeout_s: float,
    max_output_bytes: int,
    env: Mapping[str, str],
    cwd: str = "/",
    stdin: bytes | None = None,
    pass_fds: Sequence[int] = (),
    before_start: Callable[[], None] | None = None,
    memory: MemoryLimit | None = None,
) -> CommandResult:
    """Run `argv` in a process group of its own.

    Args:
        argv: Program and arguments.
        timeout_s: Seconds until it is killed.
        max_output_bytes: It is killed when it has written more than this; nothing beyond is ever held in memory.
        env: Its whole environment; nothing is inherited.
        cwd: Its working directory.
        stdin: What it reads; None is an empty input.
        pass_fds: File descriptors that it inherits beside the usual three, under their numbers.
        before_start: Called in this thread just before it is started.
        memory: Kills it when it says so; `argv` is wrapped for it.

    Raises:
        SandboxError: The program cannot be started.
    """
    started = argv if memory is None else memory.wrap([*argv])
    process = await start_host_process(started, env, cwd, stdin is not None, pass_fds, before_start)
    output = bytearray()
    timed_out = memory_exceeded = False
    feeding = asyncio.create_task(_feed(process, stdin))
    reading = asyncio.create_task(_read(process, output, max_output_bytes))
    try:
        async with asyncio.timeout(timeout_s):
            memory_exceeded = await _watched(reading, process.pid, memory)
    except TimeoutError:
        timed_out = True
    finally:
        feeding.cancel()
        exceeded = reading.done() and not reading.result()
        reading.cancel()
        await asyncio.wait([reading])
        await kill_host_process(process)
    # The kernel may have killed since the last look, and what it killed of this command is not the next one's.
    was_killed = memory is not None and memory.exceeded(process.pid)
    memory_exceeded = memory_exceeded or was_killed
    code = process.returncode if process.returncode is not None else -signal.SIGKILL
    return CommandResult(
        exit_code=128 - code if code < 0 else code,
        output=bytes(output),
        timed_out=timed_out,
        output_exceeded=exceeded,
        memory_exceeded=memory_exceeded,
    )


async def _watched(reading: asyncio.Task[bool], pid: int, memory: MemoryLimit | None) -> bool:
    """Wait for the end of a process that is read; True if it took too much memory before."""
    if memory is None:
        await asyncio.wait([reading])
        return False
    while not (await asyncio.wait([reading], timeout=memory.pause_s))[0]:
        if memory.exceeded(pid):  # Under a millisecond; on a busy machine a thread may begin fifty later.
            return True
    return False


async def start_host_process(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    has_input: bool,
    pass_fds: Sequence[int] = (),
    before_start: Callable[[], None] | None = None,
) -> asyncio.subprocess.Process:
    """Start `argv` in a session of its own, stderr into stdout; a start that is cancelled leaves nothing behind.

    Raises:
        SandboxError: The program cannot be started.
    """

    async def start() -> asyncio.subprocess.Process:
        if before_start is not None:
            before_start()
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE if has_input else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
            pass_fds=pass_fds,
        )
        _stand_back(process.pid)
        return process

    starting = asyncio.create_task(start())
    try:
        return await asyncio.shield(starting)
    except OSError as error:
        raise SandboxError(f"{argv[0]} cannot be started: {error}") from error
    except asyncio.CancelledError:
        # Were the start itself cancelled, asyncio would kill the process alone, and leave what it had started.
        await kill_host_process(await starting)
        raise


def _stand_back(pid: int) -> None:
    """Let this process and the engine have the processor first: what keeps them waiting keeps all episodes waiting.

    Where the kernel divides its time among sessions, it is the session that stands back.
    """
    with contextlib.suppress(OSError):  # It has ended; or the kernel has no such file, or lets nobody write it.
        os.setpriority(os.PRIO_PGRP, pid, _NICE)
        Path(f"/proc/{pid}/autogroup").write_text(str(_NICE))


async def _feed(process: asyncio.subprocess.Process, stdin: bytes | None) -> None:
    """Write the input; a process that does not read it to its end is not an error."""
    if stdin is None or process.stdin is None:
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(stdin)
        await process.stdin.drain()
    process.stdin.close()


async def _read(process: asyncio.subprocess.Process, output: bytearray, limit: int) -> bool:
    """Read into `output` until the process has ended (True) or until more than `limit` bytes have come (False)."""
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
