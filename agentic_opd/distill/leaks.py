"""Does a hint repeat hidden test code? Pure."""

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache

LEAK_TOKENS = 6
"""So many code tokens in a row, test data among them, are a quotation: `(3) == 4` has six."""

_MIN_UNIT_TOKENS = 4
_TOKEN = re.compile(r"\w+|[^\w\s]")
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
"""A line as Python's parser counts them; str.splitlines also ends one at form feeds and the like."""
_DATA = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"|\b\d+")

_KEPT_SOURCES = 32
"""Tests whose tokens are kept, for those of one task are asked about again and again; they may be megabytes."""

_Tokens = tuple[str, ...]


def leaks(hint: str, hidden_tests: str, public_text: str) -> bool:
    """Tell whether `hint` quotes hidden test code that is not in `public_text`.

    Two things are a quotation: a whole asserted expression or a call with literal arguments out of one, however short
    (`f(15)`), and any `LEAK_TOKENS` code tokens in a row that hold a number or a piece of a string. Spaces, the kind
    of quotes and backticks make no difference. What the agent was shown is free to be quoted.

    Args:
        hint: The judge's hint.
        hidden_tests: Python source of the hidden tests.
        public_text: Everything that the agent read or wrote.
    """
    hint_tokens = _tokens(hint)
    public_tokens = _tokens(public_text)
    grams = _data_grams(hidden_tests) & set(_grams(hint_tokens, LEAK_TOKENS))
    if grams - set(_grams(public_tokens, LEAK_TOKENS)):
        return True
    units = _units(hidden_tests)
    quoted = {run for length in set(map(len, units)) for run in _grams(hint_tokens, length)} & units
    return any(not _contains(public_tokens, unit) for unit in quoted)


def _tokens(text: str) -> _Tokens:
    # Free of context (no token spans a string), so that a quotation has the same tokens wherever it stands.
    return tuple(_TOKEN.findall(text.replace('"', "'").replace("`", " ")))


def _grams(tokens: _Tokens, length: int) -> Iterator[_Tokens]:
    return (tokens[i : i + length] for i in range(len(tokens) - length + 1))


def _contains(tokens: _Tokens, part: _Tokens) -> bool:
    return part in _grams(tokens, len(part))


@lru_cache(maxsize=_KEPT_SOURCES)
def _data_grams(source: str) -> frozenset[_Tokens]:
    """All runs of LEAK_TOKENS tokens of `source` that hold test data: code alone (`for i in range(`) is anyone's."""
    tokens: list[str] = []
    is_data: list[bool] = []
    for line in source.splitlines():
        in_data = bytearray(len(line))
        for match in _DATA.finditer(line):
            start, end = match.span()
            in_data[start:end] = b"\1" * (end - start)
        for match in _TOKEN.finditer(line.replace("`", " ")):
            tokens.append(match.group().replace('"', "'"))
            is_data.append(match.group() not in "'\"" and bool(in_data[match.start()]))
    return frozenset(
        tuple(tokens[i : i + LEAK_TOKENS])
        for i in range(len(tokens) - LEAK_TOKENS + 1)
        if any(is_data[i : i + LEAK_TOKENS])
    )


@lru_cache(maxsize=_KEPT_SOURCES)
def _units(source: str) -> frozenset[_Tokens]:
    """The asserted expressions of `source`, and the calls in them that have literal arguments."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's tests
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return frozenset()  # tests in another language: the runs of tokens remain
    asserts = [node.test for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    calls = [call for test in asserts for call in ast.walk(test) if isinstance(call, ast.Call) and _has_data(call)]
    lines = [line.encode() for line in _LINE.findall(source)]
    units = (_tokens(_segment(lines, node)) for node in (*asserts, *calls))
    return frozenset(unit for unit in units if len(unit) >= _MIN_UNIT_TOKENS)


def _segment(lines: Sequence[bytes], node: ast.expr) -> str:
    """The source of a node, as `ast.get_source_segment` returns it, which splits the whole source for each node."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    spanned = list(lines[node.lineno - 1 : node.end_lineno])
    spanned[-1] = spanned[-1][: node.end_col_offset]
    spanned[0] = spanned[0][node.col_offset :]
    return b"".join(spanned).decode()


def _has_data(call: ast.Call) -> bool:
    """Whether a call has arguments that are test data: a literal somewhere in them, or no variable (`f([])`)."""
    parts = [node for argument in (*call.args, *call.keywords) for node in ast.walk(argument)]
    has_literal = any(isinstance(node, ast.Constant) for node in parts)
    return bool(parts) and (has_literal or not any(isinstance(node, ast.Name) for node in parts))
