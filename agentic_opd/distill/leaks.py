"""Detection of hidden test data in hints: a second line of defence, behind a judge that sees none of it. Pure.

hidden tests --_facts_of--> values, containers, checks (the values of a statement), and texts
hint --_facts_in--> those of them that it holds, in code or in words: "ninety-eight" is 98, "no items" is []
a hint leaks if it holds facts that the public text does not
"""

import ast
import builtins
import keyword
import re
import warnings
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain, islice, pairwise
from typing import NamedTuple

_MAX_SOURCE, _MAX_CONTAINER, _MAX_CHECK = 200_000, 30, 60
"""Limits: characters of the tests that are parsed, leaves of a container that counts as data, values of a check."""
_EMPTY = "\N{EMPTY SET}"
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
_SCALES = {"thousand": 1_000, "million": 1_000_000, "billion": 1_000_000_000}
_BELOW_100 = rf"(?:(?:{'|'.join(_TENS)})(?:[ -](?:{'|'.join(_UNITS[1:10])})\b)?|{'|'.join(reversed(_UNITS))})"
_BELOW_1000 = rf"(?:(?:{_BELOW_100}|an?) hundred(?: (?:and )?{_BELOW_100}\b)?|{_BELOW_100})"
_NUMERAL = re.compile(
    rf"(?<![\w'-])(minus |negative )?((?:{_BELOW_1000}|an?) (?:{'|'.join(_SCALES)})(?:,? (?:and )?{_BELOW_1000}"
    rf"(?: thousand(?: (?:and )?{_BELOW_1000})?)?\b)?|{_BELOW_1000})(?![\w'])",
    re.IGNORECASE,
)
_NOUN = (
    r"(?:input|string|text|word|line|list|array|sequence|tuple|dict|dictionar|matrix|grid|value|row|item|element|entr|"
    r"set|name|collection|character|data|key|tree|iterable|mapping|number)(?:e?s|ies|y)?\b"
)
_EMPTY_VALUE = re.compile(
    r"(?<![\w\])'\"])(?<!\w = )(?:''|\"\"|\[\s*\]|\(\s*\)|\{\s*\})(?!['\"\[({])"
    rf"|\b(?:empty|blank|(?:no|without|zero)(?: any| an?| single)?(?! {_NOUN} (?:is|was|with|that)\b)) {_NOUN}",
    re.IGNORECASE,
)
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:[, ]\d{3})+(?:\.\d+)?(?![\d,])")
_ATOM = re.compile(
    rf"{_EMPTY}|(?<![\w.:])\d+(?::\d\d)+(?![\w:])|(?:(?<![\w)\]}}.'\"])-)?(?<![\w.])\d+(?:_\d+)*+(?:\.\d+)?(?!\w|\.\d)|\w+"
    r"|(?<=(['\"`]))[^\w\s'\"`]++(?=\1)|(?<!\S)[^\w\s'\"`]++(?!\S)"
)
"""Matches an empty value, a time, a number, a word, and signs that stand apart."""
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
_BREAK = re.compile(r"==|;|[-=]>|\+|\]\)|[\])}],? (?!and [\d\[(])[a-z]|(?:\b\w++\W++){6}")
"""Separates values of different containers: an operator, a word after a bracket, or six words."""


def leaks(hint: str, hidden_tests: str, public_text: str) -> bool:
    """Return whether `hint` gives away data of the hidden tests that `public_text` does not show.

    Data are, in code or in words:

    - a number, string or container of the tests. Exempt are constants, values of one digit or character, numbers that
      state a rule or count something, and ordinary words without quotes;
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
    letters = re.sub(r"\W+|\b(?:and|or)\b", "", public_text).casefold()
    return _facts_in(public_text, facts) | words | {key for key in facts.values if len(key) > 3 and key in letters}


def in_digits(text: str) -> str:
    """Replace number words by digits: "minus five" -> "-5". A lone "one" stays a word."""

    def digits(match: re.Match[str]) -> str:
        total = below_1000 = 0
        for word in re.split(r"[ ,-]+", match[2].lower()):
            if word in _SCALES:
                total, below_1000 = total + (below_1000 or 1) * _SCALES[word], 0
            else:
                below_1000 = (below_1000 or 1) * 100 if word == "hundred" else below_1000 + _NUMBERS.get(word, 0)
        return match[0] if match[0].lower() == "one" else "-" * bool(match[1]) + str(total + below_1000)

    return _NUMERAL.sub(digits, text.translate(_TYPOGRAPHY))


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
    strings: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Unusual word -> the strings that have it."""
    texts: set[str] = field(default_factory=set[str])
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
        if len(value) > 1 and value.isalnum():
            self.values.add(f"={value}")
        elif (tokens := _tokens(value)).count(" ") > 2:
            self.texts.add(tokens)
        if 1 < len(keys) <= _MAX_CONTAINER:
            self.containers.add(_container(keys))
            self.values.update(key for key in keys if sum(map(str.isdecimal, key)) > 2)
            for key in keys:
                if len(key) > 2 and not _is_ordinary(key):
                    self.strings[key].add(value)


@lru_cache(maxsize=32)  # the tests of a task are used repeatedly and may be megabytes
def _facts_of(source: str) -> _Facts:
    facts = _Facts(runs=_runs(source), texts={_tokens(source).casefold()} if source.strip() else set())
    head = source
    if len(source) > _MAX_SOURCE:
        head = "".join(re.findall(r"^.{0,10000}\n", source, re.MULTILINE))[:_MAX_SOURCE].rpartition("\n")[0]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's tests
            _read_tree(ast.parse(head), facts)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        for literal in re.findall(r"'[^'\n]*'|\"[^\"\n]*\"|\b\d+(?:\.\d+)?", head):
            facts.add_constant(literal.strip("'\""))
    return facts


def _read_tree(tree: ast.Module, facts: _Facts) -> None:
    """Read each node once, after its children, in time proportional to the source's length."""
    values: dict[ast.AST, _Value] = {}
    checks: set[tuple[Hashable, ...]] = set()
    for node in reversed([*ast.walk(tree)]):
        match node:
            case ast.Constant(value):
                values[node] = _constant(value)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                values[node] = _constant(-value)
                facts.add_constant(-value)
            case ast.Name(id=name) if name.endswith("Error"):
                values[node] = _Value([name.casefold()], [name.casefold()])
            case ast.Expr(ast.Constant()):
                values[node] = _Value()
            case _:
                values[node], keys = _joined(node, values, facts)
                if isinstance(node, ast.stmt | ast.Tuple) and 1 < len(keys) <= _MAX_CHECK:
                    checks.update({tuple(keys), (_EMPTY, keys[-1]) if _EMPTY in keys[:-1] else tuple(keys)})
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
    full = [leaf for leaf in leaves if leaf != _EMPTY]
    is_container = isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict)
    if is_container and all(part.is_literal for part in parts):
        joined = _Value(full or [_EMPTY], [_container(full or [_EMPTY])], is_literal=True)
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
        keys = [*islice((_key(match[0]) for match in _ATOM.finditer(in_digits(value))), _MAX_CHECK + 1)]
        if len(keys) > 2 and keys[0] == str(len(keys) - 1):  # a program's input: a count, then as many values
            keys = keys[1:]
        keys = keys or ["".join(value.split()) or _EMPTY]
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
    return len(key) < 2 or key in ("-1", "true", "false", "none")


def _tokens(text: str) -> str:
    """Return words and signs with spaces between, so that `in` compares whole ones."""
    tokens = re.findall(r"\w+|[^\w\s`]", text.translate(_TYPOGRAPHY).replace('"', "'"))
    return f" {' '.join(tokens)} "


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


def _facts_in(text: str, facts: _Facts) -> set[Hashable]:
    tokens = _tokens(text)
    lower = tokens.casefold()
    leaked: set[Hashable] = {part for part in facts.texts if part in tokens or part in lower}
    leaked |= facts.runs & _runs(text) if facts.runs else set()
    text = _EMPTY_VALUE.sub(f" {_EMPTY} ", in_digits(text.replace("\\n", "\n").replace("\\t", "\t")))
    for number in {match[0] for match in _THOUSANDS.finditer(text)}:
        if (joined := re.sub("[ ,]", "", number)) in facts.values:
            text = text.replace(number, joined)
    mentions = [*_mentions(text, facts)]
    keys = {mention.key for mention in mentions}
    leaked |= facts.values & (keys | {f"={text[mention.start : mention.end]}" for mention in mentions})
    words = Counter(string for key in keys for string in facts.strings.get(key, ()))
    leaked.update(f"words of {string}" for string, count in words.items() if count > 1)
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    sentences: list[list[_Mention]] = [[] for _ in range(len(ends) + 1)]
    for mention in mentions:
        sentences[bisect(ends, mention.start)].append(mention)
    before: list[Hashable] = []
    for sentence in sentences:
        values: list[Hashable] = []
        for key, start, end in sentence:
            around = f"{text[max(0, start - 2) : start]} {text[end : end + 3]}"
            if not (_is_trivial(key) and _LIST_ENTRY.search(around)):  # no input or result by itself
                values.append(key)
        containers = [*_containers(text, sentence, facts)]
        leaked.update(containers)
        values += containers
        counts = Counter(before + values)
        for check in [check for key in counts for check in facts.checks.get(key, ())]:
            if all(counts[key] >= min(count, 2) for key, count in Counter(check).items()):
                leaked.add(check)
        before = values
    return leaked


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


def _containers(text: str, sentence: Sequence[_Mention], facts: _Facts) -> Iterator[Hashable]:
    """Yield the containers whose leaves stand next to each other in a sentence, in any order."""
    gaps = (text[left.end : right.start] for left, right in pairwise(sentence))
    breaks = [*accumulate((_BREAK.search(gap) is not None for gap in gaps), initial=0)]
    sums = [*accumulate((hash(mention.key) for mention in sentence), initial=0)]
    for length in {container[0] for container in facts.containers if isinstance(container, tuple)}:
        for first in range(len(sentence) - length + 1):
            container = (length, sums[first + length] - sums[first])
            if breaks[first] == breaks[first + length - 1] and container in facts.containers:
                yield container
