"""A sandbox's memory limit by a separate cgroup (v1 or v2), below the group of this process."""

import contextlib
import os
import re
import secrets
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agentic_opd.core.errors import SandboxError
from agentic_opd.core.text import text_lines
from agentic_opd.sandboxes.folders import PREFIX, is_dead, owner_tag

_REMOVE_S = 5.0

FIRST_IN_LINE = "echo 1000 > /proc/self/oom_score_adj"
"""Shell: the kernel's out-of-memory killer takes this process and its children before any other."""


@dataclass(frozen=True, slots=True)
class ParentGroup:
    """The folder of a cgroup in which others can be made, and the version of cgroups."""

    folder: Path
    version: int

    @property
    def limit_files(self) -> dict[str, str]:
        """The files that hold a limit -> their content; `{}` is the limit in bytes."""
        if self.version == 1:
            return {"memory.limit_in_bytes": "{}", "memory.memsw.limit_in_bytes": "{}"}
        return {"memory.max": "{}", "memory.swap.max": "0", "memory.oom.group": "1"}

    @property
    def kills_file(self) -> str:
        """The file with the count of processes that were killed at the limit."""
        return "memory.oom_control" if self.version == 1 else "memory.events"


@cache
def parent_group() -> ParentGroup | None:
    """Return the group in which this process can make memory cgroups, after a trial; None if there is none."""
    for parent in groups_of_process(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()):
        with contextlib.suppress(OSError, SandboxError):
            if parent.version == 2:
                _delegate_memory(parent.folder)
            MemoryGroup(parent, 64).remove()
            return parent
    return None


def groups_of_process(mountinfo: str, cgroup: str) -> Iterator[ParentGroup]:
    """Yield a process's groups that may count memory, by its files of these names in /proc."""
    mounts = [line.split(" ") for line in text_lines(mountinfo)]
    for line in text_lines(cgroup):
        _, controllers, path = line.split(":", 2)
        version = 1 if "memory" in controllers.split(",") else 2
        for fields in mounts:
            kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
            is_mount = (kind == "cgroup" and "memory" in options) if version == 1 else kind == "cgroup2"
            if is_mount and (version == 1 or not controllers) and Path(path).is_relative_to(fields[3]):
                yield ParentGroup(Path(fields[4]) / Path(path).relative_to(fields[3]), version)


def _delegate_memory(folder: Path) -> None:
    """Allow limits to the children of this v2 group. It may then hold no process, so this one moves to a child."""
    control = folder / "cgroup.subtree_control"
    if "memory" in control.read_text().split():
        return
    child = folder / f"{PREFIX}{owner_tag()}"
    child.mkdir()
    (child / "cgroup.procs").write_text("0")
    try:
        control.write_text("+memory")
    except OSError:
        (folder / "cgroup.procs").write_text("0")
        child.rmdir()
        raise


def remove_dead_groups() -> None:
    """Remove the groups of sandboxes whose process was killed; the sandboxes' processes ended with it."""
    parent = parent_group()
    for folder in parent.folder.glob(f"{PREFIX}*") if parent else ():
        if is_dead(folder.name.removeprefix(PREFIX)):
            with contextlib.suppress(OSError):
                folder.rmdir()


class MemoryGroup:
    """A limit by a cgroup, in which the kernel kills processes of the sandbox only."""

    pause_s = 0.1
    """Seconds until `exceeded` should be asked again."""

    def __init__(self, parent: ParentGroup, limit_mb: int) -> None:
        self._kills_file, self._kills = parent.kills_file, 0
        self._folder = parent.folder / f"{PREFIX}{owner_tag()}-{secrets.token_hex(6)}"
        try:
            self._folder.mkdir()
            for name, value in parent.limit_files.items():
                # Some kernels count no swap and know no kills of whole groups.
                if (self._folder / name).exists():
                    (self._folder / name).write_text(value.format(limit_mb * 2**20))
        except OSError as error:
            raise SandboxError(f"no memory cgroup can be made in {parent.folder}: {error}") from error

    def wrap(self, argv: list[str]) -> list[str]:
        """Return a command that enters the group and execs `argv`. Kills are counted from now on."""
        with contextlib.suppress(FileNotFoundError):  # The command then fails to enter the group, with an error.
            self._kills = self._count_kills()
        script = f'{FIRST_IN_LINE}; echo 0 > "$0" && exec "$@"'
        return ["sh", "-c", script, str(self._folder / "cgroup.procs"), *argv]

    def exceeded(self, pid: int) -> bool:
        """Return whether the kernel killed a process of the group since the last call, or since `wrap`."""
        before, self._kills = self._kills, self._count_kills()
        return self._kills > before

    def _count_kills(self) -> int:
        count = re.search(r"^oom_kill (\d+)$", (self._folder / self._kills_file).read_text(), re.MULTILINE)
        return int(count[1]) if count else 0

    def remove(self) -> None:
        """Kill the processes left in the group, and remove it."""
        deadline = time.monotonic() + _REMOVE_S
        while time.monotonic() < deadline:
            try:
                self._folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                with contextlib.suppress(OSError):
                    for pid in (self._folder / "cgroup.procs").read_text().split():
                        os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.002)
