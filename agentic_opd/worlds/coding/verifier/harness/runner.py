"""The tests' process: runs the instrumented hidden tests, each check in its time, and reports what came of them.

Its input (stdin, read to the end before anything of the solution runs) is a packed `Job`; its output are the lines of
counter.py. The solution's process can reach the same output pipe, so each report carries a keyed hash that only the
host and this process can make, and this process's memory is closed to others (PR_SET_DUMPABLE).

If tests and solution share this process (`in_process`), none of that holds: the solution can find the expected
values, the counter and the secret in its own memory, and an object of its own making decides what it is equal to. Still
protected are the number of checks (the host knows it), leaving early (what has not been reported as done is not
passed), the output, and everything outside of the sandbox. That is why the verdict says `in_process`.
"""

from __future__ import annotations

import os
import sys

from agentic_opd.worlds.coding.verifier.harness.clock import AlarmClock, Clock
from agentic_opd.worlds.coding.verifier.harness.counter import Counter, error_text, nothing_foreign
from agentic_opd.worlds.coding.verifier.harness.pipe import Ref, decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_TIME_SHARE = 0.9
"""The part of the host's time limit that this process counts on: the limit also holds its own start and end."""
_PR_SET_DUMPABLE = 4


class Job:
    """What this process is to do; the host packs it."""

    def __init__(
        self,
        *,
        secret: bytes,
        timeout_s: float,
        tests: str,
        repeated: frozenset[int],
        is_file: bool,
        in_process: bool,
        modules: Sequence[str],
        files: Mapping[str, bytes],
        solution_program: str | None,
        program: str | None,
    ) -> None:
        """Take what the host says.

        Args:
            secret: Key of the reports' hash.
            timeout_s: Seconds the host waits.
            tests: Instrumented source.
            repeated: Checks that may be reached more than once.
            is_file: The tests are those of a pytest or unittest file.
            in_process: Tests and solution share this process.
            modules: What else the tests import at their top.
            files: The agent's: relative path -> content.
            solution_program: Source of the solution's own process, if it gets one.
            program: Source that runs solution.py as a program, if the tests do so.
        """
        self.secret = secret
        self.timeout_s = timeout_s
        self.tests = tests
        self.repeated = repeated
        self.is_file = is_file
        self.in_process = in_process
        self.modules = modules
        self.files = files
        self.solution_program = solution_program
        self.program = program

    def pack(self) -> bytes:
        """The input of this process."""
        return encode(vars(self), nothing_foreign)


def no_refs(ref: Ref) -> object:
    """For `decode`: nothing but plain data is expected."""
    raise ValueError(f"expected plain data, got a reference to a {ref.kind}")


def main() -> None:
    """Run one job."""
    job = Job(**decode(sys.stdin.buffer.read(), no_refs))
    clock = (AlarmClock if job.in_process else Clock)(job.timeout_s * _TIME_SHARE)
    out_fd = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    counter = Counter(out_fd, job.secret, job.repeated, clock)
    _close_memory()
    counter.report()
    for path, content in job.files.items():
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)  # noqa: PTH103, PTH120 - pathlib takes 5 ms to import
        with open(path, "wb") as file:  # noqa: PTH123
            file.write(content)
    counter.report(error=_run(counter, job, clock), done=True)
    os._exit(0)


def _run(counter: Counter, job: Job, clock: Clock) -> str | None:
    """Run the tests. Returns what made them end early, None if nothing did."""
    try:
        if job.in_process:
            _import_here(job.modules)
        elif job.solution_program is not None:
            from agentic_opd.worlds.coding.verifier.harness.test_side import SolutionModule, TestSide

            counter.side = TestSide(job.solution_program, clock)
            sys.modules["solution"] = SolutionModule(counter.side.request)
    except BaseException as error:  # noqa: BLE001 - whatever the solution does when it is imported
        counter.note(error)
        return f"solution.py could not be imported: {error_text(error)}"
    names: dict[str, Any] = {
        "__name__": "__main__",
        "_opd_begin": counter.begin,
        "_opd_equal": counter.check_equal,
        "_opd_true": counter.check_true,
        "_opd_failed": counter.failed,
        "as_json": as_json,
    }
    if job.program is not None:
        from agentic_opd.worlds.coding.verifier.harness.programs import Programs

        names["run_program"] = Programs(job.program, clock).run_program
    if job.is_file:
        from agentic_opd.worlds.coding.verifier.harness.test_cases import TestCases

        names |= TestCases(counter, names).functions()
    try:
        exec(compile(job.tests, "hidden_tests.py", "exec"), names)
    except BaseException as error:  # noqa: BLE001 - the tests may raise anything outside of their checks
        counter.note(error)
        return f"The tests ended early: {error_text(error)}"
    return None


def _import_here(modules: Sequence[str]) -> None:
    """Import the solution; before that what the tests import, as its folder may hold something of that name."""
    for module in modules:
        try:  # noqa: SIM105 - contextlib takes time to import
            __import__(module)
        except ImportError:  # The tests will say so.
            pass
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - pathlib takes 5 ms to import
    __import__("solution")


def as_json(value: Any) -> object:
    """The value with lists for tuples, as JSON would hold it."""
    kind = type(value)
    if kind is list or kind is tuple:
        return [as_json(item) for item in value]
    return {key: as_json(item) for key, item in value.items()} if kind is dict else value


def _close_memory() -> None:
    """Keep every other process of this user from this one's memory, descriptors and registers."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE) failed")
