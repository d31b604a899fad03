"""Child processes: end them with their parent, and read the end of their logs."""

import ctypes
import signal
from pathlib import Path

from agentic_opd.core.text import text_lines

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel for a signal to this process when its parent thread ends, even by SIGKILL; for `preexec_fn`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def end_of(log: Path, lines: int = 40) -> str:
    """Return the last `lines` lines of a log that are not blank; empty if the log cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            log_lines = text_lines(file.read().decode(errors="replace"))
    except OSError:
        return ""
    return "\n".join([line for line in log_lines if line.strip()][-lines:])
