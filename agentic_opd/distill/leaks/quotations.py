"""Hint, hidden tests and public text -> whether the hint quotes the tests verbatim.

Texts are compared as tokens joined by spaces, so differences in white space and in the kind of quotes are ignored.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache

from agentic_opd.distill.leaks.hidden_data import KEPT_SOURCES, head, parsed

LEAK_TOKENS = 6
"""Length of a quotation in consecutive code tokens that include test data: `(31) == 42` has six."""
_MIN_DATA = 4
"""Minimum of data characters in a quotation: those of numbers and of words next to quotes, at most two of each."""

_MIN_UNIT_TOKENS = 4
_TOKEN = re.compile(r"\w+|[^\w\s]")


def quotes(hint: str, hidden_tests: str, public_text: str) -> bool:
    """Return whether `hint` contains a data run or an asserted expression that the public text does not contain."""
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
    # Tokens are independent of context (none spans a string), so a quotation has the same tokens in any text.
    return _TOKEN.findall(text.replace('"', "'").replace("`", " "))


def _joined(tokens: Sequence[str]) -> str:
    return f" {' '.join(tokens)} "


def _is_data(run: Sequence[str]) -> bool:
    """Whether a run has enough numbers and strings; `for i in range(` and `1, 2, 3,` are common code."""
    words = [i for i, token in enumerate(run) if token[0].isalnum()]
    data = [i for i in words if run[i][0].isdecimal() or "'" in (*run[max(0, i - 1) : i], *run[i + 1 : i + 2])]
    return sum(min(2, len(run[i])) for i in data) >= _MIN_DATA


@lru_cache(maxsize=KEPT_SOURCES)
def _code(source: str) -> tuple[str, frozenset[str]]:
    """Return the joined tokens of the tests, and those of their asserted expressions."""
    return _joined(_tokens(source)), frozenset(_units(source))


def _units(source: str) -> Iterator[str]:
    tree = parsed(head(source))
    for node in ast.walk(tree) if tree is not None else ():  # other languages: token runs only
        if isinstance(node, ast.Assert):
            with suppress(RecursionError):  # an expression of a thousand terms
                tokens = _tokens(ast.unparse(node.test))
                if len(tokens) >= _MIN_UNIT_TOKENS:
                    yield _joined(tokens)
