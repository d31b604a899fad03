"""The hidden tests' verdict: a task and the agent's files in, a Verification out.

The tests run in a fresh sandbox that gets only the agent's files, in a process of their own; harness/ is what runs
there. Every `assert` counts by itself, in files for pytest or unittest every test: correctness is passed / total, and
the total is what the tests say, whatever the solution does. A check may take a quarter of the time that is left.
"""

import secrets
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from agentic_opd.core.errors import DatasetError, SandboxError
from agentic_opd.core.types import Task, Verification, VerifyOutcome
from agentic_opd.sandboxes.protocol import CommandResult, SandboxFactory
from agentic_opd.worlds.coding.verifier.checks import Checks, instrument
from agentic_opd.worlds.coding.verifier.harness.runner import pack_job, read_reports

SOLUTION_FILE = "solution.py"

_SOLUTION_MODULES = ("library_types", "pipe", "peer", "solution_side")

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
        return _verdict(checks, VerifyOutcome.NO_SOLUTION, {}, f"There is no {SOLUTION_FILE}.")
    secret = secrets.token_bytes(32)
    is_apart = checks.imports_solution and not checks.in_process
    job = {
        "secret": secret,
        "timeout_s": float(timeout_s),
        "tests": checks.source,
        "repeated": checks.repeated,
        "is_file": checks.is_file,
        "in_process": checks.in_process,
        "modules": list(checks.modules),
        "files": dict(solution_files),
        "solution_program": _program(*_SOLUTION_MODULES) if is_apart else None,
        "program": _PATHS + _RUN_PROGRAM if checks.runs_program else None,
    }
    program = f"exec({_program(*_test_modules(checks))!r})\n".encode()
    async with sandbox_factory() as sandbox:
        result = await sandbox.run(_COMMAND, timeout_s, stdin=program + pack_job(job))
    state = read_reports(secret, result.output)
    if state is None and 0 < result.exit_code < 128 and not (result.timed_out or result.disk_exceeded):
        raise SandboxError(f"the verifier did not start: exit code {result.exit_code}, {result.text[-500:]!r}")
    outcome, why = _outcome(result, state or {}, timeout_s)
    return _verdict(checks, outcome, state or {}, why)


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
    modules = ["library_types", "pipe", "clock", "counter", "stand_in"]
    if checks.imports_solution and not checks.in_process:
        modules += ["children", "peer", "test_side"]
    if checks.in_process:
        modules += ["alarm"]
    if checks.runs_program:
        modules += ["children", "programs"]
    if checks.is_file:
        modules += ["pytest_stand_in", "fixtures", "test_cases"]
    return [*dict.fromkeys(modules), "runner"]


def _outcome(result: CommandResult, state: dict[str, Any], timeout_s: float) -> tuple[VerifyOutcome, str | None]:
    """The outcome, and the line that says why it is not RAN."""
    if result.timed_out:
        return VerifyOutcome.TIMEOUT, f"The tests did not end within {timeout_s:g} s."
    if result.disk_exceeded:
        return VerifyOutcome.CRASHED, "The solution's files take more space than is allowed."
    if not state["done"]:
        return VerifyOutcome.CRASHED, "The solution ended the tests' process."
    if state["late"]:
        return VerifyOutcome.TIMEOUT, state["error"] or f"{_count(state['late'], 'check')} did not end in time."
    if state["lost"]:
        return VerifyOutcome.CRASHED, state[
            "error"
        ] or f"The solution ended its process in {_count(state['lost'], 'check')}."
    return (VerifyOutcome.RAN if state["error"] is None else VerifyOutcome.CRASHED), state["error"]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _verdict(checks: Checks, outcome: VerifyOutcome, state: dict[str, Any], why: str | None) -> Verification:
    total = len(checks.labels)
    all_reached = state.get("done", False) and state["error"] is None
    passed = state.get("passed" if all_reached else "settled", 0)
    lines = [f"Hidden tests: {passed} of {total} passed."]
    if why is not None:
        lines.append(why)
    lines += [f"FAIL {checks.labels[number]}: {what}" for number, what in state.get("failures", [])]
    return Verification(outcome, passed, total, "\n".join(lines), in_process=checks.in_process)


@cache
def _program(*modules: str) -> str:
    """One source text that brings the named modules of harness/ along and runs `main` of the last."""
    folder = resources.files(_PACKAGE)
    sources = [(name, (folder / f"{name}.py").read_text(encoding="utf-8")) for name in modules]
    return _PATHS + _BOOT.format(modules=sources, package=_PACKAGE)
