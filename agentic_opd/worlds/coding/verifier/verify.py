"""The hidden tests' verdict: a task and the agent's files in, a Verification out.

The tests run in a fresh sandbox that gets only the agent's files, in a process of their own; harness/ is what runs
there. Every `assert` counts by itself, in files for pytest or unittest every test: correctness is passed / due. Due are
the checks that the task's own solution reaches; a solution that does not reach one does not pass it. Tests that do not
come to their end earn nothing. Processor time limits the tests, wall-clock time only bounds them.
"""

import binascii
import marshal
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import MAGIC_NUMBER
from typing import TYPE_CHECKING, NamedTuple

from agentic_opd.core.concurrency import in_turn
from agentic_opd.core.errors import SandboxError
from agentic_opd.core.types import Task, Verification, VerifyOutcome
from agentic_opd.sandboxes.protocol import CommandResult, SandboxFactory
from agentic_opd.worlds.coding.hidden_tests.checks import Checks, checks_of
from agentic_opd.worlds.coding.verifier.harness.counter import sign
from agentic_opd.worlds.coding.verifier.harness.pipe import NoAnswer, decode
from agentic_opd.worlds.coding.verifier.pytest_parts import packed_pytest

if TYPE_CHECKING:
    from agentic_opd.worlds.coding.verifier.harness.runner import Job

SOLUTION_FILE = "solution.py"

_NOT_IMPORTED = "solution.py could not be imported"
_MISSING_NAME = re.compile(r"cannot import name '\w+'")
_MAX_LINE = 200  # Characters of a line of solution.py that the judge is shown.

_SOLUTION_MODULES = ("pipe", "solution_side")
_TEST_MODULES = ("grading", "pipe", "clock", "counter", "programs", "test_side", "test_cases", "runner")
_COMMAND = "exec python -I -S -c 'import sys; exec(sys.stdin.buffer.readline())'"

# Starting without `site` saves 40 ms and more: it runs every .pth file there is. The packages stay importable.
_PATHS = """
import os, sys
version = "python%d.%d" % sys.version_info[:2]
for path in (f"{sys.prefix}/lib/{version}/site-packages", "/usr/lib/python3/dist-packages"):
    if os.path.isdir(path):
        sys.path.append(path)
"""
# Compiling the sources takes longer than all else that is done before the first check: 13 ms of a processor.
_BOOT = """
import binascii, marshal, _frozen_importlib_external
is_alike = _frozen_importlib_external.MAGIC_NUMBER == {magic!r}
for name, source, compiled in {modules!r}:
    sys.modules[name] = module = type(sys)(name)
    code = marshal.loads(binascii.a2b_base64(compiled)) if is_alike else compile(source, name, "exec")
    exec(code, module.__dict__)
module.main()
"""
_RUN_PROGRAM = f"""
import builtins
builtins.exit = builtins.quit = sys.exit
sys.path.insert(0, os.getcwd())
sys.argv = ["{SOLUTION_FILE}"]
del os, sys, builtins, version, path
with open("{SOLUTION_FILE}", "rb") as file:
    file = compile(file.read(), "{SOLUTION_FILE}", "exec")
exec(file)
"""


def wall_s(timeout_s: float) -> float:
    """Return the seconds by the clock that tests with so much processor time may take: others may share the cores."""
    return 20 * timeout_s + 10


async def verify(
    task: Task, sandbox_factory: SandboxFactory, solution_files: Mapping[str, bytes], timeout_s: float
) -> Verification:
    """Run the task's hidden tests on the agent's files (path -> content), in `timeout_s` of processor time at most.

    Raises:
        DatasetError: As `checks_of`.
        SandboxError: The sandbox does not work.
    """
    checks = checks_of(task)
    due = await _due(task, checks, sandbox_factory, timeout_s)
    if SOLUTION_FILE not in solution_files:
        return _verdict(task, checks, due, (VerifyOutcome.NO_SOLUTION, f"There is no {SOLUTION_FILE}.", None))
    result, report = await _run(checks, sandbox_factory, solution_files, timeout_s)
    ended = *_outcome(result, report, timeout_s), report
    return _verdict(task, checks, due, ended, solution_files[SOLUTION_FILE])


_known_due: dict[tuple[str, str], frozenset[int]] = {}  # Hidden tests and reference solution -> what it reaches.


async def _due(task: Task, checks: Checks, sandbox_factory: SandboxFactory, timeout_s: float) -> frozenset[int]:
    """Return the checks that count: those that the task's own solution reaches; without one, those outside of branches.

    The solution is run, once, only where the source of the tests does not tell.
    """
    if len(checks.certain) == len(checks.labels) or task.reference_solution is None or task.hidden_tests is None:
        return checks.certain
    key = task.hidden_tests, task.reference_solution
    if key not in _known_due:
        files = {SOLUTION_FILE: task.reference_solution.encode("utf-8", "surrogatepass")}
        _, report = await _run(checks, sandbox_factory, files, timeout_s)
        is_whole = report is not None and report.done and report.error is None and report.passed
        _known_due[key] = report.passed | report.failed if report is not None and is_whole else checks.certain
    return _known_due[key]


async def _run(
    checks: Checks, sandbox_factory: SandboxFactory, files: Mapping[str, bytes], timeout_s: float
) -> tuple[CommandResult, "Report | None"]:
    """Run the tests in a fresh sandbox; the report is None if they did not come to write one."""
    is_apart = checks.imports_solution and not checks.in_process
    job: Job = {
        "secret": secrets.token_bytes(32),
        "cpu_s": float(timeout_s),
        "num_checks": len(checks.labels),
        "tests": checks.source,
        "is_file": checks.is_file,
        "in_process": checks.in_process,
        "imports_solution": checks.imports_solution,
        "modules": checks.modules,
        "files": dict(files),
        "solution_program": _program(*_SOLUTION_MODULES) if is_apart else None,
        "program": _PATHS + _RUN_PROGRAM if checks.runs_program else None,
        "pytest": packed_pytest() if checks.needs_pytest else None,
    }
    async with in_turn():
        program = f"exec({_program(*_TEST_MODULES)!r})\n".encode() + marshal.dumps({**job})
    async with sandbox_factory() as sandbox:
        result = await sandbox.run(_COMMAND, wall_s(timeout_s), stdin=program)
    report = None if result.memory_exceeded else last_report(job["secret"], result.output, len(checks.labels))
    if report is None and 0 < result.exit_code < 128 and not result.is_over_limit:
        raise SandboxError(f"the verifier did not start: exit code {result.exit_code}, {result.text[-500:]!r}")
    return result, report


class Failure(NamedTuple):
    """A check that failed."""

    check: int  # Counted from 0.
    text: str  # What was expected and what came.
    manner: str  # The same without any value of the tests.
    line: int  # Of solution.py, where it raised; 0 if it did not.


@dataclass(frozen=True, slots=True)
class Report:
    """What the tests' process said of the checks: once when it started, and once when the tests had come to an end."""

    done: bool = False
    passed: frozenset[int] = frozenset()  # Checks that were reached and true each time.
    failed: frozenset[int] = frozenset()  # Checks that were false, or raised.
    lost: int = 0  # How often the solution's process ended.
    late: int = 0  # How often a check was over its time.
    failures: tuple[Failure, ...] = ()  # The first few.
    error: str | None = None  # Why the tests ended early, if they did.


_Ended = tuple[VerifyOutcome, str | None, Report | None]


def last_report(secret: bytes, output: bytes, num_checks: int) -> Report | None:
    """The report in `output` that is signed and can be one of `num_checks` checks; the final one if it is there."""
    last = None
    for line in output.split(b"\n"):
        try:
            raw = bytes.fromhex(line.decode("ascii"))
            fields: object = decode(raw[16:]) if raw[:16] == sign(secret, raw[16:]) else None
        except (ValueError, NoAnswer):  # A solution that shares the tests' process may have signed anything.
            continue
        match fields:
            case (bool(done), [*passed], [*failed], int(lost), int(late), [*found], None | str() as error):
                kinds = all(type(item) is tuple and [*map(type, item)] == [int, str, str, int] for item in found)
                failures = tuple(Failure(*item) for item in found) if kinds else ()
                numbers = [*passed, *failed, *(failure.check for failure in failures)]
                is_right = kinds and all(type(one) is int and 0 <= one < num_checks for one in numbers)
                if is_right and all(failure.line >= 0 for failure in failures) and (last is None or done):
                    last = Report(done, frozenset(passed), frozenset(failed), lost, late, failures, error)
            case _:
                pass
    return last


def _outcome(result: CommandResult, report: Report | None, timeout_s: float) -> tuple[VerifyOutcome, str | None]:
    """The outcome, and the line that says why it is not RAN."""
    if result.memory_exceeded:
        return VerifyOutcome.CRASHED, "The solution took more memory than is allowed."
    if result.timed_out:
        return VerifyOutcome.TIMEOUT, f"The tests did not end within {wall_s(timeout_s):g} s."
    if result.disk_exceeded:
        return VerifyOutcome.CRASHED, "The solution's files take more space than is allowed."
    if report is None:
        return VerifyOutcome.CRASHED, f"The tests' process ended without a report (exit code {result.exit_code})."
    if not report.done:
        return VerifyOutcome.CRASHED, "The solution ended the tests' process."
    if report.late:
        slow = f"{report.late} check{'s' * (report.late != 1)} did not end in time."
        return VerifyOutcome.TIMEOUT, report.error or slow
    if report.lost:
        ended = f"The solution ended its process in {report.lost} check{'s' * (report.lost != 1)}."
        return VerifyOutcome.CRASHED, report.error or ended
    return (VerifyOutcome.RAN if report.error is None else VerifyOutcome.CRASHED), report.error


def _verdict(task: Task, checks: Checks, due: frozenset[int], ended: _Ended, solution: bytes = b"") -> Verification:
    """Tests that did not come to their end have earned nothing: what follows may be what the solution does not pass.

    A check that fails counts even where the task's own solution does not reach it.
    """
    outcome, why, report = ended
    report = report or Report()
    public, source = "\n".join([task.prompt, *task.files.values()]), solution.decode(errors="replace").split("\n")
    total = len(due | report.failed)
    passed = len(due & report.passed - report.failed) if report.done and report.error is None else 0
    lines = [f"Hidden tests: {passed} of {total} passed."]
    if why is not None:
        lines.append(why)
    told = [lines[0], *_without_data(why)]
    lines += [f"FAIL {checks.labels[failure.check]}: {failure.text}" for failure in report.failures]
    told += [_told(checks, failure, public, source) for failure in report.failures]
    return Verification(outcome, passed, total, "\n".join(lines), "\n".join(told), in_process=checks.in_process)


def _without_data(why: str | None) -> list[str]:
    """Why the tests ended early; an error's text only if none of them had run, or if it names what they import."""
    if why is None or why.startswith(_NOT_IMPORTED):
        return [why] if why else []
    missing = _MISSING_NAME.search(why)
    return [f"{why.partition(':')[0].rstrip('.')}{f': {missing[0]}' if missing else ''}."]


def _told(checks: Checks, failure: Failure, public: str, source: Sequence[str]) -> str:
    """A failure by its test's name, by its call if the task shows that, or by its number."""
    label, where = checks.labels[failure.check], ""
    label = label if checks.is_file or label in public else f"check {failure.check + 1}"
    if 0 < failure.line <= len(source):
        where = f" in line {failure.line} of {SOLUTION_FILE}: {source[failure.line - 1].strip()[:_MAX_LINE]}"
    return f"FAIL {label}: {failure.manner}{where}"


@cache
def _program(*modules: str) -> str:
    """One source text that brings the named modules of harness/ along and runs `main` of the last.

    They come as compiled code too, for a Python of the sandbox that is of this one's version.
    """
    brought = list[tuple[str, str, str]]()
    for name in modules:
        package = f"agentic_opd.worlds.coding{'' if name == 'grading' else '.verifier.harness'}"
        source = (resources.files(package) / f"{name}.py").read_text(encoding="utf-8")
        code = marshal.dumps(compile(source, f"{package}.{name}", "exec", dont_inherit=True))
        brought.append((f"{package}.{name}", source, binascii.b2a_base64(code, newline=False).decode()))
    return _PATHS + _BOOT.format(modules=brought, magic=MAGIC_NUMBER)
