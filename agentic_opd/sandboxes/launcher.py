"""A thread with an event loop that starts the sandboxes.

Commands start in the order of their requests, a few more at a time than there are processors. If all started at once,
the first would finish with the last, and the engine would wait for all of them.

A process inherits the mounts and the session keyring of the thread that starts it. Where it is allowed to, this thread
has a private mount namespace: file systems that it mounts for sandboxes are invisible to other processes and disappear
with this process. Before each start it switches to a new, empty session keyring.
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
"""Seconds after which a command no longer counts as starting, so that others need not wait for it."""

_libc = ctypes.CDLL(None, use_errno=True)


class Launcher:
    """The thread; `launcher()` is the only one."""

    def __init__(self) -> None:
        self.has_own_mounts = False
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(len(os.sched_getaffinity(0)) + 1)
        ready = threading.Event()
        self._thread = threading.Thread(target=self._main, args=(ready,), name="sandboxes", daemon=True)
        self._thread.start()
        ready.wait()
        atexit.register(self._end)

    def _main(self, ready: threading.Event) -> None:
        if os.geteuid() == 0 and _libc.unshare(_CLONE_NEWNS) == 0:
            # Later mounts elsewhere become visible here, but not the other way round.
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
        """Hold a start slot; it is released on exit or after `_START_S`. Call it on this loop."""
        await self._slots.acquire()
        slot = ExitStack()
        slot.callback(self._slots.release)
        timer = self._loop.call_later(_START_S, slot.close)
        try:
            yield
        finally:
            timer.cancel()
            slot.close()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` on the thread's loop; a cancellation is passed on and waits for its end."""
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
    return Launcher()


def mount_tmpfs(folder: Path, size_mb: int, files: int) -> bool:
    """Mount a tmpfs of `size_mb` MiB and `files` inodes and return whether it worked. Launcher's thread only."""
    options = f"size={size_mb}m,nr_inodes={files},mode=0755".encode()
    return _libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", _MS_NOSUID | _MS_NODEV, options) == 0


def unmount(folder: Path) -> None:
    """Unmount `folder`. Launcher's thread only."""
    _libc.umount2(os.fsencode(folder), _MNT_DETACH)


def leave_keyring() -> None:
    """Give this thread a new, empty session keyring, which the next process that it starts inherits.

    Where the kernel or a container forbids this call, it forbids it to the started process too.
    """
    from pyseccomp import resolve_syscall, system_arch

    _libc.syscall(resolve_syscall(system_arch(), "keyctl"), _KEYCTL_JOIN_SESSION_KEYRING, None)
