"""The tests' process: run the instrumented hidden tests, each check within its time, and report the results.

The input is a marshalled `Job`, read completely before any code of the solution runs. The output is the reports of
counter.py. The solution's process can write to the same output pipe. So each report carries a keyed hash that only the
host and this process can compute, and other processes cannot read this process's memory (PR_SET_DUMPABLE).

If tests and solution share this process, these protections fail. The solution can find the expected values, the counter
and the secret in memory, and its objects decide what they are equal to. Three things remain protected: the number of
checks (the host knows it), early exits (they earn nothing), and everything outside the process. Therefore the
Verification reports `in_process`.
"""

from __future__ import annotations

import marshal
import os
import sys

from agentic_opd.worlds.coding.grading import Json, Printed
from agentic_opd.worlds.coding.verifier.harness.clock import Clock
from agentic_opd.worlds.coding.verifier.harness.counter import Counter, error_text
from agentic_opd.worlds.coding.verifier.harness.programs import SolutionProgram
from agentic_opd.worlds.coding.verifier.harness.test_cases import load_pytest, run_by_pytest, run_tests
from agentic_opd.worlds.coding.verifier.harness.test_side import Remote, SolutionProcess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, TypedDict

    class Job(TypedDict):
        """Input of this process."""

        secret: bytes  # Key of the reports' hash.
        cpu_s: float  # Processor time of all checks, in seconds.
        num_checks: int
        tests: str  # Instrumented source.
        is_file: bool  # Whether the tests are those of a pytest or unittest file.
        in_process: bool
        imports_solution: bool
        modules: Sequence[str]  # Other modules that the tests import at the top level.
        files: Mapping[str, bytes]  # The agent's files: relative path -> content.
        solution_program: str | None  # Source of the solution's process, if it is a separate one.
        program: str | None  # Source that runs solution.py as a program, if the tests do that.
        pytest: bytes | None  # pytest's modules as a zip file, if pytest runs the tests.


def main() -> None:
    job: Job = marshal.loads(sys.stdin.buffer.read())
    out_fd = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    _close_memory()
    sys.set_int_max_str_digits(0)
    if job["pytest"] is not None:
        load_pytest(job["pytest"])
    clock = Clock(job["cpu_s"], job["num_checks"])
    counter = Counter(out_fd, job["secret"], clock)
    counter.report()
    for path, content in job["files"].items():
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)  # noqa: PTH103, PTH120 - pathlib takes 5 ms to import
        with open(path, "wb") as file:  # noqa: PTH123
            file.write(content)
    counter.report(error=_run(counter, job, clock), is_final=True)
    os._exit(0)


def _run(counter: Counter, job: Job, clock: Clock) -> str | None:
    """Run the tests. Return the reason why they ended early; None if they did not."""
    folder = os.getcwd()  # noqa: PTH109 - pathlib takes 5 ms to import
    names: dict[str, Any] = {
        "__name__": "__main__",
        "__file__": "/hidden_tests.py",
        **{f"_opd_{name}": getattr(counter, name) for name in ("check", "equal", "true", "reached", "alternative")},
        "Json": Json,
        "Printed": Printed,
    }
    if job["is_file"]:
        sys.modules.setdefault("pytest", type(sys)("pytest"))  # For files that import pytest without using it.
        run = run_tests if job["pytest"] is None else run_by_pytest

        def run_all(*tests: Any) -> None:
            run(counter, names, *tests)

        names["_opd_tests"] = run_all
    try:
        if job["in_process"]:
            _import_here(folder, job)
        else:
            _leave_folder()
        if job["solution_program"] is not None:
            counter.process = SolutionProcess(folder, job["solution_program"], clock)
            counter.process.start()
            sys.modules["solution"] = Remote(counter.process)  # type: ignore[assignment]
    except BaseException as error:  # noqa: BLE001 - the import of the solution may raise anything
        counter.note(error)
        return f"solution.py could not be imported: {error_text(error)}"
    if job["program"] is not None:
        names["run_program"] = SolutionProgram(folder, job["program"], clock).run
    try:
        exec(compile(job["tests"], "hidden_tests.py", "exec"), names)
    except BaseException as error:  # noqa: BLE001 - the tests may raise anything outside of their checks
        counter.note(error)
        return f"The tests ended early: {error_text(error)}"
    return None


def _import_here(folder: str, job: Job) -> None:
    """Import the solution, after the tests' modules: its folder may contain modules of the same names."""
    for module in job["modules"]:
        try:  # noqa: SIM105 - contextlib takes time to import
            __import__(module)
        except ImportError:  # The tests will raise it again.
            pass
    sys.path.insert(0, folder)
    if job["imports_solution"]:
        __import__("solution")


def _leave_folder() -> None:
    """Leave the solution's folder, and restrict imports to the current `sys.path`.

    Folders that the tests add to the path are excluded, since the solution can write to them.
    """
    os.chdir("/")
    allowed = tuple(sys.path)
    sys.path_hooks[:] = [
        lambda path, hook=hook: hook(path if path.startswith(allowed) else os.devnull)  # os.devnull raises ImportError.
        for hook in sys.path_hooks
    ]


def _close_memory() -> None:
    """Deny the user's other processes access to this process's memory, descriptors and registers."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(4, 0, 0, 0, 0) != 0:  # 4 is PR_SET_DUMPABLE.
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE) failed")
