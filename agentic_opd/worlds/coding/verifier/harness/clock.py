"""How long one check may take, so that an endless one leaves time for all others."""

from __future__ import annotations

import time

from agentic_opd.worlds.coding.verifier.harness.pipe import NoAnswer

SHARE = 4
"""A check may take the SHAREth part of the time that is left. So the time never runs out, however many are endless."""


class TookTooLong(NoAnswer):
    """A check, or the import of the solution, did not end in its time."""


class Clock:
    """Deals out `total_s` seconds, counted from its making, to one check after the other."""

    def __init__(self, total_s: float) -> None:
        self._end = time.monotonic() + total_s
        self.share_s = 0.0
        self.start_share()

    def start_share(self) -> float:
        """A new check begins: returns the seconds it may take."""
        now = time.monotonic()
        self.share_s = max(self._end - now, 0.0) / SHARE
        self._deadline = now + self.share_s
        return self.share_s

    def left_s(self) -> float:
        """Seconds until the current check is over its time.

        Raises:
            TookTooLong: It is.
        """
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self.too_long()
        return left

    def too_long(self) -> TookTooLong:
        """What to raise for a check that is over its time."""
        return TookTooLong(f"no end after {self.share_s:.1f} s")


class AlarmClock(Clock):
    """A clock for a solution in the tests' own process: it also interrupts Python code that is over its time."""

    def __init__(self, total_s: float) -> None:
        import signal

        self._signal = signal
        signal.signal(signal.SIGALRM, self._late)
        super().__init__(total_s)

    def start_share(self) -> float:
        """As Clock's; sets the alarm."""
        share_s = super().start_share()
        self._signal.setitimer(self._signal.ITIMER_REAL, max(share_s, 0.001))
        return share_s

    def _late(self, *_: object) -> None:
        raise self.too_long()
