"""The `process` mode: items to a file of scored groups, several at a time, with progress and an orderly end (I/O).

In: items, a coroutine that makes a group of one, and a `GroupFile`. Out: a `RunSummary`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentic_opd.core.console import LiveBar, log_console
from agentic_opd.core.errors import OPDError, OutputError, ServerUnreachableError
from agentic_opd.runs.config import RunConfig
from agentic_opd.runs.files import GroupFile
from agentic_opd.runs.progress import counts_line
from agentic_opd.wire.group import RunCounts, TaskItem


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


async def process(
    items: Sequence[TaskItem],
    collect: Callable[[TaskItem], Awaitable[dict[str, Any]]],
    written: Callable[[dict[str, Any]], Awaitable[None]],
    file: GroupFile,
    counts: RunCounts,
    config: RunConfig,
    header: Text,
) -> RunSummary:
    """Collect the items that `file` does not hold yet, write each group as soon as it is whole, and close the file.

    Args:
        items: What the file is to hold in the end.
        collect: Makes the group of an item.
        written: Told of each new group once it is on disk.
        file: Where the groups go.
        counts: What `file` counts of them.
        config: For `max_concurrent_groups`.
        header: The first lines that a person reads.

    Raises:
        OutputError: the file can't be written.
    """

    async def write(group: dict[str, Any]) -> None:
        file.write(group)
        await written(group)

    skipped = len(file.finished.intersection(item.item_id for item in items))
    try:
        with RunProgress(len(items), skipped, counts) as progress:
            progress.console.print(header, soft_wrap=True)
            summary = await run_items(items, collect, write, file.finished, config.max_concurrent_groups, progress)
    finally:
        file.close()
    show_summary(counts, summary, file.path, progress.console)
    return summary


class RunProgress:
    """Shows groups as they come in; `counts` is kept by whoever writes them."""

    def __init__(self, total: int, skipped: int, counts: RunCounts, console: Console | None = None) -> None:
        self.console = console or log_console()
        self.total = total
        self.groups = skipped
        self._counts = counts
        self._bar = LiveBar(self.console, "groups", total, skipped)
        self._refresh()

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._bar.__exit__(*exc_info)

    @property
    def counts(self) -> str:
        """The counts so far, on one line."""
        return counts_line(self._counts)

    def group_done(self, item_id: str, group: Mapping[str, Any]) -> None:
        """A group is on disk."""
        self.groups += 1
        self._refresh()
        if not self._bar.is_live:
            scores = ", ".join(f"{score:.2f}" for score in group["scores"])
            self.console.print(
                f"group {self.groups}/{self.total} {item_id}: scores {scores}; {self.counts}",
                highlight=False,
                soft_wrap=True,
            )

    def group_failed(self, item_id: str, error: Exception) -> None:
        """A group came to nothing."""
        self.console.print(f"[red]group {item_id} failed:[/red]", end=" ")
        self.console.print(str(error), markup=False, soft_wrap=True)

    def _refresh(self) -> None:
        self._bar.show(self.groups, self.counts)


def show_summary(counts: RunCounts, summary: RunSummary, path: Path, console: Console) -> None:
    """Print what the file holds, and what is missing from it."""
    if counts.by_task:
        console.print(summary_table(counts), soft_wrap=True)
    if counts.distilled:
        total = counts.total()
        console.print(
            f"opd/mean_hints_per_rollout {total['hints'] / total['rollouts']:.2f}   "
            f"opd/mean_turns_scored {total['scored'] / total['rollouts']:.2f}   "
            f"opd/hint_rate {total['hints'] / total['turns']:.2f}",
            highlight=False,
            soft_wrap=True,
        )
        outcomes = ", ".join(f"{name} {count}" for name, count in counts.outcomes.most_common())
        console.print(f"turn outcomes: {outcomes}", highlight=False, soft_wrap=True)
    if counts.noise_floor is not None:
        console.print(f"noise floor: {counts.noise_floor:.1e} nats without a hint", highlight=False)
    for line in closing_lines(summary, path):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def summary_table(counts: RunCounts) -> Table:
    """What the file holds, a row a task and one for all of them."""
    table = Table(title="Rollouts" + (" and what was distilled from them" if counts.distilled else ""))
    table.add_column("task", no_wrap=True)
    names = ["rollouts", "passed", "mean score", "turns"]
    if counts.distilled:
        names += ["hints", "scored turns", "scored tokens"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    rows = sorted(counts.by_task.items())
    for i, (task, row) in enumerate([*rows, ("all", counts.total())]):
        cells = [
            f"{row['rollouts']:.0f}",
            f"{row['passed']:.0f}",
            f"{row['score'] / row['rollouts']:.2f}",
            f"{row['turns']:.0f}",
        ]
        if counts.distilled:
            share = 100 * row["scored_tokens"] / row["tokens"]
            cells += [f"{row['hints']:.0f}", f"{row['scored']:.0f}", f"{row['scored_tokens']:.0f} ({share:.1f}%)"]
        table.add_row(task, *cells, end_section=i == len(rows) - 1)
    return table


def closing_lines(summary: RunSummary, path: Path) -> list[str]:
    """What a person needs to know at the end: what is on disk, what is missing, what to do."""
    lines = [f"{summary.skipped + summary.done} of {summary.total} groups in {path}"]
    if summary.skipped:
        lines[0] += f" ({summary.skipped} from an earlier run)"
    if summary.failed:
        lines.append(f"{len(summary.failed)} groups failed; run again with --env.resume to try them again")
    if summary.stopped is not None:
        why = str(summary.stopped) or "interrupted"
        lines.append(f"stopped early: {why}")
        lines.append("what is finished is on disk; run again with --env.resume to complete it")
        if summary.skipped + summary.done:
            lines.append(f"to look at it now: python -m agentic_opd.report {path}")
    return lines
