"""Commands that are stopped or do nothing, in real sandboxes whose processes are looked at."""

import asyncio

import pytest

from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox
from agentic_opd.sandboxes.protocol import AttentiveSandbox, CommandResult

pytestmark = pytest.mark.sandbox


def run(command: str, idle_limit_s: float | None) -> CommandResult:
    async def main() -> CommandResult:
        async with BubblewrapSandbox() as sandbox:
            assert isinstance(sandbox, AttentiveSandbox)
            sandbox.idle_limit_s = idle_limit_s
            return await sandbox.run(command, 600.0)

    return asyncio.run(main())


@pytest.mark.parametrize(
    "command",
    [
        "kill -STOP $$",
        "sh -c 'kill -STOP $PPID; while true; do :; done' & wait",
        "sh -c 'while true; do kill -STOP $PPID; done' & while true; do :; done",
        "sh -c 'kill -STOP -1'; wait",
    ],
)
def test_a_stopped_command_ends_at_once(command: str) -> None:
    result = run(command, 500.0)
    assert result.stopped
    assert result.is_over_limit
    assert not result.timed_out


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sleep 900", "sh -c 'kill -STOP $$' & wait", "mkfifo f; cat f"])
def test_a_command_that_does_nothing_ends(command: str) -> None:
    result = run(command, 0.3)
    assert (result.idle, result.stopped, result.timed_out) == (True, False, False)


@pytest.mark.slow
def test_a_command_at_work_does_not(memory_kind: str) -> None:
    """Also where it waits for a processor: a second and a half of processor time take longer beside others."""
    work = "import time\nwhile time.process_time() < 0.5: pass"
    result = run(f"python -c '{work}' & python -c '{work}' & python -c '{work}'; wait", 1.0)
    assert (result.exit_code, result.is_over_limit) == (0, False)


def test_without_a_limit_nobody_looks() -> None:
    result = run("sleep 0.6", None)
    assert (result.exit_code, result.is_over_limit) == (0, False)
