"""Exit codes of commands; errors and interruptions become one line instead of a traceback."""

import argparse
import asyncio
import sys
from collections.abc import Callable
from itertools import takewhile
from typing import NoReturn

from agentic_opd.core.errors import ConfigError, DatasetError, OPDError, PlaceError, RendererError, RolledBackError
from agentic_opd.core.text import printable

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_ROLLED_BACK, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
EXIT_REFUSED = EXIT_ROLLED_BACK
"""Code of a command that found the new weights worse, or not shown to be better."""

EXIT_CODES = "Exit code 0: done; 1: failed, or not all done; 2: wrong settings; 130: interrupted."
"""Help text for the exit codes. A command with narrower meanings has a text for them."""
TRAINING_EXIT_CODES = EXIT_CODES.replace("130:", f"{EXIT_ROLLED_BACK}: rolled back by the brake; 130:")
"""Help text for the exit codes of commands that train."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line that names the command's help."""

    def error(self, message: str) -> NoReturn:
        """Print a wrong command line's error, and exit with `EXIT_USAGE`."""
        command = " ".join(takewhile(lambda word: not (word.isupper() or word.startswith("[")), self.prog.split()))
        self.exit(EXIT_USAGE, f"error: {printable(message)}; {command} --help lists the arguments\n")


_WRONG_SETTINGS = (ConfigError, DatasetError, RendererError, PlaceError)
"""Errors that only another setting or argument can fix, at any time of a run."""


def exit_code(command: Callable[[], int], *, interrupted: str = "interrupted", on_error: int = EXIT_FAILED) -> int:
    """Run a command and return its exit code.

    `interrupted` is printed after Ctrl-C. `on_error` is the code for other errors than those about a setting or an
    argument (EXIT_USAGE) and RolledBackError (EXIT_ROLLED_BACK).
    """
    try:
        return command()
    except OPDError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        if isinstance(error, RolledBackError):
            return EXIT_ROLLED_BACK
        return EXIT_USAGE if isinstance(error, _WRONG_SETTINGS) else on_error
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(interrupted, file=sys.stderr)
        return EXIT_INTERRUPTED
