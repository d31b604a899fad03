"""A sandbox's limit on memory by looking at what all of its processes hold, where no cgroup can be made.

It looks ten times a second, and more often the more of the limit is held, so that nothing gets far beyond it. What
can't be seen counts as a file of full size: what is on its way in a socket, is open in a process that lets nobody look,
or, but for root, is only mapped.
"""

import contextlib
import os
import re
import stat
from functools import cache
from pathlib import Path

from agentic_opd.core.text import text_lines
from agentic_opd.sandboxes.cgroups import FIRST_IN_LINE

_MIB = 2**20
_QUICKEST_MB_S = 8000
"""MiB a second that a sandbox might fill at most, for when to look again."""
_SHORTEST_S, _LONGEST_S = 0.002, 0.1
_PAGE = os.sysconf("SC_PAGE_SIZE")
_UNNAMED = b" (deleted)"


class MemoryWatch:
    """A limit by looking: it ends the sandbox after the fact."""

    def __init__(self, limit_mb: int, file_mb: int) -> None:
        self._limit, self._file = limit_mb * _MIB, file_mb * _MIB
        self.pause_s = _SHORTEST_S

    def wrap(self, argv: list[str]) -> list[str]:
        """Become `argv`."""
        return ["sh", "-c", f'{FIRST_IN_LINE}; exec "$@"', "sh", *argv]

    def exceeded(self, pid: int) -> bool:
        """Whether the processes below `pid` hold more than the limit."""
        used = held_by(pid, self._limit, self._file)
        self.pause_s = min(max((self._limit - used) / _MIB / _QUICKEST_MB_S, _SHORTEST_S), _LONGEST_S)
        return used > self._limit

    def remove(self) -> None:
        """Nothing is to be given back."""


_GONE = (FileNotFoundError, ProcessLookupError)
Files = dict[tuple[int, int], int]
"""Files as device and inode -> their bytes."""


def held_by(pid: int, limit: int, file_bytes: int) -> int:
    """The bytes of memory that the processes below `pid` hold, files without a name included.

    Args:
        pid: bubblewrap; neither its memory nor that of its first child, which is bubblewrap too, is looked at.
        limit: The quick sum counts what processes share since a fork for each of them: that will do where it is below
            the limit, or files without a name are above it by themselves.
        file_bytes: What a file of unseen size counts as.
    """
    inside = [process for child in children_of(pid) for process in below(child)]
    files: Files = {}
    hidden, quick = 0, 0
    for process in inside:
        with contextlib.suppress(*_GONE):
            resident, shared = map(int, Path(f"/proc/{process}/statm").read_text().split()[1:3])
            quick += (resident - shared) * _PAGE
            hidden += _add_unnamed(process, files, file_bytes)
            _add_mapped(process, files, file_bytes)
    named = sum(files.values()) + hidden
    if named > limit or quick + named <= limit:
        return quick + named
    return sum(_private_bytes(process) for process in inside) + named


def unnamed_bytes(pid: int, device: int, file_bytes: int) -> int:
    """What `pid` and the processes below it hold in open files of a device that have no name any more."""
    files: Files = {}
    for process in (pid, *below(pid)):
        with contextlib.suppress(*_GONE):
            _add_unnamed(process, files, file_bytes)
    return sum(size for (place, _), size in files.items() if place == device)


def children_of(pid: int) -> list[int]:
    """The processes that `pid` and its threads started and that live."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (task / "children").read_text().split())
    return found


def below(pid: int) -> list[int]:
    """All descendants of `pid`."""
    found, todo = list[int](), [pid]
    while todo:
        children = children_of(todo.pop())
        found += children
        todo += children
    return found


def _add_unnamed(process: int, files: Files, file_bytes: int) -> int:
    """Add the open files of `process` that have no name; returns the bytes of files on their way in its sockets."""
    on_their_way = 0
    try:
        for fd in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                about = fd.stat()
                if stat.S_ISREG(about.st_mode) and about.st_nlink == 0:
                    files[about.st_dev, about.st_ino] = about.st_blocks * 512
                elif stat.S_ISSOCK(about.st_mode):
                    on_their_way += int(_fields(process, fd.name).get("scm_fds", "0")) * file_bytes
    except PermissionError:
        _add_hidden(process, files, file_bytes)
    return on_their_way


def _add_hidden(process: int, files: Files, file_bytes: int) -> None:
    """Add the open files of a process that lets nobody look at them, such as the hidden tests' own.

    Of these only the mount and the inode are seen: any file that can be written counts as one of full size.
    """
    with contextlib.suppress(OSError):  # One that is just ending has no mounts any more.
        devices = {_memfd_mount(): _memfd_device()}
        for line in text_lines(Path(f"/proc/{process}/mountinfo").read_text()):
            mount, _, device, _, place, options = line.split(" ")[:6]
            if "rw" in options.split(",") and place not in ("/dev", "/dev/pts", "/proc"):
                major, _, minor = device.partition(":")
                devices[mount] = os.makedev(int(major), int(minor))
        for fd in Path(f"/proc/{process}/fdinfo").iterdir():
            with contextlib.suppress(OSError):
                fields = _fields(process, fd.name)
                if fields["mnt_id"] in devices:
                    inode = int(fields.get("ino", f"-{process}{fd.name}"))
                    files.setdefault((devices[fields["mnt_id"]], inode), file_bytes)


def _add_mapped(process: int, files: Files, file_bytes: int) -> None:
    """Add the shared files without a name that `process` has mapped and perhaps not open."""
    unseen: Files = {}
    for file, place in _mapped(process).items():
        if file not in files:
            try:
                files[file] = Path(f"/proc/{process}/map_files/{place}").stat().st_blocks * 512
            except OSError:  # Only an administrator may look; and what is mapped elsewhere by now is not found.
                unseen[file] = file_bytes
    if unseen:  # What a process gave back meanwhile, as all of them do when they end, is no file of full size.
        files |= {file: size for file, size in unseen.items() if file in _mapped(process)}


def _mapped(process: int) -> dict[tuple[int, int], str]:
    """The shared files without a name that `process` has mapped, each with a place where it is."""
    found: dict[tuple[int, int], str] = {}
    with contextlib.suppress(*_GONE, PermissionError):
        lines = Path(f"/proc/{process}/maps").read_bytes().split(b"\n")
        for place, modes, _, device, inode in (line.split()[:5] for line in lines if line.endswith(_UNNAMED)):
            if modes.endswith(b"s"):
                major, minor = (int(part, 16) for part in device.split(b":"))
                found[os.makedev(major, minor), int(inode)] = place.decode()
    return found


def _fields(process: int | str, fd: str) -> dict[str, str]:
    """What the kernel tells of an open file."""
    lines = text_lines(Path(f"/proc/{process}/fdinfo/{fd}").read_text())
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@cache
def _memfd_mount() -> str:
    """The mount that all memfds are on."""
    with os.fdopen(os.memfd_create("own")) as file:
        return _fields("self", str(file.fileno()))["mnt_id"]


@cache
def _memfd_device() -> int:
    with os.fdopen(os.memfd_create("own")) as file:
        return os.fstat(file.fileno()).st_dev


def _private_bytes(process: int) -> int:
    """The part of a process's memory that is no file, each page shared out among those that share it."""
    with contextlib.suppress(*_GONE, PermissionError):
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
        kib = dict(re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE))
        return 1024 * int(kib.get("Pss_Anon", kib.get("Pss", "0")))
    return 0
