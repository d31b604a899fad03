"""An event loop on which waiting takes no time: its clock jumps to the next timer when nothing else is to be done."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTime(asyncio.SelectorEventLoop):
    """For coroutines that wait for timers and for each other: sockets are looked at, never waited for.

    A thread's result is not waited for either: the clock jumps while it works.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now_s


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualTime) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        self._loop.now_s += max(0.0, timeout)
        return super().select(0)


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a VirtualTime."""
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(work)
