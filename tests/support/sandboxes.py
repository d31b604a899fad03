"""Real sandboxes."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

from agentic_opd.core.errors import SandboxError
from agentic_opd.core.types import Task, Verification
from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox
from agentic_opd.sandboxes.factory import check_sandbox
from agentic_opd.sandboxes.protocol import CommandResult, Limits, Sandbox
from agentic_opd.worlds.coding.verifier.verify import verify

T = TypeVar("T")


@cache
def why_not() -> str | None:
    try:
        asyncio.run(check_sandbox(BubblewrapSandbox))
    except SandboxError as error:
        return str(error)
    return None


def in_sandbox(use: Callable[[Sandbox], Awaitable[T]], limits: Limits | None = None) -> T:
    async def main() -> T:
        async with BubblewrapSandbox(limits) as sandbox:
            return await use(sandbox)

    return asyncio.run(main())


def run_all(*commands: str, timeout_s: float = 60.0, limits: Limits | None = None) -> list[CommandResult]:
    """Run the commands one after the other in one sandbox."""

    async def use(sandbox: Sandbox) -> list[CommandResult]:
        return [await sandbox.run(command, timeout_s) for command in commands]

    return in_sandbox(use, limits)


def verify_source(hidden_tests: str, source: str, timeout_s: float = 10.0) -> Verification:
    task = Task("t", "p", hidden_tests)
    return asyncio.run(verify(task, BubblewrapSandbox, {"solution.py": source.encode()}, timeout_s))


def processes_with(marker: str) -> list[str]:
    """The command lines on this machine that hold `marker`."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if marker in command:
            found.append(command)
    return found


def gone(marker: str) -> bool:
    """Whether no process of `marker` is left, after half a minute at most: it would run for hours."""
    deadline = time.monotonic() + 60
    while processes_with(marker):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
