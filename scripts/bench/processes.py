"""Memory and priority of processes, from /proc and the kernel."""

import os
import re
from pathlib import Path

FIRST = -15
"""A nice value."""


def memory_kb(field: str, pid: int | str = "self") -> int:
    """Return a line of a process's status in KiB: VmRSS is its resident memory, VmHWM the most since `reset_peak`.

    Raises:
        ProcessLookupError: it has ended.
    """
    if (line := re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())) is None:
        raise ProcessLookupError(f"process {pid} has ended")
    return int(line[1])


def reset_peak() -> None:
    """Let this process's VmHWM begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def come_first(pid: int | str = "self") -> None:
    """Let a process, the leader of its session, come before others (root only); its threads inherit it."""
    if (group := Path(f"/proc/{pid}/autogroup")).exists():
        group.write_text(str(FIRST))
    os.setpriority(os.PRIO_PROCESS, 0 if pid == "self" else int(pid), FIRST)
