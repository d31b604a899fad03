"""Source of hidden tests --ast--> their data: numbers, strings, containers and checks.

A leaf is a string whose first character is its type: `#5` a number (also the string '5'), `=True` a constant, `'ab` a
string in lower case without spaces, `!valueerror` an exception. The key of a container is its leaves in any order; a
container with a single leaf has that leaf as its key: "[5]", "a list of just five".
"""

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

from agentic_opd.core.text import text_lines
from agentic_opd.distill.leaks.dates import in_iso
from agentic_opd.distill.leaks.numerals import in_digits
from agentic_opd.distill.leaks.symbols import in_symbols

KEPT_TEXTS = 8
"""Number of parsed public texts in the cache; the turns of an episode share one text."""
KEPT_SOURCES = 32
"""Number of parsed tests in the cache; the tests of a task are used repeatedly and may be megabytes."""
DATA = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"|\b\d+")
NUMBER = re.compile(r"-?(?:0|[1-9][\d_]*)(?:\.\d+)?")

EMPTY_STRING = "'"
EMPTY_BOX = "[]"
BOX_OF_EMPTY = "[[]]"

_MOST_LEAVES = 30
"""Maximum of leaves in a container that counts as data; longer ones are covered by token runs only."""
_MOST_SOURCE = 200_000
"""Characters of a test file that are parsed for values and calls; token runs are compared in all of it."""
_LONGEST_LINE = 10_000
"""Longest line that is parsed in a file above `_MOST_SOURCE`, so that one huge input does not displace the others."""
IGNORED = re.compile(r"(?<=\w\w),| (?:and|then)\b|[\s'\"`]", re.IGNORECASE)
"""Ignored characters and words in a string: "the cat the dog" equals "the, cat, the and dog"."""
LAID_LEAVES = 4
LAID_IGNORED = re.compile(r"[\s,;:/|()\[\]{}'\"`]|[-=]>|=|\b(?:and|then)\b", re.IGNORECASE)
"""Ignored between the values of a container with `LAID_LEAVES` or more values, such as a table or drawing."""

Leaves = tuple[str, ...]


@dataclass(slots=True)
class HiddenData:
    """Data of hidden tests for which texts are searched."""

    numbers: set[str] = field(default_factory=set[str])
    strings: dict[str, str] = field(default_factory=dict[str, str])
    """`squashed` string -> its leaf."""
    exact: set[str] = field(default_factory=set[str])
    """Strings with normalised white space."""
    texts: set[str] = field(default_factory=set[str])
    """Strings, unchanged."""
    boxes: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """The `sum_key` of containers."""
    tuples: set[str] = field(default_factory=set[str])
    """The `box_key` of tuples."""
    laid: set[str] = field(default_factory=set[str])
    """The `laid_key` of containers with `LAID_LEAVES` or more values, and the digits of long numbers."""
    checks: dict[str, list[Leaves]] = field(default_factory=dict[str, list[Leaves]])
    """Longest key of a check -> the keys of its values, for each such check."""


@lru_cache(maxsize=KEPT_SOURCES)
def hidden_data(source: str) -> HiddenData:
    """Return the data of hidden tests; if `source` is not Python, its quoted strings and integers."""
    source = head(source)
    data, reader, tree = HiddenData(), _Reader(), parsed(source)
    try:
        if tree is not None:
            reader.visit(tree)
    except RecursionError:  # an expression of a thousand terms
        tree = None
    if tree is None:
        texts = (match.group() for match in DATA.finditer(source))
        reader.values = [_constant(text[1:-1] if text[0] in "'\"" else int(text)) for text in texts]
    for value in reader.values:
        _add(data, value)
    for values in reader.checks:
        _add_check(data, values)
    return data


def head(source: str) -> str:
    """Return the part of a test file that is parsed for values: all of it, up to `_MOST_SOURCE` characters."""
    if len(source) <= _MOST_SOURCE:
        return source
    lines = [f"{line}\n" for line in text_lines(source) if len(line) <= _LONGEST_LINE]
    total = accumulate(map(len, lines))
    return "".join(line for line, end in zip(lines, total, strict=True) if end <= _MOST_SOURCE)


@lru_cache(maxsize=1)
def parsed(source: str) -> ast.Module | None:
    """Return the syntax tree of `source`, or None if it can't be parsed as Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's tests
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def number_leaf(text: str) -> str | None:
    """Return the leaf of a number in digits; None if `text` is not a finite number."""
    try:
        value = float(text.replace("_", ""))
        return f"#{int(value)}" if value == int(value) else f"#{value!r}"
    except (ValueError, OverflowError):
        return None


def plain(text: str) -> str:
    """Return the text with number words as digits, named symbols as symbols, and dates and times in ISO form."""
    return in_iso(in_digits(in_symbols(text)))


def squashed(text: str) -> str:
    """Return the text in lower case, without the matches of `IGNORED`."""
    return IGNORED.sub("", text).casefold()


def is_trivial(key: str) -> bool:
    """Whether a value is too common to be data: one digit, one letter, a constant, an empty value."""
    return len(key) <= 2 or key[0] == "=" or key == "#-1"


def box_key(leaves: Sequence[str]) -> str:
    """Return the key of a container: its sorted leaves, or `EMPTY_BOX`."""
    return "|".join(sorted(leaves)) if leaves else EMPTY_BOX


def laid_key(leaves: Iterable[str]) -> str:
    """Return the values of a container in order, without the matches of `LAID_IGNORED`."""
    return LAID_IGNORED.sub("", "".join(leaf[1:] for leaf in leaves))


def sum_key(leaves: Sequence[str]) -> tuple[int, int]:
    """Return the number of leaves and the sum of their hashes, which is independent of order."""
    return len(leaves), sum(map(hash, leaves))


@dataclass(frozen=True, slots=True)
class _Value:
    """A literal of the tests."""

    leaves: Leaves
    children: tuple["_Value", ...] = ()
    text: str = ""
    """The original string, if the literal is a string."""
    is_tuple: bool = False


class _Reader(ast.NodeVisitor):
    """Collects the literals of a test file, and the literals of each check."""

    def __init__(self) -> None:
        self.values: list[_Value] = []
        self.checks: list[list[_Value]] = []
        self._names: dict[str, ast.expr] = {}

    def generic_visit(self, node: ast.AST) -> None:
        """Keep the largest literals, and visit all other nodes. Tuples in a sequence are rows of inputs and result."""
        if isinstance(node, ast.List | ast.Tuple):
            for row in (element for element in node.elts if isinstance(element, ast.Tuple)):
                self._check(row.elts, [])
        value = _literal(node)
        if value is None:
            super().generic_visit(node)
        else:
            self.values.append(value)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Skip docstrings; read assertions of unittest as checks."""
        if isinstance(node.value, ast.Call) and (name := _name(node.value.func)).startswith("assert"):
            result = {"assertTrue": [True], "assertFalse": [False], "assertIsNone": [None]}.get(name, [])
            self._check(node.value.args, [_constant(value) for value in result])
        elif not isinstance(node.value, ast.Constant):
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Record the value of each assigned name."""
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if "METADATA" not in names:  # HumanEval's metadata of the task
            self._names.update(dict.fromkeys(names, node.value))
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Read the test of an assertion as a check, without its message."""
        self._asserted(node.test, True)

    def visit_Call(self, node: ast.Call) -> None:
        """Skip the names of pytest's parameters."""
        for part in node.args[1:] if _name(node.func) == "parametrize" else ast.iter_child_nodes(node):
            self.visit(part)

    def visit_For(self, node: ast.For) -> None:
        """Read each value of the loop's literal as a check that raises, if the body expects exceptions."""
        raising = [inner for inner in ast.walk(node) if isinstance(inner, ast.ExceptHandler | ast.withitem)]
        table = _literal(node.iter)
        for error in (error for inner in raising for error in self._literals(inner, 0)):
            self.checks.extend([row, error] for row in (table.children if table is not None else ()))
        self.generic_visit(node)

    def visit_With(self, node: ast.With | ast.Try) -> None:
        """Read each statement of a `try`, or under `raises(ValueError)`, as a check with the error as its result."""
        errors = node.items if isinstance(node, ast.With) else [error.type for error in node.handlers if error.type]
        for statement in node.body:
            self._check([statement, *errors], [])
        self.generic_visit(node)

    visit_Try = visit_With

    def _asserted(self, test: ast.expr, truth: bool) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._asserted(test.operand, not truth)
        else:
            self._check([test], [] if isinstance(test, ast.Compare) else [_constant(truth)])

    def _check(self, nodes: Sequence[ast.AST], results: Sequence[_Value]) -> None:
        self.checks.append([*(value for node in nodes for value in self._literals(node, 3)), *results])

    def _literals(self, node: ast.AST, names: int) -> Iterator[_Value]:
        """Yield the largest literals in a check, without indices and upper bounds; names are resolved `names` times."""
        if (value := _literal(node)) is not None:
            yield value
        elif isinstance(node, ast.Name) and node.id in self._names and names:
            yield from self._literals(self._names[node.id], names - 1)
        elif isinstance(node, ast.Name) and node.id.endswith("Error"):
            yield _Value((f"!{node.id.casefold()}",))
        elif isinstance(node, ast.Subscript):
            yield from self._literals(node.value, names)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt | ast.LtE):
            yield from self._literals(node.left, names)
        else:
            for child in ast.iter_child_nodes(node):
                yield from self._literals(child, names)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _literal(node: ast.AST) -> _Value | None:
    if isinstance(node, ast.Constant):
        return _constant(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        return _constant(-value) if isinstance(value, int | float) else None
    if isinstance(node, ast.Dict):
        elements = [part for pair in zip(node.keys, node.values, strict=True) for part in pair if part is not None]
    elif isinstance(node, ast.List | ast.Tuple | ast.Set):
        elements = node.elts
    else:
        return None
    children = [child for element in elements if (child := _literal(element)) is not None]
    if len(children) < len(elements):
        return None
    leaves = tuple(leaf for child in children for leaf in child.leaves)
    return _Value(leaves, tuple(children), is_tuple=isinstance(node, ast.Tuple))


def _constant(value: object) -> _Value:
    if isinstance(value, str):
        words = value.split()[: _MOST_LEAVES + 1]
        numbers = [leaf for word in words if NUMBER.fullmatch(word) and (leaf := number_leaf(word))]
        children = tuple(_Value((leaf,)) for leaf in numbers)
        if words and len(numbers) == len(words):  # program input: often a count, followed by as many numbers
            at = int(len(words) > 1 and numbers[0] == f"#{len(words) - 1}")
            return _Value(tuple(numbers[at:]), children[at:])
        return _Value((f"'{squashed(value)}",), children, value)
    if isinstance(value, bool) or value is None or not isinstance(value, int | float):
        return _Value((f"={value}",))
    return _Value((number_leaf(repr(value)) or f"={value!r}",))


def _add(data: HiddenData, value: _Value) -> None:
    """Add a literal's data: numbers, strings, containers and their parts."""
    if len(value.leaves) > _MOST_LEAVES:
        return
    for child in value.children:
        _add(data, child)
    leaf = box_key(value.leaves)
    if len(value.leaves) > 1:
        data.boxes.add(sum_key(value.leaves))
        if value.is_tuple:
            data.tuples.add(leaf)
        if len(value.leaves) >= LAID_LEAVES and all(leaf[0] != "=" for leaf in value.leaves):
            data.laid.add(laid_key(value.leaves))
    elif len(leaf) > 1 and leaf[0] == "'":
        data.strings.update(dict.fromkeys((leaf[1:], squashed(plain(value.text))), leaf))
        data.exact.add(" ".join(value.text.split()))
        data.texts.add(value.text)
    elif leaf[0] == "#" and not is_trivial(leaf):
        data.numbers.add(leaf)
        data.laid.update({leaf[1:]} if len(leaf) > LAID_LEAVES else ())


def _add_check(data: HiddenData, values: Sequence[_Value]) -> None:
    for value in values:
        _add(data, value)
    if len(values) > 2:
        _add(data, _Value(tuple(leaf for value in values[:-1] for leaf in value.leaves)))
    if len(values) > 1 and all(len(value.leaves) <= _MOST_LEAVES for value in values):
        check = tuple(
            BOX_OF_EMPTY if value.children and not value.leaves else box_key(value.leaves) for value in values
        )
        empty = [key for key in check[:-1] if key in (EMPTY_STRING, EMPTY_BOX)]
        for keys in {check, (*empty[:1], check[-1])} if empty else {check}:  # for any other inputs
            data.checks.setdefault(max(keys, key=len), []).append(keys)
