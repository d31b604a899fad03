"""Run read-only queries on SQLite databases: the program of engine.py's query processes.

It runs as `python -I -S PATH`, so it imports only the standard library. For each request it reads a line of JSON from
stdin: `{"sql", "path"}`, or `{"sql", "image_bytes"}` followed by the database's image. It writes a line to stdout:
`{"columns", "rows"}` or `{"error"}`. With `numbers` in place of `sql`, the answer is `{"numbers"}`: those of them that
the database holds. A request that exceeds the limit of processor time or memory ends the process.
"""

from __future__ import annotations

import json
import resource
import sqlite3
import sys
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from typing import Any

MAX_STEPS = 20_000_000
"""Steps of SQLite's virtual machine, about a second of them. The count does not depend on the machine's load."""
MAX_CPU_S = 3
"""Processor seconds of one query, plus at most one more; bounds single steps that take long."""
MAX_MEMORY_BYTES = 2**29
MAX_ROWS = 10_000
MAX_RESULT_BYTES = 8 * 2**20
"""Size of all rows together, as JSON."""
_STEPS_BETWEEN_LOOKS = 1000
_LIMITS = {
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
_PRAGMAS = {"table_info", "table_list", "table_xinfo", "foreign_key_list", "index_list", "data_version"}
"""Pragmas that describe the schema and take no value to set; full text search reads the last one."""
_REFUSED_FUNCTIONS = {"load_extension", "random", "randomblob", "fts3_tokenizer"}
"""load_extension and fts3_tokenizer reach native code. A query with random values has no right answer."""


class QueryError(Exception):
    """The query failed or is not allowed; the text is for the query's author."""


def run(source: bytes | Path, sql: str) -> dict[str, Any]:
    """Run one query in this process, within all limits except those on processor time and memory.

    Returns:
        `columns`, and `rows` in SQLite's order: numbers, texts, None, and `{"bytes": HEX}`.

    Raises:
        QueryError: It is not a single SELECT, SQLite refuses it, or it exceeds a limit.
        MemoryError: It needs too much memory.
    """
    with _opened(source) as connection:
        for table in _virtual_tables(connection):
            with suppress(sqlite3.Error):  # Its module is missing here.
                connection.execute(f"SELECT 1 FROM {quoted(table)} LIMIT 0")  # It connects, which the policy must not.
        connection.set_authorizer(_authorized)
        try:
            cursor = connection.execute(sql)
            if cursor.description is None:
                raise QueryError("only SELECT queries are run")
            return {"columns": [column[0] for column in cursor.description], "rows": [*_rows(cursor)]}
        except (UnicodeError, ValueError) as error:  # Lone surrogates, NUL bytes.
            raise QueryError(f"the query can't be read: {error}") from None


def stored_numbers(source: bytes | Path, numbers: list[float]) -> dict[str, Any]:
    """Return `numbers`: those of the given ones that a column of an ordinary table holds.

    Raises:
        QueryError: The search exceeds a limit.
    """
    with _opened(source) as connection:
        connection.execute("CREATE TEMP TABLE wanted_numbers (number REAL PRIMARY KEY)")
        connection.executemany("INSERT OR IGNORE INTO wanted_numbers VALUES (?)", [(number,) for number in numbers])
        virtual, matches = {*_virtual_tables(connection)}, set[float]()
        for (table,) in connection.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'").fetchall():
            info = () if table in virtual else connection.execute(f"PRAGMA main.table_xinfo({quoted(table)})")
            for column in [quoted(row[1]) for row in info]:
                matches.update(
                    number
                    for (number,) in connection.execute(
                        f"SELECT DISTINCT {column} FROM main.{quoted(table)} "
                        f"WHERE typeof({column}) = 'real' AND {column} IN (SELECT number FROM wanted_numbers)"
                    )
                )
        return {"numbers": sorted(matches)}


def quoted(name: str) -> str:
    """Return a name of a table or column as SQL."""
    return '"' + name.replace('"', '""') + '"'


def _virtual_tables(connection: sqlite3.Connection) -> list[str]:
    names = "SELECT name FROM main.sqlite_master WHERE type = 'table' AND rootpage = 0"
    return [name for (name,) in connection.execute(names).fetchall()]


def _rows(cursor: sqlite3.Cursor) -> Iterator[list[Any]]:
    size = 0
    for count, row in enumerate(cursor):
        if count >= MAX_ROWS:
            raise QueryError(f"the query gives more than {MAX_ROWS} rows")
        values = [{"bytes": value.hex()} if isinstance(value, bytes) else value for value in row]
        size += len(json.dumps(values))
        if size > MAX_RESULT_BYTES:
            raise QueryError(f"the query gives more than {MAX_RESULT_BYTES // 2**20} MiB")
        yield values


@contextmanager
def _opened(source: bytes | Path) -> Generator[sqlite3.Connection]:
    """Open a database for one request of at most `MAX_STEPS`.

    Raises:
        QueryError: SQLite refuses what the request does, or its steps are too many.
    """
    try:
        with closing(_connected(source)) as connection:
            looks = iter(range(MAX_STEPS // _STEPS_BETWEEN_LOOKS))
            connection.set_progress_handler(lambda: next(looks, None) is None, _STEPS_BETWEEN_LOOKS)
            yield connection
    except sqlite3.Error as error:
        is_stopped = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT
        raise QueryError("the query takes too long" if is_stopped else str(error)) from None


def _connected(source: bytes | Path) -> sqlite3.Connection:
    if isinstance(source, Path):
        uri = f"file:{quote(str(source.resolve()))}?mode=ro&immutable=1"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None)
    else:
        connection = sqlite3.connect(":memory:", isolation_level=None)
        connection.deserialize(source)
    connection.text_factory = decoded
    connection.execute("PRAGMA temp_store = MEMORY")
    for limit, value in _LIMITS.items():
        connection.setlimit(limit, value)
    return connection


def decoded(raw: bytes) -> str:
    """Decode a text cell; real databases are not always UTF-8."""
    return raw.decode(errors="replace")


def _authorized(action: int, first: str | None, second: str | None, _database: str | None, _inner: str | None) -> int:
    if action in _READING:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION:
        return sqlite3.SQLITE_DENY if second in _REFUSED_FUNCTIONS else sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_PRAGMA:
        return sqlite3.SQLITE_OK if first in _PRAGMAS else sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_DENY


def main() -> None:
    """Answer queries until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most_cpu_s = resource.getrlimit(resource.RLIMIT_CPU)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        source = Path(request["path"]) if "path" in request else sys.stdin.buffer.read(request["image_bytes"])
        # A query that exceeds this limit receives SIGXCPU, which ends the process.
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + MAX_CPU_S, most_cpu_s))
        try:
            answer = stored_numbers(source, request["numbers"]) if "numbers" in request else run(source, request["sql"])
        except QueryError as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
