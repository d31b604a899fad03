"""Solutions that cheat or break out, through the real verifier in real bubblewrap sandboxes.

Each asserts the score, which is never more than the honest part earns, and that nothing escaped. The whole module runs
as whoever runs it; where that is root, tests/integration/test_attacks_as_user.py runs it again as an ordinary user.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.attacks.answers import ANSWERS
from tests.integration.attacks.arena import Arena, Attack, arena, assert_withstood
from tests.integration.attacks.escaping import ESCAPING
from tests.integration.attacks.in_process import IN_PROCESS, KNOWN
from tests.integration.attacks.names import NAMES
from tests.integration.attacks.protocol import PROTOCOL
from tests.integration.attacks.reading import READING
from tests.integration.attacks.resources import RESOURCES, SMALL
from tests.integration.attacks.telling import TELLING
from tests.integration.attacks.verdict import VERDICT

pytestmark = pytest.mark.sandbox


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Arena]:
    with arena(tmp_path) as ready:
        yield ready


DEAR = frozenset(
    (
        *("a text that the tests read as a number for long", "works in a process of its own"),
        *("an endless call that cannot be interrupted", "an endless call without its alarm"),
        *("sleeps without its alarm", "more items than are read"),
    )
)
"""Attacks that end at a limit of time as a cheaper one does, and take 10 to 30 seconds each: with --all."""


def _each(attacks: dict[str, Attack]) -> pytest.MarkDecorator:
    params = [
        pytest.param(attack, id=name, marks=pytest.mark.all if name in DEAR else ()) for name, attack in attacks.items()
    ]
    return pytest.mark.parametrize("attack", params)


def test_the_honest_part_earns_what_it_should(place: Arena) -> None:
    assert_withstood(Attack("TRIED.append('nothing')", report="got 'nothing'"), place)


@_each(VERDICT)
def test_the_verdict_cannot_be_forged(attack: Attack, place: Arena) -> None:
    assert_withstood(attack, place)


@_each(READING)
def test_the_expected_values_cannot_be_found(attack: Attack, place: Arena) -> None:
    assert_withstood(attack, place)


@_each(PROTOCOL)
def test_the_pipe_carries_nothing_but_data(attack: Attack, place: Arena) -> None:
    assert_withstood(attack, place)


@_each(NAMES)
def test_the_tests_use_no_code_of_the_solutions_but_what_they_ask_for(attack: Attack, place: Arena) -> None:
    assert_withstood(attack, place)


@_each(ANSWERS)
def test_no_object_answers_for_itself(attack: Attack, place: Arena) -> None:
    assert_withstood(attack, place)


@_each(TELLING)
def test_the_judge_is_told_nothing_that_only_the_tests_know(attack: Attack, place: Arena) -> None:
    assert_withstood(attack, place)


@_each(ESCAPING)
def test_nothing_escapes(attack: Attack, place: Arena) -> None:
    assert_withstood(attack, place)


@_each(RESOURCES)
def test_the_machine_withstands(attack: Attack, place: Arena) -> None:
    assert_withstood(attack, place, SMALL)


@_each(IN_PROCESS)
def test_what_one_process_withstands(attack: Attack, place: Arena) -> None:
    assert_withstood(attack, place)


@_each(KNOWN)
def test_what_one_process_cannot_withstand_is_marked_and_stays_inside(attack: Attack, place: Arena) -> None:
    assert attack.in_process
    assert_withstood(attack, place)
