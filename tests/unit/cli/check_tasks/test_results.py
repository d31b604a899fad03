import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentic_opd.cli.check_tasks.results import CheckedTask, CheckProgress, ResultLines
from agentic_opd.core.errors import OutputError
from agentic_opd.core.types import Verification, VerifyOutcome


def checked(outcome: VerifyOutcome = VerifyOutcome.RAN, passed: int = 2, total: int = 2) -> CheckedTask:
    return CheckedTask("é/1", Verification(outcome, passed, total, "Hidden tests: ...\nFAIL f(1): no", ""), 0.12345)


def test_a_line_says_what_came_of_a_task() -> None:
    assert checked(passed=1).to_row() == {
        "id": "é/1",
        "correctness": 0.5,
        "passed": 1,
        "total": 2,
        "outcome": "ran",
        "seconds": 0.123,
    }


def test_the_outcome_says_when_tests_and_solution_shared_a_process() -> None:
    shared = CheckedTask("a", Verification(VerifyOutcome.CRASHED, 0, 2, "", "", in_process=True), 0.1)
    assert shared.to_row()["outcome"] == "crashed, in_process"
    shared = CheckedTask("a", Verification(VerifyOutcome.RAN, 2, 2, "", "", in_process=True), 0.1)
    assert shared.to_row()["outcome"] == "ran, in_process"
    assert shared.is_passed


def test_only_tests_that_came_to_their_end_pass() -> None:
    assert checked().is_passed
    assert not checked(passed=1).is_passed
    for outcome in (VerifyOutcome.CRASHED, VerifyOutcome.TIMEOUT, VerifyOutcome.NO_SOLUTION):
        assert not checked(outcome).is_passed


def test_lines_come_in_the_order_of_the_tasks(tmp_path: Path) -> None:
    """Done: 2, 0 (writes 0), 3, 1 (writes 1, 2, 3), 5; 4 never comes, and closing writes 5."""
    path = tmp_path / "new" / "out.jsonl"
    lines = ResultLines(path)
    there: list[str] = []

    def ids() -> str:
        return "".join(json.loads(line)["id"] for line in path.read_text().splitlines())

    for number in (2, 0, 3, 1, 5):
        lines.add(number, replace(checked(), task_id=str(number)))
        there.append(ids())
    lines.close()
    assert there == ["", "0", "0", "0123", "0123"]
    assert ids() == "01235"


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="Choose another --out"):
        ResultLines(tmp_path / "file" / "out.jsonl")
    if Path("/dev/full").exists():
        lines = ResultLines(Path("/dev/full"))
        with pytest.raises(OutputError, match="cannot write to '/dev/full': No space"):
            lines.add(0, checked())


def test_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with CheckProgress(2) as progress:
        progress.done(checked())
        progress.done(checked(VerifyOutcome.CRASHED, passed=0))
    printed = capsys.readouterr()
    assert printed.err == (
        "1/2 é/1: 2 of 2 passed (0.1 s), ran\n2/2 FAIL é/1: 0 of 2 passed (0.1 s), crashed\n    FAIL f(1): no\n"
    )
    assert printed.out == ""
    assert progress.counts == "1 passed, 1 failed"


def test_a_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with CheckProgress(2) as progress:
        progress.done(checked())
        progress.done(checked(passed=1))
    printed = capsys.readouterr().err
    assert "2/2" in printed
    assert "1 passed, 1 failed" in printed
    assert "FAIL é/1: 1 of 2 passed (0.1 s), ran" in printed
    assert "é/1: 2 of 2" not in printed


def test_nothing_of_a_task_controls_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b[2K\x9b1A\u202e"
    one = CheckedTask(
        f"a\n2/2 b: 1 of 1 passed{evil}", Verification(VerifyOutcome.RAN, 0, 1, f"0 of 1\n{evil}", ""), 0.1
    )
    progress = CheckProgress(1)
    with progress:
        progress.done(one)
        progress.say(f"warning: {evil}")
    lines = ResultLines(None)
    lines.add(0, one)
    lines.close()
    said = capsys.readouterr()
    assert not any(char in said.out + said.err for char in evil if not char.isprintable())
    assert said.err.count("\n") == 3, "the task, its report, the warning"
    assert json.loads(said.out)["id"] == one.task_id
