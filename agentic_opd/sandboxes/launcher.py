"""A thread with an event loop of its own, from which sandboxes are started, and what that thread keeps to itself.

Commands start in the order in which they are asked for, a few more than there are processors at a time: were all
started at once, the first would be done when the last one is, and the engine would wait for all of them.

A process inherits the mounts and the session keyring of the thread that starts it. So this one thread, where it may,
has its own view of the mounts: file systems that it mounts for sandboxes are seen by nobody else, and are gone with
this process, however that ends. And it gives up its session keyring for a new, empty one before each start.
"""

import asyncio
import atexit
import concurrent.futures
import ctypes
import os
import threading
from collections.abc import AsyncGenerator, Coroutine
from contextlib import ExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_CLONE_NEWNS = 0x2_0000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_SLAVE = 2, 4, 2**14, 2**19
_MNT_DETACH = 2
_KEYCTL_JOIN_SESSION_KEYRING = 1
_END_S = 10.0
_START_S = 0.25
"""After so long a command is no start any more: others need not wait for it."""

_libc = ctypes.CDLL(None, use_errno=True)


class Launcher:
    """The thread; `launcher()` is the only one."""

    def __init__(self) -> None:
        self.has_own_mounts = False
        self._loop = asyncio.new_event_loop()
        self._places = asyncio.Semaphore(len(os.sched_getaffinity(0)) + 1)
        ready = threading.Event()
        self._thread = threading.Thread(target=self._main, args=(ready,), name="sandboxes", daemon=True)
        self._thread.start()
        ready.wait()
        atexit.register(self._end)

    def _main(self, ready: threading.Event) -> None:
        if os.geteuid() == 0 and _libc.unshare(_CLONE_NEWNS) == 0:
            # What is mounted elsewhere later on is seen here too, and nothing of here elsewhere.
            self.has_own_mounts = _libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None) == 0
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(ready.set)
        self._loop.run_forever()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_S)
        if not self._thread.is_alive():
            self._loop.close()

    @asynccontextmanager
    async def start(self) -> AsyncGenerator[None]:
        """A place among those that start; it is given on when this is left, or has taken `_START_S`. On this loop."""
        await self._places.acquire()
        place = ExitStack()
        place.callback(self._places.release)
        timer = self._loop.call_later(_START_S, place.close)
        try:
            yield
        finally:
            timer.cancel()
            place.close()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` on the thread's loop; a cancellation reaches it, and waits for its end."""
        ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda _: ended.set_result(None))

        self._loop.call_soon_threadsafe(start)
        waiting = asyncio.wrap_future(ended)
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            await asyncio.wait([waiting])
            raise
        return tasks[0].result()


@cache
def launcher() -> Launcher:
    """The thread of this process, started when it is first asked for."""
    return Launcher()


def mount_tmpfs(place: Path, size_mb: int, files: int) -> bool:
    """Mount a tmpfs of so many MiB and files; whether it was possible. For the launcher's thread only."""
    options = f"size={size_mb}m,nr_inodes={files},mode=0755".encode()
    return _libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", _MS_NOSUID | _MS_NODEV, options) == 0


def unmount(place: Path) -> None:
    """Unmount what was mounted there. For the launcher's thread only."""
    _libc.umount2(os.fsencode(place), _MNT_DETACH)


def leave_keyring() -> None:
    """Give this thread a new, empty session keyring, so that what it starts next inherits no other.

    Where the kernel or a container forbids it, so it does to whatever is started from here.
    """
    from pyseccomp import resolve_syscall, system_arch

    _libc.syscall(resolve_syscall(system_arch(), "keyctl"), _KEYCTL_JOIN_SESSION_KEYRING, None)
