"""Verify an agent's files by a task's hidden tests: task and files in, a Verification out.

The tests run in a fresh sandbox that receives only the agent's files, in a separate process whose code is harness/.
Each `assert` counts as one check, or each test in a pytest or unittest file: correctness is passed / due. Due checks
are those that the task's reference solution reaches. A check that a solution does not reach is not passed. Tests that
do not finish earn nothing. The limit is on processor time; wall-clock time has only a far higher bound.
"""

import marshal
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from agentic_opd.core.concurrency import fair_slot
from agentic_opd.core.errors import SandboxError
from agentic_opd.core.types import Task, Verification, VerifyOutcome
from agentic_opd.sandboxes.protocol import CommandResult, SandboxFactory
from agentic_opd.worlds.coding.hidden_tests.checks import Suite, checks_of, shown_checks
from agentic_opd.worlds.coding.verifier.harness.counter import sign
from agentic_opd.worlds.coding.verifier.harness.pipe import NoAnswer, decode
from agentic_opd.worlds.coding.verifier.packed import RUN_PROGRAM, SOLUTION_FILE, packed_pytest, packed_side

if TYPE_CHECKING:
    from agentic_opd.worlds.coding.verifier.harness.runner import Job

_NOT_IMPORTED = "solution.py could not be imported"
_MISSING_NAME = re.compile(r"cannot import name '\w+'")
_MAX_LINE = 200  # Maximum characters of a line of solution.py in the judge's report.
_COMMAND = "exec python -I -S -c 'import sys; exec(sys.stdin.buffer.readline())'"


def wall_s(timeout_s: float) -> float:
    """Return the wall-clock limit (s) for this limit of processor time (s): other work may share the cores."""
    return 20 * timeout_s + 10


async def verify(
    task: Task, sandbox_factory: SandboxFactory, solution_files: Mapping[str, bytes], timeout_s: float
) -> Verification:
    """Run the task's hidden tests on the agent's files (path -> content), in at most `timeout_s` s of processor time.

    Raises:
        DatasetError: As `checks_of`.
        SandboxError: The sandbox does not work.
    """
    checks = checks_of(task)
    due = await _due(task, checks, sandbox_factory, timeout_s)
    if SOLUTION_FILE not in solution_files:
        return _verdict(task, checks, due, (VerifyOutcome.NO_SOLUTION, f"There is no {SOLUTION_FILE}."))
    result, report = await _run(checks, sandbox_factory, solution_files, timeout_s)
    return _verdict(task, checks, due, _outcome(result, report, timeout_s), report, solution_files[SOLUTION_FILE])


_known_due: dict[tuple[str, str], frozenset[int]] = {}  # (hidden tests, reference solution) -> due checks.


async def _due(task: Task, checks: Suite, sandbox_factory: SandboxFactory, timeout_s: float) -> frozenset[int]:
    """Return the due checks: those that the reference solution reaches.

    The reference solution runs, once, only if the source of the tests does not determine them. The checks outside of
    branches are due if there is no reference solution, or if its run does not finish or passes no check.
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
    checks: Suite, sandbox_factory: SandboxFactory, files: Mapping[str, bytes], timeout_s: float
) -> tuple[CommandResult, "CheckReport | None"]:
    """Run the tests in a fresh sandbox; the report is None if the tests' process wrote no valid one."""
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
        "solution_program": packed_side(of_tests=False) if is_apart else None,
        "program": RUN_PROGRAM if checks.runs_program else None,
        "pytest": packed_pytest() if checks.needs_pytest else None,
    }
    async with fair_slot():
        program = f"exec({packed_side(of_tests=True)!r})\n".encode() + marshal.dumps({**job})
    async with sandbox_factory() as sandbox:
        result = await sandbox.run(_COMMAND, wall_s(timeout_s), stdin=program)
    report = None if result.memory_exceeded else last_report(job["secret"], result.output, len(checks.labels))
    if report is None and 0 < result.exit_code < 128 and not result.is_over_limit:
        raise SandboxError(f"the verifier did not start: exit code {result.exit_code}, {result.text[-500:]!r}")
    return result, report


class Failure(NamedTuple):
    """A check that failed."""

    check: int  # Counted from 0.
    text: str  # Expected and actual value, or the error.
    manner: str  # The same without values of the tests.
    line: int  # Line of solution.py that raised the error; 0 if there is no such line.


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Results of the checks, written by the tests' process at its start and again when the tests have ended."""

    done: bool = False
    passed: frozenset[int] = frozenset()  # Checks that were reached and true every time.
    failed: frozenset[int] = frozenset()  # Checks that were false or raised an error.
    lost: int = 0  # Number of times the solution's process ended.
    late: int = 0  # Number of times a check exceeded its time.
    failures: tuple[Failure, ...] = ()  # The first few.
    error: str | None = None  # Reason why the tests ended early; None if they did not.


_Ended = tuple[VerifyOutcome, str | None]  # And a line that explains an outcome other than RAN.


def last_report(secret: bytes, output: bytes, num_checks: int) -> CheckReport | None:
    """Return the last valid report in `output`, the final one if there is one; None if no report is valid.

    A valid report has the right signature and only numbers of `num_checks` checks.
    """
    last = None
    for line in output.split(b"\n"):
        try:
            raw = bytes.fromhex(line.decode("ascii"))
            fields: object = decode(raw[16:]) if raw[:16] == sign(secret, raw[16:]) else None
        except (ValueError, NoAnswer):  # A solution in the tests' process can sign anything.
            continue
        match fields:
            case (bool(done), [*passed], [*failed], int(lost), int(late), [*found], None | str() as error):
                kinds = all(type(item) is tuple and [*map(type, item)] == [int, str, str, int] for item in found)
                failures = tuple(Failure(*item) for item in found) if kinds else ()
                numbers = [*passed, *failed, *(failure.check for failure in failures)]
                is_right = kinds and all(type(one) is int and 0 <= one < num_checks for one in numbers)
                if is_right and all(failure.line >= 0 for failure in failures) and (last is None or done):
                    last = CheckReport(done, frozenset(passed), frozenset(failed), lost, late, failures, error)
            case _:
                pass
    return last


def _outcome(result: CommandResult, report: CheckReport | None, timeout_s: float) -> _Ended:
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
        return VerifyOutcome.TIMEOUT, report.error or f"Checks that did not end in time: {report.late}."
    if report.lost:
        return VerifyOutcome.CRASHED, report.error or f"Checks in which the solution ended its process: {report.lost}."
    return (VerifyOutcome.RAN if report.error is None else VerifyOutcome.CRASHED), report.error


def _verdict(
    task: Task, checks: Suite, due: frozenset[int], ended: _Ended, report: CheckReport | None = None, code: bytes = b""
) -> Verification:
    """Build the Verification; tests that did not finish earn nothing.

    The solution may fail exactly the checks that did not run. A failed check is due even if the reference solution does
    not reach it. Checks that the task's text shows as examples do not count where there are others.
    """
    (outcome, why), report = ended, report or CheckReport()
    public, source = "\n".join([task.prompt, *task.files.values()]), code.decode(errors="replace").split("\n")
    shown = shown_checks(checks.labels, public)
    counted = due - shown or due
    total = len(counted | report.failed - (shown - counted))
    passed = len(counted & report.passed - report.failed) if report.done and report.error is None else 0
    lines = [f"Hidden tests: {passed} of {total} passed."]
    if why is not None:
        lines.append(why)
    told = [lines[0], *_without_data(why)]
    lines += [f"FAIL {checks.labels[failure.check]}: {failure.text}" for failure in report.failures]
    told += [_told(checks, failure, public, source) for failure in report.failures]
    return Verification(outcome, passed, total, "\n".join(lines), "\n".join(told), in_process=checks.in_process)


def _without_data(why: str | None) -> list[str]:
    """Return the reason why the tests ended early, without values of the tests.

    An error's text stays only if importing the solution failed, or in part if it names a missing import.
    """
    if why is None or why.startswith(_NOT_IMPORTED):
        return [why] if why else []
    missing = _MISSING_NAME.search(why)
    return [f"{why.partition(':')[0].rstrip('.')}{f': {missing[0]}' if missing else ''}."]


def _told(checks: Suite, failure: Failure, public: str, source: Sequence[str]) -> str:
    """Describe a failure for the judge: by its test's name, by its call if the task shows that, or by its number."""
    label, where = checks.labels[failure.check], ""
    label = label if checks.is_file or label in public else f"check {failure.check + 1}"
    if 0 < failure.line <= len(source):
        where = f" in line {failure.line} of {SOLUTION_FILE}: {source[failure.line - 1].strip()[:_MAX_LINE]}"
    return f"FAIL {label}: {failure.manner}{where}"
