"""What runs that were killed leave behind: names that tell whose a thing is, and the removal of dead runs' folders.

Everything that a sandbox makes outside of itself (a folder, a container, a volume) carries `owner_tag()`. Process ids
are used again, so the tag also holds when the process started; and it holds the place in which the id counts, so that
no run removes what belongs to a living one of another container or machine that shares the folder or the server.
"""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path

from agentic_opd.core.errors import SandboxError
from agentic_opd.sandboxes.protocol import not_entered

PREFIX = "agentic-opd-"

_TAG = re.compile(r"(\d+)-(\d+)-([0-9a-f]{12})(?:-.*)?", re.DOTALL)

# Places in what `_stat` returns.
_STATE, _TERMINAL, _START = 0, 4, 19


def owner_tag() -> str:
    """`PID-START-PLACE` of this process: its id, its start in clock ticks since boot, the place that the id is of."""
    pid = os.getpid()
    return f"{pid}-{_start_of(pid)}-{_place()}"


def is_dead(tag: str) -> bool:
    """Whether `tag` (or a name that begins with it) is of a process of this place that no longer lives.

    Anything else, a tag of another place or no tag at all, is not known to be dead.
    """
    match = _TAG.fullmatch(tag)
    return match is not None and match[3] == _place() and _start_of(int(match[1])) != int(match[2])


def make_folder() -> Path:
    """A new private folder in the temporary directory whose name tells its owner."""
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{owner_tag()}-"))


async def remove_leftovers() -> list[Path]:
    """End the processes and remove the folders that dead runs of this user left here. Returns those folders."""
    return await asyncio.to_thread(_remove_leftovers)


def remove_tree(folder: Path) -> None:
    """Remove a folder in which the agent may have done anything: unreadable parts, very deep nesting."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        subprocess.run(["chmod", "-R", "u+rwX", "--", str(folder)], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", "--", str(folder)], check=False, stderr=subprocess.DEVNULL)


def _remove_leftovers() -> list[Path]:
    folders = [path for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*") if _is_leftover(path)]
    for folder in folders:
        for pid in _processes_of(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        remove_tree(folder)
    return folders


def _is_leftover(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        mine = path.stat(follow_symlinks=False).st_uid == os.geteuid()
        return mine and not path.is_symlink() and path.is_dir() and is_dead(path.name.removeprefix(PREFIX))
    return False


def _processes_of(folder: Path) -> list[int]:
    """The processes that work in `folder` or were started on it: a sandbox's own programs, and what escaped them.

    They have no terminal. A person's shell does, and may look at the folder.
    """
    found: list[int] = []
    name = os.fsencode(folder)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            works_in = os.fsencode((process / "cwd").readlink())
            inside = works_in == name or works_in.startswith(name + b"/") or name in (process / "cmdline").read_bytes()
            if inside and _stat(process)[_TERMINAL] == "0":
                found.append(int(process.name))
    return found


def _start_of(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None for one that does not run."""
    try:
        fields = _stat(Path(f"/proc/{pid}"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[_STATE] in ("Z", "X") else int(fields[_START])


def _stat(process: Path) -> list[str]:
    """What /proc/PID/stat says from its third field on; the second is the program's name, and may hold anything."""
    return (process / "stat").read_text().rpartition(")")[2].split()


@cache
def _place() -> str:
    """Host and process namespace, as 12 hexadecimal digits."""
    namespace = Path("/proc/self/ns/pid").readlink()
    return blake2b(f"{socket.gethostname()} {namespace}".encode(), digest_size=6).hexdigest()


class PrivateFolder:
    """A folder of the temporary directory whose name tells its owner."""

    def __init__(self) -> None:
        self._path: Path | None = None

    @property
    def path(self) -> Path:
        """Where it is.

        Raises:
            SandboxError: it is not made yet, or removed.
        """
        if self._path is None:
            raise not_entered()
        return self._path

    async def make(self, fill: Callable[[Path], None]) -> None:
        """Make it and put in what `fill` puts in.

        Raises:
            SandboxError: the file system refused; nothing of it is left.
        """
        try:
            self._path = make_folder()
            fill(self._path)
        except OSError as error:
            await self.remove()
            raise SandboxError(f"no work directory can be made in {tempfile.gettempdir()}: {error}") from error

    async def remove(self) -> None:
        """Remove it, whatever is in it; nothing happens if there is no folder."""
        if self._path is not None:
            path, self._path = self._path, None
            await asyncio.shield(asyncio.to_thread(remove_tree, path))
