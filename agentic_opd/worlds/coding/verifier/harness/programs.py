"""Child processes of the tests' one; and solution.py as a program: an input text in, what it prints out."""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentic_opd.worlds.coding.verifier.harness.clock import Clock

MAX_OUTPUT_BYTES = 16 * 2**20
_TAIL_BYTES = 2000
# The module `signal` takes 4 ms to import.
_SIGKILL = 9


def spawn(folder: str, source: str, arguments: list[str], fds: tuple[int, int, int]) -> int:
    """Start a child in `folder`, with `fds` as descriptors 0 to 2 and what is inheritable; returns its id."""
    source = f"import os\nos.chdir({folder!r})\n{source}"
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-s", "-S", "-P", "-c", source, *arguments],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds)],
        setpgroup=0,
    )


def end_child(pid: int) -> None:
    """Kill a child and its group, and reap it."""
    for kill in (os.killpg, os.kill):
        try:  # noqa: SIM105 - contextlib takes time to import
            kill(pid, _SIGKILL)
        except OSError:
            pass
    os.waitpid(pid, 0)


class ProgramError(Exception):
    """The program failed, or printed what is not text."""


class Programs:
    """Runs programs within the time of the current check.

    `source` is what starts solution.py, in `folder`. A program gets three descriptors and nothing else: its input and
    its errors are files in memory, its output is a pipe that is read until the program ends.
    """

    def __init__(self, folder: str, source: str, clock: Clock) -> None:
        self._folder = folder
        self._source = source
        self._clock = clock

    def run_program(self, text: str) -> str:
        """What the program prints on standard output, without the white space at the ends of lines.

        Raises:
            ProgramError: Its exit code is not 0, it prints too much, or no UTF-8.
            TookTooLong: It did not end in time.
        """
        to_read = os.memfd_create("input")
        errors = os.memfd_create("errors")
        output, to_write = os.pipe()
        try:
            with open(to_read, "wb", closefd=False) as file:
                file.write(text.encode("utf-8", "surrogatepass"))
            os.lseek(to_read, 0, os.SEEK_SET)
            pid = spawn(self._folder, self._source, [], (to_read, to_write, errors))
            os.close(to_write)
            to_write = -1
            try:
                printed = self._read(output)
                code = self._wait(pid)
            finally:
                end_child(pid)
            if code != 0:
                raise ProgramError(f"exit code {code}{_last_line(errors)}")
        finally:
            for fd in (to_read, errors, output, to_write):
                if fd >= 0:
                    os.close(fd)
        try:
            return bare_lines(printed.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ProgramError(f"what it prints is not UTF-8: {error}") from error

    def _read(self, fd: int) -> bytes:
        output = bytearray()
        while True:
            self._clock.wait(fd)
            chunk = os.read(fd, 65536)
            if not chunk:
                return bytes(output)
            output += chunk
            if len(output) > MAX_OUTPUT_BYTES:
                raise ProgramError(f"it prints more than {MAX_OUTPUT_BYTES // 2**20} MiB")

    def _wait(self, pid: int) -> int:
        """Wait for the end of a program that has closed its output."""
        while True:
            # WNOWAIT leaves its process id taken until `end_child`.
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                return ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status
            time.sleep(min(0.001, self._clock.left_s()))


def bare_lines(text: str) -> str:
    """The text without white space at the ends of its lines, and without empty lines at its end."""
    return "\n".join(line.rstrip() for line in text.rstrip().split("\n"))


def _last_line(errors: int) -> str:
    size = os.fstat(errors).st_size
    lines = os.pread(errors, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode("utf-8", "replace").split("\n")
    said = [line for line in lines if line.strip()]
    return f": {said[-1].strip()}" if said else ""
