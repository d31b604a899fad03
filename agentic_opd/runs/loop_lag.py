"""Lag of the event loop; a long callback delays all episodes of this process."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence

_LOOK_S = 0.02
_LATEST = 1000


class LoopLag:
    """Samples the lag of the event loop as the excess duration of short sleeps."""

    def __init__(self) -> None:
        self._latest = deque[float](maxlen=_LATEST)
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start sampling the running event loop."""
        self._looking = asyncio.create_task(self._look())

    def latest(self) -> Sequence[float]:
        """Return the latest lags in seconds, from about the last 20 seconds."""
        return tuple(self._latest)

    def stop(self) -> None:
        """Stop sampling."""
        if self._looking is not None:
            self._looking.cancel()

    async def _look(self) -> None:
        while True:
            start = time.monotonic()
            await asyncio.sleep(_LOOK_S)
            self._latest.append(time.monotonic() - start - _LOOK_S)
