import io
import logging
from collections.abc import Iterator

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentic_opd.core.console import ConsoleHandler, LiveBar, PrintableConsole
from agentic_opd.core.errors import ConfigError
from agentic_opd.core.exit_codes import exit_code


@pytest.fixture
def shown() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    """A logger below this package's, and what a person sees of it."""
    text = io.StringIO()
    logger = logging.getLogger("agentic_opd.of_a_test")
    logger.setLevel(logging.INFO)
    handler = ConsoleHandler(Console(file=text, width=40))
    logger.addHandler(handler)
    yield logger, text
    logger.removeHandler(handler)


def test_a_warning_is_shown_once_and_then_counted(shown: tuple[logging.Logger, io.StringIO]) -> None:
    logger, text = shown
    for i in range(1000):
        logger.warning("group %d was not measured: HTTP 400", i)
    logger.warning("something else")
    assert text.getvalue().splitlines() == [
        "warning: group 0 was not measured: HTTP 400",
        "warning: group 9 was not measured: HTTP 400 (10 times so far)",
        "warning: group 99 was not measured: HTTP 400 (100 times so far)",
        "warning: group 999 was not measured: HTTP 400 (1000 times so far)",
        "warning: something else",
    ]


def test_errors_and_steps_are_shown_each_time(shown: tuple[logging.Logger, io.StringIO]) -> None:
    logger, text = shown
    for _ in range(2):
        logger.error("a group failed: [red]%s", "x")
        logger.info("step")
    assert text.getvalue().splitlines() == ["error: a group failed: [red]x", "step"] * 2


def test_what_begins_again_is_said_again(shown: tuple[logging.Logger, io.StringIO]) -> None:
    logger, text = shown
    outages = logging.getLogger("agentic_opd.core.notices")
    outages.addHandler(logger.handlers[0])
    try:
        for _ in range(2):
            outages.warning("waiting for vLLM")
    finally:
        outages.removeHandler(logger.handlers[0])
    assert text.getvalue().count("waiting for vLLM") == 2


@pytest.mark.parametrize(("verbose", "lines"), [(False, 1), (True, 2)])
def test_other_libraries_are_heard_where_something_failed(verbose: bool, lines: int) -> None:
    text = io.StringIO()
    logger = logging.getLogger("some_library")
    logger.setLevel(logging.DEBUG)
    handler = ConsoleHandler(Console(file=text, width=40), with_names=verbose)
    logger.addHandler(handler)
    logger.warning("saved to %s", "x")
    logger.error("lost")
    logger.removeHandler(handler)
    assert len(text.getvalue().splitlines()) == lines
    assert "error: " in text.getvalue()


EVIL = "\x1b]0;pwned\x07\x1b[2J\x9b31m[red]\u202eabc\rover\\"


def spelled_out(text: str) -> bool:
    return not any(char in text for char in "\x07\x1b\x9b\u202e\r") and "u001b" in text and "[red]" in text


def test_nothing_that_is_logged_controls_the_terminal(shown: tuple[logging.Logger, io.StringIO]) -> None:
    logger, text = shown
    logger.warning("no such file: %s", EVIL)
    assert spelled_out(text.getvalue())


@pytest.mark.parametrize("kind", ["text", "markup off", "cell", "bar"])
def test_nothing_that_is_printed_controls_the_terminal(kind: str) -> None:
    text = io.StringIO()
    console = PrintableConsole(file=text, width=200, force_terminal=True, color_system="truecolor")
    if kind == "bar":
        with LiveBar("tasks", 1, console=console) as bar:
            bar.say(EVIL)
            bar.show(1, EVIL)
    elif kind == "cell":
        table = Table("a")
        table.add_row(Text(EVIL, "bold"))
        console.print(table)
    else:
        console.print(Text(EVIL) if kind == "text" else EVIL, markup=False)
    shown = text.getvalue()
    assert "pwned" in shown
    assert not any(bad in shown for bad in ("\x1b]0", "\x1b[2J\x9b", "\x9b", "\u202e", "\x07", "\rover"))


def test_an_error_that_ends_a_command_controls_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise ConfigError(f"there is no task {EVIL}")

    assert exit_code(command) == 2
    assert spelled_out(capsys.readouterr().err)
