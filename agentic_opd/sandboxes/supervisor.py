"""A program that runs one command and leaves no process behind, for machines without namespaces.

It is started as `python -I -S -c SOURCE`, on this machine or another one, and so imports nothing but the standard
library (Python 3.8 or later). supervised.py writes its input, one line of JSON on stdin, and reads its answer, one line
of JSON in the job's result file. Every process that the command starts, daemons too, ends before it answers: orphans
become its children (PR_SET_CHILD_SUBREAPER). SIGTERM ends them all.

A command can kill it, because both run as the same user.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_END_S = 10.0


def main() -> None:
    job = json.loads(sys.stdin.readline())
    answer = json.dumps(run(job)) + "\n"
    with open(job["result"] + ".part", "w") as file:  # noqa: PTH123 - pathlib takes 5 ms to import
        file.write(answer)
    os.rename(job["result"] + ".part", job["result"])  # noqa: PTH104


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run the job's command. Returns the fields of a CommandResult (output in base64), and `survivors`."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # The input may hold hidden tests: keep the command, of the same user, out of this process's memory.
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    woken = _wake_on_signals()
    out_read, out_write = os.pipe()
    os.set_blocking(out_read, False)
    pid = _start(job, out_write)
    os.close(out_write)
    watched = _Watched(pid, out_read, woken)
    watched.watch(job["timeout_s"], job["output_bytes"])
    survivors = end_children()
    watched.read(job["output_bytes"])
    return {
        "exit_code": watched.exit_code,
        "timed_out": watched.timed_out,
        "output_exceeded": len(watched.output) > job["output_bytes"],
        "output": base64.b64encode(watched.output[: job["output_bytes"]]).decode(),
        "survivors": survivors,
    }


class _Watched:
    """A running command: what it wrote, and how it ended."""

    def __init__(self, pid: int, out_fd: int, woken: int) -> None:
        self.output = bytearray()
        self.timed_out = False
        self.exit_code = 128 + signal.SIGKILL
        self._pid = pid
        self._out_fd = out_fd
        self._woken = woken
        self._fds = [out_fd, woken]

    def watch(self, timeout_s: float, output_bytes: int) -> None:
        """Return when it has ended, or must be ended."""
        deadline = time.monotonic() + timeout_s
        while True:
            ready = select.select(self._fds, [], [], max(0.0, deadline - time.monotonic()))[0]
            if self._out_fd in ready and not self.read(output_bytes):
                self._fds.remove(self._out_fd)
            if len(self.output) > output_bytes:
                return
            signals = os.read(self._woken, 4096) if self._woken in ready else b""
            if self._reap() or signal.SIGTERM in signals:
                return
            if time.monotonic() >= deadline:
                self.timed_out = True
                return

    def read(self, output_bytes: int) -> bool:
        """Read its output, at most one byte more than allowed; False at the end."""
        with contextlib.suppress(BlockingIOError):
            while len(self.output) <= output_bytes:
                chunk = os.read(self._out_fd, 65536)
                if not chunk:
                    return False
                self.output += chunk
        return True

    def _reap(self) -> bool:
        """Whether the command itself has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == self._pid:
                signaled = os.WIFSIGNALED(status)
                self.exit_code = 128 + os.WTERMSIG(status) if signaled else os.WEXITSTATUS(status)
                return True
            if pid == 0:
                return False


def end_children() -> int:
    """Kill every descendant; return how many still run after `_END_S` seconds (0 unless they are unkillable)."""
    deadline = time.monotonic() + _END_S
    while True:
        try:
            # An orphan would have become a child, so without a child there is no descendant.
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        except ChildProcessError:
            return 0
        alive = _descendants()
        if time.monotonic() > deadline:
            return len(alive)
        for pid in alive:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(name))
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _wake_on_signals() -> int:
    """A file descriptor that gives the number of each SIGCHLD and SIGTERM."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, _do_nothing)
    return woken


def _do_nothing(number: int, frame: object) -> None:
    """A signal without a handler would not be written to the wakeup descriptor."""


def _start(job: dict[str, Any], out_fd: int) -> int:
    stdin = os.open(os.devnull, os.O_RDONLY)
    if job["stdin"] is not None:
        stdin = os.memfd_create("stdin")
        os.write(stdin, base64.b64decode(job["stdin"]))
        os.lseek(stdin, 0, os.SEEK_SET)
    pid = os.fork()
    if pid != 0:
        os.close(stdin)
        return pid
    try:
        os.setsid()
        for source, target in ((stdin, 0), (out_fd, 1), (out_fd, 2)):
            os.dup2(source, target)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(job["cwd"])
        for name, value in job["limits"].items():
            _limit(getattr(resource, name), value)
        shell = "bash" if os.path.exists("/bin/bash") else "sh"  # noqa: PTH110
        os.execvpe(shell, [shell, "-c", job["command"]], job["env"])
    except OSError as error:
        os.write(2, f"the command cannot be started: {error}\n".encode())
    finally:
        os._exit(126)
    return 0


def _limit(which: int, value: int) -> None:
    highest = resource.getrlimit(which)[1]
    value = value if highest == resource.RLIM_INFINITY else min(value, highest)
    resource.setrlimit(which, (value, value))


if __name__ == "__main__":
    main()
