"""The `process` mode: items to a file of scored groups, with progress and a summary (I/O)."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rich.text import Text

from agentic_opd.config import RolloutConfig
from agentic_opd.group import RunCounts, TaskItem
from agentic_opd.output import GroupFile
from agentic_opd.progress import RunProgress, show_summary
from agentic_opd.runner import RunSummary, run_items


async def process(
    items: Sequence[TaskItem],
    collect: Callable[[TaskItem], Awaitable[dict[str, Any]]],
    written: Callable[[dict[str, Any]], Awaitable[None]],
    file: GroupFile,
    counts: RunCounts,
    config: RolloutConfig,
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
