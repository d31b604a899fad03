"""Run model-written queries on SQLite, read-only and with bounded resources.

A query must be one SELECT. It runs in a reused query process (query_process.py), on a connection that can only read.
The number of SQLite's steps is limited. A single long step, or rows that need too much memory, end the query process
but not this one.
"""

import atexit
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

from agentic_opd.core.text import read_json
from agentic_opd.sandboxes.host_process import HOST_ENV
from agentic_opd.worlds.sql import query_process
from agentic_opd.worlds.sql.query_process import MAX_RESULT_BYTES, QueryError

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

    @staticmethod
    def of(answer: dict[str, Any]) -> "Result":
        """Convert the return value of `query_process.run`."""
        rows = (tuple(bytes.fromhex(v["bytes"]) if isinstance(v, dict) else v for v in row) for row in answer["rows"])
        return Result(tuple(answer["columns"]), tuple(rows))


def run_query(source: Source, sql: str) -> Result:
    """Run one query in a query process. Safe to call from any thread.

    Raises:
        QueryError: It is not a single SELECT, SQLite refuses it, or it exceeds a limit.
    """
    with _free:
        process = _taken()
        try:
            answer = process.answer(source, sql)
        except BaseException:
            process.end()
            raise
        _idle.append(process)
    if "error" in answer:
        raise QueryError(answer["error"])
    return Result.of(answer)


class _QueryProcess:
    """A process that answers one query at a time."""

    def __init__(self) -> None:
        argv = [sys.executable, "-I", "-S", str(_PROGRAM)]
        pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=quiet, env=HOST_ENV, bufsize=0)

    def answer(self, source: Source, sql: str) -> dict[str, Any]:
        """Run one query.

        Raises:
            QueryError: The query exceeded a limit; the process has ended, or the caller must end it.
        """
        assert self._process.stdin is not None
        until = time.monotonic() + MAX_SECONDS
        about = {"path": str(source.resolve())} if isinstance(source, Path) else {"image_bytes": len(source)}
        line = json.dumps({"sql": sql, **about}).encode() + b"\n"
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
        said, out = bytearray(), self._process.stdout.fileno()
        while not said.endswith(b"\n"):
            if not select.select([out], [], [], max(0.0, until - time.monotonic()))[0]:
                raise QueryError("the query takes too long")
            chunk = os.read(out, 2**20)
            if not chunk or len(said) > 2 * MAX_RESULT_BYTES:
                is_cpu = self._process.wait() == -signal.SIGXCPU
                raise QueryError("the query takes too long" if is_cpu else "the query needs too much memory")
            said += chunk
        return read_json(said)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self._process.kill()
        with self._process:
            pass


_free = BoundedSemaphore(_PROCESSES)
_idle = deque[_QueryProcess]()


def _taken() -> _QueryProcess:
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

_RELATIVE, _ABSOLUTE = 1e-9, 1e-12
"""Tolerances for the equality of two numbers of which at least one is a float (as `math.isclose`, PEP 485)."""


def difference(got: Result, expected: Result, *, is_ordered: bool) -> str | None:
    """Describe how a result differs from the expected one, without its values; None if it does not.

    Column names are ignored, but the order of columns matters. Floats are equal within a tolerance, all other values
    only exactly.
    """
    if len(got.columns) != len(expected.columns):
        return f"{_counted(len(got.columns), 'column')}, expected {len(expected.columns)}"
    if len(got.rows) != len(expected.rows):
        return f"{_counted(len(got.rows), 'row')}, expected {len(expected.rows)}"
    same = [_representatives(column) for column in zip(*got.rows, *expected.rows, strict=True)]
    both = [
        tuple(column[value] for column, value in zip(same, row, strict=True)) for row in (*got.rows, *expected.rows)
    ]
    mine, theirs = both[: len(got.rows)], both[len(got.rows) :]
    if Counter(mine) == Counter(theirs):
        return "the right rows in another order" if is_ordered and mine != theirs else None
    return "other values in the rows"


def _representatives(column: Sequence[Value]) -> dict[Value, Value]:
    """Map each value of a column to a representative that all equal values share."""
    found: dict[Value, Value] = {value: value for value in column}
    numbers = sorted(value for value in found if isinstance(value, int | float))
    for before, value in itertools.pairwise(numbers):
        is_float = isinstance(before, float) or isinstance(value, float)
        if is_float and isclose(before, value, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE):
            found[value] = found[before]
    return found


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


# ----------------------------------------------------------------------------------------------------------- showing


def shown(result: Result, max_rows: int = 6) -> str:
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
    """Return the CREATE TABLE statements of a database, without SQLite's internal tables."""
    found = run_query(source, "SELECT sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    return "\n".join(str(row[0]) for row in found.rows)
