"""Text, data of hidden tests -> the data in the text, in code or in words, and whether a hint has more than is public.

A text is parsed sentence by sentence into values. The context of a value decides whether it counts: `n % 15` is a rule
and "26 letters" is a count, so neither number is a value.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from agentic_opd.distill.leaks.hidden_data import (
    BOX_OF_EMPTY,
    EMPTY_BOX,
    EMPTY_STRING,
    IGNORED,
    KEPT_TEXTS,
    LAID_IGNORED,
    HiddenData,
    box_key,
    hidden_data,
    is_trivial,
    laid_key,
    number_leaf,
    plain,
    squashed,
)
from agentic_opd.distill.leaks.ordinary_words import ORDINARY
from agentic_opd.distill.leaks.pieces import words

_Evidence = tuple[str, ...]
"""The kind of a datum, followed by the datum."""


def tells(hint: str, hidden_tests: str, public_text: str) -> bool:
    """Return whether `hint` contains data of the tests that the public text does not contain."""
    told = _evidence(hint, hidden_data(hidden_tests), words(public_text), public=False)
    return bool(told) and not told <= _shown(public_text, hidden_tests)


@lru_cache(maxsize=KEPT_TEXTS)
def _shown(public_text: str, hidden_tests: str) -> frozenset[_Evidence]:
    return frozenset(_evidence(public_text, hidden_data(hidden_tests), words(public_text), public=True))


_TYPOGRAPHY = str.maketrans("“”„«»‘’−–—→⇒", '"""""\'\'--->>')  # noqa: RUF001
_END = re.compile(r"(?<=[.!?;])(?<!e\.g\.)(?<!i\.e\.)['\")]?\s+(?=[A-Z(\[`'\"\d])|\n+")
_LONGEST, _OVERLAP = 2_000, 200
"""Longer lines are parsed in overlapping parts, so that the time is linear in their length."""


def _sentences(text: str) -> Iterator[str]:
    start = 0
    for end in (*(match.end() for match in _END.finditer(text)), len(text)):
        for part in range(start, max(start + 1, end - _OVERLAP), _LONGEST):
            yield text[part : min(end, part + _LONGEST + _OVERLAP)].replace("\\n", "\n").replace("\\t", "\t")
        start = end


@dataclass(frozen=True, slots=True)
class _Mention:
    """A value in a text, at `[start, end)`."""

    key: str
    start: int
    end: int
    is_part: bool = False
    """Whether it is a trivial value inside a list, and therefore no input or result."""


def _evidence(text: str, data: HiddenData, nouns: frozenset[str], *, public: bool) -> set[_Evidence]:
    """Return all data of the tests in `text`; `nouns`, the words of the public text, may name empty values."""
    text = plain(text.translate(_TYPOGRAPHY))
    found: set[_Evidence] = set(_laid_out(text, data, public))
    squashed_text = squashed(text)
    strings = sorted((string for string in data.strings if string and string in squashed_text), key=len, reverse=True)
    before: list[_Mention] = []
    for sentence in _sentences(text):
        reader = _Sentence(sentence, data, strings, nouns, public)
        found.update(reader.found, _checks([*before, *reader.mentions], data))
        before = [replace(mention, start=mention.start - len(sentence) - 1) for mention in reader.mentions]
    return found


def _squeezed(text: str, ignored: re.Pattern[str]) -> tuple[str, list[int]]:
    """Return the text in lower case without the matches of `ignored`, and the original index of each character."""
    kept = bytearray(b"\1") * len(text)
    for match in ignored.finditer(text):
        kept[match.start() : match.end()] = bytes(len(match.group()))
    pairs = [(char, i) for i, c in enumerate(text) if kept[i] for char in c.casefold()]
    return "".join(char for char, _ in pairs), [i for _, i in pairs]


def _laid_out(text: str, data: HiddenData, public: bool) -> Iterator[_Evidence]:
    """Yield containers whose values occur in order in any layout; in the public text, strings as well."""
    line, at = _squeezed(text, LAID_IGNORED)
    for kind, value in (*(("laid", v) for v in data.laid), *(("string", v) for v in data.strings if public)):
        start = line.find(value)
        while value and start >= 0:
            before, after = text[at[start] - 1 : at[start]], text[at[start + len(value) - 1] + 1 :][:1]
            if not ((value[0].isalnum() and before.isalnum()) or (value[-1].isalnum() and after.isalnum())):
                yield kind, value
                break
            start = line.find(value, start + 1)


def _checks(mentions: Sequence[_Mention], data: HiddenData) -> Iterator[_Evidence]:
    """Yield the checks whose values are all mentioned, in more than one place."""
    places: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for mention in (mention for mention in mentions if not mention.is_part):
        places[mention.key].add((mention.start, mention.end))
    for check in [check for key in places for check in data.checks.get(key, ())]:
        is_there = all(len(places[key]) >= min(count, 2) for key, count in Counter(check).items())
        if is_there and len(set[tuple[int, int]]().union(*(places[key] for key in check))) > 1:
            yield ("check", *check)


_NOUNS = frozenset(
    """
    list array sequence collection tuple dict dictionary mapping object input string text word line matrix grid
    tree iterable value number element item interval entry entries name row set sentence key character data result
    answer output
    """.split()  # noqa: SIM905
)
_VALUE = re.compile(
    r"""
      (?P<string>(?<![\w'"])(?:\'\'|\"\")(?!['"\w]|\.\w))
    | (?P<box>(?<!\w)(?:\[\s*(?:\[[\s,\[\]]*)?\]|\{\s*\}|\(\s*\)))
    | \b(?i:empty|blank)\s(?P<noun>\w+)
    | \b(?P<subject>\w+)\s(?:is|are|was|were|be|being)\s(?:\w+\s)?empty\b
    | \b(?i:no|without|zero)\s(?:(?:any|an?|single)\s)?(?P<without>\w+)
        (?!\s(?:is|was|with|that)\b(?!\s(?:given|there)\b))
    | (?P<none>\bthere\s(?:is|are)\snone\b|\b(?:print|return|output|write)s?\snothing\b
        | \b(?i:nothing)\s(?:in|inside|at\sall|is\s(?:given|passed|there)|(?:may|must|should|is\sto)\sbe)\b)
    | (?P<number>(?:(?<![\w)\]}.'"])-)?(?<![\w.])\d[\d_]*(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)(?!\.\w))
    | (?P<constant>\b(?:True|False|None|true|false)\b)
    | (?P<error>\b\w+Error\b)
    """,
    re.VERBOSE,
)
_BOXES = frozenset(
    """
    list array sequence collection tuple dict dictionary mapping object set item items element elements entry entries
    """.split()  # noqa: SIM905
)
"""Nouns of containers and their parts: an empty one is not an empty string."""
_ASSIGNED = re.compile(r"\w ?= ?$|\.\w+\([^()]*$")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:([, ])\d{3})(?:\1\d{3})*(?![\d,]*\d)")

_CALLED = "range|round|pop|max|min|len|int|str|float|sum|slice|get|split|append|insert|enumerate|abs|sorted|zip|pow"
_RULE_BEFORE = re.compile(
    r"(?:%|(?<!\S)\*|\w\*\*?|//|[\w)\]] [-+/]|<<|>>|(?<![-=])[<>]=?|%\s*\w+\s*[=!]=|[\w\])]\[[^\[\](){},]*|"
    r"\b(?:base|version|python|line|column|step|than|least|most|index|position)|"
    r"\b(?:divi\w+|multipl\w+|modulo|mod|factors?|powers?|remainder)"
    r"(?: (?:by|of|with|into|both|all))*(?: -?\d+(?:,|,? and|,? or|,? but not)(?: by| of)?)*|"
    rf"\b(?:{_CALLED})\([^()]*)\s*$",
    re.IGNORECASE,
)
_RULE_AFTER = re.compile(
    r"\s?(?:%|\*|//|<<|[-+/] |percent|degrees|decimals?|\w*\s?divides)|"
    r" (?:(?!(?:on|in|at|of|for|to|as|with|and|or|not|per)\b)\w+ )?(?:(?:value|element|number|word|item|pointer|loop|"
    r"case|branche|check|time|digit|bit|condition|letter|character|group|list|step|line|row|column|side|end|way|part|"
    r"rule|kind|name|level)s?|branch)\b"
)
_LIKE = re.compile(r"\b(?:like|such as|as in|e\.g\.|for example|word|string|letter|character|key),? $", re.IGNORECASE)
_VARIABLE = re.compile(r"(?:\b[b-hj-z] is|[!=]=) ['\"`]?$")
"""Matches before a constant of the code: `if c == ')'`."""
_SPACE = " \n\t'\"`"
_QUOTES = ("''", '""', "``")
_AROUND = (*_QUOTES, "[]", "()", "{}")
_PART = re.compile(r"[\[({] ,|, ?  ?(?:, ?[-\d'\"\[({]|[\])}])")
_LOOSE_WORDS = 5
_RANGE = re.compile(r" to |-|\.\.+")
_BREAK = re.compile(r"==|;|[-=]>|\+|\]\)")
_WORD = re.compile(r"\w+")
_NO_BRACKET = re.compile(r"[^\[\](){}]+")
_BRACKETS = re.compile(r"\[\]|\(\)|\{\}")


class _Sentence:
    """One sentence or line of a text: the values in it, and the data found."""

    def __init__(
        self, text: str, data: HiddenData, strings: Sequence[str], nouns: frozenset[str], public: bool
    ) -> None:
        self.found: set[_Evidence] = set()
        self.mentions: list[_Mention] = []
        self._text = text
        self._data = data
        self._nouns = nouns
        self._public = public
        self._taken = bytearray(len(text))
        self._read_strings(strings)
        for match in _VALUE.finditer(text):
            for key in self._keys(match):
                self._mention(key, *match.span())
        for match in (*_THOUSANDS.finditer(text), *(re.finditer(r"\d+", text) if public else ())):
            self._number(re.sub("[, ]", "", match.group()))
        self._read_boxes()

    def _around(self, start: int, end: int) -> tuple[str, str]:
        return self._text[max(0, start - 50) : start], self._text[end : end + 40]

    def _mention(self, key: str, start: int, end: int) -> None:
        if 1 in self._taken[start:end]:
            return
        before, after = self._around(start, end)
        is_part = is_trivial(key) and key != EMPTY_BOX and bool(_PART.search(f"{before[-2:]} {after[:3]}"))
        self.mentions.append(_Mention(key, start, end, is_part))

    def _number(self, text: str) -> str | None:
        leaf = number_leaf(text)
        if leaf in self._data.numbers:
            self.found.add(("number", leaf))
        return leaf

    def _read_strings(self, strings: Sequence[str]) -> None:
        line, at = _squeezed(self._text, IGNORED)
        for string in strings:
            start = line.find(string)
            while start >= 0:
                self._read_string(string, at[start], at[start + len(string) - 1] + 1)
                start = line.find(string, start + 1)

    def _read_string(self, string: str, start: int, end: int) -> None:
        """Record a string between word boundaries; skip an ordinary word or sign unless quoted or an example."""
        before, after = self._text[start - 1 : start] or " ", self._text[end : end + 1] or " "
        starts = not re.match(r"\w", before) if string[0].isalnum() else before in _SPACE
        ends = not re.match(r"\w", after) if string[-1].isalnum() else after in _SPACE + ".,;:?!)"
        if (
            not (starts and ends)
            or (after == "(" and string.isidentifier())
            or _VARIABLE.search(self._around(start, end)[0])
        ):
            return
        is_quoted = before + after in _QUOTES
        is_ordinary = string in ORDINARY or re.fullmatch(r"\W", string)
        if is_ordinary and not is_quoted and not _LIKE.search(self._around(start, end)[0]):
            return
        if len(string) > 1:
            self.found.add(("string", string))
            exact = " ".join(self._text[start:end].split())
            if exact in self._data.exact:
                self.found.add(("exact", exact))
        self._mention(self._data.strings[string], start, end)
        self._taken[start:end] = b"\1" * (end - start)

    def _keys(self, match: re.Match[str]) -> Iterator[str]:
        """Yield the keys of a value other than a non-empty string; "empty lists" may be one list or a list of them."""
        kind, text = match.lastgroup or "", match.group()
        before, after = self._around(*match.span())
        plain_keys = {"constant": f"={text.title()}", "error": f"!{text.casefold()}", "string": EMPTY_STRING}
        if kind == "number":
            if not (_RULE_BEFORE.search(before) or _RULE_AFTER.match(after)):
                yield self._number(text) or ""
        elif kind in plain_keys:
            yield plain_keys[kind]
        elif kind == "box":
            if not _ASSIGNED.search(before):
                yield BOX_OF_EMPTY if text.count("[") > 1 else EMPTY_BOX
        elif kind == "none" or self._is_noun(match[kind].casefold()):
            yield EMPTY_BOX
            if kind == "noun" and text.endswith("s"):
                yield BOX_OF_EMPTY
            if match[kind] not in _BOXES:
                yield EMPTY_STRING

    def _is_noun(self, word: str) -> bool:
        """Whether the word may name an input or a result."""
        forms = {word, word.removesuffix("s"), word.removesuffix("es"), f"{word}s"}
        return not forms.isdisjoint(_NOUNS) or (len(word) > 3 and not forms.isdisjoint(self._nouns))

    def _read_boxes(self) -> None:
        """Record containers by their leaves, in any order and notation."""
        atoms = sorted((m for m in self.mentions if m.key not in (EMPTY_BOX, BOX_OF_EMPTY)), key=lambda m: m.start)
        gaps = [self._text[a.end : b.start] for a, b in pairwise(atoms)]
        breaks = (_BREAK.search(gap) is not None or len(_WORD.findall(gap)) > _LOOSE_WORDS for gap in gaps)
        sums = list(accumulate((hash(atom.key) for atom in atoms), initial=0))
        far = list(accumulate(breaks, initial=0))
        for length in {length for length, _ in self._data.boxes}:
            for first in range(len(atoms) - length + 1):
                last = first + length - 1
                is_box = (length, sums[last + 1] - sums[first]) in self._data.boxes and far[first] == far[last]
                if is_box and self._is_whole(atoms[first].start, atoms[last].end):
                    key = box_key([atom.key for atom in atoms[first : last + 1]])
                    box = _Mention(key, atoms[first].start, atoms[last].end)
                    is_tuple = self._text[: box.start].endswith("(") or "tuple" in self._text.casefold()
                    self.mentions.append(box)
                    # two values may be adjacent by chance
                    if self._public or length > 2 or _RANGE.fullmatch(gaps[first]) or self._is_enclosed(box):
                        self.found.add(("values", key))
                    if is_tuple and key in self._data.tuples:
                        self.found.add(("tuple", key))
                    if (laid := laid_key(atom.key for atom in atoms[first : last + 1])) in self._data.laid:
                        self.found.add(("laid", laid))

    def _is_whole(self, start: int, end: int) -> bool:
        """Whether a bracket left open in the span closes right after it, and an unopened one opens right before it."""
        rest, shorter = "", _NO_BRACKET.sub("", self._text[start:end])
        while shorter != rest:
            rest, shorter = shorter, _BRACKETS.sub("", shorter)
        before, after = self._text[:start].rstrip(_SPACE)[-1:], self._text[end:].lstrip(_SPACE)[:1]
        return (not rest or rest[0] in "[({" or before in "[({") and (not rest or rest[-1] in "])}" or after in "])}")

    def _is_enclosed(self, box: _Mention) -> bool:
        before, after = self._text[: box.start].rstrip("'\"`"), self._text[box.end :].lstrip("'\"`")
        return before[-1:] + after[:1] in _AROUND and not before[-2:-1].isalnum()
