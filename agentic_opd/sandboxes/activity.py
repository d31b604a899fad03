"""Tell by polling whether a sandbox's command is at work, is stopped by a signal, or waits for nothing.

The program in the sandbox may limit its own time, but code that shares its process, or its user, can stop or disarm it.
Nothing in the sandbox can do that to this process. What needs a processor and gets none, as on a busy machine, is at
work.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import Literal

from agentic_opd.sandboxes.watch import below, children_of

POLL_S = 0.5
_ACTIVE = 0.1
"""Processes that use less than this part of the time are idle."""
_KERNEL_TICKS_S = os.sysconf("SC_CLK_TCK")
_STOPPED_POLLS = 2
"""A process may be stopped for a moment, as a debugger does; it is found so twice only if nothing continues it."""

Inactivity = Literal["stopped", "idle"]


class Activity:
    """What one command has done so far."""

    def __init__(self, idle_limit_s: float) -> None:
        self._left_s = idle_limit_s
        self._last = time.monotonic()
        self._ticks = 0
        self._ticks_at = self._last
        self._stopped_polls = 0

    def look(self, pid: int) -> Inactivity | None:
        """Return why the command below bubblewrap's process `pid` must end, or None; it looks once in `POLL_S`.

        Stopped: its first process, or bubblewrap itself. Idle: its processes together spent more than the limit
        without using a processor, waiting for one, or waiting for the disk.
        """
        passed_s = time.monotonic() - self._last
        if passed_s < POLL_S:
            return None
        self._last += passed_s
        first = [child for inner in children_of(pid) for child in children_of(inner)[:1]]
        is_stopped = any(_fields(Path(f"/proc/{process}"))[0] in ("T", "t") for process in (pid, *first))
        self._stopped_polls = self._stopped_polls + 1 if is_stopped else 0
        if self._stopped_polls == _STOPPED_POLLS:
            return "stopped"
        # A poll that comes late has not seen what happened before.
        self._left_s -= min(passed_s, 2 * POLL_S) if self._is_idle(pid, first) else 0.0
        return "idle" if self._left_s < 0 else None

    def _is_idle(self, pid: int, first: list[int]) -> bool:
        inside = [process for inner in children_of(pid) for process in below(inner)]
        states = {process: {*_thread_states(process)} for process in inside}
        # The first process may wait for the others, and these for the disk. Waiting for a new process to call exec is
        # state D too, and that process may sleep for ever.
        awaited = [states[process] for process in inside if process not in first] or [*states.values()]
        if any("R" in of_process for of_process in states.values()) or all(waits <= {"D"} for waits in awaited):
            return False
        before, since = self._ticks, self._last - self._ticks_at
        self._ticks, self._ticks_at = sum(map(_ticks, inside)), self._last
        return self._ticks - before < _ACTIVE * since * _KERNEL_TICKS_S


def _ticks(process: int) -> int:
    """Return the processor time of a process and its ended children, in the kernel's ticks."""
    return sum(map(int, _fields(Path(f"/proc/{process}"))[11:15]))


def _thread_states(process: int) -> list[str]:
    with contextlib.suppress(OSError):
        return [_fields(thread)[0] for thread in Path(f"/proc/{process}/task").iterdir()]
    return []


def _fields(folder: Path) -> list[str]:
    """Return the fields of `stat` from the third on; state X if the process has ended."""
    with contextlib.suppress(OSError):
        # The second field, the program's name, may hold any character.
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return ["X"]
