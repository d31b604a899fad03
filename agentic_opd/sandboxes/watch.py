"""A sandbox's memory limit by polling the memory of all its processes, where no cgroup can be made.

It polls ten times a second, and more often close to the limit, so that no sandbox gets far beyond it. A file whose size
is invisible counts with its maximum size: one that is in transit in a socket, is open in a process that can't be
inspected, or is only mapped (visible to root).
"""

import contextlib
import os
import re
import stat
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from agentic_opd.core.text import text_lines
from agentic_opd.sandboxes.cgroups import FIRST_IN_LINE

_MIB = 2**20
_QUICKEST_MB_S = 8000
"""Highest assumed allocation rate in MiB/s, which sets the polling interval."""
_SHORTEST_S, _LONGEST_S = 0.002, 0.1
_PAGE = os.sysconf("SC_PAGE_SIZE")
_UNNAMED = b" (deleted)"


class MemoryWatch:
    """A memory limit by polling: it ends the sandbox after it has exceeded the limit."""

    def __init__(self, limit_mb: int, file_mb: int) -> None:
        self._limit, self._file = limit_mb * _MIB, file_mb * _MIB
        self.pause_s = _SHORTEST_S
        """Seconds until `exceeded` should be asked again."""

    def wrap(self, argv: list[str]) -> list[str]:
        """Return a command that execs `argv`."""
        return ["sh", "-c", f'{FIRST_IN_LINE}; exec "$@"', "sh", *argv]

    def exceeded(self, pid: int) -> bool:
        """Return whether the processes below `pid` hold more than the limit."""
        # The memory of bubblewrap and of its first child, which is bubblewrap too, does not count.
        inside = [process for child in children_of(pid) for process in below(child)]
        used = held_by(inside, self._limit, self._file)
        self.pause_s = min(max((self._limit - used) / _MIB / _QUICKEST_MB_S, _SHORTEST_S), _LONGEST_S)
        return used > self._limit

    def remove(self) -> None:
        """There is no resource to release."""


_ENDED = (FileNotFoundError, ProcessLookupError)
"""Errors of reading the files of a process that has ended."""
Files = dict[tuple[int, int], int]
"""Files as device and inode -> their bytes."""


def held_by(inside: Sequence[int], limit: int, file_bytes: int) -> int:
    """Return the bytes of memory that processes hold, unnamed files included.

    The exact sum is computed only if needed: if a quick one, which counts pages shared by a fork more than once, is
    above `limit`, and unnamed files alone are not. A file of unknown size counts `file_bytes`.
    """
    files: Files = {}
    hidden, quick = 0, 0
    for process in inside:
        with contextlib.suppress(*_ENDED):
            resident, shared = map(int, Path(f"/proc/{process}/statm").read_text().split()[1:3])
            quick += (resident - shared) * _PAGE
            hidden += _add_unnamed(process, files, file_bytes)
            _add_mapped(process, files, file_bytes)
    named = sum(files.values()) + hidden
    if named > limit or quick + named <= limit:
        return quick + named
    return sum(_private_bytes(process) for process in inside) + named


def unnamed_bytes(pid: int, device: int, file_bytes: int) -> int:
    """Return the bytes of unnamed open files on `device` of `pid` and the processes below it."""
    files: Files = {}
    for process in (pid, *below(pid)):
        with contextlib.suppress(*_ENDED):
            _add_unnamed(process, files, file_bytes)
    return sum(size for (file_device, _), size in files.items() if file_device == device)


def children_of(pid: int) -> list[int]:
    """Return the living children of `pid`'s threads."""
    children: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                children += map(int, (task / "children").read_text().split())
    return children


def below(pid: int) -> list[int]:
    """Return all descendants of `pid`."""
    descendants, todo = list[int](), [pid]
    while todo:
        children = children_of(todo.pop())
        descendants += children
        todo += children
    return descendants


def _add_unnamed(process: int, files: Files, file_bytes: int) -> int:
    """Add the unnamed open files of `process`; return the bytes of files in transit in its sockets."""
    in_transit = 0
    try:
        for fd in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = fd.stat()
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                    files[status.st_dev, status.st_ino] = status.st_blocks * 512
                elif stat.S_ISSOCK(status.st_mode):
                    in_transit += int(_fields(process, fd.name).get("scm_fds", "0")) * file_bytes
    except PermissionError:
        _add_hidden(process, files, file_bytes)
    return in_transit


def _add_hidden(process: int, files: Files, file_bytes: int) -> None:
    """Add the open files of a process that can't be inspected, such as that of the hidden tests.

    Only mount and inode are visible: every writable file counts with its maximum size.
    """
    with contextlib.suppress(OSError):  # A process that is just ending has no mounts any more.
        devices = {_memfd_mount(): _memfd_device()}
        for line in text_lines(Path(f"/proc/{process}/mountinfo").read_text()):
            mount, _, device, _, path, options = line.split(" ")[:6]
            if "rw" in options.split(",") and path not in ("/dev", "/dev/pts", "/proc"):
                major, _, minor = device.partition(":")
                devices[mount] = os.makedev(int(major), int(minor))
        for fd in Path(f"/proc/{process}/fdinfo").iterdir():
            with contextlib.suppress(OSError):
                fields = _fields(process, fd.name)
                if fields["mnt_id"] in devices:
                    inode = int(fields.get("ino", f"-{process}{fd.name}"))
                    files.setdefault((devices[fields["mnt_id"]], inode), file_bytes)


def _add_mapped(process: int, files: Files, file_bytes: int) -> None:
    """Add the unnamed shared files that `process` has mapped, open or not."""
    unmeasured: Files = {}
    for file, addresses in _mapped(process).items():
        if file not in files:
            try:
                files[file] = Path(f"/proc/{process}/map_files/{addresses}").stat().st_blocks * 512
            except OSError:  # This user is not an administrator, or the mapping has moved.
                unmeasured[file] = file_bytes
    if unmeasured:  # Without the files that the process has unmapped meanwhile, as an ending process does.
        files |= {file: size for file, size in unmeasured.items() if file in _mapped(process)}


def _mapped(process: int) -> dict[tuple[int, int], str]:
    """Return the unnamed shared files that `process` has mapped, each with an address range."""
    files: dict[tuple[int, int], str] = {}
    with contextlib.suppress(*_ENDED, PermissionError):
        lines = Path(f"/proc/{process}/maps").read_bytes().split(b"\n")
        for addresses, modes, _, device, inode in (line.split()[:5] for line in lines if line.endswith(_UNNAMED)):
            if modes.endswith(b"s"):
                major, minor = (int(part, 16) for part in device.split(b":"))
                files[os.makedev(major, minor), int(inode)] = addresses.decode()
    return files


def _fields(process: int | str, fd: str) -> dict[str, str]:
    """Return the fields of /proc/PID/fdinfo/FD."""
    lines = text_lines(Path(f"/proc/{process}/fdinfo/{fd}").read_text())
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@cache
def _memfd_mount() -> str:
    """Return the mount id of all memfds."""
    with os.fdopen(os.memfd_create("own")) as file:
        return _fields("self", str(file.fileno()))["mnt_id"]


@cache
def _memfd_device() -> int:
    with os.fdopen(os.memfd_create("own")) as file:
        return os.fstat(file.fileno()).st_dev


def _private_bytes(process: int) -> int:
    """Return a process's anonymous memory; shared pages are divided among the processes that share them."""
    with contextlib.suppress(*_ENDED, PermissionError):
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
        kib = dict(re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE))
        return 1024 * int(kib.get("Pss_Anon", kib.get("Pss", "0")))
    return 0
