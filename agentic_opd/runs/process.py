"""The `process` mode: writes scored groups of items to a file, concurrently, with progress and a summary (I/O)."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentic_opd.core.concurrency import to_its_end
from agentic_opd.core.console import LiveBar, start_screen
from agentic_opd.core.errors import OPDError, OutputError, SandboxError, ServerUnreachableError
from agentic_opd.core.text import printable_line
from agentic_opd.report.command import report_run
from agentic_opd.runs.config import RunConfig
from agentic_opd.runs.environment import Environment, FinishedGroup
from agentic_opd.runs.metric_log import RunMetrics
from agentic_opd.wire.counts import RunCounts
from agentic_opd.wire.files import GroupFile, default_output_folder
from agentic_opd.wire.group import TaskItem


@dataclass
class RunSummary:
    """Result of a run; `stopped` is the exception that ended it early, if any."""

    total: int
    skipped: int = 0
    written: int = 0
    failed: dict[str, str] = field(default_factory=dict[str, str])
    stopped: BaseException | None = None

    @property
    def complete(self) -> bool:
        """Whether every item is on disk."""
        return self.skipped + self.written == self.total


def output_path(config: RunConfig) -> Path:
    """Return the file of `process`."""
    return Path(config.data_path_to_save_groups or default_output_folder("process") / "groups.jsonl")


async def process(env: Environment, metrics: RunMetrics, count: int, held_out: str = "") -> RunSummary:
    """Make those of the first `count` groups of `env` that are missing from its file, then write the report.

    `held_out` is a note on held-out tasks, for the start screen.
    """
    config, counts = env.config, RunCounts()
    items = list(islice(env.items(), count))
    path = output_path(config)
    file = GroupFile(
        path,
        env.line_settings(),
        resume=config.resume,
        overwrite=config.overwrite,
        on_group=counts.add,
    )
    try:
        metrics.step = len(file.finished)
        if config.use_wandb:
            metrics.to_wandb(str(env.name), env.line_settings(), config.wandb_name)
        else:
            metrics.to_file(file, default_output_folder("process"))
        skipped = len(file.finished.intersection(item.item_id for item in items))

        async def write(finished: FinishedGroup) -> None:
            await file.write(finished.group)
            metrics.step += 1  # Without a trainer, each group is a logging step.
            metrics.add(finished)
            metrics.flush()

        with RunProgress(len(items), skipped, counts) as progress:
            title = f"{count} groups of {config.group_size} rollouts{held_out}"
            rows = {**env.roles(), "groups": str(path), **metrics.destination()}
            progress.console.print(start_screen(title, rows), soft_wrap=True)
            summary = await run_items(items, env.collect, write, file.finished, config.groups_at_a_time, progress)
    finally:
        file.close()
    show_summary(counts, summary, path, progress.console)
    if config.report and summary.stopped is None and summary.skipped + summary.written:
        await asyncio.to_thread(report_run, path, env.tokenizer)
    return summary


async def run_items(
    items: Sequence[TaskItem],
    collect: Callable[[TaskItem], Awaitable[FinishedGroup]],
    write: Callable[[FinishedGroup], Awaitable[None]],
    finished: set[str],
    concurrency: int,
    progress: "RunProgress",
) -> RunSummary:
    """Collect and write every item that is not `finished`, at most `concurrency` at a time.

    The failure of a single group is counted, and the run continues. An unreachable server, a failing disk or sandbox,
    or a cancellation stops the run: pending groups are dropped, and finished groups stay on disk.
    """
    todo = [item for item in items if item.item_id not in finished]
    summary = RunSummary(total=len(items), skipped=len(items) - len(todo))
    queue = iter(todo)

    async def work() -> None:
        for item in queue:
            try:
                group = await collect(item)
            except (ServerUnreachableError, SandboxError):
                raise
            except OPDError as error:
                summary.failed[item.item_id] = str(error)
                progress.group_failed(item.item_id, error)
                continue
            await to_its_end(keep(item, group))

    async def keep(item: TaskItem, group: FinishedGroup) -> None:
        await write(group)
        summary.written += 1
        progress.group_done(item.item_id, group.group.scores)

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, len(todo))):
                workers.create_task(work())
    except* (ServerUnreachableError, SandboxError, OutputError) as failures:
        summary.stopped = failures.exceptions[0]
    except* asyncio.CancelledError as cancelled:
        summary.stopped = cancelled.exceptions[0]
    return summary


def counts_line(counts: RunCounts) -> str:
    total = counts.total
    text = f"{total.rollouts} rollouts"
    if total.rollouts:
        text += f", {100 * total.passed / total.rollouts:.0f}% passed"
    if counts.no_verdicts:
        text += f", {counts.no_verdicts.total()} without a verdict"
    if counts.distilled:
        text += f", {total.records.hints} hints, {total.records.scored} of {total.assistant_turns} turns scored"
    return text


class RunProgress(LiveBar):
    """Progress of `process`; the caller updates `counts` when it writes a group."""

    def __init__(self, total: int, skipped: int, counts: RunCounts, console: Console | None = None) -> None:
        super().__init__("groups", total, skipped, console)
        self.total, self.groups = total, skipped
        self._counts = counts
        self.show(skipped, counts_line(counts))

    def group_done(self, item_id: str, scores: Sequence[float]) -> None:
        self.groups += 1
        counts = counts_line(self._counts)
        self.show(self.groups, counts)
        if not self.is_live:
            texts = ", ".join(f"{score:.2f}" for score in scores)
            self.say(
                f"group {self.groups}/{self.total} {printable_line(item_id)}: scores {texts} (all so far: {counts})"
            )

    def group_failed(self, item_id: str, error: Exception) -> None:
        self.console.print(Text(f"group {printable_line(item_id)} failed:", "red"), end=" ")
        self.say(str(error))


def show_summary(counts: RunCounts, summary: RunSummary, path: Path, console: Console) -> None:
    """Print the contents of the file, and the missing groups."""
    lines: list[str] = []
    if counts.by_task:
        console.print(summary_table(counts), soft_wrap=True)
    if counts.distilled:
        total, records = counts.total, counts.total.records
        lines += [
            f"opd/mean_hints_per_rollout {records.hints / total.rollouts:.2f}   "
            f"opd/mean_turns_scored {records.scored / total.rollouts:.2f}   "
            f"opd/hint_rate {records.hints / total.assistant_turns:.2f}",
            "turn outcomes: "
            + ", ".join(f"{outcome.value} {count}" for outcome, count in records.outcomes.most_common()),
        ]
    if counts.no_verdicts:
        causes = ", ".join(f"{cause} {count}" for cause, count in counts.no_verdicts.most_common())
        lines.append(f"rollouts left out because their tests gave no verdict: {causes} (docs/harbor.md)")
    if counts.noise_floor is not None:
        rms = "" if counts.noise_rms is None else f" at most, {counts.noise_rms:.1e} root mean square,"
        lines.append(f"noise floor: {counts.noise_floor:.1e} nats{rms} without a hint")
    for line in (*lines, *closing_lines(summary, path)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def summary_table(counts: RunCounts) -> Table:
    """Return a table of the counts, with a row per task and a total."""
    table = Table(title="Rollouts" + (" and what was distilled from them" if counts.distilled else ""))
    table.add_column("task", no_wrap=True)
    names = ["rollouts", "passed", "mean score", "turns"]
    if counts.distilled:
        names += ["hints", "scored turns", "scored tokens"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    rows = sorted(counts.by_task.items())
    for i, (task, row) in enumerate([*rows, ("all", counts.total)]):
        cells = [f"{row.rollouts}", f"{row.passed}", f"{row.score / row.rollouts:.2f}", f"{row.assistant_turns}"]
        if counts.distilled:
            share = 100 * row.scored_tokens / max(1, row.sampled_tokens)
            cells += [f"{row.records.hints}", f"{row.records.scored}", f"{row.scored_tokens} ({share:.1f}%)"]
        table.add_row(Text(printable_line(task)), *cells, end_section=i == len(rows) - 1)
    return table


def closing_lines(summary: RunSummary, path: Path) -> list[str]:
    """Return the closing lines: groups on disk, failed groups, and how to complete the run."""
    lines = [f"{summary.skipped + summary.written} of {summary.total} groups in {path}"]
    if summary.skipped:
        lines[0] += f" ({summary.skipped} from an earlier run)"
    if summary.failed:
        lines.append(f"{len(summary.failed)} groups failed; run again with --env.resume to try them again")
    if summary.stopped is not None:
        why = str(summary.stopped) or "interrupted"
        lines.append(f"stopped early: {why}")
        lines.append("finished groups are on disk; run again with --env.resume to complete it")
        if summary.skipped + summary.written:
            lines.append(f"to look at it now: agentic-opd report {path}")
    return lines
