from pathlib import Path

import pytest

from agentic_opd.report.command import main, report_run

from .sample import group, write


def test_a_report_lies_beside_the_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "groups.jsonl", group(), "{}")
    assert main([str(path)]) == 0
    assert (tmp_path / "groups.html").read_text().startswith("<!doctype html>")
    shown = capsys.readouterr().err
    assert "warning: line 2: tokens: missing" in shown
    assert "warning: Tokens are shown as ids" in shown
    assert "1 groups, 2 rollouts" not in shown
    assert "1 group, 2 rollouts" in shown


def test_two_files_are_compared_beside_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (tmp_path / name / "groups.jsonl" for name in ("before", "after"))
    for path in (first, second):
        path.parent.mkdir()
        write(path, group())
    assert main([str(first), str(second)]) == 0
    page = (second.parent / "groups.compared.html").read_text()
    assert '"name":"before/groups.jsonl"' in page
    assert '"name":"after/groups.jsonl"' in page
    shown = " ".join(capsys.readouterr().err.split())
    assert "warning: before/groups.jsonl: Tokens are shown as ids" in shown
    assert "2 groups, 4 rollouts" in shown


def test_more_than_two_files_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["a.jsonl", "b.jsonl", "c.jsonl"])
    assert caught.value.code == 2
    assert "3 files: a report is about one, or compares two" in capsys.readouterr().err


def test_it_can_be_written_elsewhere(tmp_path: Path) -> None:
    path = write(tmp_path / "groups.jsonl", group())
    assert main([str(path), "-o", str(tmp_path / "new" / "x.html")]) == 0
    assert (tmp_path / "new" / "x.html").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["groups.jsonl", "nowhere.jsonl"], "cannot read 'nowhere.jsonl'"),
        (["nowhere.jsonl"], "cannot read 'nowhere.jsonl'"),
        (["groups.jsonl", "-o", "./groups.jsonl"], "--output 'groups.jsonl' is an input file"),
        (["groups.jsonl", "-o", "/dev/null/x.html"], "cannot write '/dev/null/x.html'"),
        (["groups.jsonl", "--tokenizer", "/nowhere"], "the tokenizer '/nowhere' can't be loaded"),
        (["empty.jsonl"], "'empty.jsonl' holds no scored group: it is empty"),
    ],
)
def test_what_can_not_be_done_is_one_clear_error(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("groups.jsonl"), group())
    Path("empty.jsonl").touch()
    assert main(flags) == 2
    assert f"error: {message}" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.html*"))


def test_a_run_whose_report_can_not_be_written_is_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tokenizer: object
) -> None:
    path = write(tmp_path / "groups.jsonl", group())
    (tmp_path / "groups.html").mkdir()
    report_run(path, tokenizer)
    assert "the report was not written" in caplog.text
    assert f"agentic-opd report {path}" in caplog.text
    (tmp_path / "groups.html").rmdir()
    report_run(path, tokenizer)
    assert (tmp_path / "groups.html").is_file()
