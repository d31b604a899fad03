"""Run items to groups on disk: bounded concurrency, progress, and an orderly end whatever happens.

In: items, a coroutine that makes a group of one, and a `GroupFile`. Out: a `RunSummary`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from agentic_opd.errors import OPDError, OutputError, ServerUnreachableError


class Item(Protocol):
    """What a group is made of; `item_id` names it across runs."""

    @property
    def item_id(self) -> str:
        """Unique within a run, the same in a continued one."""
        ...


ItemT = TypeVar("ItemT", bound=Item)
GroupT = TypeVar("GroupT", bound=Mapping[str, Any])


class Progress(Protocol):
    """What a person sees meanwhile; see progress.py."""

    def group_done(self, item_id: str, group: Mapping[str, Any]) -> None:
        """A group is on disk."""
        ...

    def group_failed(self, item_id: str, error: Exception) -> None:
        """A group came to nothing; the run goes on."""
        ...


@dataclass
class RunSummary:
    """How a run went. `stopped` is what ended it early, if anything did."""

    total: int
    skipped: int = 0
    done: int = 0
    failed: dict[str, str] = field(default_factory=dict[str, str])
    stopped: BaseException | None = None

    @property
    def complete(self) -> bool:
        """Every item is on disk."""
        return self.skipped + self.done == self.total


async def run_items(
    items: Sequence[ItemT],
    collect: Callable[[ItemT], Awaitable[GroupT]],
    write: Callable[[GroupT], Awaitable[None]],
    finished: set[str],
    concurrency: int,
    progress: Progress,
) -> RunSummary:
    """Collect and write every item that is not `finished`, at most `concurrency` at a time.

    A group that fails by itself is counted and the run goes on. A dead server or disk, or a cancellation, stops the
    run: groups under way are dropped, groups finished stay on disk.
    """
    todo = [item for item in items if item.item_id not in finished]
    summary = RunSummary(total=len(items), skipped=len(items) - len(todo))
    queue = iter(todo)

    async def work() -> None:
        for item in queue:
            try:
                group = await collect(item)
            except ServerUnreachableError:
                raise
            except OPDError as error:
                summary.failed[item.item_id] = str(error)
                progress.group_failed(item.item_id, error)
                continue
            await write(group)
            summary.done += 1
            progress.group_done(item.item_id, group)

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, len(todo))):
                workers.create_task(work())
    except* (ServerUnreachableError, OutputError) as failures:
        summary.stopped = failures.exceptions[0]
    except* asyncio.CancelledError as cancelled:
        summary.stopped = cancelled.exceptions[0]
    return summary
