"""A clock for a solution in the tests' own process, where no waiting can be ended."""

from __future__ import annotations

import signal

from agentic_opd.worlds.coding.verifier.harness.clock import Clock


class AlarmClock(Clock):
    """A clock that also interrupts Python code which is over its time."""

    def __init__(self, total_s: float) -> None:
        signal.signal(signal.SIGALRM, self._late)
        super().__init__(total_s)

    def start_share(self) -> float:
        """As Clock's; sets the alarm."""
        share_s = super().start_share()
        signal.setitimer(signal.ITIMER_REAL, max(share_s, 0.001))
        return share_s

    def _late(self, *_: object) -> None:
        raise self.too_long()
