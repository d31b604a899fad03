"""What the order of a query's rows leaves open: runs of rows that any order fits, and limits that cut through ties.

Rows that are equal in all terms of ORDER BY may come in any order. To find them, the query runs twice, with the columns
of its result as further terms: ascending, then descending. Whatever differs is not decided by the query.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentic_opd_environments.sql.engine import QueryError, Result, Row, Source, difference, run_query

_TOKENS = re.compile(
    r"""--[^\n]*|/\*.*?(?:\*/|\Z)|'(?:[^']|'')*+(?:'|\Z)|"(?:[^"]|"")*+(?:"|\Z)|`[^`]*+(?:`|\Z)|\[[^\]]*+(?:\]|\Z)"""
    r"""|[^\W\d]\w*|\d\w*|\S""",
    re.DOTALL,
)
"""Matches comments, texts, names and signs; a text without an end reaches to the end of the query."""
_OUT_OF_RANGE = re.compile(r"should be between 1 and (\d+)")
_MANY = 9999
"""More columns than any result has."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The result of a right query on a database."""

    result: Result
    tie_ends: tuple[int, ...] = ()
    """Ends of the runs of rows that any order fits, if the query orders its rows; see `engine.difference`."""
    cuts_tie: bool = False
    """Whether a LIMIT keeps some of several rows that the query does not order among each other."""


def expected(source: Source, sql: str) -> Expected:
    """Run a right query, and find what its order leaves open. Safe to call from any thread.

    Raises:
        QueryError: The query fails.
    """
    result = run_query(source, sql)
    tie_ends, cuts_tie = (), False
    for level in _levels(sql):
        both = _both_orders(source, sql, level, len(result.columns))
        if both is None:
            continue
        if difference(*both, is_ordered=False) is not None:
            cuts_tie = True
        elif level.is_outermost and level.has_order:
            tie_ends = tuple(_tie_ends(both[0].rows, both[1].rows))
    return Expected(result, () if cuts_tie else tie_ends, cuts_tie)


def is_ordered(sql: str) -> bool:
    """Return whether a query orders its rows at the outermost level."""
    return any(level.is_outermost and level.has_order for level in _levels(sql))


class _Level(NamedTuple):
    """The outermost query, or one in parentheses, that has an order or a limit."""

    end: int
    """Where further terms of the order belong: before the limit, or at the end."""
    is_outermost: bool
    has_order: bool


@dataclass(slots=True)
class _Open:
    """A level whose end has not been read."""

    has_order: bool = False
    limit: int | None = None
    last_word: str = ""
    end: int = 0

    def closed(self, *, is_outermost: bool) -> Iterator[_Level]:
        if self.limit is not None or (is_outermost and self.has_order):
            yield _Level(self.end if self.limit is None else self.limit, is_outermost, self.has_order)


def _levels(sql: str) -> Iterator[_Level]:
    levels = [_Open()]
    for token in _TOKENS.finditer(sql):
        text, level = token[0], levels[-1]
        if text.startswith(("--", "/*")):
            continue
        if text == ";":
            break
        word = text.upper()
        if word == "(":
            levels.append(_Open())
        elif word == ")" and len(levels) > 1:
            yield from levels.pop().closed(is_outermost=False)
            level = levels[-1]
        elif word == "LIMIT":
            level.limit = token.start()
        elif word == "BY" and level.last_word == "ORDER":
            level.has_order = True
        level.last_word, level.end = word, token.end()
    yield from levels[0].closed(is_outermost=True)


def _both_orders(source: Source, sql: str, level: _Level, columns: int) -> tuple[Result, Result] | None:
    """Run a query with its ties in ascending and in descending order; None if that fails, for example by its limits.

    `columns` is the number of columns of the outermost level.
    """

    def run(terms: Iterable[str]) -> Result:
        begin = "," if level.has_order else "ORDER BY"
        return run_query(source, f"{sql[: level.end]}\n{begin} {', '.join(terms)} {sql[level.end :]}")

    try:
        if not level.is_outermost:
            columns = _num_columns(run)
        ascending, descending = (
            run(f"{n} {direction}" for n in range(1, columns + 1)) for direction in ("ASC", "DESC")
        )
    except QueryError:
        return None
    return ascending, descending


def _num_columns(run: Callable[[Iterable[str]], Result]) -> int:
    """Return the number of columns of a level, which SQLite names when a term of the order is out of range."""
    try:
        run([str(_MANY)])
    except QueryError as error:
        if (match := _OUT_OF_RANGE.search(str(error))) is not None:
            return int(match[1])
        raise
    raise QueryError("the order has no effect")


def _tie_ends(ascending: Sequence[Row], descending: Sequence[Row]) -> Iterator[int]:
    """Yield each end of a run: where the rows so far are the same in both orders."""
    balance = Counter[Row]()
    for end, (first, second) in enumerate(zip(ascending, descending, strict=True), start=1):
        for row, change in ((first, 1), (second, -1)):
            balance[row] += change
            if not balance[row]:
                del balance[row]
        if not balance:
            yield end
