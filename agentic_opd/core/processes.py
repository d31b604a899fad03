"""Child processes: they end with the process that started them, and say why they ended."""

import ctypes
import signal
from pathlib import Path

from agentic_opd.core.text import text_lines

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """For `preexec_fn`: the kernel asks this process to end if the thread that started it is gone, killed or not."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end_of(log: Path, lines: int = 40) -> str:
    """The last lines of a log that say something; nothing if there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            said = text_lines(file.read().decode(errors="replace"))
    except OSError:
        return ""
    return "\n".join([line for line in said if line.strip()][-lines:])
