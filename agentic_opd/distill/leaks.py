"""Does a hint repeat hidden test code? Pure."""

import ast
import re
import warnings
from collections.abc import Iterator
from functools import lru_cache

LEAK_TOKENS = 6
"""So many code tokens in a row, test data among them, are a quotation: `(3) == 4` has six."""

_MIN_UNIT_TOKENS = 4
_TOKEN = re.compile(r"\w+|[^\w\s]")
_DATA = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"|\b\d+")

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
    return any(_contains(hint_tokens, unit) and not _contains(public_tokens, unit) for unit in _units(hidden_tests))


def _tokens(text: str) -> _Tokens:
    # Free of context (no token spans a string), so that a quotation has the same tokens wherever it stands.
    return tuple(_TOKEN.findall(text.replace('"', "'").replace("`", " ")))


def _grams(tokens: _Tokens, length: int) -> Iterator[_Tokens]:
    return (tokens[i : i + length] for i in range(len(tokens) - length + 1))


def _contains(tokens: _Tokens, part: _Tokens) -> bool:
    return part in _grams(tokens, len(part))


@lru_cache(maxsize=1024)
def _data_grams(source: str) -> frozenset[_Tokens]:
    """All runs of LEAK_TOKENS tokens of `source` that hold test data: code alone (`for i in range(`) is anyone's."""
    tokens: list[str] = []
    is_data: list[bool] = []
    for line in source.splitlines():
        spans = [match.span() for match in _DATA.finditer(line)]
        for match in _TOKEN.finditer(line.replace("`", " ")):
            tokens.append(match.group().replace('"', "'"))
            is_data.append(match.group() not in "'\"" and any(a <= match.start() < b for a, b in spans))
    return frozenset(
        tuple(tokens[i : i + LEAK_TOKENS])
        for i in range(len(tokens) - LEAK_TOKENS + 1)
        if any(is_data[i : i + LEAK_TOKENS])
    )


@lru_cache(maxsize=1024)
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
    units = (_tokens(ast.get_source_segment(source, node) or "") for node in (*asserts, *calls))
    return frozenset(unit for unit in units if len(unit) >= _MIN_UNIT_TOKENS)


def _has_data(call: ast.Call) -> bool:
    """Whether a call has arguments that are test data: a literal somewhere in them, or no variable (`f([])`)."""
    parts = [node for argument in (*call.args, *call.keywords) for node in ast.walk(argument)]
    has_literal = any(isinstance(node, ast.Constant) for node in parts)
    return bool(parts) and (has_literal or not any(isinstance(node, ast.Name) for node in parts))
