"""Write and read a work directory on this machine from this process: the same as workdir.py's commands, but faster.

The agent controls the content, so every name is opened from the descriptor of its directory, no link is followed, and
only regular files that the sandbox's user may read are read. If the directory holds too much (`TooMuch`), the caller
falls back to commands, for which the sandbox's limits hold.
"""

import contextlib
import itertools
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import PurePosixPath

from agentic_opd.core.errors import SandboxError

MAX_FILES = 200
MAX_FILE_BYTES = 2**20
MAX_BYTES = 4 * 2**20
"""What `get_files` gives at most."""
NOT_READ = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"})
"""Names of what running a program or a test leaves behind."""

_MOST_ENTRIES = 2000
_DEEPEST = 50
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC


class TooMuch(Exception):
    """The directory holds more than this process should look at."""


def put(work: int, files: Mapping[str, str]) -> None:
    """Write files (relative path -> text) below the directory, as its owner's.

    Raises:
        SandboxError: a path leads elsewhere, or the file system refused.
    """
    for path, text in files.items():
        try:
            _write(work, path, text.encode())
        except (OSError, ValueError) as error:
            raise SandboxError(f"the task's file {path!r} could not be written: {error}") from error


def write(work: int, path: str, content: bytes) -> bool:
    """Write one file as a command of the sandbox would; False where it takes that command to say what happens."""
    try:
        _write(work, path, content)
    except (OSError, ValueError):
        return False
    return True


def read(work: int, first: str) -> dict[str, bytes]:
    """The regular files, by relative path: `first` before all others; those not in UTF-8 are left out.

    Raises:
        TooMuch: see the module.
    """
    found = dict[str, bytes]()
    paths = sorted(filter(is_text, _files(work, folder="", entries=itertools.count())))
    size = 0
    for path in sorted(paths, key=lambda path: path != first)[:MAX_FILES]:
        content = _content(work, path)
        if content is not None:
            size += len(content)
            if size > MAX_BYTES:
                break
            found[path] = content
    return found


def is_text(name: str) -> bool:
    """Whether the name is UTF-8; Python hands on other bytes as halves of surrogate pairs."""
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
    """Root may do anything; the sandbox's user may do what the modes say."""
    if os.fstat(fd).st_mode & bits != bits:
        raise PermissionError("the sandbox's user may not write there")


def _give(fd: int, owner: int, mode: int) -> None:
    if owner != os.geteuid():
        os.fchown(fd, owner, owner)
    os.fchmod(fd, mode)


def _files(folder_fd: int, *, folder: str, entries: Iterator[int]) -> Iterator[str]:
    """The paths of the regular files that are not too large, in no order."""
    folders = list[str]()
    with os.scandir(folder_fd) as found:
        for entry in found:
            if next(entries) >= _MOST_ENTRIES:
                raise TooMuch
            if entry.name in NOT_READ:
                continue
            about = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(about.st_mode) and about.st_mode & 0o500 == 0o500:
                folders.append(entry.name)
            elif stat.S_ISREG(about.st_mode) and about.st_size <= MAX_FILE_BYTES:
                yield f"{folder}{entry.name}"
    for name in folders:
        path = f"{folder}{name}/"
        if path.count("/") > _DEEPEST:
            raise TooMuch
        yield from _opened(folder_fd, name, path, entries=entries)


def _opened(parent: int, name: str, path: str, *, entries: Iterator[int]) -> Iterator[str]:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _OPEN, dir_fd=parent)
    except OSError:
        return
    try:
        yield from _files(fd, folder=path, entries=entries)
    finally:
        os.close(fd)


def _content(work: int, path: str) -> bytes | None:
    """The file's bytes; None if it can't be read, or is no regular file any more."""
    *folders, name = path.split("/")
    folder = os.dup(work)
    try:
        for one in folders:
            below = os.open(one, os.O_RDONLY | os.O_DIRECTORY | _OPEN, dir_fd=folder)
            os.close(folder)
            folder = below
        with os.fdopen(os.open(name, os.O_RDONLY | os.O_NONBLOCK | _OPEN, dir_fd=folder), "rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            return stream.read(MAX_FILE_BYTES) if stat.S_ISREG(mode) and mode & 0o400 else None
    except OSError:
        return None
    finally:
        os.close(folder)
