"""What takes more memory than a sandbox may have, each in a way of its own; and both ways to limit it."""

import os

import pytest

from agentic_opd.sandboxes import bubblewrap, memory
from agentic_opd.sandboxes.protocol import Limits

LIMIT = Limits(memory_mb=160, file_mb=32, disk_mb=64)
MARK = f"held-{os.getpid()}"
"""In the command line of every process of a trick."""

_START = f"""
# {MARK}
import mmap, os, socket, sys, time
held = 0
def hold(mb):
    global held
    held += mb
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            held -= mb  # The kernel ended a child: it holds nothing any more.
    except ChildProcessError:
        pass
    print(held, flush=True)
    time.sleep(0.03)  # A watch looks from outside, and on a busy machine late.
written, done = os.pipe()
"""

TRICKS = {
    "memfds": """
files = []
for _ in range(28):
    fd = os.memfd_create("m")
    os.write(fd, bytes(2**24))
    files.append(fd)
    hold(16)
""",
    "processes": """
for _ in range(19):
    if os.fork() == 0:
        data = bytearray(b"x") * (2**20 * 24)
        os.write(done, b"x")
        time.sleep(30)
        os._exit(0)
    os.read(written, 1)
    hold(24)
""",
    "shared memory": """
for _ in range(28):
    if os.fork() == 0:
        data = mmap.mmap(-1, 2**24)
        data.write(bytes(2**24))
        os.write(done, b"x")
        time.sleep(30)
    os.read(written, 1)
    hold(16)
""",
    "memfds that are only mapped": """
import ctypes
for _ in range(28):
    fd = os.memfd_create("m")
    os.write(fd, bytes(2**24))
    ctypes.CDLL(None).mmap(None, 4096, 3, mmap.MAP_SHARED, fd, 0)
    os.close(fd)
    hold(16)
""",
    "memfds on their way": """
ends = []
for _ in range(28):
    fd = os.memfd_create("m")
    os.write(fd, bytes(2**24))
    ends.append(socket.socketpair())
    socket.send_fds(ends[-1][0], [b"x"], [fd])
    os.close(fd)
    hold(16)
""",
    "a process that hides what it holds": """
import ctypes
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
files = []
for _ in range(28):
    files.append(os.memfd_create("m"))
    os.write(files[-1], bytes(2**24))
    hold(16)
""",
    "a stopped process": """
if os.fork() == 0:
    os.setsid()
    data = bytearray(b"x") * (2**20 * 100)
    os.kill(os.getpid(), 19)
time.sleep(0.2)
data = bytearray(b"x") * (2**20 * 100)
hold(200)
""",
}
"""Programs that say how many MiB they hold and would hold far more than LIMIT."""

UNLINKED = """
files = []
for number in range(28):
    for folder in ("/tmp", "/dev/shm", ".", os.path.expanduser("~")):
        files.append(os.open(f"{folder}/{number}", os.O_CREAT | os.O_RDWR))
        os.write(files[-1], bytes(2**22))
        os.unlink(f"{folder}/{number}")
        hold(4)
"""
"""A trick whose files lie on the disk or in memory: it may come to its end by a full tmpfs too."""


def command_of(trick: str) -> str:
    """The shell line that runs a trick and then keeps what it holds."""
    return f"python -I -S -c '{_START}{trick}\ntime.sleep(30)'"


def only_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no memory cgroup can be made: a watch, and folders on the disk, also for root."""
    for module in (memory, bubblewrap):
        monkeypatch.setattr(module, "parent_group", lambda: None)
