import json
from pathlib import Path
from typing import Any

import pytest
from checks.tasks import CheckedTask, CheckResults, in_flags, main, read_solutions

from agentic_opd.core.errors import DatasetError, OutputError, PlaceError
from agentic_opd.core.types import NoVerdict, Verification, VerifyOutcome


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


RAN = VerifyOutcome.RAN


def of_harbor(without_work: Verification, solved: Verification | None = None) -> CheckedTask:
    return CheckedTask("a", solved or Verification(RAN, 1, 1, "The tests gave a reward of 1.", ""), 0.1, without_work)


def test_a_task_that_passes_without_any_work_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free, half = of_harbor(Verification(RAN, 1, 1, "", "")), of_harbor(Verification.of_score(0.5, "", ""))
    with CheckResults(tmp_path / "out.jsonl", 2) as progress:
        progress.add(0, free)
        progress.add(1, half)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["correctness"], row["reward_without_work"]) for row in rows] == [(1, 1), (1, 0.5)]
    assert progress.counts == "1 passed, 1 failed (1 of them pass without any work)"
    assert capsys.readouterr().err == (
        "1/2 FAIL a: 1 of 1 passed (0.1 s), ran; a reward of 1 for doing nothing\n"
        "    The tests pass without any work: let them test what the task asks for.\n"
        "2/2 a: 1 of 1 passed (0.1 s), ran; a reward of 0.5 for doing nothing\n"
    )


def test_without_a_verdict_doing_nothing_has_no_reward() -> None:
    report = "The tests did not write their reward; their exit code is 1.\nboom"
    nothing = Verification(VerifyOutcome.NO_VERDICT, 0, 1, report, "", no_verdict=NoVerdict.NO_REWARD)
    task = of_harbor(nothing)
    assert task.is_passed
    assert task.to_row()["reward_without_work"] is None
    assert task.to_text().endswith(f"no reward (no_verdict, no_reward: {report[:-5]}) for doing nothing")


def test_all_lines_about_a_failed_build_are_shown() -> None:
    failed = Verification(VerifyOutcome.CRASHED, 0, 1, "can't be built: it fails at `RUN a`\n1\n2\n3\n4\nlast", "")
    assert of_harbor(failed, failed).to_text().splitlines()[1:] == [
        "    can't be built: it fails at `RUN a`",
        *("    1", "    2", "    3", "    4", "    last"),
    ]


@pytest.mark.parametrize(
    ("message", "in_flags_of_this_command"),
    [
        ("Skip such tasks with env.world.skip_broken.", "Skip such tasks with --skip-broken."),
        ("Set env.world.skip_broken to leave such rows out.", "Set --skip-broken to leave such rows out."),
        ("set env.world.variables to {KEY: ...}; b", "give one with --variables KEY=VALUE; b"),
        ("set env.sandbox.type docker (and env.sandbox.container_command)", "set --sandbox docker (and --engine)"),
        ("in '/data/world.folder' and my_world.limit", "in '/data/world.folder' and my_world.limit"),
    ],
)
def test_errors_name_the_flags_of_this_command(message: str, in_flags_of_this_command: str) -> None:
    assert in_flags(message) == in_flags_of_this_command


def test_a_broken_task_is_skipped_by_the_flag_that_the_error_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, toml in (("broken", "[environment"), ("whole", '[environment]\ndocker_image = "a"')):
        (tmp_path / name / "tests").mkdir(parents=True)
        (tmp_path / name / "tests" / "test.sh").write_text("exit 0")
        (tmp_path / name / "instruction.md").write_text("Do it.")
        (tmp_path / name / "task.toml").write_text(toml)
    assert main([str(tmp_path), "--format", "harbor", "--engine", "no-engine"]) == 2
    said = capsys.readouterr().err
    assert "task.toml, line 1: expected" in said
    assert said.endswith("Skip such tasks with --skip-broken.\n")


def test_lines_come_in_the_order_of_the_tasks(tmp_path: Path) -> None:
    """Done: 2, 0 (writes 0), 3, 1 (writes 1, 2, 3), 5; 4 never comes, and the end writes 5."""
    path = tmp_path / "new" / "out.jsonl"
    lines = CheckResults(path, 6)
    there: list[str] = []

    def ids() -> str:
        return "".join(json.loads(line)["id"] for line in path.read_text().splitlines())

    with lines:
        for number in (2, 0, 3, 1, 5):
            lines.add(number, checked()._replace(task_id=str(number)))
            there.append(ids())
    assert there == ["", "0", "0", "0123", "0123"]
    assert ids() == "01235"


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="Choose another --out"):
        CheckResults(tmp_path / "file" / "out.jsonl", 1)
    with pytest.raises(PlaceError, match="is a character device, expected a regular file"):
        CheckResults(Path("/dev/null"), 1)


def test_plain_lines_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with CheckResults(tmp_path / "out.jsonl", 2) as progress:
        progress.add(0, checked())
        progress.add(1, checked(VerifyOutcome.CRASHED, passed=0))
    printed = capsys.readouterr()
    assert printed.err == (
        "1/2 é/1: 2 of 2 passed (0.1 s), ran\n2/2 FAIL é/1: 0 of 2 passed (0.1 s), crashed\n    FAIL f(1): no\n"
    )
    assert printed.out == ""
    assert progress.counts == "1 passed, 1 failed"


def test_a_bar_in_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with CheckResults(tmp_path / "out.jsonl", 2) as progress:
        progress.add(0, checked())
        progress.add(1, checked(passed=1))
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
    with CheckResults(None, 1) as progress:
        progress.add(0, one)
        progress.say(f"warning: {evil}")
    said = capsys.readouterr()
    assert not any(char in said.out + said.err for char in evil if not char.isprintable())
    assert said.err.count("\n") == 3, "the task, its report, the warning"
    assert json.loads(said.out)["id"] == one.task_id


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_ids_are_texts_and_may_be_called_task_id(tmp_path: Path) -> None:
    path = write(
        tmp_path / "s.jsonl",
        {"id": 7, "files": {"solution.py": "x = 'é'", "lib/a.py": ""}},
        {"task_id": "HumanEval/0", "files": {"a.py": "", "b.py": None}},
    )
    files, unknown = read_solutions(path, {"7", "HumanEval/0"})
    assert files == {"7": {"solution.py": "x = 'é'".encode(), "lib/a.py": b""}, "HumanEval/0": {"a.py": b""}}
    assert unknown == []


def test_ids_of_no_task_are_named_with_their_line(tmp_path: Path) -> None:
    row = {"files": {"solution.py": ""}}
    files, unknown = read_solutions(write(tmp_path / "s.jsonl", {**row, "id": "a"}, "", {**row, "id": "b"}), {"a"})
    assert [*files] == ["a"]
    assert unknown == ["s.jsonl, line 3: no task has the id 'b'"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", r"line 2: not valid JSON"),
        ("[]", r"line 2: expected a JSON object, got list"),
        ({"files": {"solution.py": ""}}, r"line 2: no id, a text or an integer; there is files"),
        ({"id": None, "files": {}}, r"line 2: no id"),
        ({"id": 1.5, "files": {}}, r"line 2: no id"),
        ({"id": "b"}, r"line 2: files must be an object such as .* got NoneType"),
        ({"id": "b", "files": {}}, r"line 2: files must be an object .* got an empty one"),
        ({"id": "b", "files": {"solution.py": 1}}, r"line 2: files\['solution.py'\] must be a text, got int"),
        ({"id": "b", "files": {"../x": ""}}, r"line 2: files\['../x'\] must be a relative path"),
        ({"id": "b", "files": {"/x": ""}}, r"line 2: files\['/x'\] must be a relative path"),
        ({"id": "b", "files": {"x" * 300: ""}}, r"line 2: files\['x+'\] is no path of a file"),
        ({"id": "b", "files": {"a\0b": ""}}, r"line 2: files\['a.*b'\] is no path of a file"),
        ('{"id": ' + "7" * 5000 + ', "files": {"a": ""}}', r"line 2: the id id is an integer of over 1000 bits"),
        ({"id": "a", "files": {"solution.py": ""}}, r"line 2: the id 'a' is already that of s.jsonl, line 1"),
    ],
)
def test_broken_rows(tmp_path: Path, row: Any, message: str) -> None:
    path = write(tmp_path / "s.jsonl", {"id": "a", "files": {"solution.py": ""}}, row)
    with pytest.raises(DatasetError, match=message):
        read_solutions(path, {"a", "b"})


def test_what_is_no_file_of_solutions(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nope.jsonl", write(tmp_path / "s.txt")):
        with pytest.raises(DatasetError, match=r"expected a file that ends in \.jsonl"):
            read_solutions(path, set())
