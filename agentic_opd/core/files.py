"""Checks of paths before they are opened (I/O)."""

import errno
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
_DESCRIPTORS = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
"""Names of files that are open already, such as standard input and a shell's `<(command)`."""

LFS_POINTER = b"version https://git-lfs"
"""Beginning of the text that a clone without Git LFS has in place of a file."""


def check_regular(path: Path, *, is_read: bool = False) -> None:
    """Check that `path` is a regular file, or does not exist. To open a FIFO waits for its other end, maybe forever.

    `is_read`: the file is only read, so that it may also be an open pipe, such as standard input.

    Raises:
        OSError: it is something else; `strerror` names what.
    """
    if is_read and str(path).startswith(_DESCRIPTORS):
        return
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except OSError:  # Opening the file fails with the same error, and the caller handles it there.
        return
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is {_KINDS[kind]}, expected a regular file", str(path))
