"""Verify an agent's files by a task's hidden tests: task and files in, a Verification out.

The tests run in a fresh sandbox that receives only the agent's files, in a separate process whose code is harness/.
Each `assert` counts as one check, or each test in a pytest or unittest file: correctness is passed / due. Due checks
are those that the task's reference solution reaches. A check that a solution does not reach is not passed. Tests that
do not finish earn nothing. The limit is on processor time; wall-clock time has only a far higher bound.
"""

import asyncio
import builtins
import marshal
import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from agentic_opd.core.concurrency import fair_slot
from agentic_opd.core.errors import SandboxError
from agentic_opd.core.text import printable_line
from agentic_opd.core.types import Task, Verification, VerifyOutcome
from agentic_opd.sandboxes.protocol import AttentiveSandbox, CommandResult, SandboxFactory
from agentic_opd.worlds.coding.hidden_tests.checks import Suite, checks_of, shown_checks
from agentic_opd.worlds.coding.verifier.harness.counter import sign
from agentic_opd.worlds.coding.verifier.harness.pipe import NoAnswer, decode
from agentic_opd.worlds.coding.verifier.packed import (
    RUN_PROGRAM,
    SOLUTION_FILE,
    packed_pytest,
    packed_side,
    tests_program,
)

if TYPE_CHECKING:
    from agentic_opd.worlds.coding.verifier.harness.runner import Job

_NOT_IMPORTED = "solution.py could not be imported"
_MISSING_NAME = re.compile(r"cannot import name '(\w+)'")
_MAX_FAILURES = 3
_MAX_TEXT = 200  # Maximum characters of a name, or of a line of solution.py, in the judge's report.
_MAX_LINES = 1000  # In a longer solution.py no line is named: the choice of one could reveal an input of the tests.
_MAX_REPORT_CHARS, _MAX_CHECK_CHARS = 2**16, 64  # Of a report: in hexadecimal digits, and what each check may add.
_REPORT_LINE = re.compile(rb"^[0-9a-f]{64,}$", re.MULTILINE)
_SLOW_OUTPUT_BYTES = 2**16  # A larger output is searched for reports in a thread: it takes up to 0.2 s.
_SIGXCPU_CODE = 128 + 24
# The tests' process can interrupt itself between the steps of its code only, the kernel always.
_COMMAND = """ulimit -S -t {cpu_s} && ulimit -H -t {kill_s}
exec python -I -S -c 'import sys; exec(sys.stdin.buffer.readline())'"""
_START_CPU_S, _PYTEST_CPU_S = 2, 8  # Time to start Python, and pytest if it must be compiled first.


def wall_s(timeout_s: float) -> float:
    """Return the wall-clock limit (s) for this limit of processor time (s): other work may share the cores."""
    return 20 * timeout_s + 10


def _idle_limit_s(timeout_s: float) -> float:
    """Return how long (s) a whole verification may wait for nothing; the tests' process counts that time too."""
    return 2 * timeout_s + 5


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
    return _verdict(task, checks, due, _outcome(result, report, timeout_s), report, solution_files)


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
        is_whole = report is not None and report.is_final and report.error is None and report.passed
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
        program = tests_program() + marshal.dumps({**job})
    cpu_s = math.ceil(timeout_s) + (_PYTEST_CPU_S if checks.needs_pytest else _START_CPU_S)
    async with sandbox_factory() as sandbox:
        if isinstance(sandbox, AttentiveSandbox):
            sandbox.idle_limit_s = _idle_limit_s(timeout_s)
        command = _COMMAND.format(cpu_s=cpu_s, kill_s=cpu_s + 1)
        result = await sandbox.run(command, wall_s(timeout_s), stdin=program)
    reading = job["secret"], result.output, len(checks.labels)
    if result.memory_exceeded:
        report = None
    elif len(result.output) > _SLOW_OUTPUT_BYTES:
        report = await asyncio.to_thread(last_report, *reading)
    else:
        report = last_report(*reading)
    if report is None and 0 < result.exit_code < 128 and not result.is_over_limit:
        raise SandboxError(f"the verifier did not start: exit code {result.exit_code}, {result.text[-500:]!r}")
    return result, report


class Failure(NamedTuple):
    """A check that failed."""

    check: int  # Counted from 0.
    text: str  # Expected and actual value, or the error.
    manner: str  # The same as a kind and names of types, see counter.py.
    line: int  # Line of solution.py that raised the error; 0 if there is no such line.


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Results of the checks, written by the tests' process at its start and again when the tests have ended."""

    is_final: bool = False  # Whether the tests have ended.
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
    last, max_chars = None, _MAX_REPORT_CHARS + _MAX_CHECK_CHARS * num_checks
    for line in _REPORT_LINE.finditer(output):
        try:
            if line.end() - line.start() > max_chars:
                continue
            raw = bytes.fromhex(line[0].decode("ascii"))
            fields: object = decode(raw[16:]) if raw[:16] == sign(secret, raw[16:]) else None
        except (ValueError, NoAnswer):  # A solution in the tests' process can sign anything.
            continue
        match fields:
            case (bool(is_final), [*passed], [*failed], int(lost), int(late), [*found], None | str() as error):
                kinds = all(type(item) is tuple and [*map(type, item)] == [int, str, str, int] for item in found)
                failures = tuple(Failure(*item) for item in found) if kinds else ()
                numbers = [*passed, *failed, *(failure.check for failure in failures)]
                is_right = kinds and all(type(number) is int and 0 <= number < num_checks for number in numbers)
                # An integer of very many digits could not be written into a verdict.
                is_right = is_right and all(0 <= n < 2**31 for n in (lost, late, *(item.line for item in failures)))
                if is_right and (last is None or is_final):
                    last = CheckReport(is_final, frozenset(passed), frozenset(failed), lost, late, failures, error)
            case _:
                pass
    return last


def _outcome(result: CommandResult, report: CheckReport | None, timeout_s: float) -> _Ended:
    crashed, timeout = VerifyOutcome.CRASHED, VerifyOutcome.TIMEOUT
    is_done, is_out_of_time = report is not None and report.is_final, result.exit_code == _SIGXCPU_CODE
    for is_exceeded, outcome, why in (
        (result.memory_exceeded, crashed, "The solution took more memory than is allowed."),
        (result.stopped, crashed, "The solution stopped the tests' process."),
        (result.idle, timeout, f"The tests did nothing for {_idle_limit_s(timeout_s):g} s."),
        (result.timed_out, timeout, f"The tests did not end within {wall_s(timeout_s):g} s."),
        (result.disk_exceeded, crashed, "The solution's files take more space than is allowed."),
        (is_out_of_time and not is_done, timeout, f"The tests did not end within {timeout_s:g} s of processor time."),
    ):
        if is_exceeded:
            return outcome, why
    if report is None:
        return crashed, f"The tests' process ended without a report (exit code {result.exit_code})."
    if not report.is_final:
        return crashed, "The solution ended the tests' process."
    if report.late:
        return timeout, report.error or f"Checks that did not end in time: {report.late}."
    if report.lost:
        return crashed, report.error or f"Checks in which the solution ended its process: {report.lost}."
    return (VerifyOutcome.RAN if report.error is None else crashed), report.error


def _verdict(
    task: Task,
    checks: Suite,
    due: frozenset[int],
    ended: _Ended,
    report: CheckReport | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Verification:
    """Build the Verification; tests that did not finish earn nothing.

    The solution may fail exactly the checks that did not run. A failed check is due even if the reference solution does
    not reach it. Checks that the task's text shows as examples do not count where there are others.
    """
    (outcome, reason), report = ended, report or CheckReport()
    public = "\n".join([task.prompt, *task.files.values()])
    public_checks = shown_checks(checks.labels, public)
    counted = due - public_checks or due
    total = len(counted | report.failed - (public_checks - counted))
    passed = len(counted & report.passed - report.failed) if report.is_final and report.error is None else 0
    lines = [f"Hidden tests: {passed} of {total} passed."]
    if reason is not None:
        lines.append(_one_line(reason))
    judge_lines = [lines[0], *_without_data(checks, reason)]
    failures = report.failures[:_MAX_FAILURES]
    lines += [f"FAIL {checks.labels[failure.check]}: {_one_line(failure.text)}" for failure in failures]
    judge_lines += [_failure_for_judge(checks, failure, public, files or {}) for failure in failures]
    return Verification(outcome, passed, total, "\n".join(lines), "\n".join(judge_lines), in_process=checks.in_process)


def _one_line(text: str) -> str:
    """Return a text of the tests' process for a person: a solution that shares that process may have written it."""
    return printable_line(text)[: 4 * _MAX_TEXT]


def _without_data(checks: Suite, why: str | None) -> list[str]:
    """Return the reason why the tests ended early, without values of the tests.

    An error's text stays only if importing the solution failed before it could know the tests, or in part if it names
    an import that the tests need.
    """
    if why is None:
        return []
    if why.startswith(_NOT_IMPORTED) and not checks.in_process:
        return [_one_line(why)]
    reason, _, text = re.split(r"([:(])", f"{why}:", maxsplit=1)
    missing, error = _MISSING_NAME.search(text), text.partition(":")[0].strip()
    if missing is not None and missing[1] in checks.solution_names:
        return [f"{reason}: {missing[0]}."]
    # Without its text, as for any failure.
    return [f"{reason}: {error}." if why.startswith(_NOT_IMPORTED) and error in _ERRORS else f"{reason.rstrip('. ')}."]


# The judge reads these sentences only, so a solution can choose only among a few words. A free text could reveal an
# input of the tests, which the judge would pass on to the policy.
_MANNERS = {
    "assertion": "an assertion of the test failed",
    "value": "it gives another value than expected",
    "untrue": "it is not true",
    "late": "it does not end in time",
    "lost": "the solution's process ended",
    "program": "the program fails",
}
_PLAIN_TYPES = frozenset(
    {
        *("int", "float", "complex", "bool", "str", "bytes", "bytearray"),
        *("list", "tuple", "dict", "set", "frozenset", "range", "list_iterator"),
    }
)
_ERRORS = frozenset(
    name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)
)


def _failure_for_judge(checks: Suite, failure: Failure, public: str, files: Mapping[str, bytes]) -> str:
    """Describe a failure for the judge: by its test's name, by its call if the task shows that, or by its number."""
    label = checks.labels[failure.check]
    label = label if checks.is_file or label in public else f"check {failure.check + 1}"
    return f"FAIL {label}: {_manner(failure.manner, files)}{_line_text(failure.line, files)}"


def _manner(manner: str, files: Mapping[str, bytes]) -> str:
    match manner.split(" "):
        case ["type", got, expected]:
            return f"it gives {_type_name(got, files)} where {_type_name(expected, files)} is expected"
        case ["raises", name, _] if name in _ERRORS or _is_in_source(name, files):
            return f"it raises {name}"
        case ["raises", _, base] if base in _ERRORS:
            return f"it raises {base}"
        case _:
            return _MANNERS.get(manner, "it fails")


def _type_name(name: str, files: Mapping[str, bytes]) -> str:
    if name == "NoneType":
        return "None"
    is_named = name in _PLAIN_TYPES or _is_in_source(name, files)
    return f"a value of type {name}" if is_named else "a value of another type"


def _is_in_source(name: str, files: Mapping[str, bytes]) -> bool:
    """Return whether a name occurs in the agent's Python files as a whole word."""
    if not name.isidentifier() or len(name) > _MAX_TEXT:
        return False
    word = name.encode()
    pattern = re.compile(rb"(?<!\w)" + word + rb"(?!\w)")  # Searched only where it is: other searches take no time.
    return any(word in text and pattern.search(text) for path, text in files.items() if path.endswith(".py"))


def _line_text(line: int, files: Mapping[str, bytes]) -> str:
    """Describe the line of solution.py that raised an error, if the file has code there."""
    lines = files.get(SOLUTION_FILE, b"").decode(errors="replace").split("\n")
    if not 0 < line <= len(lines) <= _MAX_LINES:
        return ""
    text = lines[line - 1].strip()
    return f" in line {line} of {SOLUTION_FILE}: {text[:_MAX_TEXT]}" if text and not text.startswith("#") else ""
