"""What the tests of this folder share: real sandboxes, and a mark for the tests that need them."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache
from typing import TypeVar

import pytest

from agentic_opd.errors import SandboxError
from agentic_opd.rollout.bubblewrap import Limits
from agentic_opd.rollout.process import CommandResult
from agentic_opd.rollout.sandbox import BubblewrapSandbox, Sandbox, check_sandbox
from agentic_opd.rollout.verify import verify
from agentic_opd.types import Task, Verification

T = TypeVar("T")


@cache
def why_not() -> str | None:
    try:
        asyncio.run(check_sandbox(BubblewrapSandbox))
    except SandboxError as error:
        return str(error)
    return None


needs_bwrap = pytest.mark.skipif(why_not() is not None, reason=f"bubblewrap cannot run here: {why_not()}")


def in_sandbox(use: Callable[[Sandbox], Awaitable[T]], limits: Limits | None = None) -> T:
    async def main() -> T:
        async with BubblewrapSandbox(limits) as sandbox:
            return await use(sandbox)

    return asyncio.run(main())


def run_all(*commands: str, timeout_s: float = 10.0, limits: Limits | None = None) -> list[CommandResult]:
    """Run the commands one after the other in one sandbox."""

    async def use(sandbox: Sandbox) -> list[CommandResult]:
        return [await sandbox.run(command, timeout_s) for command in commands]

    return in_sandbox(use, limits)


def verify_source(hidden_tests: str, source: str, timeout_s: float = 10.0) -> Verification:
    task = Task("t", "p", hidden_tests)
    return asyncio.run(verify(task, BubblewrapSandbox, {"solution.py": source.encode()}, timeout_s))
