"""One limit on the memory of a sandbox as a whole: its processes, what they share, and files that lie in memory.

The kernel enforces it where this process may make memory cgroups below its own (cgroups.py). Elsewhere a watch adds up
the memory of a sandbox's processes and ends the sandbox (watch.py). Both make the sandbox the first choice of the
kernel's out-of-memory killer, and report when a sandbox exceeded its limit.
"""

from agentic_opd.sandboxes.cgroups import MemoryGroup, parent_group
from agentic_opd.sandboxes.watch import MemoryWatch

MemoryLimit = MemoryGroup | MemoryWatch
"""Keeps one sandbox within its memory."""


def memory_limit(limit_mb: int, file_mb: int) -> MemoryLimit:
    """Make the limit of a new sandbox: a cgroup where the machine allows one, else a watch.

    Both sizes are in MiB; `file_mb` is for a single file.

    Raises:
        SandboxError: Cgroups could be made before, but this one could not.
    """
    parent = parent_group()
    return MemoryWatch(limit_mb, file_mb) if parent is None else MemoryGroup(parent, limit_mb)


def memory_limited() -> str:
    """Describe how memory is limited on this machine."""
    parent = parent_group()
    if parent is None:
        return "its memory is limited by a watch: no memory cgroup can be made below this process's own"
    return f"its memory is limited by its cgroup (v{parent.version})"
