"""Limit the processor time of each check, so that an endless check leaves time for the others."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] - `signal` takes 4 ms to import.
import time

from agentic_opd.worlds.coding.verifier.harness.pipe import NoAnswer

SHARE = 4  # A check may take 1/SHARE of the time left, or an even share of the total if that is more.
TICK_S = 0.25
IDLE = 0.01  # Processes that use less than this part of a tick are idle.


class TookTooLong(NoAnswer):
    """A check, or the import of the solution, exceeded its time."""


class Clock:
    """Distributes `total_s` seconds of processor time, of this process and the solution's, over `num_checks` checks.

    Other work on the machine does not affect the limits. A tick in which both processes are idle is charged in full, so
    that `sleep` ends too. The timer interrupts this process anywhere, in its code or while it waits for the other
    process.
    """

    def __init__(self, total_s: float, num_checks: int) -> None:
        self._left_s = total_s
        self._even_s = total_s / max(num_checks, SHARE)
        self._child_id: int | None = None
        self._child_s = 0.0
        self._used_s = time.process_time()
        self.start_share()
        _signal.signal(_signal.SIGALRM, self._tick)
        _signal.setitimer(_signal.ITIMER_REAL, TICK_S, TICK_S)

    def watch(self, pid: int) -> None:
        """Count the time of the child process `pid` too, from now on."""
        self._charge()
        self._child_id, self._child_s = (~pid << 3) | 2, 0.0  # The clock's id, as clock_getcpuclockid(3) computes it.

    def start_share(self) -> None:
        """Start the time of a new check."""
        self._charge()
        self._share_s = max(self._left_s / SHARE, min(self._even_s, self._left_s), 0.001)
        self._end_s = self._left_s - self._share_s
        self._tick_at, self._tick_left_s = time.monotonic(), self._left_s

    def _charge(self) -> None:
        """Charge the processor time used since the last call."""
        used_s, self._used_s = self._used_s, time.process_time()
        self._left_s -= self._used_s - used_s
        if self._child_id is not None:
            try:
                child_s = time.clock_gettime(self._child_id)
            except OSError:  # The child has ended.
                return
            self._left_s -= child_s - self._child_s
            self._child_s = child_s

    def _tick(self, *_: object) -> None:
        self._charge()
        if time.monotonic() - self._tick_at >= TICK_S:  # Other code may send the signal too.
            if self._tick_left_s - self._left_s < IDLE * TICK_S:
                self._left_s -= TICK_S
            self._tick_at, self._tick_left_s = time.monotonic(), self._left_s
        if self._left_s < self._end_s:
            raise TookTooLong(f"no end after {self._share_s:.1f} s")
