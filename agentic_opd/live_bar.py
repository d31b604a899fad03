"""A progress bar that counts things, in a terminal; elsewhere nothing, and its owner prints lines."""

import sys
from collections.abc import Iterable
from functools import cache
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text


@cache
def log_console() -> Console:
    """Where progress and log lines go: standard error, wide enough for a table where that is no terminal.

    It is one for the whole process, because a live bar moves aside only for what its own console prints.
    """
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=120)


class _TwoLines(Progress):
    """The bar, and below it what was counted: on one line the counts would push the bar off a narrow screen."""

    counts = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """What is drawn, from the top down."""
        yield self.make_tasks_table(self.tasks)
        if self.counts:
            yield Text(f"  {self.counts}")


class LiveBar:
    """Shows how many of `total` things are done, with `counts` below it, while its block runs."""

    def __init__(self, console: Console, things: str, total: int | None, completed: int = 0) -> None:
        """Prepare a bar; `completed` were done before."""
        self.is_live = console.is_terminal
        self._bar = _TwoLines(
            TextColumn(things),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not self.is_live,
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = self._bar.add_task(things, total=total, completed=completed)

    def show(self, completed: int, counts: str, total: int | None = None) -> None:
        """Show that so many are done, of another `total` where one is given."""
        self._bar.counts = counts
        self._bar.update(self._task, completed=completed, total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
