"""How late the event loop is: what takes it long keeps every other episode of this process waiting."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence

_LOOK_S = 0.02
_LATEST = 1000


class LoopLag:
    """Sleeps for a moment again and again, and keeps by how much too long it slept."""

    def __init__(self) -> None:
        self._latest = deque[float](maxlen=_LATEST)
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look from now on, at the loop that runs."""
        self._looking = asyncio.create_task(self._look())

    def latest(self) -> Sequence[float]:
        """Seconds, of the last 20 seconds."""
        return tuple(self._latest)

    def stop(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()

    async def _look(self) -> None:
        while True:
            start = time.monotonic()
            await asyncio.sleep(_LOOK_S)
            self._latest.append(time.monotonic() - start - _LOOK_S)
