"""`agentic-opd hints`: what it prints."""

from pathlib import Path

import pytest
from learning.hint_lifts.written import write_lifts

from agentic_opd.cli.hints import main
from agentic_opd.report.lifts import Lifts, ResampledTurn, lifts_path
from tests.unit.report.sample import HINT, group, write


def measured(line: int, passed_with: int = 8, hint: str = HINT) -> ResampledTurn:
    return ResampledTurn(line, 0, 0, "t", hint, ("tool",), 8, passed_with, 2)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_hints_are_listed_without_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "groups.jsonl", group())
    assert main([str(path)]) == 0
    text = said(capsys)
    assert HINT in text
    assert "lift" not in text


def test_a_lift_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """8 of 8 against 2 of 8; what was measured of another hint at this place is not this hint's."""
    path = write(tmp_path / "groups.jsonl", group(), group())
    write_lifts(lifts_path(path), Lifts(8, 1.0, "p", 0, 2, (measured(1), measured(2, 0, "Of a file of before."))))
    assert main([str(path)]) == 0
    text = said(capsys)
    assert "lift, points" in text
    assert "+75 (+" in text


def test_a_file_that_is_not_there_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nowhere.jsonl"]) == 2
    assert "cannot read 'nowhere.jsonl'" in said(capsys)
