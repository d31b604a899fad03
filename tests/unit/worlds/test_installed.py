"""Worlds that installed packages register as entry points."""

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentic_opd.core.errors import ConfigError
from agentic_opd.worlds.choose import ENTRY_POINTS, world_class

RIDDLES = '''\
"""A world of another package."""

from agentic_opd.worlds.custom import CustomWorld, Task


class Riddles(CustomWorld):
    """One riddle."""

    system_prompt = "Answer."

    def __init__(self, prompt: str, answer: str = "no"):
        self.prompt, self.answer = prompt, answer

    def tasks(self):
        yield Task("riddle", self.prompt, self.answer, limits={"max_turns": 1})

    def verify(self, task, state, messages):
        return float(self.answer in messages[-1]["content"])
'''

Register = Callable[[str, str, str], None]


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Register]:
    """A function that installs the metadata of a package: its name, the world's name, and the world's location."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(package: str, world: str, location: str) -> None:
        folder = tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{world} = {location}\n")

    yield write
    for name in [name for name in sys.modules if name.startswith("riddles_")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["babyai", "functions", "harbor", "replay", "sql"])
def test_the_worlds_beside_the_package_are_registered(name: str) -> None:
    assert world_class(name).__module__.startswith("agentic_opd_environments.")


def test_a_registered_class_is_found_by_its_name(register: Register, tmp_path: Path) -> None:
    (tmp_path / "riddles_found.py").write_text(RIDDLES)
    register("riddles_a", "riddles", "riddles_found:Riddles")
    assert world_class("riddles").__module__ == "riddles_found"


def test_the_log_lines_of_a_registered_world_are_shown_as_the_packages_own(
    register: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "riddles_logged.py").write_text(RIDDLES)
    register("riddles_a", "riddles", "riddles_logged:Riddles")
    monkeypatch.setattr(logging.getLogger("agentic_opd"), "level", logging.INFO)
    world_class("riddles")
    assert logging.getLogger("riddles_logged").level == logging.INFO


def test_an_unknown_name_is_answered_with_the_known_ones(register: Register) -> None:
    register("riddles_a", "riddles", "riddles_never:Riddles")
    with pytest.raises(ConfigError) as caught:
        world_class("ridles")
    text = str(caught.value)
    assert text.startswith(
        "env.world: there is no world 'ridles'. There are coding, babyai, functions, harbor, replay, riddles, sql. "
        "Install"
    )
    assert text.endswith(
        "(as an entry point of the group agentic_opd.worlds), or name a class as FILE.py:CLASS or package.module:CLASS"
    )


def test_two_packages_with_one_name_are_refused(register: Register) -> None:
    register("riddles_a", "riddles", "riddles_one:Riddles")
    register("riddles_b", "riddles", "riddles_two:Riddles")
    both = (
        r"'riddles' is registered by riddles_[ab] \(riddles_\w+:Riddles\) and by riddles_[ab] \(riddles_\w+:Riddles\)"
    )
    with pytest.raises(ConfigError, match=rf"{both}. Uninstall all but one"):
        world_class("riddles")


@pytest.mark.parametrize(
    ("code", "location", "cause"),
    [
        (None, "riddles_gone:Riddles", "ModuleNotFoundError: No module named 'riddles_gone'"),
        ("import no_such_simulator\n", "riddles_lacks:Riddles", "ModuleNotFoundError: No module named 'no_such_sim"),
        (RIDDLES, "riddles_other:Riddle", "AttributeError: .* has no attribute 'Riddle'"),
        ("1 / 0\n", "riddles_broken:Riddles", r"ZeroDivisionError: division by zero \(.*riddles_broken.py:1\)"),
    ],
)
def test_a_world_that_cannot_be_imported_is_named_with_its_package(
    code: str | None, location: str, cause: str, register: Register, tmp_path: Path
) -> None:
    if code is not None:
        (tmp_path / f"{location.partition(':')[0]}.py").write_text(code)
    register("riddles_a", "riddles", location)
    with pytest.raises(ConfigError, match=rf"'riddles' of riddles_a \({location}\) can't be imported: {cause}"):
        world_class("riddles")


@pytest.mark.parametrize("location", ["json:dumps", "json:JSONDecoder", "json.decoder:NaN"])
def test_what_is_no_world_is_refused(location: str, register: Register) -> None:
    register("riddles_a", "riddles", location)
    with pytest.raises(ConfigError, match=r"riddles is .*, expected a subclass of CustomWorld or a World"):
        world_class("riddles")
