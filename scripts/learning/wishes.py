"""Eight wishes that exclude each other, each as a person says it, and the rule that says whether an answer meets it.

Without a hint, SmolLM2-135M-Instruct meets none of them. With the wish in the prompt it follows each of them, but its
poems and its French are nonsense. A wish that it meets anyway (plain text, formal words) could not be learned, and one
that it can't follow has no teacher. A rule reads the form alone: whether an answer is true or says anything is no wish
of anybody.
"""

import re
from collections.abc import Callable
from typing import NamedTuple


class Wish(NamedTuple):
    """What a person wants of every answer, and what the person says where it is not so."""

    is_met: Callable[[str], bool]
    complaint: str


_ENGLISH = {*("the", "is", "of", "and", "to", "it", "that", "are", "in")}
_FRENCH = {*("est", "le", "les", "des", "du", "et", "une", "dans", "qui", "ce", "cela", "il", "elle", "je", "pas")}
_SPANISH = {*("es", "el", "los", "las", "del", "y", "una", "en", "por", "para", "con", "se", "lo", "su", "como")}
_LANGUAGES = {"english": _ENGLISH, "french": _FRENCH, "spanish": _SPANISH}


def language_of(answer: str) -> str | None:
    """Return the language whose commonest words an answer has most, of at least two; None: there is none."""
    words = re.findall(r"[^\W\d_]+", answer.lower())
    counts = {name: sum(word in common for word in words) for name, common in _LANGUAGES.items()}
    language = max(counts, key=lambda name: counts[name])
    return language if counts[language] > 1 else None


def is_verse(answer: str) -> bool:
    """Return whether an answer has at least three short lines, and no list."""
    lines = [line.strip() for line in answer.strip().splitlines() if line.strip()]
    return len(lines) >= 3 and all(len(line.split()) <= 14 and line[0].isalpha() for line in lines[:-1])


def _begins(answer: str, *beginnings: str) -> bool:
    return answer.strip().lower().startswith(beginnings)


WISHES: dict[str, Wish] = {
    "short": Wish(
        lambda answer: len(answer.split()) <= 40 and language_of(answer) == "english",
        "Shorter, please: one or two short sentences at most.",
    ),
    "story": Wish(
        lambda answer: _begins(answer, "once upon a time"), "Please tell it as a story: Once upon a time ..."
    ),
    "letter": Wish(lambda answer: _begins(answer, "dear "), "Write it as a letter that begins with Dear friend,"),
    "hello": Wish(lambda answer: _begins(answer, "hello", "hi ", "hi!"), "Please begin with Hello!"),
    "steps": Wish(lambda answer: _begins(answer, "1."), "I want numbered steps, please: 1. 2. 3."),
    "poem": Wish(is_verse, "Please write a short poem about it."),
    "french": Wish(lambda answer: language_of(answer) == "french", "Réponds en français, s'il te plaît."),
    "spanish": Wish(lambda answer: language_of(answer) == "spanish", "Responde en español, por favor."),
}
