"""Detection of hidden test data in hints: a second line of defence, after a judge that does not see the tests. Pure.

hidden tests --_facts_of--> values, containers, checks (the values of a statement), and texts
hint --_facts_in--> those of them that it holds, in code or in words: "ninety-eight" is 98, "no items" is []
a hint leaks if it holds facts that the public text does not
"""

import ast
import builtins
import keyword
import re
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain, islice, pairwise
from operator import itemgetter
from typing import NamedTuple

from agentic_opd.core.syntax import parse_module

_MAX_SOURCE, _MAX_CONTAINER, _MAX_CHECK = 200_000, 30, 60
"""Limits: characters of the tests that are parsed, leaves of a container that counts as data, values of a check."""
_EMPTY, _EMPTY_STRING, _NESTED = "[]", "''", "[[]]"
"""Keys of empty values. The last is a list of empty lists."""
_ORDINARY = frozenset(
    """
    a an as at be by do go i if in is it no of on or so to up us we able about above add after again all also any are
    ask back bad been begin best big bit blank body both but call can case char check close code comma data date day
    digit does done down each edge element else empty end entry equal error even every example expected extra fail fast
    field file first fit fix flag for from function get give given good great group half has have head help here high
    hint hold inner input item just keep key kind large last least leave left letter level like line long look loop lot
    low make many match math may mean minus miss mode more most move much must name need never new next not null number
    off old once one only order other out over own pair part pass path plus point push put read real rest result right
    root row rule run same score see self shift short should side size skip small some space stack start state step
    stop store string style sub such swap table take task test text than that the their then there these they thing
    this time token too top total tree two under use user valid value wait was way well were what when where which white
    whole will with word work write wrong year yes yet you your zero
    """.split()  # noqa: SIM905
).union(keyword.kwlist, dir(str), dir(list), dir(dict), (name for name in dir(builtins) if name.islower()))
"""Words that count as data only in quotes or after words like "such as"."""
_UNITS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_NUMBERS = {word: n for n, word in enumerate(_UNITS)} | {word: 20 + 10 * n for n, word in enumerate(_TENS)}
_SCALES = {"hundred": 100, "thousand": 1_000, "million": 1_000_000, "billion": 1_000_000_000}
_NUMERAL = "|".join(sorted({*_NUMBERS, *_SCALES}, key=len, reverse=True))
_NUMERALS = re.compile(
    rf"(?<![\w'\"`-])(minus |negative )?((?:an? (?={'|'.join(_SCALES)}))?(?:{_NUMERAL})"
    rf"(?:[ -](?:and (?!one\b))?(?:{_NUMERAL})){{0,12}})(e?s)?(?![\w'\"`])",
    re.IGNORECASE,
)
_EMPTY_VALUE = re.compile(
    r"(?P<string>(?<![\w'\"])(?:''|\"\")(?!['\"\w]|\.\w))|(?P<nested>\[\s*\[[\s,\[\]]{0,100}\])"
    r"|(?P<container>(?<!\w)(?<!\w = )(?:\[\s*\]|\(\s*\)|\{\s*\}))|\b(?:empty|blank) (?P<noun>\w+)"
    r"|\b(?:no|without)(?: any| an?| single)? (?P<missing>\w+)(?! (?:is|was|with|that)\b)"
    r"|\b(?P<subject>\w+) (?:is|are|was|were|be|being) (?:\w+ )?empty\b",
    re.IGNORECASE,
)
_NOUN = re.compile(
    r"(?:(list|array|sequence|collection|tuple|dict|dictionary|mapping|object|set|item|element|entry|entries)|input|string|"
    r"text|word|line|matrix|grid|tree|iterable|value|number|name|row|key|character|data|result|answer|output)(e?s)?",
    re.IGNORECASE,
)
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:[, ]\d{3})+(?:\.\d+)?(?![\d,])")
_ATOM = re.compile(
    r"(?<![\w.:])\d+(?::\d\d)+(?![\w:])|(?:(?<![\w)\]}.'\"])-)?(?<![\w.])\d+(?:_\d+)*+(?:\.\d+)?(?!\w|\.\d)|\w+"
    r"|(?<=(['\"`]))[^\w\s'\"`]++(?=\1)|(?<!\S)[^\w\s'\"`]++(?!\S)"
)
"""Matches a time, a number, a word, and separate signs."""
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*(?:_\d+)*)(?:\.\d+)?")
_TYPOGRAPHY = str.maketrans("“”„«»‘’−–—→⇒", '"""""\'\'--->>')  # noqa: RUF001
_SENTENCE_END = re.compile(r"(?<=[.!?;])(?<!e\.g\.)(?<!i\.e\.)['\")]?\s+(?=[A-Z(\[`'\"\d])|\n+")
_RULE_BEFORE = re.compile(
    r"(?:%|(?<!\S)\*|\w\*\*?|//|[\w)\]] [-+/]|<<|>>|(?<![-=])[<>]=?|%\s*\w+\s*[=!]=|[\w\])]\[[^\[\](){},]*|"
    r"\b(?:base|version|python|line|column|step|than|least|most|index|position)|"
    r"\b(?:divi\w+|multipl\w+|modulo|mod|factors?|powers?|remainder)"
    r"(?: (?:by|of|with|into|both|all))*(?: -?\d+(?:,|,? and|,? or|,? but not)(?: by| of)?)*|"
    r"\b(?:range|round|pop|max|min|len|int|str|sum|slice|split|append|insert|enumerate|abs|pow)\([^()]*)\s*$",
    re.IGNORECASE,
)
_RULE_AFTER = re.compile(
    r"\s?(?:%|\*|//|<<|[-+/] |percent|degrees|decimals?|\w*\s?divides)|"
    r" (?:(?!(?:on|in|at|of|for|to|as|with|and|or|not|per)\b)\w+ )?(?:(?:value|element|number|word|item|pointer|loop|"
    r"case|branche|check|time|digit|bit|condition|letter|character|group|list|step|line|row|column|side|end|way|part|"
    r"rule|kind|name|level)s?|branch)\b"
)
"""Match the surroundings of a number that states a rule or counts something: `n % 15`, "26 letters"."""
_EXAMPLE_BEFORE = re.compile(
    r"\b(?:like|such as|as in|e\.g\.|for example|word|string|letter|character|key),? $", re.IGNORECASE
)
_COMPARED_BEFORE = re.compile(r"(?:\b[b-hj-z] is|[!=]=) ['\"`]?$")
_LIST_ENTRY = re.compile(r"[\[({] ,|, ?  ?(?:, ?[-\d'\"\[({]|[\])}])")
_SPACE = " \n\t'\"`"
_BREAK = re.compile(r"==|;|[-=]>|\+|\]\)|[\])}],? (?!and [\d\[(])[a-z]|(?:\b\w++\W++){6}")
"""Separates values of different containers: an operator, a word after a bracket, or six words."""


def leaks(hint: str, hidden_tests: str, public_text: str) -> bool:
    """Return whether `hint` gives away data of the hidden tests that `public_text` does not show.

    Data are, in code or in words:

    - a number, string or container of the tests. Exempt are constants, values of one digit or character, numbers that
      state a rule or count something, pairs by chance, and ordinary words without quotes;
    - two unusual words of one string, a number of three digits in it, or three consecutive long numbers;
    - all values of a check in one or two sentences; an empty input and the result are enough;
    - an asserted expression, or the whole hidden text: the answer itself, in a world without tests.

    If the hidden tests are not Python, their quoted strings and numbers count.
    """
    leaked = _facts_in(hint, _facts_of(hidden_tests))
    return bool(leaked) and not leaked <= _public_facts(public_text, hidden_tests)


@lru_cache(maxsize=8)  # the turns of an episode share one text
def _public_facts(public_text: str, hidden_tests: str) -> set[Hashable]:
    facts = _facts_of(hidden_tests)
    words = {_key(match[0]) for match in _ATOM.finditer(in_digits(public_text))}
    letters, signs = "".join(_words(public_text)), re.sub(r"[\s,;:'\"`()\[\]{}]+", "", public_text)
    spelled: set[Hashable] = set()
    for text in facts.values | facts.spellings | facts.texts:
        joined = text.replace(" ", "")
        if (len(joined) > 3 and joined in letters) or (joined in signs and re.fullmatch(r"\W+", joined)):
            spelled.add(text)
    return _facts_in(public_text, facts, is_public=True) | words | spelled


def in_digits(text: str) -> str:
    """Replace number words by digits: "minus five" -> "-5", "three fives" -> "5, 5, 5". A lone "one" stays a word."""

    def digits(match: re.Match[str]) -> str:
        numbers = _numbers(re.split("[ -]", match[2].lower()))
        if match[3] and len(numbers) == 2 and numbers[0] < 10:
            return ", ".join([str(numbers[1])] * numbers[0])
        return match[0] if numbers == [1] and not match[1] else "-" * bool(match[1]) + " ".join(map(str, numbers))

    return _NUMERALS.sub(digits, text.translate(_TYPOGRAPHY))


def _numbers(words: Iterable[str]) -> list[int]:
    """Return the numbers in a run of number words: `twenty one two` -> [21, 2]."""
    numbers: list[int] = []
    total = below_1000 = 0
    limit = -1  # A smaller number continues the current one.
    for word in words:
        if word == "hundred":
            below_1000, limit = (below_1000 or 1) * 100, 100
        elif word in _SCALES:
            total, below_1000, limit = total + (below_1000 or 1) * _SCALES[word], 0, 1000
        elif word == "and" and limit == 10:
            limit = 0
        elif word in _NUMBERS:
            number = _NUMBERS[word]
            if limit >= 0 and (number >= limit or number == 0):
                numbers.append(total + below_1000)
                total = below_1000 = 0
            below_1000, limit = below_1000 + number, 10 if number >= 20 else 0
    return [*numbers, total + below_1000]


# ---------------------------------------------------------------------------------------------------- the hidden tests


class _Value(NamedTuple):
    """What a node of the tests holds: the keys of its leaves, and those of its largest literals."""

    leaves: Sequence[str] = ()
    keys: Sequence[Hashable] = ()
    is_literal: bool = False


@dataclass(slots=True)
class _Facts:
    values: set[str] = field(default_factory=set[str])
    """Numbers and words; words also with `=` in front and with their case."""
    containers: set[Hashable] = field(default_factory=set[Hashable])
    checks: dict[Hashable, list[tuple[Hashable, ...]]] = field(default_factory=lambda: defaultdict(list))
    """Key that the fewest checks have -> the keys of all values of such a check."""
    spellings: set[str] = field(default_factory=set[str])
    """Letters and digits of a string, in lower case."""
    strings: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Unusual word -> the strings that have it."""
    texts: set[str] = field(default_factory=set[str])
    answer: str = ""
    """The whole hidden text."""
    runs: set[str] = field(default_factory=set[str])
    vocabulary: set[Hashable] = field(default_factory=set[Hashable])

    def add_constant(self, value: object) -> None:
        """Add a literal that is data on its own."""
        keys = _constant(value).leaves
        self.vocabulary.update(keys)
        if len(keys) == 1 and not _is_trivial(keys[0]):
            self.values.add(keys[0])
        if not isinstance(value, str):
            return
        spelling = "".join(_words(value))
        if len(spelling) > (5 if spelling.isdecimal() else 3) and not _is_ordinary(spelling):
            self.spellings.add(spelling)
        if len(value) > 1 and value.isalnum():
            self.values.add(f"={value}")
        elif (tokens := _tokens(value)).count(" ") > 2 and not _is_ordinary(spelling):
            self.texts.add(tokens)
        if 1 < len(keys) <= _MAX_CONTAINER:
            self.containers.add(_container(keys))
            self.values.update(key for key in keys if sum(map(str.isdecimal, key)) > 2)
            for key in {*keys, *_compounds(value)}:
                if len(key) > 2 and not _is_ordinary(key):
                    self.strings[key].add(value)


@lru_cache(maxsize=32)  # the tests of a task are used repeatedly and may be megabytes
def _facts_of(source: str) -> _Facts:
    facts = _Facts(runs=_runs(source), answer=_with_edges(source))
    head = source
    if len(source) > _MAX_SOURCE:
        head = "".join(re.findall(r"^.{0,10000}\n", source, re.MULTILINE))[:_MAX_SOURCE].rpartition("\n")[0]
    try:
        _read_tree(parse_module(head), facts)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        for literal in re.findall(r"'[^'\n]*'|\"[^\"\n]*\"|\b\d+(?:\.\d+)?", head):
            facts.add_constant(literal.strip("'\""))
    return facts


def _read_tree(tree: ast.Module, facts: _Facts) -> None:
    """Read each node once, after its children, in time proportional to the source's length."""
    values: dict[ast.AST, _Value] = {}
    checks: set[tuple[Hashable, ...]] = set()
    tables = [node for node in ast.walk(tree) if isinstance(node, ast.List | ast.Tuple)]
    rows = {row for table in tables for row in table.elts if isinstance(row, ast.Tuple)}
    for node in reversed([*ast.walk(tree)]):
        match node:
            case ast.Constant(value):
                values[node] = _constant(value)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                values[node] = _constant(-value)
                facts.add_constant(-value)
            case ast.Name(id=name) if name.endswith("Error"):
                values[node] = _Value([name.casefold()], [name.casefold()])
            case ast.Attribute(attr="assertTrue" | "assertFalse" as name):
                values[node] = _Value(keys=[name.removeprefix("assert").casefold()])
            case ast.Expr(ast.Constant()) | ast.JoinedStr():  # An f-string is a message, not data.
                values[node] = _Value()
            case _:
                values[node], keys = _joined(node, values, facts)
                is_simple = isinstance(node, ast.stmt) and not hasattr(node, "body")
                is_check = is_simple or isinstance(node, ast.With | ast.Try) or node in rows
                if is_check and 1 < len(keys) <= _MAX_CHECK:
                    empty = [key for key in keys[:-1] if key in (_EMPTY, _EMPTY_STRING)][:1]
                    checks.update({tuple(keys), (*empty, keys[-1]) if empty else tuple(keys)})
        facts.vocabulary.update(values[node].leaves)
    counts = Counter(key for check in checks for key in {*check})
    facts.vocabulary.update(counts)
    for check in checks:
        facts.checks[min(check, key=lambda key: counts[key])].append(check)


def _joined(node: ast.AST, values: Mapping[ast.AST, _Value], facts: _Facts) -> tuple[_Value, list[Hashable]]:
    """Return what a node's children hold together, and the keys of the node as a check; add it and them to `facts`."""
    children = [node.test] if isinstance(node, ast.Assert) else [*ast.iter_child_nodes(node)]
    parts = [values[child] for child in children if not isinstance(child, ast.expr_context)]
    keys = [*islice(chain.from_iterable(part.keys for part in parts), _MAX_CHECK + 1)]
    leaves = [*islice(chain.from_iterable(part.leaves for part in parts), _MAX_CHECK + 1)]
    joined = _Value(leaves, keys)
    full = [leaf for leaf in leaves if leaf not in (_EMPTY, _NESTED)]
    is_container = isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict)
    if is_container and all(part.is_literal for part in parts):
        full_or_empty = full or [_NESTED if parts else _EMPTY]
        joined = _Value(full_or_empty, [_container(full_or_empty)], is_literal=True)
    if (joined.is_literal or isinstance(node, ast.Call)) and 1 < len(full) <= _MAX_CONTAINER:
        facts.containers.add(_container(full))
    if not is_container or len(full) <= _MAX_CONTAINER:
        for child in children:
            if isinstance(child, ast.Constant):
                facts.add_constant(child.value)
    if isinstance(node, ast.Assert):
        facts.texts.add(_tokens(ast.unparse(node.test)))
        if not isinstance(node.test, ast.Compare):
            keys = [*keys, "false" if isinstance(node.test, ast.UnaryOp) else "true"]
    return joined, keys


def _constant(value: object) -> _Value:
    keys: list[str] = []
    if isinstance(value, str):
        keys = [*islice((_key(match[0]) for match in _ATOM.finditer(value)), _MAX_CHECK + 1)]
        if len(keys) > 2 and keys[0] == str(len(keys) - 1):  # a program's input: a count, then as many values
            keys = keys[1:]
        keys = keys or ["".join(value.split()) or _EMPTY_STRING]
    elif value is None or isinstance(value, int | float):
        keys = [_key(repr(value))]
    return _Value(keys, [_container(keys)] if keys else [], is_literal=True)


def _key(text: str) -> str:
    if _NUMBER.fullmatch(text) and len(text) < 300:
        return f"{float(text):.15g}"
    return text.casefold()


def _container(leaves: Sequence[str]) -> Hashable:
    """Return the key of a container: the number of its leaves and the sum of their hashes, in any order."""
    return leaves[0] if len(leaves) == 1 else (len(leaves), sum(map(hash, leaves)))


def _is_ordinary(word: str) -> bool:
    return not _ORDINARY.isdisjoint(word.removesuffix(end) for end in ("", "s", "es", "ed", "d", "ing", "ly", "er"))


def _is_trivial(key: str) -> bool:
    return len(key) < 2 or key in ("-1", "true", "false", "none", _EMPTY_STRING)


def _words(text: str) -> list[str]:
    """Return the words in lower case, without those that join the entries of a list."""
    return [word for word in re.findall(r"[^\W_]+", text.casefold()) if word not in ("and", "or", "then")]


def _compounds(text: str) -> set[str]:
    """Return words like `well-known` and `a.b`. One of them and an unusual part of it are two unusual words."""
    return {*re.findall(r"(?<![\w.:'-])[^\W_]+(?:[-'.:][^\W_]+)++", text.casefold())}


def _tokens(text: str) -> str:
    """Return words and signs with spaces between, so that `in` compares whole ones."""
    tokens = re.findall(r"\w+|[^\w\s`]", text.translate(_TYPOGRAPHY).replace('"', "'"))
    return f" {' '.join(tokens)} "


def _with_edges(text: str) -> str:
    """Mark each place where a word does not continue to the left or to the right, so that `in` compares whole words."""
    return re.sub(r"(?!\w)", "\x1d", re.sub(r"(?<!\w)", "\x1c", " ".join(text.casefold().split())))


def _runs(text: str) -> set[str]:
    """Return each three consecutive long numbers."""
    numbers = re.findall(r"\d+", text)
    triples = zip(numbers, numbers[1:], numbers[2:], strict=False)
    return {" ".join(triple) for triple in triples if sum(map(len, triple)) > 7}


# ------------------------------------------------------------------------------------------------------------ the texts


class _Mention(NamedTuple):
    """The key of a value in a text, and its span."""

    key: str
    start: int
    end: int


def _facts_in(text: str, facts: _Facts, *, is_public: bool = False) -> set[Hashable]:
    tokens = _tokens(text)
    lower = tokens.casefold()
    leaked: set[Hashable] = {part for part in facts.texts if part in tokens or part in lower}
    leaked |= facts.runs & _runs(text) if facts.runs else set()
    leaked |= {"answer"} if facts.answer.strip("\x1c\x1d") and facts.answer in _with_edges(text) else set()
    leaked |= _spelled(text, facts)
    text = in_digits(text.replace("\\n", "\n").replace("\\t", "\t"))
    for number in {match[0] for match in _THOUSANDS.finditer(text)}:
        if (joined := re.sub("[ ,]", "", number)) in facts.values:
            text = text.replace(number, joined)
    mentions = sorted([*_mentions(text, facts), *_empty_values(text)], key=itemgetter(1))
    keys = {mention.key for mention in mentions}
    leaked |= facts.values & (keys | {f"={text[mention.start : mention.end]}" for mention in mentions})
    words = Counter(string for key in keys | _compounds(text) for string in facts.strings.get(key, ()))
    leaked.update(f"words of {string}" for string, count in words.items() if count > 1)
    return leaked | _groups_in(text, mentions, facts, is_public=is_public)


def _groups_in(text: str, mentions: Sequence[_Mention], facts: _Facts, *, is_public: bool) -> set[Hashable]:
    """Return the containers that a text holds, and the checks whose values are all in two consecutive sentences."""
    leaked: set[Hashable] = set()
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    sentences: list[list[_Mention]] = [[] for _ in range(len(ends) + 1)]
    for mention in mentions:
        sentences[bisect(ends, mention.start)].append(mention)
    before: list[tuple[Hashable, int, int]] = []
    for sentence in sentences:
        values: list[tuple[Hashable, int, int]] = []
        for mention in sentence:
            around = f"{text[max(0, mention.start - 2) : mention.start]} {text[mention.end : mention.end + 3]}"
            if not (_is_trivial(mention.key) and _LIST_ENTRY.search(around)):  # no input or result by itself
                values.append(mention)
        for container, start, end, is_data in _containers(text, sentence, facts):
            values.append((container, start, end))
            if is_data or is_public:
                leaked.add(container)
        spans: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
        for key, start, end in before + values:
            spans[key].append((start, end))
        for check in [check for key in spans for check in facts.checks.get(key, ())]:
            is_told = all(len(spans[key]) >= min(count, 2) for key, count in Counter(check).items())
            if is_told and len({span for key in check for span in (spans[key][0], spans[key][-1])}) > 1:
                leaked.add(check)
        before = values
    return leaked


def _spelled(text: str, facts: _Facts) -> set[str]:
    """Return the strings that occur as whole words, with any signs between their letters."""
    words = _words(text)
    joined, edges = "".join(words), {*accumulate(map(len, words), initial=0)}
    return {
        spelling
        for spelling in facts.spellings - (facts.values & {*words})
        if spelling in joined
        and any(edge + len(spelling) in edges and joined.startswith(spelling, edge) for edge in edges)
    }


def _empty_values(text: str) -> Iterator[_Mention]:
    """Yield the empty values in a text. "Empty lists" are a list of them or several, an empty value may be a string."""
    kinds = {"string": [_EMPTY_STRING], "nested": [_NESTED], "container": [_EMPTY]}
    for match in _EMPTY_VALUE.finditer(text):
        kind = str(match.lastgroup)
        keys = kinds.get(kind, [])
        if noun := _NOUN.fullmatch(match[kind]):
            keys = [_EMPTY] if noun[1] else [_EMPTY, _EMPTY_STRING]
            keys += [_NESTED] if noun[2] and kind == "noun" else []
        for key in keys:
            yield _Mention(key, *match.span())


def _mentions(text: str, facts: _Facts) -> Iterator[_Mention]:
    """Yield the values in a text, without numbers of rules and ordinary words."""
    for match in _ATOM.finditer(text):
        key, (start, end) = _key(match[0]), match.span()
        before, after = text[max(0, start - 50) : start], text[end : end + 40]
        if _NUMBER.fullmatch(key):
            is_data = not (_RULE_BEFORE.search(before) or _RULE_AFTER.match(after))
        elif key not in facts.vocabulary or (len(key) == 1 and _COMPARED_BEFORE.search(before)) or after[:1] == "(":
            is_data = False
        else:
            is_constant = key in ("true", "false") or match[0] == "None"
            is_example = before[-1:] + after[:1] in ("''", '""', "``") or _EXAMPLE_BEFORE.search(before)
            is_data = is_constant or is_example or not _is_ordinary(key)
        if is_data:
            yield _Mention(key, start, end)


def _containers(text: str, sentence: Sequence[_Mention], facts: _Facts) -> Iterator[tuple[Hashable, int, int, bool]]:
    """Yield the containers whose leaves stand next to each other, in any order; their spans; and whether they are data.

    Two values are data if they are written as a pair: in brackets, or joined by a comma or a word like "and".
    """
    leaves = [mention for mention in sentence if mention.key not in (_EMPTY, _NESTED)]
    gaps = [text[left.end : right.start] for left, right in pairwise(leaves)]
    breaks = [*accumulate((_BREAK.search(gap) is not None for gap in gaps), initial=0)]
    sums = [*accumulate((hash(mention.key) for mention in leaves), initial=0)]
    for length in {container[0] for container in facts.containers if isinstance(container, tuple)}:
        for first in range(len(leaves) - length + 1):
            last = first + length - 1
            container = (length, sums[last + 1] - sums[first])
            if breaks[first] == breaks[last] and container in facts.containers:
                start, end = leaves[first].start, leaves[last].end
                around = text[max(0, start - 9) : start].rstrip(_SPACE)[-1:] + text[end : end + 9].lstrip(_SPACE)[:1]
                is_pair = around in ("[]", "()", "{}") or re.fullmatch(r",? (?:and |or |to )?|,|-|\.\.+", gaps[first])
                yield container, start, end, length > 2 or bool(is_pair)
