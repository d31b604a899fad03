"""The hidden tests' verdict: a task and the agent's files in, a Verification out.

The tests run in a fresh sandbox that gets only the agent's files, in a process of their own; harness/ is what runs
there. Every `assert` counts by itself, in files for pytest or unittest every test: correctness is passed / total, and
the total is what the tests say, whatever the solution does. A check may take a quarter of the time that is left.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from agentic_opd.core.errors import DatasetError, SandboxError
from agentic_opd.core.types import Task, Verification, VerifyOutcome
from agentic_opd.sandboxes.protocol import CommandResult, SandboxFactory
from agentic_opd.worlds.coding.verifier.checks import Checks, instrument
from agentic_opd.worlds.coding.verifier.harness.counter import sign
from agentic_opd.worlds.coding.verifier.harness.pipe import NoAnswer, decode
from agentic_opd.worlds.coding.verifier.harness.runner import Job, no_refs

SOLUTION_FILE = "solution.py"

_SOLUTION_MODULES = ("pipe", "peer", "solution_side")

_PACKAGE = "agentic_opd.worlds.coding.verifier.harness"
_COMMAND = "exec python -I -S -c 'import sys; exec(sys.stdin.buffer.readline())'"

# Starting without `site` saves 40 ms and more: it runs every .pth file there is. The packages stay importable.
_PATHS = """
import os, sys
version = "python%d.%d" % sys.version_info[:2]
for path in (f"{sys.prefix}/lib/{version}/site-packages", "/usr/lib/python3/dist-packages"):
    if os.path.isdir(path):
        sys.path.append(path)
"""
_BOOT = """
for name, source in {modules!r}:
    name = {package!r} + "." + name
    sys.modules[name] = module = type(sys)(name)
    exec(compile(source, name, "exec"), module.__dict__)
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


async def verify(
    task: Task, sandbox_factory: SandboxFactory, solution_files: Mapping[str, bytes], timeout_s: float
) -> Verification:
    """Run the task's hidden tests on the agent's files.

    Args:
        task: Whose hidden tests.
        sandbox_factory: Makes the fresh sandbox.
        solution_files: Relative path -> content; `solution.py` is what the tests import.
        timeout_s: Seconds all tests together may take.

    Raises:
        DatasetError: The hidden tests are not Python, or check nothing.
        SandboxError: The sandbox does not work.
    """
    checks = checks_of(task)
    if SOLUTION_FILE not in solution_files:
        return _verdict(checks, VerifyOutcome.NO_SOLUTION, Report(), f"There is no {SOLUTION_FILE}.")
    is_apart = checks.imports_solution and not checks.in_process
    job = Job(
        secret=secrets.token_bytes(32),
        timeout_s=float(timeout_s),
        tests=checks.source,
        repeated=checks.repeated,
        is_file=checks.is_file,
        in_process=checks.in_process,
        modules=checks.modules,
        files=dict(solution_files),
        solution_program=_program(*_SOLUTION_MODULES) if is_apart else None,
        program=_PATHS + _RUN_PROGRAM if checks.runs_program else None,
    )
    program = f"exec({_program(*_test_modules(checks))!r})\n".encode()
    async with sandbox_factory() as sandbox:
        result = await sandbox.run(_COMMAND, timeout_s, stdin=program + job.pack())
    report = last_report(job.secret, result.output, len(checks.labels))
    if report.number == 0 and 0 < result.exit_code < 128 and not (result.timed_out or result.disk_exceeded):
        raise SandboxError(f"the verifier did not start: exit code {result.exit_code}, {result.text[-500:]!r}")
    outcome, why = _outcome(result, report, timeout_s)
    return _verdict(checks, outcome, report, why)


def checks_of(task: Task) -> Checks:
    """The task's hidden tests, instrumented.

    Raises:
        DatasetError: They are not Python, or check nothing.
    """
    try:
        checks = instrument(task.hidden_tests)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise DatasetError(f"task {task.task_id!r}: the hidden tests are not valid Python: {error}") from error
    if not checks.labels:
        raise DatasetError(
            f"task {task.task_id!r}: the hidden tests have no `assert` that depends on the solution, and no test"
        )
    return checks


def _test_modules(checks: Checks) -> list[str]:
    """The modules of harness/ that the tests' process needs for these tests, the last one to be started."""
    modules = ["pipe", "clock", "counter"]
    if checks.imports_solution and not checks.in_process:
        modules += ["children", "peer", "test_side"]
    if checks.runs_program:
        modules += ["children", "programs"]
    if checks.is_file:
        modules += ["pytest_stand_in", "test_cases"]
    return [*dict.fromkeys(modules), "runner"]


@dataclass(frozen=True, slots=True)
class Report:
    """What the tests' process said of the checks. The default is that it said nothing."""

    number: int = 0
    """Counted from 1; 0 if there was no report."""
    passed: int = 0
    """Checks that are true so far."""
    settled: int = 0
    """Those of them that are not reached again, whatever follows."""
    lost: int = 0
    """How often the solution's process ended."""
    late: int = 0
    """How often a check was over its time."""
    failures: tuple[tuple[int, str], ...] = ()
    """A check's number and what happened: the first few."""
    done: bool = False
    error: str | None = None
    """Why the tests ended early, if they did."""


def last_report(secret: bytes, output: bytes, num_checks: int) -> Report:
    """The last report in `output` that has the right signature and can be one of `num_checks` checks."""
    last = Report()
    for line in output.split(b"\n"):
        try:
            raw = bytes.fromhex(line.decode("ascii"))
        except ValueError:
            continue
        if len(raw) > 16 and raw[:16] == sign(secret, raw[16:]):
            report = _read_report(raw[16:], num_checks)
            last = report if report is not None and report.number > last.number else last
    return last


def _read_report(body: bytes, num_checks: int) -> Report | None:
    """The report; None for anything else, which a solution that shares the tests' process may have signed."""
    try:
        fields: object = decode(body, no_refs)
    except NoAnswer:
        return None
    match fields:
        case (
            int(number),
            int(passed),
            int(settled),
            int(lost),
            int(late),
            [*found],
            bool(done),
            None | str() as error,
        ):
            failures = tuple((check, text) for check, text in map(_failure, found) if 0 <= check < num_checks)
            if 0 <= settled <= passed <= num_checks and len(failures) == len(found):
                return Report(number, passed, settled, lost, late, failures, done, error)
        case _:
            pass
    return None


def _failure(item: object) -> tuple[int, str]:
    """A check's number and what happened; the number is -1 for anything else."""
    match item:
        case (int(check), str(text)):
            return check, text
        case _:
            return -1, ""


def _outcome(result: CommandResult, report: Report, timeout_s: float) -> tuple[VerifyOutcome, str | None]:
    """The outcome, and the line that says why it is not RAN."""
    if result.timed_out:
        return VerifyOutcome.TIMEOUT, f"The tests did not end within {timeout_s:g} s."
    if result.disk_exceeded:
        return VerifyOutcome.CRASHED, "The solution's files take more space than is allowed."
    if report.number == 0:
        return (
            VerifyOutcome.CRASHED,
            f"The tests' process ended before its first report (exit code {result.exit_code}).",
        )
    if not report.done:
        return VerifyOutcome.CRASHED, "The solution ended the tests' process."
    if report.late:
        return VerifyOutcome.TIMEOUT, report.error or f"{_count(report.late, 'check')} did not end in time."
    if report.lost:
        ended = f"The solution ended its process in {_count(report.lost, 'check')}."
        return VerifyOutcome.CRASHED, report.error or ended
    return (VerifyOutcome.RAN if report.error is None else VerifyOutcome.CRASHED), report.error


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _verdict(checks: Checks, outcome: VerifyOutcome, report: Report, why: str | None) -> Verification:
    total = len(checks.labels)
    passed = report.passed if report.done and report.error is None else report.settled
    lines = [f"Hidden tests: {passed} of {total} passed."]
    if why is not None:
        lines.append(why)
    lines += [f"FAIL {checks.labels[number]}: {what}" for number, what in report.failures]
    return Verification(outcome, passed, total, "\n".join(lines), in_process=checks.in_process)


@cache
def _program(*modules: str) -> str:
    """One source text that brings the named modules of harness/ along and runs `main` of the last."""
    folder = resources.files(_PACKAGE)
    sources = [(name, (folder / f"{name}.py").read_text(encoding="utf-8")) for name in modules]
    return _PATHS + _BOOT.format(modules=sources, package=_PACKAGE)
