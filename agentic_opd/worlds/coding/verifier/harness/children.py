"""Child processes that run a source text in this interpreter, each the leader of a process group of its own."""

from __future__ import annotations

import os
import sys

# The module `signal` takes 4 ms to import.
_SIGKILL = 9


def spawn(source: str, arguments: list[str], fds: tuple[int, int, int]) -> int:
    """Start a child with `fds` as its descriptors 0, 1 and 2, and those that are inheritable. Returns its id."""
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-s", "-S", "-P", "-c", source, *arguments],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds)],
        setpgroup=0,
    )


def end_child(pid: int) -> None:
    """Kill a child and its group, and reap it."""
    for kill in (os.killpg, os.kill):
        try:  # noqa: SIM105 - contextlib takes time to import
            kill(pid, _SIGKILL)
        except OSError:
            pass
    os.waitpid(pid, 0)
