r"""The words of a judge's answer: `\boxed{...}`, `[HINT_START]` and `[HINT_END]`. Pure.

    text --words--> boxes and marks of hints, in order
    content of a box --boxed_number, boxed_turn--> what it says, if only one reading is possible

Judges write the words in several ways: `\boxed { 1 }`, `\boxed{\text{1}}`, `[ hint_start ]`, `[HINT\_START]`.
"""

import re
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

MIN_HINT_CHARS = 10
"""A hint must have more characters than this (OpenClaw-RL's bound). Spaces in a row count once, and what can't be seen
does not count."""

_MARK = r"\[[ \t]{0,3}(?i:HINT(?:\\?_|[ -])%s)[ \t]{0,3}\]"
_WORD = re.compile(
    r"(?P<box>\\boxed)(?P<brace>[ \t]{0,4}\{)?"
    rf"|(?P<markup>[*_`#]{{0,6}}) ?{_MARK % 'START'}|(?P<end>{_MARK % 'END'})"
)
_BROKEN_MARK = re.compile(rf"(?=(?P<mark>{_MARK % '(?:START|END)'}))(?P<head>\[[ \t]{{0,3}}(?i:HINT)(?:\\?_|[ -]))")
_BOX_CHARS = 64
"""A box with more characters says nothing that can be read."""
_WRAPPERS = re.compile(r"\\(?:text|math|bold)[a-z]{0,8}|\\(?:bf|bm|rm|tt|it|mbox)(?![a-z])|\\[,;:! ]|[{}$*`]")
"""Matches what TeX and Markdown write around a number."""
_MINUS_SIGNS = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-"))
_NUMBER = re.compile(r"(?P<sign>[+-]?)\s{0,4}(?P<number>[0-9]{1,9})(?:\.0{0,9})?")
_NUMBER_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_TURN = re.compile(
    r"(?:turn\s{0,4})?(?:(?:number|no\.?)\s{0,4})?#?\s{0,4}(?P<context>c)?\s{0,4}#?"
    rf"(?:(?P<number>[0-9]{{1,9}})(?:\.0{{1,9}})?|(?P<word>{'|'.join(_NUMBER_WORDS)}))[.:]?",
    re.IGNORECASE,
)


class Word(NamedTuple):
    """A box, or a mark at the beginning or the end of a hint, with its position in the text."""

    kind: str
    """`box`, `start` or `end`."""
    start: int
    end: int
    content: str | None = None
    """Content of a box; None if its end is missing."""
    markup: str = ""
    """The Markdown before a mark at the beginning."""


def words(text: str) -> Iterator[Word]:
    """Yield the words of a text in order; a box in another's content is none."""
    position = 0
    for match in _WORD.finditer(text):
        if match.start() < position:
            continue
        position = match.end()
        if match["box"] is None:
            yield Word("end" if match["end"] else "start", match.start(), position, markup=match["markup"] or "")
            continue
        content = _content(text, position) if match["brace"] else None
        position += 0 if content is None else len(content) + 1
        yield Word("box", match.start(), position, content)


def _content(text: str, start: int) -> str | None:
    """Return the text from `start` to the brace that closes a box; None if it is missing or far."""
    depth = 1
    for position in range(start, min(len(text), start + _BOX_CHARS)):
        depth += (text[position] == "{") - (text[position] == "}")
        if not depth:
            return text[start:position]
    return None


def without_marks(text: str) -> str:
    """Return a text with a space inserted into each mark of a hint, so that `words` does not read it as one."""
    return _BROKEN_MARK.sub(r"\g<head> ", text)


def boxed_number(content: str | None) -> int | None:
    r"""Return the whole number in a box, None if it has none: `1`, `+1`, `1.0`, `\text{-1}`, a full-width 1."""
    match = _NUMBER.fullmatch(_plain_text(content))
    return None if match is None else int(match["number"]) * (-1 if match["sign"] == "-" else 1)


def boxed_turn(content: str | None) -> str | None:
    """Return the label of the turn that a box names, `3` or `c1` of a context turn; None if it names no single one.

    It may be written as `3`, `Turn 3`, `#3`, `No. 3`, `3.` or `three`; a range or a list names none.
    """
    match = _TURN.fullmatch(_plain_text(content))
    if match is None:
        return None
    number = int(match["number"]) if match["number"] else _NUMBER_WORDS.index(match["word"].lower()) + 1
    return f"{'c' if match['context'] else ''}{number}"


def _plain_text(content: str | None) -> str:
    """Return what a box shows, in ASCII where there is such a sign."""
    text = _WRAPPERS.sub("", unicodedata.normalize("NFKC", content or ""))
    return text.translate(_MINUS_SIGNS).strip()


def hint_between_marks(text: str, markup: str) -> str | None:
    """Return the hint in the text between its marks; None if it is too short.

    `markup` is the Markdown before the first mark: judges also write **[HINT_START]** ... **[HINT_END]**. A hint that
    is one fenced block is the text in it.
    """
    hint = text.strip().removeprefix(markup).removesuffix(markup).strip().replace("\r\n", "\n")
    first, _, rest = hint.partition("\n")
    if first.startswith("```") and rest.endswith("```") and hint.count("```") == 2:
        hint = rest.removesuffix("```").strip()
    visible = sum(unicodedata.category(char)[0] != "C" for char in " ".join(hint.split()))
    return hint if visible > MIN_HINT_CHARS else None
