"""Rewards that tests leave behind, and the part of their output that the judge reads."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.types import NoVerdict, VerifyOutcome
from agentic_opd.sandboxes.protocol import CommandResult
from agentic_opd_environments.harbor.verdict import judged, spoken

TESTS = """
def test_total():
    total = read_total()
    assert total == 9175
"""


@pytest.mark.parametrize(
    ("files", "exit_code", "reward"),
    [
        ({"reward.txt": "1"}, 1, 1),
        ({"reward.txt": "0"}, 127, 0),
        ({"reward.txt": " 0.25\n"}, 0, 0.25),
        ({"reward.txt": "\ufeff0.5"}, 0, 0.5),
        ({"reward.txt": "0.9996"}, 0, 0.9996),
        ({"reward.txt": "0.0004"}, 0, 0.0004),
        ({"reward.txt": "0.99999999999"}, 0, 0.99999999999),
        ({"reward.txt": "-3"}, 0, 0),
        ({"reward.txt": "7"}, 0, 1),
        ({"reward.json": "0.5", "reward.txt": "1"}, 0, 0.5),
        ({"reward.json": '{"reward": 1, "speed": 0}'}, 0, 1),
        ({"reward.json": '{"a": 1, "b": 0, "c": true}'}, 0, 2 / 3),
        ({}, 0, 1),
        ({}, 3, 0),
    ],
)
def test_rewards_are_exact(files: dict[str, str], exit_code: int, reward: float, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    verdict = judged(CommandResult(exit_code, b"said"), tmp_path, (TESTS,), "", ())
    assert (verdict.outcome, verdict.correctness) == (VerifyOutcome.RAN, reward)
    assert verdict.all_passed is (reward > 0.9999999)
    assert verdict.report.endswith("said")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "one",
        "nan",
        "inf",
        "[1]",
        '{"reward": "1"}',
        "{}",
        "1e999",
        "[" * 9999,
        "1" * 5000,
        '{"a": 1, "reward": null}',
    ],
)
@pytest.mark.parametrize("name", ["reward.json", "reward.txt"])
def test_what_is_no_reward_is_no_verdict(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    verdict = judged(CommandResult(0, b""), tmp_path, (TESTS,), "", ())
    assert (verdict.outcome, verdict.no_verdict) == (VerifyOutcome.NO_VERDICT, NoVerdict.UNREADABLE_REWARD)
    assert f"wrote a {name} without a reward" in verdict.judge_report


@pytest.mark.parametrize(
    ("name", "text", "details"),
    [
        ("reward.txt", "", "It is empty; expected a number."),
        ("reward.txt", " passed\n", "It holds 'passed'; expected a number."),
        ("reward.txt", "NaN", "It holds 'NaN'; expected a number."),
        ("reward.json", '{"score": "1"}', """It holds '{"score": "1"}'; expected a number, or an object of numbers."""),
        ("reward.txt", "Traceback " * 99, f"It begins with {('Traceback ' * 8)!r}; expected a number."),
        ("reward.txt", "\x1b[2K s3cret-token", r"It holds '\x1b[2K [left out]'; expected a number."),
    ],
)
def test_a_file_without_a_reward_is_shown_to_a_person_but_not_to_the_judge(
    name: str, text: str, details: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    verdict = judged(CommandResult(1, b""), tmp_path, (TESTS,), "", ["s3cret-token"])
    assert verdict.report == f"The tests wrote a {name} without a reward. {details}"
    assert verdict.judge_report == f"The tests wrote a {name} without a reward."


def test_a_reward_that_this_user_can_t_read_is_told_from_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of tests of another user with a strict umask: the mode of a file stops no root, so `open` does here."""
    (tmp_path / "reward.txt").write_text("1")

    def refused(path: Any, flags: int, *, dir_fd: int | None = None) -> int:
        if path == "reward.txt":
            raise PermissionError(13, "Permission denied")
        return real(path, flags, dir_fd=dir_fd)

    real = os.open
    monkeypatch.setattr(os, "open", refused)
    verdict = judged(CommandResult(0, b""), tmp_path, (TESTS,), "", ())
    assert verdict.no_verdict is NoVerdict.UNREADABLE_REWARD
    assert "It can't be read (Permission denied); expected a regular file that all may read" in verdict.report


def test_links_pipes_and_folders_are_not_read(tmp_path: Path) -> None:
    secret, logs = tmp_path / "secret", tmp_path / "logs"
    secret.write_text("1")
    logs.mkdir()
    (logs / "reward.txt").symlink_to(secret)
    os.mkfifo(logs / "reward.json")
    for name, reason in (("reward.json", "it is no file"), ("reward.txt", "it is a link")):
        verdict = judged(CommandResult(0, b""), logs, (TESTS,), "", ())
        assert (verdict.passed, verdict.no_verdict) == (0, NoVerdict.UNREADABLE_REWARD)
        assert f"{name} without a reward. It can't be read ({reason})" in verdict.report
        (logs / name).unlink()
    (logs / "reward.txt").mkdir()
    assert judged(CommandResult(0, b""), logs, (TESTS,), "", ()).passed == 0
    linked = tmp_path / "linked"
    linked.symlink_to(tmp_path)
    (tmp_path / "reward.txt").write_text("1")
    assert judged(CommandResult(1, b""), linked, (TESTS,), "", ()).passed == 0


@pytest.mark.parametrize(
    ("result", "cause", "text"),
    [
        (CommandResult(137, b"", timed_out=True), NoVerdict.TIMEOUT, "The tests did not end in time."),
        (CommandResult(137, b"", memory_exceeded=True), NoVerdict.MEMORY, "took more memory than the task has"),
        (CommandResult(137, b"", disk_exceeded=True), NoVerdict.DISK, "took more disk space than the task has"),
        (CommandResult(137, b"", output_exceeded=True), NoVerdict.OUTPUT, "The tests printed too much."),
    ],
)
@pytest.mark.parametrize("reward", ["1", "0"])
def test_tests_that_reach_a_limit_are_no_verdict(
    result: CommandResult, cause: NoVerdict, text: str, reward: str, tmp_path: Path
) -> None:
    (tmp_path / "reward.txt").write_text(reward)
    verdict = judged(result, tmp_path, (TESTS,), "", ())
    assert (verdict.outcome, verdict.no_verdict) == (VerifyOutcome.NO_VERDICT, cause)
    assert text in verdict.judge_report


@pytest.mark.parametrize(
    ("exit_code", "cause"),
    [
        (124, NoVerdict.TIMEOUT),
        (126, NoVerdict.NOT_RUN),
        (127, NoVerdict.NOT_RUN),
        (137, NoVerdict.KILLED),
        (139, NoVerdict.KILLED),
        (143, NoVerdict.KILLED),
    ],
)
def test_tests_that_could_not_run_are_no_verdict(exit_code: int, cause: NoVerdict, tmp_path: Path) -> None:
    verdict = judged(CommandResult(exit_code, b"uvx: not found"), tmp_path, (), "", ())
    assert verdict.no_verdict is cause
    assert verdict.report.endswith("uvx: not found")


@pytest.mark.parametrize("exit_code", [0, 1, 255])
def test_without_a_reward_the_exit_code_decides_only_if_the_tests_never_write_one(
    exit_code: int, tmp_path: Path
) -> None:
    """A test.sh that begins with `set -e` stops at a failed download, before it writes its reward."""
    writes = "set -e\ncurl -LsSf https://example.org | sh\npytest && echo 1 > /logs/verifier/reward.txt\n"
    verdict = judged(CommandResult(exit_code, b""), tmp_path, (TESTS, writes), "", ())
    assert verdict.no_verdict is NoVerdict.NO_REWARD
    assert judged(CommandResult(exit_code, b""), tmp_path, (TESTS,), "", ()).correctness == (exit_code == 0)


def test_the_judge_reads_which_test_failed_but_neither_code_nor_values(tmp_path: Path) -> None:
    output = b"""\
=== FAILURES ===
    def test_total():
        total = read_total()
>       assert total == 9175
E       assert 120 == 9175
/tests/test_state.py: AssertionError
FAILED ../tests/test_state.py::test_total - assert 120 == 9175
1 failed, 3 passed, token s3cret-token"""
    verdict = judged(CommandResult(1, output), tmp_path, (TESTS,), "", ["s3cret-token"])
    assert "E       assert 120 == 9175" in verdict.report
    assert verdict.judge_report.split("\n") == [
        "The tests wrote no reward; their exit code is 1.",
        "=== FAILURES ===",
        "[left out]",
        "/tests/test_state.py: AssertionError",
        "FAILED ../tests/test_state.py::test_total - [left out]",
        "1 failed, 3 passed, token [left out]",
    ]
    assert "s3cret" not in verdict.report
    assert "9175" in judged(CommandResult(1, output), tmp_path, (TESTS,), "the sum is 9175", ()).judge_report


def test_a_conversation_as_text() -> None:
    call = {"function": {"name": "terminal", "arguments": '{"command": "ls"}'}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "a.txt"}]
    assert spoken(messages, "Do it.") == 'Do it.\n\n{"command": "ls"}\na.txt'


@pytest.mark.slow
def test_a_long_line_of_output_is_filtered_in_a_moment(tmp_path: Path) -> None:
    """One line of 40,000 brackets stopped the environment for seconds, and each file of tests reads the output anew."""
    hidden = [f"{TESTS}\nassert f({number}) == 'value {number}'\n" for number in range(4)]
    output = "\n".join(["[" * 200_000, "FAILED test_total - assert 3 == 9175", "the end"])
    start = time.process_time()
    verdict = judged(CommandResult(1, output.encode()), tmp_path, hidden, "[" * 20_000, ())
    assert time.process_time() - start < 10, "it takes one second"
    assert verdict.judge_report.endswith("FAILED test_total - [left out]\nthe end")
