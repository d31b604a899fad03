"""The machine, which the forks of a test session share."""

import fcntl
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def part_of_machine(folder: Path, *, alone: bool) -> Generator[None]:
    """Wait for a place on the machine and hold it while the block runs.

    Args:
        folder: Where the locks lie that all forks share.
        alone: Whether nobody else may run meanwhile. Whoever waits for that keeps those that come later out.
    """
    with (folder / "door").open("w") as door, (folder / "machine").open("w") as machine:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
