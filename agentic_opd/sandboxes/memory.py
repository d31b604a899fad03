"""One limit on the memory of a sandbox as a whole: its processes, what they share, and files that lie in memory.

The kernel keeps it where this process may make memory cgroups below its own (cgroups.py). Elsewhere a watch adds up
what all processes of a sandbox hold, and ends it (watch.py). Both put the sandbox first in line for the kernel's
out-of-memory killer, and say when a sandbox was over its limit.
"""

from typing import Protocol

from agentic_opd.sandboxes.cgroups import MemoryGroup, group_place
from agentic_opd.sandboxes.watch import MemoryWatch


class MemoryLimit(Protocol):
    """Keeps one sandbox within its memory."""

    pause_s: float
    """Seconds until `exceeded` should be asked again."""

    def wrap(self, argv: list[str]) -> list[str]:
        """The argv that starts `argv` under the limit."""
        ...

    def exceeded(self, pid: int) -> bool:
        """Whether the command that was started as process `pid` is over the limit, or was since the last call."""
        ...

    def remove(self) -> None:
        """Give back what the limit needed; the sandbox has ended."""
        ...


def memory_limit(limit_mb: int, file_mb: int) -> MemoryLimit:
    """The limit of a new sandbox: a cgroup where this machine lets us, else a watch.

    Args:
        limit_mb: MiB that it may hold.
        file_mb: MiB that a file of it may have.

    Raises:
        SandboxError: A cgroup could be made before, and can't be made now.
    """
    place = group_place()
    return MemoryWatch(limit_mb, file_mb) if place is None else MemoryGroup(place, limit_mb)


def memory_limited() -> str:
    """How memory is limited here, for a person."""
    place = group_place()
    if place is None:
        return "its memory is limited by a watch: no memory cgroup can be made below this process's own"
    return f"its memory is limited by a cgroup (v{place.version}) of its own"
