"""Hint, hidden tests and public text -> whether the hint quotes the tests, token by token.

A text is compared as its tokens, each between two spaces, so that white space and the kind of quotes do not count.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache

from agentic_opd.distill.leaks.hidden_data import KEPT_SOURCES, head, parsed

LEAK_TOKENS = 6
"""So many code tokens in a row, test data among them, are a quotation: `(31) == 42` has six."""
_MIN_DATA = 4
"""The numbers and the words beside quotes in it have so many characters, of which two count of each."""

_MIN_UNIT_TOKENS = 4
_TOKEN = re.compile(r"\w+|[^\w\s]")


def quotes(hint: str, hidden_tests: str, public_text: str) -> bool:
    """Tell whether `hint` holds a run of data or a unit of the tests that the public text does not hold."""
    tokens = _tokens(hint)
    code, units = _code(hidden_tests)
    runs = [tokens[i : i + LEAK_TOKENS] for i in range(len(tokens) - LEAK_TOKENS + 1)]
    quoted = [joined for run in runs if _is_data(run) and (joined := _joined(run)) in code]
    joined = _joined(tokens)
    quoted += [unit for unit in units if unit in joined]
    if not quoted:
        return False
    public = _joined(_tokens(public_text))
    return any(quotation not in public for quotation in quoted)


def _tokens(text: str) -> list[str]:
    # Free of context (no token spans a string), so that a quotation has the same tokens wherever it stands.
    return _TOKEN.findall(text.replace('"', "'").replace("`", " "))


def _joined(tokens: Sequence[str]) -> str:
    return f" {' '.join(tokens)} "


def _is_data(run: Sequence[str]) -> bool:
    """Whether a run holds enough of numbers and strings: `for i in range(` is anyone's, and so is `1, 2, 3,`."""
    words = [i for i, token in enumerate(run) if token[0].isalnum()]
    data = [i for i in words if run[i][0].isdecimal() or "'" in (*run[max(0, i - 1) : i], *run[i + 1 : i + 2])]
    return sum(min(2, len(run[i])) for i in data) >= _MIN_DATA


@lru_cache(maxsize=KEPT_SOURCES)
def _code(source: str) -> tuple[str, frozenset[str]]:
    """The tests as tokens, and their asserted expressions."""
    return _joined(_tokens(source)), frozenset(_units(source))


def _units(source: str) -> Iterator[str]:
    tree = parsed(head(source))
    for node in ast.walk(tree) if tree is not None else ():  # of tests in another language the runs of tokens remain
        if isinstance(node, ast.Assert):
            with suppress(RecursionError):  # an expression of a thousand terms
                tokens = _tokens(ast.unparse(node.test))
                if len(tokens) >= _MIN_UNIT_TOKENS:
                    yield _joined(tokens)
