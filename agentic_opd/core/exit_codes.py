"""How a command ends: its exit code, with errors and interruptions as one line instead of a traceback."""

import asyncio
import sys
from collections.abc import Callable

from agentic_opd.core.errors import ConfigError, OPDError

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def exit_code(command: Callable[[], int], *, interrupted: str = "interrupted", on_error: int = EXIT_FAILED) -> int:
    """Run a command to its exit code.

    Args:
        command: Returns its exit code.
        interrupted: What is said after Ctrl-C.
        on_error: The code of a typed error other than `ConfigError`, which is always EXIT_USAGE.
    """
    try:
        return command()
    except OPDError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else on_error
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(interrupted, file=sys.stderr)
        return EXIT_INTERRUPTED
