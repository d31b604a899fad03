"""Run model-written queries on SQLite, read-only and with bounded resources.

A query must be one SELECT. It runs in a reused query process (query_process.py), on a connection that can only read.
The number of SQLite's steps is limited. A single long step, or rows that need too much memory, end the query process
but not this one.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from threading import BoundedSemaphore
from types import EllipsisType
from typing import Any

from agentic_opd.core.text import read_json
from agentic_opd.sandboxes.host_process import HOST_ENV
from agentic_opd_environments.sql import query_process
from agentic_opd_environments.sql.matching import Number, has_matching, is_near, is_rounded
from agentic_opd_environments.sql.query_process import MAX_RESULT_BYTES, QueryError

MAX_SECONDS = 10.0
"""Wall-clock limit of a query. Unless the machine is busy, the limit of processor time (`query_process.MAX_CPU_S`) is
reached first."""
_SPARE_S = 5.0
"""Seconds beyond `MAX_SECONDS` after which a query process that does not read its input is killed."""
_PROGRAM = Path(query_process.__file__)
_PROCESSES = max(2, os.cpu_count() or 1)

Value = str | int | float | bytes | None
Source = bytes | Path
"""A database: an image from `Connection.serialize`, or a file."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a query; `rows` are in SQLite's order."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    source: Source | None = field(default=None, compare=False, repr=False)
    """The database."""

    @staticmethod
    def of(answer: dict[str, Any], source: Source) -> "Result":
        """Convert the return value of `query_process.run`."""
        rows = (tuple(bytes.fromhex(v["bytes"]) if isinstance(v, dict) else v for v in row) for row in answer["rows"])
        return Result(tuple(answer["columns"]), tuple(rows), source)


def run_query(source: Source, sql: str) -> Result:
    """Run one query in a query process. Safe to call from any thread.

    Raises:
        QueryError: It is not a single SELECT, SQLite refuses it, or it exceeds a limit.
    """
    return Result.of(_answer(source, {"sql": sql}), source)


def stored_numbers(source: Source, numbers: Iterable[float]) -> frozenset[float]:
    """Return those of `numbers` that a column of the database holds. Safe to call from any thread.

    Raises:
        QueryError: The database is too large to search.
    """
    return frozenset(_answer(source, {"numbers": [*numbers]})["numbers"])


def _answer(source: Source, request: dict[str, Any]) -> dict[str, Any]:
    with _free:
        process = _idle_process()
        try:
            answer = process.answer(source, request)
        except BaseException:
            process.end()
            raise
        _idle.append(process)
    if "error" in answer:
        raise QueryError(answer["error"])
    return answer


class _QueryProcess:
    """A process that answers one query at a time."""

    def __init__(self) -> None:
        argv = [sys.executable, "-I", "-S", str(_PROGRAM)]
        pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=quiet, env=HOST_ENV, bufsize=0)

    def answer(self, source: Source, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one request (`query_process.py`) about a database.

        Raises:
            QueryError: The query exceeded a limit; the process has ended, or the caller must end it.
        """
        assert self._process.stdin is not None
        until = time.monotonic() + MAX_SECONDS
        database = {"path": str(source.resolve())} if isinstance(source, Path) else {"image_bytes": len(source)}
        line = json.dumps({**request, **database}).encode() + b"\n"
        rest = memoryview(line if isinstance(source, Path) else line + source)
        watch = threading.Timer(MAX_SECONDS + _SPARE_S, self._process.kill)  # A stopped process does not read either.
        watch.start()
        try:
            while rest:
                rest = rest[self._process.stdin.write(rest) :]
            return self._read(until)
        except BrokenPipeError as error:
            raise QueryError("the query takes too long") from error
        finally:
            watch.cancel()

    def _read(self, until: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        output, out = bytearray(), self._process.stdout.fileno()
        while not output.endswith(b"\n"):
            if not select.select([out], [], [], max(0.0, until - time.monotonic()))[0]:
                raise QueryError("the query takes too long")
            chunk = os.read(out, 2**20)
            if not chunk or len(output) > 2 * MAX_RESULT_BYTES:
                is_cpu = self._process.wait() == -signal.SIGXCPU
                raise QueryError("the query takes too long" if is_cpu else "the query needs too much memory")
            output += chunk
        return read_json(output)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self._process.kill()
        with self._process:
            pass


_free = BoundedSemaphore(_PROCESSES)
_idle = deque[_QueryProcess]()


def _idle_process() -> _QueryProcess:
    """Return an idle process, or start one."""
    while True:
        try:
            process = _idle.pop()
        except IndexError:
            return _QueryProcess()
        if process.is_alive:
            return process
        process.end()


@atexit.register
def _end_all() -> None:
    while _idle:
        _idle.pop().end()


# --------------------------------------------------------------------------------------------------------- comparing


def difference(answer: Result, expected: Result, *, is_ordered: bool, tie_ends: Sequence[int] = ()) -> str | None:
    """Describe how a result differs from the expected one, without its values; None if it does not.

    Column names are ignored, but the order of columns matters. Numbers that arithmetic may have rounded are equal
    within a tolerance (`matching.is_near`), unless the database holds both of them; all other values only exactly.

    Args:
        answer: The result to judge.
        expected: The right result.
        is_ordered: Whether the order of the rows matters.
        tie_ends: Where the order matters: the ends of the runs of expected rows that any order fits. Empty: each row
            has its own place.
    """
    if len(answer.columns) != len(expected.columns):
        return f"{_counted(len(answer.columns), 'column')}, expected {len(expected.columns)}"
    if len(answer.rows) != len(expected.rows):
        return f"{_counted(len(answer.rows), 'row')}, expected {len(expected.rows)}"
    if answer.rows == expected.rows or (not is_ordered and Counter(answer.rows) == Counter(expected.rows)):
        return None
    equality = _Equality(answer, expected)
    if not equality.has_equal_rows(answer.rows, expected.rows):
        return "other values in the rows"
    ends = (tie_ends or range(1, len(expected.rows) + 1)) if is_ordered else ()
    runs = [slice(start, end) for start, end in pairwise((0, *ends))]
    if all(equality.has_equal_rows(answer.rows[run], expected.rows[run]) for run in runs):
        return None
    return "the right rows in another order"


Row = tuple[Value | EllipsisType, ...]


class _Equality:
    """Compares sets of rows of two results."""

    def __init__(self, answer: Result, expected: Result) -> None:
        self._source = expected.source
        columns = [*zip(*answer.rows, *expected.rows, strict=True)]
        self._is_rounded = [any(map(is_rounded, column)) for column in columns]
        """For each column, whether it holds a number that may be rounded."""
        self._rounded = {value for column in columns for value in column if isinstance(value, float) and value}

    def has_equal_rows(self, mine: Sequence[Row], theirs: Sequence[Row]) -> bool:
        """Return whether each of two equally long sequences of rows is the other in some order."""
        groups = [self._by_exact_part(mine), self._by_exact_part(theirs)]
        return groups[0].keys() == groups[1].keys() and all(
            has_matching(numbers, groups[1][exact], self._is_equal) for exact, numbers in groups[0].items()
        )

    def _by_exact_part(self, rows: Sequence[Row]) -> dict[Row, Counter[tuple[Number, ...]]]:
        """Count the numbers of the columns with rounded ones, by the rest of the row."""
        groups: defaultdict[Row, Counter[tuple[Number, ...]]] = defaultdict(Counter)
        for row in rows:
            cells = [*zip(row, self._is_rounded, strict=True)]
            exact = tuple(... if rounded and isinstance(v, int | float) else v for v, rounded in cells)
            groups[exact][tuple(v for v, rounded in cells if rounded and isinstance(v, int | float))] += 1
        return groups

    def _is_equal(self, a: Number, b: Number) -> bool:
        if a == b or not is_near(a, b):
            return a == b
        return not all(number in self._stored for number in (a, b) if number)

    @cached_property
    def _stored(self) -> frozenset[float]:
        """The numbers of the results that a column of the database holds, and that no arithmetic has rounded."""
        if self._source is None:
            return frozenset()
        with suppress(QueryError):
            return stored_numbers(self._source, self._rounded)
        return frozenset()


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# ----------------------------------------------------------------------------------------------------------- showing


def result_text(result: Result, max_rows: int = 6) -> str:
    """Return a result as text: a line of column names, a line per row, and the number of omitted rows."""
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
    """Return the CREATE statements of a database's tables and views, without tables that SQLite keeps for itself."""
    statements = "SELECT name, sql FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT GLOB 'sqlite_*'"
    shadows = {row[1] for row in run_query(source, "PRAGMA table_list").rows if row[2] == "shadow"}
    return "\n".join(str(sql) for name, sql in run_query(source, statements).rows if name not in shadows)
