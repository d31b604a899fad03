"""Run child processes of the tests' process, and solution.py as a program: input text in, printed text out."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentic_opd.worlds.coding.verifier.harness.clock import Clock

MAX_OUTPUT_BYTES = 16 * 2**20
_TAIL_BYTES = 2000
_PYTHON = [sys.executable, "-s", "-S", "-P", "-Xint_max_str_digits=0", "-c"]


def spawn(folder: str, source: str, arguments: list[str], fds: tuple[int, int, int]) -> int:
    """Start a child in `folder` and return its id; `fds` become its descriptors 0 to 2.

    The child also inherits all inheritable descriptors.
    """
    return os.posix_spawn(
        sys.executable,
        [*_PYTHON, f"import os\nos.chdir({folder!r})\n{source}", *arguments],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds)],
        setpgroup=0,
    )


def end_child(pid: int) -> None:
    """Kill a child and its process group, and reap it."""
    for kill in (os.killpg, os.kill):
        try:  # noqa: SIM105 - contextlib takes time to import
            kill(pid, 9)
        except OSError:
            pass
    os.waitpid(pid, 0)


class ProgramError(Exception):
    """The program failed, or its output is too long or not UTF-8."""


class SolutionProgram:
    """solution.py as a program, which `source` starts in `folder`, within the time of the current check.

    It receives only three descriptors: files in memory for its input, its output and its errors.
    """

    def __init__(self, folder: str, source: str, clock: Clock) -> None:
        self._folder, self._source, self._clock = folder, source, clock

    def run(self, text: str) -> str:
        """Return the output for the input `text`; raise ProgramError for a failure or an output that is not text."""
        fds = os.memfd_create("input"), os.memfd_create("output"), os.memfd_create("errors")
        try:
            with open(fds[0], "wb", closefd=False) as file:
                file.write(text.encode("utf-8", "surrogatepass"))
            os.lseek(fds[0], 0, os.SEEK_SET)
            pid = spawn(self._folder, self._source, [], fds)
            try:
                self._clock.watch(pid)
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # The id stays taken until `end_child`.
                assert ended is not None
            finally:
                end_child(pid)
            printed, errors = os.pread(fds[1], MAX_OUTPUT_BYTES + 1, 0), _tail(fds[2])
        finally:
            for fd in fds:
                os.close(fd)
        if len(printed) > MAX_OUTPUT_BYTES:
            raise ProgramError(f"it prints more than {MAX_OUTPUT_BYTES // 2**20} MiB")
        if ended.si_code != os.CLD_EXITED or ended.si_status != 0:
            raise ProgramError(f"exit code {ended.si_status + 128 * (ended.si_code != os.CLD_EXITED)}{errors}")
        try:
            return printed.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ProgramError(f"what it prints is not UTF-8: {error}") from error


def _tail(errors: int) -> str:
    """Return the last non-blank line of the program's errors, after a colon; empty if there is none."""
    size = os.fstat(errors).st_size
    lines = os.pread(errors, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode("utf-8", "replace").split("\n")
    return next((f": {line.strip()}" for line in lines[::-1] if line.strip()), "")
