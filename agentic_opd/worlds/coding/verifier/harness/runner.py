"""The tests' process: runs the instrumented hidden tests, each check in its time, and reports the results.

Its input is a marshalled `Job`, read to the end before anything of the solution runs; its output are the lines of
counter.py. The solution's process can reach the same output pipe, so each report carries a keyed hash that only the
host and this process can make, and this process's memory is closed to others (PR_SET_DUMPABLE).

If tests and solution share this process, none of that holds: the solution can find the expected values, the counter and
the secret in its own memory, and its objects decide what they are equal to. Still protected are the number of checks
(the host knows it), leaving early (which earns nothing) and all outside. So the verdict says `in_process`.
"""

from __future__ import annotations

import marshal
import os
import sys

from agentic_opd.worlds.coding.grading import Json, Printed
from agentic_opd.worlds.coding.verifier.harness.clock import Clock
from agentic_opd.worlds.coding.verifier.harness.counter import Counter, error_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, TypedDict

    class Job(TypedDict):
        """What this process is to do."""

        secret: bytes  # The key of the reports' hash.
        cpu_s: float  # Processor time of all checks.
        num_checks: int
        tests: str  # Instrumented source.
        is_file: bool  # The tests are those of a pytest or unittest file.
        in_process: bool
        imports_solution: bool
        modules: Sequence[str]  # What else the tests import at their top.
        files: Mapping[str, bytes]  # The agent's: relative path -> content.
        solution_program: str | None  # Source of the solution's own process.
        program: str | None  # Source that runs solution.py as a program, if the tests do so.
        pytest: bytes | None  # pytest's modules as a zip file, if it is to run the tests.


def main() -> None:
    """Run one job."""
    job: Job = marshal.loads(sys.stdin.buffer.read())
    out_fd = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    _close_memory()
    sys.set_int_max_str_digits(0)
    if job["pytest"] is not None:
        from agentic_opd.worlds.coding.verifier.harness.test_cases import load_pytest

        load_pytest(job["pytest"])
    clock = Clock(job["cpu_s"], job["num_checks"])
    counter = Counter(out_fd, job["secret"], clock)
    counter.report()
    for path, content in job["files"].items():
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)  # noqa: PTH103, PTH120 - pathlib takes 5 ms to import
        with open(path, "wb") as file:  # noqa: PTH123
            file.write(content)
    counter.report(error=_run(counter, job, clock), done=True)
    os._exit(0)


def _run(counter: Counter, job: Job, clock: Clock) -> str | None:
    """Run the tests. Return what made them end early, None if nothing did."""
    folder = os.getcwd()  # noqa: PTH109 - pathlib takes 5 ms to import
    names: dict[str, Any] = {
        "__name__": "__main__",
        "__file__": "/hidden_tests.py",
        **{f"_opd_{name}": getattr(counter, name) for name in ("check", "equal", "true", "reached", "alternative")},
        "Json": Json,
        "Printed": Printed,
    }
    if job["is_file"]:
        from agentic_opd.worlds.coding.verifier.harness.test_cases import run_by_pytest, run_tests

        sys.modules.setdefault("pytest", type(sys)("pytest"))  # For files that import it and use nothing of it.
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
            from agentic_opd.worlds.coding.verifier.harness.test_side import SolutionModule, SolutionProcess

            counter.process = SolutionProcess(folder, job["solution_program"], clock)
            counter.process.start()
            sys.modules["solution"] = SolutionModule(counter.process)
    except BaseException as error:  # noqa: BLE001 - whatever the solution does when it is imported
        counter.note(error)
        return f"solution.py could not be imported: {error_text(error)}"
    if job["program"] is not None:
        from agentic_opd.worlds.coding.verifier.harness.programs import Programs

        names["run_program"] = Programs(folder, job["program"], clock).run_program
    try:
        exec(compile(job["tests"], "hidden_tests.py", "exec"), names)
    except BaseException as error:  # noqa: BLE001 - the tests may raise anything outside of their checks
        counter.note(error)
        return f"The tests ended early: {error_text(error)}"
    return None


def _import_here(folder: str, job: Job) -> None:
    """Import the solution; before that what the tests import, as its folder may hold something of that name."""
    for module in job["modules"]:
        try:  # noqa: SIM105 - contextlib takes time to import
            __import__(module)
        except ImportError:  # The tests will say so.
            pass
    sys.path.insert(0, folder)
    if job["imports_solution"]:
        __import__("solution")


def _leave_folder() -> None:
    """Go where no file of the solution's is, and import only from where this process can import now: not from folders
    that the tests put on the path, in which the solution can write.
    """
    os.chdir("/")
    known = tuple(sys.path)
    sys.path_hooks[:] = [
        lambda path, hook=hook: hook(path if path.startswith(known) else os.devnull)  # Which raises ImportError.
        for hook in sys.path_hooks
    ]


def _close_memory() -> None:
    """Keep every other process of this user from this one's memory, descriptors and registers."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(4, 0, 0, 0, 0) != 0:  # 4 is PR_SET_DUMPABLE.
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE) failed")
