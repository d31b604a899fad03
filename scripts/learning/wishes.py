"""Eight wishes that exclude each other, each as a person says it, and the rule that says whether an answer meets it.

SmolLM2-135M-Instruct almost never follows one of them without a hint, and often with the wish in its prompt
(`scripts/learning/people --screen` prints the shares). A wish that it meets anyway (plain text, formal words) could not
be learned, and one that it can't follow has no teacher. A rule reads the form alone: whether an answer is true or says
anything is no wish of anybody.
"""

import re
from collections.abc import Callable
from typing import NamedTuple


class Wish(NamedTuple):
    """What a person wants of every answer, and what the person says where it is not so."""

    is_met: Callable[[str], bool]
    complaint: str


_ENGLISH = {*("the", "is", "of", "and", "to", "it", "that", "are", "in")}


def is_english(answer: str) -> bool:
    """Return whether an answer has at least two of the commonest English words."""
    return sum(word in _ENGLISH for word in re.findall(r"[^\W\d_]+", answer.lower())) > 1


def _begins(answer: str, *beginnings: str) -> bool:
    return answer.strip().lower().startswith(beginnings)


WISHES: dict[str, Wish] = {
    "short": Wish(
        lambda answer: len(answer.split()) <= 40 and is_english(answer),
        "Shorter, please: one or two short sentences at most.",
    ),
    "story": Wish(
        lambda answer: _begins(answer, "once upon a time"), "Please tell it as a story: Once upon a time ..."
    ),
    "letter": Wish(lambda answer: _begins(answer, "dear "), "Write it as a letter that begins with Dear friend,"),
    "hello": Wish(lambda answer: _begins(answer, "hello", "hi ", "hi!"), "Please begin with Hello!"),
    "steps": Wish(lambda answer: _begins(answer, "1."), "I want numbered steps, please: 1. 2. 3."),
    "welcome": Wish(lambda answer: _begins(answer, "welcome"), "Please begin with Welcome!"),
    "today": Wish(lambda answer: _begins(answer, "today"), "Please begin with Today, ..."),
    "oh": Wish(lambda answer: _begins(answer, "oh,", "oh ", "oh!"), "Please begin with Oh!"),
}
