"""The wishes of the scripted people exclude each other."""

import pytest
from learning.wishes import WISHES

ANSWERS = {
    "short": "A comet is a ball of ice and dust. It has a long tail near the sun.",
    "story": "Once upon a time there was a comet. " + "It flew around the sun. " * 10,
    "letter": "Dear friend, I am writing about comets. " + "They are made of ice. " * 10,
    "hello": "Hello! A comet is made of ice and dust. " + "It has a long tail. " * 10,
    "steps": "1. A comet comes near the sun.\n2. The ice melts.\n" + "3. It has a long tail. " * 10,
    "welcome": "Welcome to the world of comets! " + "They are made of ice and dust. " * 10,
    "today": "Today, a comet was seen in the sky. " + "It has a long tail of dust. " * 10,
    "oh": "Oh, a comet is a ball of ice and dust. " + "It has a long tail near the sun. " * 10,
}


def test_every_wish_has_an_answer() -> None:
    assert set(ANSWERS) == set(WISHES)


@pytest.mark.parametrize("name", list(ANSWERS))
def test_an_answer_meets_its_own_wish_alone(name: str) -> None:
    assert [wish for wish in WISHES if WISHES[wish].is_met(ANSWERS[name])] == [name]


@pytest.mark.parametrize(
    "answer", ["", "Ohio is a state. It is in the north of the United States.", "Je suis Charlie."]
)
def test_other_answers_meet_none_but_a_short_one(answer: str) -> None:
    assert {wish for wish in WISHES if WISHES[wish].is_met(answer)} <= {"short"}
