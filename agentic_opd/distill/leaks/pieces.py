"""Hint, hidden tests and public text -> whether the hint contains pieces of a string of the tests.

A hint rarely repeats a line of a table, log or prose verbatim, but may repeat its numbers and unusual words.
"""

import builtins
import keyword
import re
from collections import Counter, defaultdict
from functools import lru_cache

from agentic_opd.core.text import text_lines
from agentic_opd.distill.leaks.hidden_data import KEPT_SOURCES, KEPT_TEXTS, hidden_data, plain
from agentic_opd.distill.leaks.ordinary_words import ORDINARY

_TOKEN = re.compile(r"[^\W_]+(?:(?:[-'.]|(?<=\d):(?=\d))[^\W_]+)*")
_INNER = re.compile(r"[-'.:]")
_CODE = frozenset(name.casefold() for name in (*keyword.kwlist, *dir(builtins)))
_COMMON_NUMBERS = frozenset(("12", "16", "24", "26", "32", "64", "128", "256", "365", "512", "1024"))
_ENDINGS = ("s", "es", "d", "ed", "ing", "ly")
_ENOUGH = 2
_MORE_OF_LONG = 8
"""The required weight grows by 1 per this many pieces of a string."""


def tells_pieces(hint: str, hidden_tests: str, public_text: str) -> bool:
    """Return whether `hint` has enough pieces of one string, or of one line of it, that the public text lacks."""
    index, needed = _pieces(hidden_tests)
    told: Counter[int] = Counter()
    for word in words(hint) - words(public_text):
        for unit in index.get(word, ()):
            told[unit] += _weight(word)
    return any(weight >= needed[unit] for unit, weight in told.items())


@lru_cache(maxsize=KEPT_TEXTS)
def words(text: str) -> frozenset[str]:
    """Return the words and numbers of a text in lower case, and the parts of those joined by `-`, `'`, `.` or `:`."""
    tokens = {token.casefold() for token in _TOKEN.findall(plain(text))}
    return frozenset(tokens.union(*map(_INNER.split, tokens)))


@lru_cache(maxsize=KEPT_SOURCES)
def _pieces(source: str) -> tuple[dict[str, list[int]], list[int]]:
    """Return piece -> indices of its units (strings and their lines), and the weight required per unit."""
    index: dict[str, list[int]] = defaultdict(list)
    needed: list[int] = []
    for unit in {line for text in hidden_data(source).texts for line in (text, *text_lines(text))}:
        pieces = [word for word in words.__wrapped__(unit) if _weight(word)]
        for piece in pieces:
            index[piece].append(len(needed))
        needed.append(_ENOUGH + len(pieces) // _MORE_OF_LONG)
    return dict(index), needed


def _weight(word: str) -> int:
    """Return the weight of a piece: 2 suffices for a short string, 1 needs a second piece, 0 is a common word."""
    if word.replace(".", "").isdecimal():
        digits = word.replace(".", "").strip("0")
        return 0 if len(digits) < 2 or word in _COMMON_NUMBERS else 1 if len(word) == 2 else 2
    if word.isalpha():
        stems = {word, *(word.removesuffix(ending) for ending in _ENDINGS)}
        return int(len(word) > 2 and stems.isdisjoint(ORDINARY) and stems.isdisjoint(_CODE))
    parts = [part for part in _INNER.split(word) if part != word]
    return 2 * (("'" not in word and any(map(_weight, parts))) or (not parts and len(word) > 2))
