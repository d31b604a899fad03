"""Helpers for coroutines: gather with the first error, fair slots on the event loop, cancellation and signals."""

import asyncio
import gc
import signal
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

_TURNS = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()


def cancel_on(*signals: signal.Signals) -> None:
    """Let each of these signals cancel the current task, so that a command ends in order."""
    task = asyncio.current_task()
    assert task is not None
    for number in signals:
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)


@asynccontextmanager
async def fair_slot() -> AsyncGenerator[None]:
    """Run a few milliseconds of synchronous work in an exclusive slot of this event loop.

    Many responses arrive together when an engine step ends. Handling them all at once would block the loop for the sum
    of their times. After each slot the loop can run other callbacks.
    """
    turn = _TURNS.setdefault(asyncio.get_running_loop(), asyncio.Lock())
    async with turn:
        yield
        await asyncio.sleep(0)


@contextmanager
def rare_collections() -> Generator[None]:
    """Collect garbage rarely in this block, and only among objects that are made in it.

    A collection blocks the event loop, for 0.1 s if it scans all imported modules. With Python's thresholds there is
    one for every group that is sent, because its JSON consists of thousands of lists.
    """
    threshold = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000)
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to completion even if the caller is cancelled, once or repeatedly; then raise the cancellation.

    A web server cancels the handler of a disconnected client repeatedly until the handler ends.
    """
    task, cancelled = asyncio.create_task(work), None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            raise cancelled from failure
        raise cancelled
    return task.result()


async def gather_all(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results in order. If one fails, cancel and await the others, then raise its error."""

    async def wait(awaitable: Awaitable[T]) -> T:
        return await awaitable

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(wait(awaitable)) for awaitable in awaitables]
    except BaseExceptionGroup as failures:
        first: BaseException = failures
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    return [task.result() for task in tasks]
