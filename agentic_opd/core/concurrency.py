"""Coroutines: run together, failing with the first of their errors; in turn on the loop; to their end."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

_TURNS = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()


@asynccontextmanager
async def in_turn() -> AsyncGenerator[None]:
    """Do a few milliseconds of work that does not await, one of this event loop at a time.

    The answers to many requests come together, as a step of the engine ends: if what they cause were done at once, the
    loop would see to nothing else for as long as all of it takes. Between two turns it looks at everything.
    """
    turn = _TURNS.setdefault(asyncio.get_running_loop(), asyncio.Lock())
    async with turn:
        yield
        await asyncio.sleep(0)


async def own_turn() -> None:
    """Wait for a turn: what the caller does from here until it next waits is done `in_turn`."""
    async with in_turn():
        pass


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await the work; if this is cancelled meanwhile, however often, the work is done before the cancellation goes on.

    A web server whose client has left cancels what answers it again and again until it ends.
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
    """Results in order. When one fails the others are cancelled and awaited, and that one's error is raised."""

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
