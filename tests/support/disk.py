"""A disk that is full for a while."""

import os
import resource
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def largest_file(size: int) -> Generator[None]:
    """Let no file of this process grow beyond `size` bytes: a write that begins below is cut off there, then fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


KINDS = ["fifo", "directory", "socket", "device"]


def make(kind: str, path: Path) -> None:
    """Make something that is no regular file; a reader or writer of a FIFO would wait for the other side."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        folder = os.open(path.parent, os.O_RDONLY)  # The name of a socket has at most 108 characters.
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)
