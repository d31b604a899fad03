"""The supervisor of commands where there are no namespaces, as a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from agentic_opd.sandboxes.protocol import CommandResult, Limits
from agentic_opd.sandboxes.supervised import FOLDERS, job_line, program, read_answer

pytestmark = pytest.mark.processes


def supervised(
    folder: Path, command: str, timeout_s: float = 10.0, limits: Limits | None = None
) -> CommandResult | int:
    """How `command` ended, or the exit code of a supervisor that left no answer."""
    for name in FOLDERS:
        (folder / name).mkdir()
    job = job_line(
        command,
        timeout_s,
        None,
        folder=str(folder),
        path="/usr/bin:/bin",
        limits=limits or Limits(),
        result=str(folder / "answer"),
    )
    argv = [sys.executable, "-I", "-S", "-c", program()]
    process = subprocess.run(argv, input=job.encode(), timeout=10 * timeout_s)
    answer = folder / "answer"
    return read_answer(answer.read_bytes()) if answer.exists() else process.returncode


def test_a_command_has_the_limits_that_were_asked_for(tmp_path: Path) -> None:
    limits = Limits(memory_mb=99, file_mb=3)
    ended = supervised(tmp_path, "ulimit -v; ulimit -f; ulimit -t; ulimit -c", 6.5, limits)
    assert isinstance(ended, CommandResult)
    assert ended.text.split() == [str(99 * 1024), str(3 * 1024), "8", "0"]


def test_a_supervisor_that_its_command_kills_leaves_no_answer(tmp_path: Path) -> None:
    assert supervised(tmp_path, "kill -9 $PPID; sleep 0.1") == -9


@pytest.mark.parametrize(
    ("command", "exit_code"), [("exec >&- 2>&-; sleep 0.2; exit 5", 5), ("(sleep 0.2; kill -9 $$) & wait", 137)]
)
def test_closed_output_is_no_end(command: str, exit_code: int, tmp_path: Path) -> None:
    ended = supervised(tmp_path, command)
    assert isinstance(ended, CommandResult)
    assert ended.exit_code == exit_code


def test_what_the_command_started_ends_with_it(tmp_path: Path) -> None:
    ended = supervised(tmp_path, "setsid sleep 3600 & echo $!")
    assert isinstance(ended, CommandResult)
    assert not Path(f"/proc/{int(ended.text)}").exists()
