"""Limit the processor time of each check, so that an endless check leaves time for the others."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] - `signal` takes 4 ms to import.
import os
import time

from agentic_opd.worlds.coding.verifier.harness.pipe import NoAnswer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    Threads = dict[tuple[int, int], tuple[str, float]]
    """(process, thread) -> its state as in /proc/PID/stat, and its processor time in seconds."""

SHARE = 4  # A check may take 1/SHARE of the time left, or an even share of the total if that is more.
TICK_S = 0.25
IDLE = 0.01  # Processes that use less than this part of a tick are idle.
_KERNEL_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class TookTooLong(NoAnswer):
    """A check, or the import of the solution, exceeded its time."""


class Clock:
    """Distributes `total_s` seconds of processor time, of this process and the solution's, over `num_checks` checks.

    Other work on the machine does not affect the limits. A tick in which both processes are idle is charged in full, so
    that `sleep` ends too. Processes that wait for a processor or for the disk are not idle: their state tells. A
    solution that is stopped by a signal ends at once, because nothing but itself can have stopped it. The timer
    interrupts this process anywhere, in its code or while it waits for the other process.
    """

    def __init__(self, total_s: float, num_checks: int) -> None:
        self._left_s = total_s
        self._even_s = total_s / max(num_checks, SHARE)
        self._pid = 0
        self._child_id: int | None = None
        self._child_s = 0.0
        self._used_s = time.process_time()
        self._queued_s = queued_s()
        self._threads: Threads = {}
        self._is_paused = False
        self.start_share()
        _signal.signal(_signal.SIGALRM, self._tick)
        _signal.setitimer(_signal.ITIMER_REAL, TICK_S, TICK_S)

    def watch(self, pid: int) -> None:
        """Count the time of the child process `pid` too, from now on."""
        self._charge()
        self._pid, self._threads = pid, {}
        self._child_id, self._child_s = (~pid << 3) | 2, 0.0  # The clock's id, as clock_getcpuclockid(3) computes it.

    def start_share(self) -> None:
        """Start the time of a new check."""
        self._charge()
        self._share_s = max(self._left_s / SHARE, min(self._even_s, self._left_s), 0.001)
        self._end_s = self._left_s - self._share_s
        self._tick_at, self._tick_left_s = time.monotonic(), self._left_s

    def pause(self) -> None:
        """Charge nothing until `resume`: what runs meanwhile is neither the tests nor the solution."""
        self._charge()
        self._is_paused = True

    def resume(self) -> None:
        """Charge again from now on, with the time that was left at `pause`."""
        self._charge()
        self._is_paused = False
        self.start_share()

    def _charge(self) -> None:
        """Charge the processor time used since the last call."""
        used_s, self._used_s = self._used_s, time.process_time()
        charged_s = self._used_s - used_s
        if self._child_id is not None:
            try:
                child_s = time.clock_gettime(self._child_id)
                charged_s += child_s - self._child_s
                self._child_s = child_s
            except OSError:  # The child has ended.
                pass
        if not self._is_paused:
            self._left_s -= charged_s

    def _tick(self, *_: object) -> None:
        self._charge()
        if self._is_paused:
            return
        passed_s = time.monotonic() - self._tick_at
        if passed_s >= TICK_S:  # Other code may send the signal too.
            before, self._threads = self._threads, threads_of_others() if self._child_id is not None else {}
            queued_s_before, self._queued_s = self._queued_s, queued_s()
            is_stopped = any(pid == self._pid and thread[0] in ("T", "t") for (pid, _), thread in self._threads.items())
            if self._tick_left_s - self._left_s < IDLE * TICK_S:
                waited_s = max(0.0, min(passed_s, TICK_S) - (self._queued_s - queued_s_before))
                self._left_s -= idle_s(self._pid, before, self._threads, waited_s)
            self._tick_at, self._tick_left_s = time.monotonic(), self._left_s
            self._used_s = time.process_time()  # Without the time that looking took: it would count as work.
            if is_stopped:
                raise NoAnswer("the solution stopped its process")
        if self._left_s < self._end_s:
            raise TookTooLong(f"no end after {self._share_s:.1f} s")


def idle_s(child: int, before: Threads, threads: Threads, waited_s: float) -> float:
    """Return how many of `waited_s` seconds to charge, in which the solution's process `child` used no processor.

    None are charged if its threads wait for the disk. If they wait for a processor, what its own processes used is:
    they may be what it waits for. `before` and `threads` are the solution's threads at the last tick and now.
    """
    states = [state for state, _ in threads.values()]
    # A process is in state D too while a process that it started has not called exec, which may sleep for ever.
    if states and all(state == "D" for state in states):
        return 0.0
    # Processes of the child's wait if they waited before too: no time is known of those that end in between.
    waiting = [key for key, (state, _) in threads.items() if state == "R"]
    if any(key[0] == child or before.get(key, ("", 0.0))[0] == "R" for key in waiting):
        used_s = sum(used - before[key][1] for key, (_, used) in threads.items() if key in before and key[0] != child)
        return min(used_s, waited_s)
    return waited_s


def threads_of_others() -> Threads:
    """Return the threads of all processes in the sandbox but this one and the first, which is not the solution's."""
    threads: Threads = {}
    for pid in _numbers("/proc"):
        if pid not in (1, os.getpid()):
            for thread in _numbers(f"/proc/{pid}/task"):
                # The second field, the program's name, may hold any character.
                fields = _text(f"/proc/{pid}/task/{thread}/stat").rpartition(")")[2].split()
                if len(fields) > 12:
                    threads[pid, thread] = fields[0], (int(fields[11]) + int(fields[12])) * _KERNEL_TICK_S
    return threads


def queued_s() -> float:
    """Return the seconds that this process has waited for a processor; 0 if the kernel does not count them."""
    fields = _text("/proc/self/schedstat").split()
    return int(fields[1]) / 1e9 if len(fields) == 3 else 0.0


def _numbers(folder: str) -> Iterable[int]:
    try:
        return [int(name) for name in os.listdir(folder) if name.isdecimal()]  # noqa: PTH208 - pathlib is slow to import
    except OSError:  # The process has ended.
        return []


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
