"""The sandboxes of a process: at most so many in use at a time, and some of them started ahead.

No sandbox is used by two episodes. A reset would have to be exact, and an engine has none that is: removing the files
of the writable folders leaves what an episode did to their owners and times, to shared memory, queues and counters of
the kernel, and what an escaped process has hidden. A start ahead costs the same work, and no episode waits for it.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Hashable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from agentic_opd.core.errors import SandboxError
from agentic_opd.sandboxes.protocol import Sandbox, SandboxFactory, WarmSandbox

_POOLS = WeakKeyDictionary[asyncio.AbstractEventLoop, "SandboxPool"]()


class SandboxPool:
    """The sandboxes of one event loop.

    Sandboxes that wait for an episode are left when the loop ends (`asyncio.run` cancels the pool's task). If the
    process is killed, they end as every sandbox of its backend does.
    """

    def __init__(self, most: int | None, warm: int) -> None:
        """Start nothing yet. At most `most` sandboxes (None: any number) are in use, and `warm` further ones wait."""
        self.in_use: AbstractAsyncContextManager[object] = nullcontext() if most is None else asyncio.Semaphore(most)
        """Entered while a sandbox is in use."""
        self._warm = warm
        self._idle: list[tuple[Hashable, WarmSandbox]] = []
        """Sandboxes that were started ahead, with their kinds."""
        self._starting = 0
        self._tasks = set[asyncio.Task[None]]()

    @asynccontextmanager
    async def sandbox(self, kind: Hashable, make: SandboxFactory) -> AsyncGenerator[Sandbox]:
        """Wait for a free place, and enter a sandbox made by `make`, or one of the same kind that was started ahead."""
        async with self.in_use, AsyncExitStack() as leaving:
            sandbox = await self._taken(kind)
            if sandbox is None:
                sandbox = await leaving.enter_async_context(make())
            else:
                leaving.push_async_callback(sandbox.__aexit__)
            self._start_ahead(kind, make)
            yield sandbox

    async def _taken(self, kind: Hashable) -> Sandbox | None:
        """Return a sandbox of this kind that was started ahead, and leave those that have ended since."""
        for idle in [idle for idle in self._idle if idle[0] == kind]:
            self._idle.remove(idle)
            if idle[1].is_running:
                return idle[1]
            await idle[1].__aexit__()
        return None

    def _start_ahead(self, kind: Hashable, make: SandboxFactory) -> None:
        """Fill the pool in the background. The latest kind replaces others: a group's episodes are of one task."""
        if not self._tasks and self._warm:
            self._run(self._leave_at_end())
        for other in [idle for idle in self._idle if idle[0] != kind]:
            self._idle.remove(other)
            self._run(other[1].__aexit__())
        while len(self._idle) + self._starting < self._warm:
            self._starting += 1
            self._run(self._start(kind, make))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, kind: Hashable, make: SandboxFactory) -> None:
        try:
            sandbox = make()
            assert isinstance(sandbox, WarmSandbox)
            await sandbox.__aenter__()
            self._idle.append((kind, sandbox))
        except SandboxError:
            pass  # The episode that needs one starts it itself, and meets the error.
        finally:
            self._starting -= 1

    async def _leave_at_end(self) -> None:
        """Wait for the end of the loop, then leave the sandboxes that no episode took."""
        try:
            await asyncio.Event().wait()
        finally:
            idle, self._idle = self._idle, []
            await asyncio.gather(*(sandbox.__aexit__() for _, sandbox in idle))


def place(most: int | None) -> AbstractAsyncContextManager[object]:
    """Return what is entered while a sandbox that comes from elsewhere is in use; `most` is the pool's."""
    return _pool(most, 0).in_use


def pooled(make: SandboxFactory, kind: Hashable, most: int | None, warm: int) -> SandboxFactory:
    """Return a factory whose sandboxes come from the pool of the event loop in which they are entered."""
    return lambda: _pool(most, warm).sandbox(kind, make)


def _pool(most: int | None, warm: int) -> SandboxPool:
    return _POOLS.setdefault(asyncio.get_running_loop(), SandboxPool(most, warm))
