"""The trivial command by which every backend finds out whether it works."""

from agentic_opd.core.errors import SandboxError
from agentic_opd.sandboxes.host_process import CommandResult

TRIAL = "echo 'import sys; print(sys.version_info >= (3, 8))' | python - && touch .check && rm .check"
"""Runs Python, reads a pipe, and writes in the work directory."""

TRIAL_TIMEOUT_S = 30.0


def why_trial_failed(result: CommandResult) -> str | None:
    """What went wrong with TRIAL, None where nothing did."""
    if result.timed_out:
        return f"a trivial command did not end within {TRIAL_TIMEOUT_S:g} s"
    if result.exit_code == 0 and result.text == "True\n":
        return None
    return f"a trivial command ended with exit code {result.exit_code}, {result.text.strip()[:500]!r}"


def not_entered() -> SandboxError:
    """The error of a command in a sandbox that has no work directory."""
    return SandboxError("the sandbox is closed, or was not entered with `async with`")
