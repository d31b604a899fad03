"""The `process` mode: items to a file of scored groups, with progress and a summary (I/O)."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentic_opd.config import RolloutConfig
from agentic_opd.group import RunCounts, TaskItem
from agentic_opd.output import GroupFile
from agentic_opd.progress import RunProgress, show_summary
from agentic_opd.runner import RunSummary, run_items


async def process(
    items: Sequence[TaskItem],
    collect: Callable[[TaskItem], Awaitable[dict[str, Any]]],
    written: Callable[[dict[str, Any]], Awaitable[None]],
    path: Path,
    config: RolloutConfig,
    settings: Mapping[str, Any],
    header: str,
) -> RunSummary:
    """Collect the items that `path` does not hold yet, and write each group as soon as it is whole.

    Args:
        items: What the file is to hold in the end.
        collect: Makes the group of an item.
        written: Told of each new group once it is on disk.
        path: The JSONL file.
        config: For `resume`, `overwrite` and `max_concurrent_groups`.
        settings: What the file's lines depend on; a continued file must have been written with the same.
        header: The first lines that a person reads.

    Raises:
        OutputError: the file can't be written or continued.
    """
    counts = RunCounts()
    file = GroupFile(path, settings, resume=config.resume, overwrite=config.overwrite, seen=counts.add)

    async def write(group: dict[str, Any]) -> None:
        file.write(group)
        await written(group)

    skipped = len(file.finished.intersection(item.item_id for item in items))
    try:
        with RunProgress(len(items), skipped, counts) as progress:
            progress.console.print(header, markup=False, highlight=False, soft_wrap=True)
            summary = await run_items(items, collect, write, file.finished, config.max_concurrent_groups, progress)
    finally:
        file.close()
    show_summary(counts, summary, path, progress.console)
    return summary
