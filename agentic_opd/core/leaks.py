"""Detection of hidden test data in hints. Pure.

    hidden tests --_hidden_data--> numbers, strings, containers, and checks (the inputs of a test with its result)
    text --_read--> the same data in code or in words: "1 to 3 and 3 to 5" is [[1, 3], [3, 5]], "ninety-eight" is 98
    a hint leaks what is found in it and not in the public text

Values have keys: `#5` is a number (also the string '5'), `=True` a constant, `!valueerror` an exception, `'ab` a string
in lower case without spaces, `[]` an empty container. The key of another container is its leaves in sorted order.
"""

import ast
import re
import warnings
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain, islice, pairwise
from operator import itemgetter
from typing import NamedTuple

_MOST_SOURCE = 200_000
"""Characters of the hidden tests that are parsed; runs of numbers are compared in all of them."""
_MOST_LEAVES = 30
"""Leaves of the largest container that counts as data."""
_MOST_VALUES = 60
"""Values of the largest check that counts as data."""
_VISITS, _VISITS_PER_NODE = 100_000, 20
"""Nodes of the tests that are visited to find checks: names are resolved where they are used, so a short source can
name a large value often. The checks that come later are not read; their values count one by one."""
_EMPTY_STRING, _EMPTY, _BOX_OF_EMPTY = "'", "[]", "[[]]"


def leaks(hint: str, hidden_tests: str, public_text: str) -> bool:
    """Return whether `hint` gives away data of the hidden tests that `public_text` does not show.

    A hint leaks if one of these is found in it, in code or in words, and not in the public text (all that the agent
    read or wrote):

    - a number, string or container of the tests. Exempt are constants, one-digit integers, empty and one-character
      values, numbers that state a rule or count something (`n % 15`, "26 letters"), and ordinary words without quotes;
    - two unusual words of one string, one number of three digits in it, or three consecutive long numbers of a list;
    - all values of a check in one or two consecutive sentences: "for 0 it must return FizzBuzz". For an empty input,
      that input and the result are enough;
    - an asserted expression;
    - the whole hidden text, if it is no longer than the hint: the answer itself, in a world without tests.

    If the hidden tests are not Python, their quoted strings and integers count.
    """
    data, words = _hidden_data(hidden_tests), _words(public_text)
    if (found := _read(hint, data)) and not found <= _shown(public_text, hidden_tests):
        return True
    told = [(text, word) for word in _words(hint) - words for text in data.pieces.get(word, ())]
    if (
        any(sum(map(str.isdecimal, word)) > 2 for _, word in told)
        or max(Counter(t for t, _ in told).values(), default=0) > 1
    ):
        return True
    answer, said, shown = (" ".join(text.casefold().split()) for text in (hidden_tests, hint, public_text))
    return answer != "" and _has_words(said, answer) and not _has_words(shown, answer)


def _has_words(text: str, part: str) -> bool:
    """Return whether `part` occurs in the text and neither begins nor ends within a word."""
    return part in text and _with_edges(part) in _with_edges(text)


def _with_edges(text: str) -> str:
    r"""Mark each place where no word goes on to the left (`\x1c`) or the right (`\x1d`), so that `in` compares edges.

    The text has neither mark, because `str.split` removes both. A regex would take quadratic time for `[[[[`.
    """
    return re.sub(r"(?!\w)", "\x1d", re.sub(r"(?<!\w)", "\x1c", text))


@lru_cache(maxsize=8)  # the turns of an episode share one text
def _shown(public_text: str, hidden_tests: str) -> set[str]:
    return _read(public_text, _hidden_data(hidden_tests), public=True)


_UNITS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_NAMED = {word: i for i, word in enumerate(_UNITS)} | {word: 20 + 10 * i for i, word in enumerate(_TENS)}
_SCALES = {"hundred": 100, "thousand": 1_000, "million": 1_000_000, "billion": 1_000_000_000}
_NUMERAL = "|".join(sorted({*_NAMED, *_SCALES}, key=len, reverse=True))
_NUMERALS = re.compile(
    rf"(?<![\w'\"`-])(?:(minus|negative)[ -])?((?:an? (?={'|'.join(_SCALES)}))?(?:{_NUMERAL})"
    rf"(?:[ -](?:and (?!one\b))?(?:{_NUMERAL})){{0,12}})(e?s)?(?![\w'\"`])",
    re.IGNORECASE,
)
_TYPOGRAPHY = str.maketrans("“”„«»‘’−–—→⇒", '"""""\'\'--->>')  # noqa: RUF001
_WORD = re.compile(r"[^\W_]+(?:[-'.:][^\W_]+)*")
_ORDINARY = frozenset(
    """
    a an as at be by do go i if in is it no of on or so to up us we able about above add after again all also any are
    array ask back bad been begin best big bit blank body bool both break but call can case char character check class
    close code comma count data date day dict digit does done down each edge element else empty end entry equal error
    even every example expected extra fail false fast field file find first fit fix flag float for from function get
    give given good great group half has hash have head help here high hint hold index inner input int its item join
    just keep key kind large last least leave left len letter level like line list long look loop lot low make many map
    match math max may mean min minus miss mode more most move much must name need never new next none not null number
    off old once one only open order other out over own pair part pass path plus point pop print push put range read
    real remove replace rest result return reverse right root round row rule run same score see self set shift short
    should side size skip slice small some sort source space split stack start state step stop store str string style
    sub such sum swap table take task test text than that the their then there these they thing this time token too top
    total tree true try tuple two type under use user valid value wait was way well were what when where which while
    white whole will with word work write wrong year yes yet you your zero
    """.split()  # noqa: SIM905
)
"""Words that count as strings of the tests only in quotes or after words like "such as"."""


def in_digits(text: str) -> str:
    """Replace number words by digits: "minus five" -> "-5", "three fives" -> "5, 5, 5". A lone "one" stays a word."""

    def digits(match: re.Match[str]) -> str:
        numbers = _numbers(re.split("[ -]", match[2].lower()))
        if match[3] and len(numbers) == 2 and numbers[0] < 10:
            return ", ".join([str(numbers[1])] * numbers[0])
        return match.group() if numbers == [1] and not match[1] else "-" * bool(match[1]) + " ".join(map(str, numbers))

    return _NUMERALS.sub(digits, text.translate(_TYPOGRAPHY))


def _numbers(words: Iterable[str]) -> list[int]:
    """Return the numbers in a run of number words: `twenty one two` -> [21, 2]."""
    numbers: list[int] = []
    total = part = 0
    room = -1  # a following word below this continues the number
    for word in words:
        if word == "hundred":
            part, room = (part or 1) * 100, 100
        elif word in _SCALES:
            total, part, room = total + (part or 1) * _SCALES[word], 0, 1000
        elif word in _NAMED:
            value = _NAMED[word]
            if room >= 0 and (value >= room or value == 0):
                numbers.append(total + part)
                total = part = 0
            part, room = part + value, 10 if value >= 20 else 0
    return [*numbers, total + part]


@lru_cache(maxsize=8)
def _words(text: str) -> frozenset[str]:
    """Return the words and numbers of a text in lower case, and the parts of those joined by `-`, `'`, `.` or `:`."""
    tokens = {token.casefold() for token in _WORD.findall(in_digits(text))}
    return frozenset(tokens.union(*(re.split("[-'.:]", token) for token in tokens)))


def _is_ordinary(word: str) -> bool:
    return not _ORDINARY.isdisjoint(word.removesuffix(end) for end in ("", "s", "es", "ed", "d", "ing", "ly", "er"))


def _number(text: str) -> str | None:
    """Return the key of a number in digits; None if `text` is not a finite number."""
    with suppress(ValueError, OverflowError):
        value = float(text.replace("_", ""))
        return f"#{int(value)}" if value == int(value) else f"#{value!r}"
    return None


class _Value(NamedTuple):
    """A literal of the tests, without the leaves beyond those of the largest container that counts as data."""

    leaves: tuple[str, ...]
    children: tuple["_Value", ...] = ()
    text: str = ""

    @property
    def key(self) -> str:
        return _BOX_OF_EMPTY if self.children and not self.leaves else _key(self.leaves)


def _joined(values: Iterable[_Value], children: tuple[_Value, ...] = ()) -> _Value:
    leaves = chain.from_iterable(value.leaves for value in values)
    return _Value(tuple(islice(leaves, _MOST_LEAVES + 1)), children)


@dataclass(slots=True)
class _Data:
    """Data of hidden tests for which texts are searched."""

    numbers: set[str] = field(default_factory=set[str])
    strings: dict[str, str] = field(default_factory=dict[str, str])
    """String without the matches of `_IGNORED` -> its key."""
    boxes: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """Number of leaves and the sum of their hashes, which is independent of order."""
    checks: dict[str, list[tuple[str, ...]]] = field(default_factory=lambda: defaultdict(list))
    """Key of a check that the fewest checks have -> the keys of its values."""
    exact: set[str] = field(default_factory=set[str])
    """Words, with their case."""
    pieces: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Unusual word or number -> the strings that have it."""
    units: list[str] = field(default_factory=list[str])
    """Asserted expressions, as `_tight`."""
    digits: str = ""
    """All numbers of the tests, in order and without signs, with spaces between them."""

    def add(self, value: _Value) -> None:
        """Add a literal and its parts."""
        if len(value.leaves) > _MOST_LEAVES:
            return
        key = value.key
        for child in value.children:
            self.add(child)
        if len(value.leaves) > 1:
            self.boxes.add((len(value.leaves), sum(map(hash, value.leaves))))
        elif key[0] == "#" and not _is_trivial(key):
            self.numbers.add(key)
        elif key[0] == "'":
            self.strings.update(dict.fromkeys((key[1:], _IGNORED.sub("", in_digits(value.text)).casefold()), key))
            self.exact.update([value.text] if value.text.isalnum() else [])
            for word in _words.__wrapped__(value.text):
                if len(word) > 2 and word != value.text.casefold() and not _is_ordinary(word):
                    self.pieces[word].add(value.text)

    def add_checks(self, checks: Iterable[Sequence[_Value]]) -> None:
        """Add the values of each check, and all its inputs as one container."""
        distinct: dict[tuple[str, ...], None] = {}
        for values in checks:
            for value in (*values, _joined(values[:-1])):
                self.add(value)
            if len(values) > 1 and all(len(value.leaves) <= _MOST_LEAVES for value in values):
                keys = tuple(value.key for value in values)
                empty = [key for key in keys[:-1] if key in (_EMPTY_STRING, _EMPTY)]
                distinct |= dict.fromkeys({keys, (*empty[:1], keys[-1])} if empty else {keys})
        counts = Counter(key for check in distinct for key in {*check})
        for check in distinct:
            self.checks[min(check, key=lambda key: (counts[key], -len(key)))].append(check)


_IGNORED = re.compile(r"(?<=\w\w),| (?:and|then)\b|[\s'\"`]", re.IGNORECASE)
"""Ignored in a string: "the cat the dog" equals "the, cat, the and dog"."""
_LAYOUT = re.compile(r"[\s,;:/|()\[\]{}'\"`]|[-=]>|=|\b(?:and|then)\b", re.IGNORECASE)


def _tight(text: str) -> str:
    return re.sub(r"[\s`]", "", text).replace('"', "'")


def _key(leaves: Sequence[str]) -> str:
    return "|".join(sorted(leaves)) if leaves else _EMPTY


def _is_trivial(key: str) -> bool:
    """Whether a value is too common to be data: one digit, one letter, a constant, an empty value."""
    return len(key) <= 2 or key[0] == "=" or key == "#-1"


@lru_cache(maxsize=32)  # the tests of a task are used repeatedly and may be megabytes
def _hidden_data(source: str) -> _Data:
    data, head = _Data(digits=f" {' '.join(re.findall(r'[0-9]+', source))} "), source
    if len(source) > _MOST_SOURCE:
        head = "".join(re.findall(r"^.{0,10000}\n", source, re.MULTILINE))[:_MOST_SOURCE].rpartition("\n")[0]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's tests
            tree = ast.parse(head)
        literals = _Literals(tree)
        for value in literals.of(tree, {}):
            data.add(value)
        data.add_checks(literals.checks())
        data.units = [_tight(ast.unparse(node.test)) for node in literals.nodes if isinstance(node, ast.Assert)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        for text in re.findall(r"'[^'\n]*'|\"[^\"\n]*\"|\b\d+", head):
            is_text = text[0] in "'\""
            data.add(_constant(text[1:-1]) if is_text else _Value((_number(text) or f"={text}",)))
    return data


class _Literals:
    """The literals in the source of tests. Each is read once, and the time is in proportion to the source's length."""

    def __init__(self, tree: ast.Module) -> None:
        self.nodes = [*ast.walk(tree)]
        self._values: dict[ast.AST, _Value | None] = {}
        self._visits_left = _VISITS + _VISITS_PER_NODE * len(self.nodes)

    def checks(self) -> Iterator[list[_Value]]:
        """Yield the literals of each check: an assertion, a row of a table, a statement with the error it raises."""
        names: dict[str, ast.expr] = {}
        for node in self.nodes:
            results: list[_Value] = []
            groups: Iterable[Iterable[ast.AST]] = ()
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names[node.targets[0].id] = node.value
            elif isinstance(node, ast.List | ast.Tuple):
                groups = (row.elts for row in node.elts if isinstance(row, ast.Tuple))
            elif isinstance(node, ast.With | ast.Try):
                handlers = node.handlers if isinstance(node, ast.Try) else ()
                types = [handler.type for handler in handlers if handler.type]
                errors = node.items if isinstance(node, ast.With) else types
                groups = (chain([statement], errors) for statement in node.body)
            elif isinstance(node, ast.Assert):
                groups = [[node.test]]
                is_not = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
                results = [] if isinstance(node.test, ast.Compare) else [_constant(not is_not)]
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr.startswith("assert")
            ):
                groups = [node.args]
                results = [
                    _constant(value) for value in {"assertTrue": [True], "assertFalse": [False]}.get(node.func.attr, [])
                ]
            for group in groups:
                values = [*islice((value for part in group for value in self.of(part, names)), _MOST_VALUES + 1)]
                if len(values) <= _MOST_VALUES and self._visits_left > 0:
                    yield [*values, *results]

    def of(self, node: ast.AST, names: dict[str, ast.expr], depth: int = 3) -> Iterator[_Value]:
        """Yield the largest literals, without docstrings, indices and upper bounds; names are resolved `depth` times.

        Nothing more is yielded when all visits are made.
        """
        self._visits_left -= 1
        if self._visits_left <= 0:
            return
        children: Iterable[ast.AST] = ast.iter_child_nodes(node)
        if (value := self._literal(node)) is not None:
            yield value
            children = ()
        elif isinstance(node, ast.Name) and node.id.endswith("Error"):
            yield _Value((f"!{node.id.casefold()}",))
        elif isinstance(node, ast.Name) and node.id in names and depth:
            children = [names[node.id]]
            depth -= 1
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            children = ()
        elif isinstance(node, ast.Subscript) or (
            isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt | ast.LtE)
        ):
            children = islice(children, 1)
        elif isinstance(node, ast.Assign) and _is_named(node.targets[0], "METADATA"):  # of HumanEval's tasks
            children = ()
        for child in children:
            yield from self.of(child, names, depth)

    def _literal(self, node: ast.AST) -> _Value | None:
        if node not in self._values:
            self._values[node] = self._read_literal(node)
        return self._values[node]

    def _read_literal(self, node: ast.AST) -> _Value | None:
        if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict):
            pairs = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else [node.elts]
            children = [self._literal(part) for parts in pairs for part in parts if part is not None]
            values = [child for child in children if child is not None]
            if len(values) < len(children):
                return None
            full = [value for value in values if value.leaves]  # An empty value is no data of its own.
            return _joined(full, tuple((full or values[:1])[: _MOST_LEAVES + 1]))
        with suppress(ValueError, TypeError):
            return _constant(ast.literal_eval(node)) if isinstance(node, ast.Constant | ast.UnaryOp) else None
        return None


def _is_named(target: ast.expr, name: str) -> bool:
    return isinstance(target, ast.Name) and target.id == name


def _constant(value: object) -> _Value:
    if isinstance(value, str):
        words = value.split()[: _MOST_LEAVES + 1]
        plain = [word for word in words if re.fullmatch(r"-?(?:0|[1-9]\d*)(\.\d+)?", word)]
        numbers = [number for word in plain if (number := _number(word)) is not None]
        if words and len(numbers) == len(words):  # program input: often a count, followed by as many numbers
            numbers = numbers[int(len(words) > 1 and numbers[0] == f"#{len(words) - 1}") :]
            return _Value(tuple(numbers), tuple(_Value((number,)) for number in numbers))
        return _Value((f"'{_IGNORED.sub('', value).casefold()}",), (), value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return _Value(((is_number and _number(repr(value))) or f"={value}",))


_Mention = tuple[str, int, int]
"""Key of a value in a text, and its span."""
_SENTENCE_END = re.compile(r"(?<=[.!?;])(?<!e\.g\.)(?<!i\.e\.)['\")]?\s+(?=[A-Z(\[`'\"\d])|\n+")
_VALUE = re.compile(
    r"""
      (?P<string>(?<![\w'"])(?:\'\'|\"\")(?!['"\w]|\.\w)) | (?P<boxes>\[\s*\[[\s,\[\]]{0,100}\])
    | (?P<box>(?<!\w)(?<!\w\s=\s)(?:\[\s*\]|\{\s*\}|\(\s*\)))
    | \b(?i:empty|blank)\s(?P<noun>\w+) | \b(?P<subject>\w+)\s(?:is|are|was|were|be|being)\s(?:\w+\s)?empty\b
    | \b(?i:no|without|zero)\s(?:(?:any|an?|single)\s)?(?P<without>\w+)
        (?!\s(?:is|was|with|that)\b(?!\s(?:given|there)\b))
    | (?P<number>(?:(?<![\w)\]}.'"])-)?(?<![\w.])\d[\d_]*(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)(?!\.\w))
    | (?P<constant>\b(?:True|False|None|true|false)\b) | (?P<error>\b\w+Error\b)
    """,
    re.VERBOSE,
)
_NOUN = re.compile(
    r"(?:(list|array|sequence|collection|tuple|dict|dictionary|mapping|object|set|item|element|entry|entries)|input|string|"
    r"text|word|line|matrix|grid|tree|iterable|value|number|name|row|key|character|data|result|answer|output)(e?s)?"
)
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
_PART = re.compile(r"[\[({] ,|, ?  ?(?:, ?[-\d'\"\[({]|[\])}])")
_BREAK = re.compile(r"==|;|[-=]>|\+|\]\)|[\])}],? (?!and [\d\[(])[a-z]|(?:\b\w++\W++){6}")
"""Separates values of different containers: an operator, a word after a bracket, or six words."""
_QUOTED = ("''", '""', "``")
_SPACE = " \n\t'\"`"


def _read(text: str, data: _Data, *, public: bool = False) -> set[str]:
    """Return the data of the tests in a text."""
    tight = _tight(text)
    digits = re.findall(r"\d+", text)
    found = {*(unit for unit in data.units if unit in tight), *_shared_runs(digits, data.digits)}
    text = in_digits(text.replace("\\n", "\n").replace("\\t", "\t"))
    mentions = [*_strings(text, data)]
    taken = bytearray(len(text))
    for key, start, end in mentions:
        taken[start:end] = b"\1" * (end - start)
        found.update({key, text[start:end]} & {key, *data.exact} if len(key) > 2 else ())
    parts: set[_Mention] = set()
    for match in _VALUE.finditer(text):
        before, after = text[max(0, match.start() - 50) : match.start()], text[match.end() : match.end() + 40]
        these = [] if 1 in taken[match.start() : match.end()] else _keys(match, before, after)
        mentions.extend((key, *match.span()) for key in these)
        if _PART.search(f"{before[-2:]} {after[:3]}"):  # a trivial value inside a list is no input or result
            parts.update((key, *match.span()) for key in these if _is_trivial(key) and key != _EMPTY)
    if public:
        found.update(key for key, _, _ in _occurrences(text, data.strings, _LAYOUT))
        found.update(f"#{int(number)}" for number in digits if len(number) < 20)
    found.update(data.numbers.intersection(key for key, _, _ in mentions))
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    sentences: list[list[_Mention]] = [[] for _ in range(len(ends) + 1)]
    for mention in sorted(mentions, key=itemgetter(1)):
        sentences[bisect(ends, mention[1])].append(mention)
    for before, sentence in pairwise([[], *sentences]):
        for box, is_data in _boxes(text, sentence, data):
            sentence.append(box)
            found.update([box[0]] if is_data or public else [])
        found.update(_told({*before, *sentence} - parts, data))
    return found


def _shared_runs(numbers: Sequence[str], digits: str) -> set[str]:
    """Return the runs of three long numbers that are in the tests too."""
    runs = {f" {' '.join(run)} " for run in zip(numbers, numbers[1:], numbers[2:], strict=False)}
    runs = {run for run in runs if len(run) > 10}
    of_tests = digits.split() if runs else []
    return runs.intersection(f" {' '.join(run)} " for run in zip(of_tests, of_tests[1:], of_tests[2:], strict=False))


def _told(mentions: Iterable[_Mention], data: _Data) -> Iterator[str]:
    """Yield the checks whose values are all mentioned, in more than one place."""
    places: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for key, start, end in mentions:
        places[key].add((start, end))
    for check in [check for key in places for check in data.checks.get(key, ())]:
        is_there = all(len(places[key]) >= min(count, 2) for key, count in Counter(check).items())
        if is_there and len({place for key in check for place in places[key]}) > 1:
            yield f"check {check}"


def _occurrences(text: str, wanted: dict[str, str], ignored: re.Pattern[str]) -> Iterator[tuple[str, int, int]]:
    """Yield the value of each key of `wanted` that occurs in the text as whole words, and its span there."""
    kept = bytearray(b"\1") * len(text)
    for match in ignored.finditer(text):
        kept[match.start() : match.end()] = bytes(len(match.group()))
    pairs = [(char, i) for i, c in enumerate(text) if kept[i] for char in c.casefold()]
    line, at = "".join(char for char, _ in pairs), [i for _, i in pairs]
    for key in sorted((key for key in wanted if key and key in line), key=len, reverse=True):
        place = -1
        while (place := line.find(key, place + 1)) >= 0:
            start, end = at[place], at[place + len(key) - 1] + 1
            before, after = text[max(0, start - 1) : start], text[end : end + 1]
            if not ((key[0].isalnum() and before.isalnum()) or (key[-1].isalnum() and after.isalnum())):
                yield wanted[key], start, end


def _strings(text: str, data: _Data) -> Iterator[_Mention]:
    """Yield the strings of the tests; skip an ordinary word or sign unless it is quoted or an example."""
    for key, start, end in _occurrences(text, data.strings, _IGNORED):
        near, before, after = text[max(0, start - 50) : start], text[max(0, start - 1) : start], text[end : end + 1]
        is_apart = (text[start].isalnum() or before in _SPACE) and (
            text[end - 1].isalnum() or after in _SPACE + ".,;:?!)"
        )
        is_code = (after == "(" and key[1:].isidentifier()) or _VARIABLE.search(near)
        is_ordinary = _is_ordinary(key[1:]) or re.fullmatch(r"\W", key[1:])
        if is_apart and not is_code and (not is_ordinary or before + after in _QUOTED or _LIKE.search(near)):
            yield key, start, end


def _keys(match: re.Match[str], before: str, after: str) -> list[str]:
    """Return the keys of a value other than a non-empty string; "empty lists" may be one list or a list of them."""
    kind, text = match.lastgroup or "", match.group()
    if kind == "number":
        return [] if _RULE_BEFORE.search(before) or _RULE_AFTER.match(after) else [_number(text) or ""]
    if noun := _NOUN.fullmatch(match[kind].casefold()):
        boxes = [_EMPTY, _BOX_OF_EMPTY] if noun[2] and kind == "noun" else [_EMPTY]
        return boxes if noun[1] else [*boxes, _EMPTY_STRING]
    keys = {"string": _EMPTY_STRING, "box": _EMPTY, "boxes": _BOX_OF_EMPTY}
    keys |= {"constant": f"={text.title()}", "error": f"!{text.casefold()}"}
    return [keys[kind]] if kind in keys else []


def _boxes(text: str, sentence: Sequence[_Mention], data: _Data) -> list[tuple[_Mention, bool]]:
    """Return the containers in a sentence, by their leaves in any order, and whether two values are no chance pair."""
    atoms = [mention for mention in sentence if mention[0] not in (_EMPTY, _BOX_OF_EMPTY)]
    gaps = [text[a[2] : b[1]] for a, b in pairwise(atoms)]
    far = [*accumulate((_BREAK.search(gap) is not None for gap in gaps), initial=0)]
    sums = [*accumulate((hash(atom[0]) for atom in atoms), initial=0)]
    boxes: list[tuple[_Mention, bool]] = []
    for length in {length for length, _ in data.boxes}:
        for first in range(len(atoms) - length + 1):
            last = first + length - 1
            if far[first] == far[last] and (length, sums[last + 1] - sums[first]) in data.boxes:
                start, end = atoms[first][1], atoms[last][2]
                around = text[max(0, start - 9) : start].rstrip(_SPACE)[-1:] + text[end : end + 9].lstrip(_SPACE)[:1]
                is_pair = around in ("[]", "()", "{}") or re.fullmatch(r" to |-|\.\.+", gaps[first])
                key = _key([atom[0] for atom in atoms[first : last + 1]])
                boxes.append(((key, start, end), length > 2 or bool(is_pair)))
    return boxes
