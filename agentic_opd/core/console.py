"""Output for users on standard error: one console, a progress bar with counts, and log lines.

The bar is shown in a terminal only; elsewhere its owner prints lines. Log lines of this package are shown, repeated
warnings only rarely. Log lines of other libraries are shown only at level ERROR or above.
"""

import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import cache
from types import TracebackType
from typing import BinaryIO, Self

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.text import Text

from agentic_opd import __version__
from agentic_opd.core.text import printable


class PrintableConsole(Console):
    """A console on which untrusted text cannot move the cursor, change a colour or set a title."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the printed segments: text made `printable`, and rich's own control codes."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


@cache
def log_console() -> Console:
    """Return the console of progress and log lines: standard error, 120 columns wide if that is not a terminal.

    The whole process shares one console, because a live bar moves aside only for output of the same console.
    """
    console = PrintableConsole(stderr=True)
    return console if console.is_terminal else PrintableConsole(stderr=True, width=120)


def start_screen(title: str, addresses: Mapping[str, str]) -> Text:
    """Return the start screen: the run in words, then a line per entry of `places` (name -> server or file)."""
    width = max(map(len, addresses))
    lines = [f"agentic_opd {__version__}: {title}", *(f"  {name:<{width}}  {text}" for name, text in addresses.items())]
    return Text("\n".join(lines), no_wrap=True, overflow="ignore")


class _TwoLines(Progress):
    """A bar with its counts on a second line: on one line the counts would push the bar off a narrow screen."""

    counts = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.counts:
            yield Text(f"  {self.counts}")


class LiveBar:
    """A progress bar of `total` things with `counts` below it, shown inside its `with` block and in a terminal only.

    The progress displays of modes and commands use it; they print lines if it is not `is_live`.
    """

    def __init__(self, unit: str, total: int | None, completed: int = 0, console: Console | None = None) -> None:
        """Prepare a bar that starts at `completed`. The default console is `log_console()`."""
        self.console = console = console or log_console()
        self.is_live = console.is_terminal
        self._bar = _TwoLines(
            TextColumn(unit),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not self.is_live,
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = self._bar.add_task(unit, total=total, completed=completed)

    def show(self, completed: int, counts: str, total: int | None = None) -> None:
        """Show the number of completed things; a `total` replaces the earlier one."""
        self._bar.counts = counts
        self._bar.update(self._task, completed=completed, total=total)

    def say(self, text: str) -> None:
        """Print a line above the bar, without interpreting markup."""
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


_STYLES = {logging.WARNING: ("warning: ", "yellow"), logging.ERROR: ("error: ", "red")}
_PACKAGES = ("agentic_opd", "agentic_opd_environments")
"""Packages whose log lines are shown; the second one is installed with this one."""
_SAYS_IT_ONCE = "agentic_opd.core.notices"
"""Logger that handles repetition itself: its warnings are printed every time."""


@contextmanager
def reading_bar(console: Console) -> Generator[Callable[[BinaryIO, int], BinaryIO]]:
    """Show the progress of reading a file in a terminal; yield a function of a file and its size in bytes."""
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        yield lambda raw, size: progress.wrap_file(raw, size, description="reading")


class ConsoleHandler(logging.Handler):
    """Prints records through the console of the live bar, which moves aside for them.

    A repeated warning is shown at its 10th, 100th, 1000th occurrence, with its count; warnings that differ only in
    numbers count as the same. Other libraries' records are shown only at ERROR or above: some libraries set a level of
    their loggers themselves, regardless of the root logger's.
    """

    def __init__(self, console: Console, *, with_names: bool = False) -> None:
        super().__init__()
        self._console, self._with_names = console, with_names
        self._counts: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        return self._with_names or record.name.startswith("agentic_opd") or record.levelno >= logging.ERROR

    def emit(self, record: logging.LogRecord) -> None:
        message, times = printable(record.getMessage()), ""
        if record.levelno == logging.WARNING and record.name != _SAYS_IT_ONCE:
            key = f"{record.name} {re.sub(r'[0-9]+', '#', message)}"
            self._counts[key] += 1
            count = self._counts[key]
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
    """Show this package's log lines; with `verbose`, those of all libraries and Python's warnings too."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.ERROR,
        handlers=[ConsoleHandler(log_console(), with_names=verbose)],
        force=True,
    )
    for package in _PACKAGES:
        logging.getLogger(package).setLevel(logging.INFO)
    logging.captureWarnings(True)
    if not verbose:
        for library in ("transformers", "huggingface_hub"):
            logging.getLogger(library).setLevel(logging.ERROR)
        # These set their levels at import, possibly later. The hub's client reports each of its retries.
        os.environ["TRANSFORMERS_VERBOSITY"] = os.environ["HF_HUB_VERBOSITY"] = "error"
