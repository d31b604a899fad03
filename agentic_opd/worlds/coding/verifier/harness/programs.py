"""solution.py as a program: an input text in, what it prints out, each time in a fresh process."""

from __future__ import annotations

import os
import time

from agentic_opd.worlds.coding.verifier.harness.children import end_child, spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentic_opd.worlds.coding.verifier.harness.clock import Clock

MAX_OUTPUT_BYTES = 16 * 2**20
_TAIL_BYTES = 2000


class ProgramError(Exception):
    """The program failed, or printed what is not text."""


class Programs:
    """Runs programs within the time of the current check.

    `source` is what starts solution.py. A program gets three descriptors and nothing else: its input and its errors
    are files in memory, its output is a pipe that is read until the program ends.
    """

    def __init__(self, source: str, clock: Clock) -> None:
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
            _write_all(to_read, text.encode("utf-8", "surrogatepass"))
            pid = spawn(self._source, [], (to_read, to_write, errors))
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
        import select

        output = bytearray()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while True:
            if not poll.poll(self._clock.left_s() * 1000):
                continue
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


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
    os.lseek(fd, 0, os.SEEK_SET)


def _last_line(errors: int) -> str:
    size = os.fstat(errors).st_size
    lines = os.pread(errors, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode("utf-8", "replace").split("\n")
    said = [line for line in lines if line.strip()]
    return f": {said[-1].strip()}" if said else ""
