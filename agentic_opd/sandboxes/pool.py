"""The sandboxes of a process: at most so many in use at a time, and some of them started ahead.

No sandbox is used by two episodes. A reset would have to be exact, and no engine has an exact one: after the removal of
the files, an episode's changes to owners and times, to shared memory, queues and counters of the kernel remain, and so
does a hidden process that escaped. A start ahead costs the same work, and no episode waits for it.
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

    def __init__(self, max_in_use: int | None, warm: int) -> None:
        """Start nothing yet. At most `max_in_use` sandboxes (None: any number) are in use, and `warm` others wait."""
        self.in_use: AbstractAsyncContextManager[object] = (
            nullcontext() if max_in_use is None else asyncio.Semaphore(max_in_use)
        )
        """Entered while a sandbox is in use."""
        self._warm = warm
        self._idle: list[tuple[Hashable, WarmSandbox]] = []
        """Sandboxes that were started ahead, with their kinds."""
        self._starting = 0
        self._tasks = set[asyncio.Task[None]]()

    @asynccontextmanager
    async def sandbox(self, kind: Hashable, make: SandboxFactory) -> AsyncGenerator[Sandbox]:
        """Wait until one more may be in use, and yield one of this kind that was started ahead, or a new one."""
        async with self.in_use, AsyncExitStack() as leaving:
            sandbox = await self._take_idle(kind)
            if sandbox is None:
                sandbox = await leaving.enter_async_context(make())
            else:
                leaving.push_async_callback(sandbox.__aexit__)
            self._start_ahead(kind, make)
            yield sandbox

    async def _take_idle(self, kind: Hashable) -> Sandbox | None:
        """Return a running sandbox of this kind that was started ahead, and leave those that have ended."""
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
        for idle in [idle for idle in self._idle if idle[0] != kind]:
            self._idle.remove(idle)
            self._run(idle[1].__aexit__())
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
            pass  # The next episode then starts a sandbox itself, and raises the error.
        finally:
            self._starting -= 1

    async def _leave_at_end(self) -> None:
        """Wait for the end of the loop, then leave the sandboxes that no episode took."""
        try:
            await asyncio.Event().wait()
        finally:
            idle, self._idle = self._idle, []
            await asyncio.gather(*(sandbox.__aexit__() for _, sandbox in idle))


def in_use(max_in_use: int | None) -> AbstractAsyncContextManager[object]:
    """Return a context for the time in which a sandbox from elsewhere is in use; it counts like the pool's."""
    return _pool(max_in_use, 0).in_use


def pooled(make: SandboxFactory, kind: Hashable, max_in_use: int | None, warm: int) -> SandboxFactory:
    """Return a factory whose sandboxes come from the pool of the event loop in which they are entered."""
    return lambda: _pool(max_in_use, warm).sandbox(kind, make)


def _pool(max_in_use: int | None, warm: int) -> SandboxPool:
    return _POOLS.setdefault(asyncio.get_running_loop(), SandboxPool(max_in_use, warm))
