"""How long one check may take, so that an endless one leaves time for all others."""

from __future__ import annotations

import time

from agentic_opd.worlds.coding.verifier.harness.pipe import NoAnswer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

SHARE = 4
"""A check may take the SHAREth part of the time that is left. So the time never runs out, however many are endless."""


class TookTooLong(NoAnswer):
    """A check, or the import of the solution, did not end in its time."""


class Clock:
    """Deals out `total_s` seconds, counted from its making, to one check after the other.

    With `alarm` it also interrupts Python code of this process that is over its time.
    """

    def __init__(self, total_s: float, *, alarm: bool = False) -> None:
        self._end = time.monotonic() + total_s
        self._alarm: Any = None
        if alarm:
            import signal

            self._alarm = signal
            signal.signal(signal.SIGALRM, self._late)
        self.start_share()

    def start_share(self) -> None:
        """A new check begins."""
        self._share_s = max((self._end - time.monotonic()) / SHARE, 0.001)
        self._deadline = time.monotonic() + self._share_s
        if self._alarm is not None:
            self._alarm.setitimer(self._alarm.ITIMER_REAL, self._share_s)

    def left_s(self) -> float:
        """Seconds until the current check is over its time.

        Raises:
            TookTooLong: It is.
        """
        left = self._deadline - time.monotonic()
        return left if left > 0 else self._late()

    def wait(self, fd: int, *, to_write: bool = False) -> None:
        """Wait until a read from `fd` may be tried, or a write; raises as `left_s`."""
        import select

        poll = select.poll()
        poll.register(fd, select.POLLOUT if to_write else select.POLLIN)
        while not poll.poll(self.left_s() * 1000):
            pass

    def _late(self, *_: object) -> NoReturn:
        raise TookTooLong(f"no end after {self._share_s:.1f} s")
