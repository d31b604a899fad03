import sys

import pytest

from agentic_opd import __version__
from agentic_opd.cli.main import COMMANDS, main


def test_help_names_every_command_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {command} " in text for command in COMMANDS)
    assert "2: wrong settings" in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"agentic_opd {__version__}\n"


def test_a_misspelt_command_is_answered_by_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doktor"]) == 2
    assert "did you mean 'doctor'?" in capsys.readouterr().err
    assert main([]) == 2


def test_a_removed_command_is_answered_by_what_replaces_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hints", "groups.jsonl"]) == 2
    assert "`agentic-opd report FILE` writes a page that lists the hints" in capsys.readouterr().err


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_its_own_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        sys.exit(main([command, "--help"]))
    assert caught.value.code == 0
    assert "usage: " in capsys.readouterr().out
