"""What open pages wait for: changes of sessions, by their owner. Pure, on one event loop."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from agentic_opd.gateway.journal import SessionRow


class Watch:
    """The sessions of an owner that changed since the last look."""

    def __init__(self) -> None:
        self._changed: dict[str, None] = {}
        self._is_changed = asyncio.Event()
        self.is_closed = False
        """Whether the gateway is being stopped."""

    def close(self) -> None:
        self.is_closed = True
        self._is_changed.set()

    def add(self, session_id: str) -> None:
        self._changed[session_id] = None
        self._is_changed.set()

    async def changed(self) -> list[str]:
        """Wait for a change; return the ids of the sessions that changed, in order."""
        await self._is_changed.wait()
        self._is_changed.clear()
        session_ids, self._changed = [*self._changed], {}
        return session_ids


class Changes:
    """The watches of all open pages."""

    def __init__(self) -> None:
        self._watches: dict[str, list[Watch]] = {}
        """Watches by the owner whose sessions they are about."""

    def tell(self, session: SessionRow) -> None:
        """Tell the pages of a session's owner that the session changed."""
        for watch in self._watches.get(session.owner, ()):
            watch.add(session.session_id)

    def close(self) -> None:
        """End all watches: the gateway is being stopped."""
        for watches in self._watches.values():
            for watch in watches:
                watch.close()

    @contextmanager
    def watch(self, owner: str) -> Generator[Watch]:
        """Collect the changes of an owner's sessions in the block."""
        watch = Watch()
        self._watches.setdefault(owner, []).append(watch)
        try:
            yield watch
        finally:
            self._watches[owner].remove(watch)
            if not self._watches[owner]:
                del self._watches[owner]
