"""Checks to findings: each check is run, what it raises becomes a finding, and what needs a failed one is skipped."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from agentic_opd.core.errors import OPDError

PATIENCE_S = 60.0
"""Seconds one check may take; tasks of the hub are loaded within them too."""

SetupT = TypeVar("SetupT")


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    """A run would start, but look at this first."""
    FAILED = "failed"
    """A run would not start, or would do nothing useful."""
    SKIPPED = "skipped"
    """Not looked at: something that it needs failed, or the settings do not use it."""


class Note(NamedTuple):
    """What a check that came to its end has to say."""

    text: str
    status: Status = Status.OK


@dataclass(frozen=True, slots=True)
class Finding:
    """One line for a person."""

    name: str
    status: Status
    text: str


@dataclass(frozen=True, slots=True)
class Check(Generic[SetupT]):
    """Looks at one thing; may leave what it found in the set-up, for the checks that need it."""

    name: str
    run: Callable[[SetupT], Awaitable[Note]]
    needs: tuple[str, ...] = ()


async def run_checks(checks: Sequence[Check[SetupT]], setup: SetupT) -> AsyncIterator[Finding]:
    """Yield a finding for each check, in order."""
    missing: set[str] = set()
    for check in checks:
        lacking = [name for name in check.needs if name in missing]
        if lacking:
            finding = Finding(check.name, Status.SKIPPED, f"needs: {', '.join(lacking)}")
        else:
            finding = await _finding(check, setup)
        if lacking or finding.status is Status.FAILED:
            missing.add(check.name)
        yield finding


async def _finding(check: Check[SetupT], setup: SetupT) -> Finding:
    try:
        async with asyncio.timeout(PATIENCE_S):
            note = await check.run(setup)
    except TimeoutError:
        return Finding(check.name, Status.FAILED, f"did not come to an end within {PATIENCE_S:g} s")
    except OPDError as error:
        return Finding(check.name, Status.FAILED, str(error))
    return Finding(check.name, note.status, note.text)
