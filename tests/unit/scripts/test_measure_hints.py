"""`scripts/learning/measure_hints` without a server: what it takes from the run, and what it refuses."""

import json
from pathlib import Path

import pytest
from learning.hint_lifts.__main__ import main

from agentic_opd.report.lifts import lifts_path
from tests.unit.report.sample import group, write


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["nowhere.jsonl", "--samples", "2"], 2, "cannot read 'nowhere.jsonl'"),
        (
            ["groups.jsonl", "--samples", "2", "--env.max_turn", "3"],
            2,
            "env.max_turn is unknown; did you mean 'env.max_turns'",
        ),
        (["groups.jsonl", "--samples", "2"], 1, "error: http://127.0.0.1:9/v1/models gave no usable answer"),
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
    assert main([str(path), "--samples", "2"]) == 2
    assert "holds a setting that this version refuses (max_turns:" in said(capsys)


@pytest.mark.parametrize("value", ["0", "-1", "x"])
def test_a_number_of_samples_is_one_or_more(value: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["groups.jsonl", "--samples", value])
    assert caught.value.code == 2
