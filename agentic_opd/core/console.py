"""What a person sees on standard error: one console, a progress bar that counts things, and log lines.

The bar is shown in a terminal only; elsewhere its owner prints lines. Of log lines a person sees this package's, each
warning once, and other libraries' only if something failed.
"""

import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import cache
from types import TracebackType
from typing import BinaryIO, Self

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.text import Text

from agentic_opd.core.text import printable


class PrintableConsole(Console):
    """A console on which no text of others moves the cursor, changes a colour or sets a title."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what is printed: text is `printable`, and control codes are rich's own."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


@cache
def log_console() -> Console:
    """Where progress and log lines go: standard error, wide enough for a table if that is not a terminal.

    It is one for the whole process, because a live bar moves aside only for what its own console prints.
    """
    console = PrintableConsole(stderr=True)
    return console if console.is_terminal else PrintableConsole(stderr=True, width=120)


class _TwoLines(Progress):
    """The bar, and below it what was counted: on one line the counts would push the bar off a narrow screen."""

    counts = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """What is drawn, from the top down."""
        yield self.make_tasks_table(self.tasks)
        if self.counts:
            yield Text(f"  {self.counts}")


class LiveBar:
    """Shows how many of `total` things are done, with `counts` below it, while its block runs: in a terminal only.

    What shows the progress of a mode or a command is made of it, and prints lines if it is not `is_live`.
    """

    def __init__(self, things: str, total: int | None, completed: int = 0, console: Console | None = None) -> None:
        """Prepare a bar; `completed` were done before. The console is standard error's unless given."""
        self.console = console = console or log_console()
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
        """Show that so many are done, of another `total` if one is given."""
        self._bar.counts = counts
        self._bar.update(self._task, completed=completed, total=total)

    def say(self, text: str) -> None:
        """Print a line above the bar, as it is: nothing in it is markup."""
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


_STYLES = {logging.WARNING: ("warning: ", "yellow"), logging.ERROR: ("error: ", "red")}
_SAYS_IT_ONCE = "agentic_opd.core.notices"
"""What this logger says again has happened again."""


@contextmanager
def reading_bar(console: Console) -> Generator[Callable[[BinaryIO, int], BinaryIO]]:
    """A bar of how much of a file is read, in a terminal: wraps the file, given its size in bytes."""
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        yield lambda raw, size: progress.wrap_file(raw, size, description="reading")


class ConsoleHandler(logging.Handler):
    """Prints records through the console of the live bar, which moves aside for them.

    A warning that comes again is shown the 10th, 100th, 1000th time, with its count; numbers in it do not make it
    another one. Other libraries are shown only if something failed: some set their own level, whatever the root's is.
    """

    def __init__(self, console: Console, *, with_names: bool = False) -> None:
        super().__init__()
        self._console, self._with_names = console, with_names
        self._seen: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a person wants to see this."""
        return self._with_names or record.name.startswith("agentic_opd") or record.levelno >= logging.ERROR

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        message, times = printable(record.getMessage()), ""
        if record.levelno == logging.WARNING and record.name != _SAYS_IT_ONCE:
            key = f"{record.name} {re.sub(r'[0-9]+', '#', message)}"
            self._seen[key] += 1
            count = self._seen[key]
            if set(str(count)[1:]) - {"0"} or not str(count).startswith("1"):
                return
            times = f" ({count} times so far)" if count > 1 else ""
        prefix, style = _STYLES.get(min(record.levelno, logging.ERROR), ("", ""))
        name = f"{record.name}: " if self._with_names else ""
        self._console.print(Text(f"{prefix}{name}{message}{times}", style), soft_wrap=True)
        if record.exc_info is not None and self._with_names:
            trace = printable(logging.Formatter().formatException(record.exc_info))
            self._console.print(trace, markup=False, soft_wrap=True)


def set_up_logging(*, verbose: bool) -> None:
    """Show this package's lines, and with `verbose` those of all libraries, Python's own warnings included."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.ERROR,
        handlers=[ConsoleHandler(log_console(), with_names=verbose)],
        force=True,
    )
    logging.getLogger("agentic_opd").setLevel(logging.INFO)
    logging.captureWarnings(True)
    if not verbose:
        logging.getLogger("transformers").setLevel(logging.ERROR)
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # It sets its level when it is imported, which may be later.
