"""The hidden tests' verdict: a task and the agent's files in, a Verification out.

The tests run in a fresh sandbox that gets only the agent's files, in a process of their own; harness/ is what runs
there. Every `assert` counts by itself.
"""

import secrets
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from agentic_opd.errors import DatasetError, SandboxError
from agentic_opd.rollout.checks import Checks, instrument
from agentic_opd.rollout.harness.runner import pack_job, read_reports
from agentic_opd.rollout.process import CommandResult
from agentic_opd.rollout.sandbox import SandboxFactory
from agentic_opd.types import Task, Verification, VerifyOutcome

SOLUTION_FILE = "solution.py"

_PACKAGE = "agentic_opd.rollout.harness"
_COMMAND = "exec python -I -S -c 'import sys; exec(sys.stdin.buffer.readline())'"

# Starting without `site` saves 40 ms and more: it runs every .pth file there is. The packages stay importable.
_BOOT = """
import os, sys
version = "python%d.%d" % sys.version_info[:2]
for path in (f"{{sys.prefix}}/lib/{{version}}/site-packages", "/usr/lib/python3/dist-packages"):
    if os.path.isdir(path):
        sys.path.append(path)
for name, source in {modules!r}:
    name = {package!r} + "." + name
    sys.modules[name] = module = type(sys)(name)
    exec(compile(source, name, "exec"), module.__dict__)
module.main()
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
    job = {
        "secret": secret,
        "tests": checks.source,
        "in_process": checks.in_process,
        "files": dict(solution_files),
        "solution_program": _program("wire", "peer", "solution_side"),
    }
    program = f"exec({_program('wire', 'peer', 'test_side', 'runner')!r})\n".encode()
    async with sandbox_factory() as sandbox:
        result = await sandbox.run(_COMMAND, timeout_s, stdin=program + pack_job(job))
    state = read_reports(secret, result.output)
    if state is None and not result.timed_out:
        raise SandboxError(f"the verifier did not start: exit code {result.exit_code}, {result.text[-500:]!r}")
    return _verdict(checks, *_outcome(result, state or {}, timeout_s))


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
        raise DatasetError(f"task {task.task_id!r}: the hidden tests have no `assert` that depends on the solution")
    return checks


def _outcome(
    result: CommandResult, state: dict[str, Any], timeout_s: float
) -> tuple[VerifyOutcome, dict[str, Any], str | None]:
    """The outcome, the state it rests on, and the line that says why it is not RAN."""
    if result.timed_out:
        return VerifyOutcome.TIMEOUT, state, f"The tests did not end within {timeout_s:g} s."
    if not state["done"]:
        return VerifyOutcome.CRASHED, state, "The solution ended the tests' process."
    if state["error"] is not None:
        return VerifyOutcome.CRASHED, state, state["error"]
    return VerifyOutcome.RAN, state, None


def _verdict(checks: Checks, outcome: VerifyOutcome, state: dict[str, Any], why: str | None) -> Verification:
    total = max(len(checks.labels), state.get("executed", 0))
    passed = state.get("passed", 0)
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
    return _BOOT.format(modules=sources, package=_PACKAGE)
