"""What log lines a person sees: this package's, each warning once; other libraries' only where something failed."""

import logging
import re
from collections import Counter

import transformers
from rich.console import Console
from rich.text import Text

from agentic_opd.live_bar import log_console

_STYLES = {logging.WARNING: ("warning: ", "yellow"), logging.ERROR: ("error: ", "red")}
_SAYS_IT_ONCE = "agentic_opd.notices"
"""What this logger says again has happened again."""


class ConsoleHandler(logging.Handler):
    """Prints records through the console of the live bar, which moves aside for them.

    A warning that comes again is shown the 10th, 100th, 1000th time, with its count; numbers in it do not make it
    another one. Other libraries are heard only where something failed: some set their own level, whatever the root's.
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
        message, times = record.getMessage(), ""
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
            self._console.print(logging.Formatter().formatException(record.exc_info), markup=False, soft_wrap=True)


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
        transformers.logging.set_verbosity_error()
