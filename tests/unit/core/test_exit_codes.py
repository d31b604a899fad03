"""How a typed error ends a command: 2 for what the user can only mend in the settings, 1 for what went wrong then."""

import asyncio

import pytest

from agentic_opd.core import errors
from agentic_opd.core.exit_codes import EXIT_USAGE, CommandParser, exit_code


def raising(error: BaseException) -> int:
    def command() -> int:
        raise error

    return exit_code(command)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("x"), 2),
        (errors.DatasetError("x"), 2),
        (errors.RendererError("x"), 2),
        (errors.PlaceError("x"), 2),
        (errors.OutputError("x"), 1),
        (errors.SandboxError("x"), 1),
        (errors.ServerUnreachableError("x"), 1),
        (errors.ServerMismatchError("x"), 1),
        (errors.AlignmentError("x"), 1),
        (errors.RolledBackError("x"), 3),
        (KeyboardInterrupt(), 130),
        (asyncio.CancelledError(), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_a_command_ends_with(error: BaseException, code: int) -> None:
    assert raising(error) == code


def test_a_checker_has_one_code_for_all_that_keeps_it_from_checking(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise errors.ServerUnreachableError("nobody answers")

    assert exit_code(command, on_error=EXIT_USAGE) == 2
    assert capsys.readouterr().err == "error: nobody answers\n"


def test_a_wrong_command_line_is_one_line_that_names_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    parser = CommandParser(prog="agentic-opd prove GROUPS [--limit N]")
    parser.add_argument("groups", metavar="GROUPS")
    with pytest.raises(SystemExit) as caught:
        parser.parse_args([])
    assert caught.value.code == EXIT_USAGE
    assert capsys.readouterr().err == (
        "error: the following arguments are required: GROUPS; agentic-opd prove --help lists the arguments\n"
    )
