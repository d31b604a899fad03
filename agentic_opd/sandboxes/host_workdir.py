"""Write and read a work directory on this machine from this process: the same as workdir.py's commands, but faster.

The agent controls the content, so every name is opened from the descriptor of its directory, no link is followed, and
only regular files that the sandbox's user may read are read. If the directory holds too much (`TooMuch`), the caller
falls back to commands, for which the sandbox's limits hold.
"""

import contextlib
import itertools
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import PurePosixPath

from agentic_opd.core.errors import SandboxError
from agentic_opd.sandboxes.needed_files import needed_first

MAX_FILES = 200
MAX_FILE_BYTES = 2**20
MAX_BYTES = 4 * 2**20
"""Limits of the files that `get_files` returns."""
NOT_READ = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"})
"""Names of the caches of programs and tests."""

_MOST_ENTRIES = 2000
_DEEPEST = 50
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC


class TooMuch(Exception):
    """The directory holds more than this process should look at."""


def write_files(work: int, files: Mapping[str, str]) -> None:
    """Write files (relative path -> text) below the directory; they belong to its owner.

    Raises:
        SandboxError: a path leads out of the directory, or the file system refused.
    """
    for path, text in files.items():
        try:
            _write(work, path, text.encode())
        except (OSError, ValueError) as error:
            raise SandboxError(f"the task's file {path!r} could not be written: {error}") from error


def write(work: int, path: str, content: bytes) -> bool:
    """Write one file; return False if it takes a command in the sandbox, whose message says why."""
    try:
        _write(work, path, content)
    except (OSError, ValueError):
        return False
    return True


class WorkFiles(dict[str, bytes]):
    """Files of a work directory by relative path, at most MAX_FILES and MAX_BYTES."""

    left_out: Sequence[str] = ()
    """Paths of the regular files beyond these limits, and of those larger than MAX_FILE_BYTES; sorted."""

    def add(self, contents: Mapping[str, bytes | None]) -> dict[str, bytes]:
        """Add the files for which there is room, and return them; None is a file that can't be read."""
        added = dict[str, bytes]()
        size = sum(map(len, self.values()))
        for path, content in contents.items():
            if content is not None and len(self) + len(added) < MAX_FILES and size + len(content) <= MAX_BYTES:
                added[path] = content
                size += len(content)
        self.update(added)
        return added


def read(work: int, first: str) -> WorkFiles:
    """Return the regular files by relative path: `first`, what it needs, then others. Names are UTF-8 only.

    Raises:
        TooMuch: see the module.
    """
    sizes = {path: size for path, size in _files(work, folder="", entries=itertools.count()) if is_text(path)}
    paths = [path for path, size in sizes.items() if size <= MAX_FILE_BYTES]
    files, unreadable = WorkFiles(), set[str]()

    def take(batch: Sequence[str]) -> dict[str, bytes]:
        contents = {path: _content(work, path) for path in batch if len(files) < MAX_FILES}
        unreadable.update(path for path, content in contents.items() if content is None)
        return files.add(contents)

    if len(paths) <= MAX_FILES and sum(map(sizes.__getitem__, paths)) <= MAX_BYTES:
        take(sorted(paths))
    else:
        batches = needed_first(first, paths)
        batch: Sequence[str] = next(batches)
        with contextlib.suppress(StopIteration):
            while True:
                batch = batches.send(take(batch))
    files.left_out = sorted({*sizes} - {*files} - unreadable)
    return files


def is_text(name: str) -> bool:
    """Return whether the name is UTF-8; Python shows other bytes as halves of surrogate pairs."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _write(work: int, path: str, content: bytes) -> None:
    parts = PurePosixPath(path).parts
    if not parts or parts[0] == "/" or ".." in parts or path.endswith(("/", "/.")):
        raise ValueError("it is not a path below the work directory")
    owner = os.fstat(work).st_uid
    with ExitStack() as opened:
        folder = work
        for name in parts[:-1]:
            _check_mode(folder, 0o300)
            is_new = False
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=folder)
                is_new = True
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _OPEN, dir_fd=folder)
            opened.callback(os.close, folder)
            if is_new:
                _give(folder, owner, 0o755)
        _check_mode(folder, 0o300)
        try:
            file = os.open(parts[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=folder)
            is_new = True
        except FileExistsError:
            file = os.open(parts[-1], os.O_WRONLY | os.O_NONBLOCK | _OPEN, dir_fd=folder)
            is_new = False
        with os.fdopen(file, "wb") as stream:
            if is_new:
                _give(file, owner, 0o644)
            else:
                _check_mode(file, stat.S_IFREG | 0o200)
                os.ftruncate(file, 0)
            stream.write(content)


def _check_mode(fd: int, bits: int) -> None:
    """Raise PermissionError unless the mode has these bits: for root, which may write anywhere."""
    if os.fstat(fd).st_mode & bits != bits:
        raise PermissionError("the sandbox's user may not write there")


def _give(fd: int, owner: int, mode: int) -> None:
    if owner != os.geteuid():
        os.fchown(fd, owner, owner)
    os.fchmod(fd, mode)


def _files(folder_fd: int, *, folder: str, entries: Iterator[int]) -> Iterator[tuple[str, int]]:
    """Yield the paths and sizes of the regular files, in no order."""
    folders = list[str]()
    with os.scandir(folder_fd) as directory:
        for entry in directory:
            if next(entries) >= _MOST_ENTRIES:
                raise TooMuch
            if entry.name in NOT_READ:
                continue
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode) and status.st_mode & 0o500 == 0o500:
                folders.append(entry.name)
            elif stat.S_ISREG(status.st_mode):
                yield f"{folder}{entry.name}", status.st_size
    for name in folders:
        path = f"{folder}{name}/"
        if path.count("/") > _DEEPEST:
            raise TooMuch
        yield from _opened(folder_fd, name, path, entries=entries)


def _opened(parent: int, name: str, path: str, *, entries: Iterator[int]) -> Iterator[tuple[str, int]]:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _OPEN, dir_fd=parent)
    except OSError:
        return
    try:
        yield from _files(fd, folder=path, entries=entries)
    finally:
        os.close(fd)


def _content(work: int, path: str) -> bytes | None:
    """Return the file's bytes; None if it can't be read, or is no longer a regular file."""
    *folders, name = path.split("/")
    folder = os.dup(work)
    try:
        for folder_name in folders:
            below = os.open(folder_name, os.O_RDONLY | os.O_DIRECTORY | _OPEN, dir_fd=folder)
            os.close(folder)
            folder = below
        with os.fdopen(os.open(name, os.O_RDONLY | os.O_NONBLOCK | _OPEN, dir_fd=folder), "rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            return stream.read(MAX_FILE_BYTES) if stat.S_ISREG(mode) and mode & 0o400 else None
    except OSError:
        return None
    finally:
        os.close(folder)
