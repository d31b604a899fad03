"""Queries that a model wrote, on SQLite: they read, and take a bounded share of the machine.

A query is one SELECT. It runs in this process, on a connection that can do nothing else: SQLite asks for every action
that it compiles, and what is not reading is refused. Its work is counted in SQLite's own steps, so whether a query is
too expensive does not depend on how busy the machine is.
"""

import sqlite3
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

MAX_STEPS = 20_000_000
"""Of SQLite's virtual machine, about a second."""
MAX_SECONDS = 10.0
"""The end of what MAX_STEPS can't count: loops of steps that take long."""
MAX_ROWS = 10_000
_STEPS_BETWEEN_LOOKS = 20
_HEAP_BYTES = 2**30
"""Of all connections of this process together."""
_LIMITS = {
    # Nothing stops a single step, and one may take the square of it: looking for a text in a text.
    sqlite3.SQLITE_LIMIT_LENGTH: 50_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 10_000,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 100_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_PRAGMAS = {"table_info", "table_list", "table_xinfo", "foreign_key_list", "index_list"}
"""Which say what there is, and take no value to set."""
_REFUSED_FUNCTIONS = {"load_extension", "random", "randomblob", "fts3_tokenizer"}
"""Others than load_extension: a query that rolls dice has no right answer."""

Value = str | int | float | bytes | None
Source = bytes | Path
"""A database: what `Connection.serialize` gives, or a file."""


class QueryError(Exception):
    """The query could not be run, or is not allowed; its text is for whoever wrote it."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a query gave; `rows` in SQLite's own order."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]


def run_query(source: Source, sql: str) -> Result:
    """Run one query.

    Raises:
        QueryError: it is no single SELECT, SQLite refuses it, or it takes too much.
    """
    with _opened(source) as connection:
        looks, until = iter(range(MAX_STEPS // _STEPS_BETWEEN_LOOKS)), time.monotonic() + MAX_SECONDS
        connection.set_progress_handler(
            lambda: next(looks, None) is None or time.monotonic() > until, _STEPS_BETWEEN_LOOKS
        )
        connection.set_authorizer(_authorized)
        try:
            cursor = connection.execute(sql)
            rows = cursor.fetchmany(MAX_ROWS + 1)
        except sqlite3.Error as error:
            is_stopped = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT
            raise QueryError("the query takes too long" if is_stopped else str(error)) from None
        except MemoryError:
            raise QueryError("the query needs too much memory") from None
        except (UnicodeError, ValueError) as error:  # Halves of surrogate pairs, zero bytes.
            raise QueryError(f"the query can't be read: {error}") from None
        if cursor.description is None:
            raise QueryError("only SELECT queries are run")
        if len(rows) > MAX_ROWS:
            raise QueryError(f"the query gives more than {MAX_ROWS} rows")
        return Result(tuple(column[0] for column in cursor.description), tuple(rows))


@contextmanager
def _opened(source: Source) -> Generator[sqlite3.Connection]:
    if isinstance(source, Path):
        uri = f"file:{quote(str(source.resolve()))}?mode=ro&immutable=1"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None)
    else:
        connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        if isinstance(source, bytes):
            connection.deserialize(source)
        connection.text_factory = decoded
        connection.execute(f"PRAGMA hard_heap_limit = {_HEAP_BYTES}")
        connection.execute("PRAGMA temp_store = MEMORY")
        for limit, value in _LIMITS.items():
            connection.setlimit(limit, value)
        yield connection
    finally:
        connection.close()


def decoded(raw: bytes) -> str:
    """What a text cell holds; databases of the field are not always UTF-8."""
    return raw.decode(errors="replace")


def _authorized(action: int, first: str | None, second: str | None, _database: str | None, _inner: str | None) -> int:
    if action in _READING:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION:
        return sqlite3.SQLITE_DENY if second in _REFUSED_FUNCTIONS else sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_PRAGMA:
        return sqlite3.SQLITE_OK if first in _PRAGMAS else sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_DENY


# --------------------------------------------------------------------------------------------------------- comparing


def difference(got: Result, expected: Result, *, is_ordered: bool) -> str | None:
    """How a result differs from the expected one, without a value of it; None: it does not.

    Names of columns do not matter; their order does. Numbers are equal to nine digits.

    Args:
        got: Of the answer.
        expected: Of the right query.
        is_ordered: The order of rows matters.
    """
    if len(got.columns) != len(expected.columns):
        return f"{_counted(len(got.columns), 'column')}, expected {len(expected.columns)}"
    mine, theirs = _plain(got.rows), _plain(expected.rows)
    if Counter(mine) == Counter(theirs):
        return "the right rows in another order" if is_ordered and mine != theirs else None
    if len(mine) != len(theirs):
        return f"{_counted(len(mine), 'row')}, expected {len(theirs)}"
    return "other values in the rows"


def _plain(rows: Sequence[Sequence[Value]]) -> list[tuple[Value, ...]]:
    return [tuple(float(f"{value:.9g}") if isinstance(value, float) else value for value in row) for row in rows]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


# ----------------------------------------------------------------------------------------------------------- showing


def shown(result: Result, max_rows: int = 6) -> str:
    """A result as text: a line of columns, a line a row, and how many more there are."""
    lines = [" | ".join(result.columns), *(" | ".join(map(_text, row)) for row in result.rows[:max_rows])]
    if len(result.rows) > max_rows:
        lines.append(f"({len(result.rows) - max_rows} more rows)")
    return "\n".join(lines) if result.rows else f"{lines[0]}\n(no rows)"


def _text(value: Value) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, float):
        return f"{value:.6g}"
    return value.hex() if isinstance(value, bytes) else str(value)


def schema_text(source: Source) -> str:
    """The statements that made a database's tables, without SQLite's own."""
    found = run_query(source, "SELECT sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    return "\n".join(str(row[0]) for row in found.rows)
