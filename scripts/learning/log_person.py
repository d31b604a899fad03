"""A person who corrects an agent in its logs, by three wishes, and who judges answers as a model behind an address.

    python -m learning.log_person PORT WISHES.json

The person wants the figure of a query in the answer (`figure`), the new value of a setting (`value`), and explanations
of one short sentence (`brief`). Asked for a hint, it repeats the correction that it gave as the turn's direct reply.
Asked to grade a new turn, it looks up what it wanted there, and never reads the log's reply: so its grades are the same
where the corrections were shuffled. Where it wanted nothing special, it votes 0.
"""

import json
import re
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from learning.scripted_judge import HINT_START, sections, serve


class Wish(StrEnum):
    """What the person holds to in all projects."""

    FIGURE = "figure"
    VALUE = "value"
    BRIEF = "brief"


CORRECTIONS: Mapping[Wish, tuple[str, ...]] = {
    Wish.FIGURE: (
        "Say the number that the query returned.",
        "Tell me the number, please.",
        "Please tell me which number the query returned.",
    ),
    Wish.VALUE: (
        "Say which setting has which value now.",
        "Tell me the new value as well, please.",
        "Please name the setting and its new value.",
    ),
    Wish.BRIEF: (
        "Please answer in one short sentence.",
        "Too long. Please answer in one short sentence.",
        "That is too much to read: one short sentence, please.",
    ),
}
ALL_CORRECTIONS = {text: wish for wish, texts in CORRECTIONS.items() for text in texts}
THANKS = "Thanks."
MOST_WORDS = 25
"""Of an explanation."""
_CALL = re.compile(r"^\[", re.MULTILINE)
"""A call in a turn's text, which begins with its name in brackets."""
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_TITLE, _EARLIER = "Task and earlier turn", "\n\n[earlier turn]\n"


class Demand(NamedTuple):
    """What the person wants of an answer: a wish, and what must be in the answer."""

    wish: Wish
    fact: str
    """The number of `figure` and `value`, the topic of `brief`."""

    def is_met(self, answer: str) -> bool:
        """Return whether an answer, a turn as text, does what the person wants; a call is no answer."""
        if _CALL.search(answer):
            return False
        if self.wish is Wish.BRIEF:
            sentence = answer.strip()
            is_sentence = sentence.endswith((".", "!")) and "\n" not in sentence and len(sentence.split()) <= MOST_WORDS
            return is_sentence and self.fact.lower()[:5] in sentence.lower()
        number = float(self.fact)
        return any(abs(float(text) - number) <= 0.005 * max(1.0, abs(number)) for text in _NUMBER.findall(answer))


def wish_key(request: str, answer: str) -> str:
    """Return the key of an answer's wish: the user's last words before it, and the answer, as a judge reads them."""
    return f"{request}{_EARLIER}{answer}".strip()


def judge(question: str, system: str, wishes: Mapping[str, Demand]) -> str:
    """Return the judge's answer: a hint for a turn, or a grade of a new turn."""
    parts = sections(question)
    texts = {section.title: section.text for section in parts}
    if HINT_START in system:
        reply = texts.get("Next state: user reply", "")
        return f"\\boxed{{1}}\n{HINT_START}{reply}[HINT_END]" if reply in ALL_CORRECTIONS else "\\boxed{-1}"
    demand = wishes.get(texts.get(_TITLE, ""))
    if demand is None:
        return "\\boxed{0}"
    return "\\boxed{1}" if demand.is_met(texts["New turn"]) else "\\boxed{-1}"


def read_wishes(path: Path) -> dict[str, Demand]:
    """Read what `log_corpus` wrote beside its logs."""
    return {key: Demand(Wish(wish), fact) for key, (wish, fact) in json.loads(path.read_text()).items()}


def main() -> None:
    """Serve until the process is ended."""
    wishes = read_wishes(Path(sys.argv[2]))
    serve(int(sys.argv[1]), lambda system, question, _: judge(question, system, wishes), ("person",))


if __name__ == "__main__":
    main()
