"""Leftovers of killed runs: names that identify the owner, and the removal of dead runs' folders.

Everything that a sandbox creates outside of itself (a folder, a container, a volume) carries `owner_tag()`. Process ids
are reused, so the tag also holds the process's start time. It also holds the process namespace of the id, so that no
run removes the files of a living run in another container or on another machine that shares the folder or the server.
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

# Indexes of the fields that `_stat` returns.
_STATE, _TERMINAL, _START = 0, 4, 19


def owner_tag() -> str:
    """Return `PID-START-NAMESPACE` of this process: id, start in clock ticks since boot, host and process namespace."""
    pid = os.getpid()
    return f"{pid}-{_start_of(pid)}-{_host_and_namespace()}"


def is_dead(tag: str) -> bool:
    """Return whether `tag` (or a name that begins with it) belongs to an ended process of this namespace.

    Tags of other namespaces and other texts count as alive.
    """
    match = _TAG.fullmatch(tag)
    return match is not None and match[3] == _host_and_namespace() and _start_of(int(match[1])) != int(match[2])


def make_folder() -> Path:
    """Make a private folder in the temporary directory; its name identifies the owner."""
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{owner_tag()}-"))


async def remove_leftovers() -> list[Path]:
    """End the processes and remove the folders of this user's dead runs. Returns those folders."""
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
    """Return the processes that work in `folder` or name it in their command line.

    Processes with a terminal are left out: a person may look at the folder.
    """
    pids: list[int] = []
    name = os.fsencode(folder)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            works_in = os.fsencode((process / "cwd").readlink())
            inside = works_in == name or works_in.startswith(name + b"/") or name in (process / "cmdline").read_bytes()
            if inside and _stat(process)[_TERMINAL] == "0":
                pids.append(int(process.name))
    return pids


def _start_of(pid: int) -> int | None:
    """Return the process's start in clock ticks since boot; None if it does not run."""
    try:
        fields = _stat(Path(f"/proc/{pid}"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[_STATE] in ("Z", "X") else int(fields[_START])


def _stat(process: Path) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on; the second, the program's name, may hold any character."""
    return (process / "stat").read_text().rpartition(")")[2].split()


@cache
def _host_and_namespace() -> str:
    """Return host and process namespace as 12 hexadecimal digits."""
    namespace = Path("/proc/self/ns/pid").readlink()
    return blake2b(f"{socket.gethostname()} {namespace}".encode(), digest_size=6).hexdigest()


class PrivateFolder:
    """A folder of the temporary directory whose name identifies the owner."""

    def __init__(self) -> None:
        self._path: Path | None = None

    @property
    def path(self) -> Path:
        """Its path.

        Raises:
            SandboxError: it does not exist yet, or was removed.
        """
        if self._path is None:
            raise not_entered()
        return self._path

    async def make(self, fill: Callable[[Path], None]) -> None:
        """Create it and call `fill` on it.

        Raises:
            SandboxError: the file system refused; the folder is removed again.
        """
        try:
            self._path = make_folder()
            fill(self._path)
        except OSError as error:
            await self.remove()
            raise SandboxError(f"no work directory can be made in {tempfile.gettempdir()}: {error}") from error

    async def remove(self) -> None:
        """Remove it with its content; do nothing if it does not exist."""
        if self._path is not None:
            path, self._path = self._path, None
            await asyncio.shield(asyncio.to_thread(remove_tree, path))
