"""`agentic-opd hints` without a server: what it prints, what it takes from the run, and what it refuses."""

import json
from pathlib import Path

import pytest

from agentic_opd.cli.hints import main
from agentic_opd.wire.lifts import Lifts, ResampledTurn, lifts_path, write_lifts
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


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["nowhere.jsonl"], 2, "cannot read 'nowhere.jsonl'"),
        (
            ["groups.jsonl", "--resample", "2", "--env.max_turn", "3"],
            2,
            "--env.max_turn is unknown; did you mean '--env.max_turns'",
        ),
        (["groups.jsonl", "--resample", "2"], 1, "error: http://127.0.0.1:9/v1/models gave no usable answer"),
    ],
)
def test_what_can_not_be_done_is_one_clear_error(
    flags: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("groups.jsonl"), group())
    settings = ["--openai.base_url", "http://127.0.0.1:9/v1", "--env.server_retry_s", "0"]
    assert main([*flags, *settings]) == code
    assert message in said(capsys)
    assert not lifts_path(Path("groups.jsonl")).exists()


def test_the_settings_are_those_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "groups.jsonl", group())
    path.with_suffix(".run.json").write_text(json.dumps({"max_turns": "many", "gone_since": 1}))
    assert main([str(path)]) == 2
    assert "holds a setting that is none today (max_turns:" in said(capsys)


@pytest.mark.parametrize("value", ["0", "-1", "x"])
def test_a_number_of_samples_is_one_or_more(value: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["groups.jsonl", "--resample", value])
    assert caught.value.code == 2


def test_nothing_of_a_hint_controls_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor is it rich's markup: a backslash does not make it so."""
    one = group()
    for overrides in one["overrides"]:
        for turn in overrides["opd"]["turns"]:
            if turn.get("hint"):
                turn["hint"] = "\x1b]0;t\x07 \x9b1A \\[red]x[/red] \u202e"
    assert main([str(write(tmp_path / "groups.jsonl", one))]) == 0
    shown = said(capsys)
    assert not any(char in shown for char in "\x1b\x9b\u202e\x07")
    assert r"\u001b]0;t\u0007 \u009b1A \[red]x[/red] \u202e" in shown
