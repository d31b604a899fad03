"""What a person sees of a run: a live bar in a terminal, a line a group elsewhere, and a table at the end."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentic_opd import __version__
from agentic_opd.group import RunCounts
from agentic_opd.live_bar import LiveBar, log_console
from agentic_opd.runner import RunSummary


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


@dataclass(frozen=True, slots=True)
class ServeLook:
    """What one look at the API found: the trainer's step of `last_step`, and where groups are."""

    step: int
    last_step: int
    sent: int
    skipped: int
    under_way: int
    queued: int
    """Groups that wait for the trainer, those of other environments included."""


class ServeProgress:
    """Shows how far a `serve` is: a live bar of the trainer's steps in a terminal; elsewhere its log lines are all."""

    def __init__(self, counts: RunCounts, console: Console | None = None) -> None:
        self.console = console or log_console()
        self._counts = counts
        self._bar = LiveBar(self.console, "steps", None)

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._bar.__exit__(*exc_info)

    def show(self, look: ServeLook) -> None:
        """Show what the last look at the API found."""
        skipped = f"{look.skipped} skipped, " if look.skipped else ""
        groups = f"{look.sent} groups sent, {skipped}{look.under_way} under way, {look.queued} queued"
        self._bar.show(look.step, f"{groups}; {counts_line(self._counts)}", look.last_step)


def start_screen(what: str, places: Mapping[str, str]) -> Text:
    """What a run is, and below it a line for each of `places`: what runs where, and what is written."""
    width = max(map(len, places))
    lines = [f"agentic_opd {__version__}: {what}", *(f"  {name:<{width}}  {text}" for name, text in places.items())]
    return Text("\n".join(lines), no_wrap=True, overflow="ignore")


def counts_line(counts: RunCounts) -> str:
    """What was made so far, on one line."""
    total = counts.total()
    rollouts = total["rollouts"]
    text = f"{rollouts:.0f} rollouts"
    if rollouts:
        text += f", {100 * total['passed'] / rollouts:.0f}% passed"
    if counts.distilled:
        text += f", {total['hints']:.0f} hints, {total['scored']:.0f} of {total['turns']:.0f} turns scored"
    return text


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
