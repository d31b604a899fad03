"""Queries that a model wrote can read, and nothing else; what they take is bounded."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from agentic_opd.worlds.sql.engine import MAX_ROWS, QueryError, Result, difference, run_query, schema_text, shown

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT {} FROM c"


def make(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE shops (id INTEGER, name TEXT, price REAL)")
    connection.executemany("INSERT INTO shops VALUES (?, ?, ?)", [(1, "a", 0.5), (2, "b", None), (3, "a", 1 / 3)])
    connection.commit()


@pytest.fixture
def image() -> bytes:
    with closing(sqlite3.connect(":memory:")) as connection:
        make(connection)
        return connection.serialize()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a shop?#.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        make(connection)
    return path


def test_a_query_gives_columns_and_rows(image: bytes, file: Path) -> None:
    expected = Result(("name", "n"), (("a", 2), ("b", 1)))
    for source in (image, file):
        assert run_query(source, "SELECT name, COUNT(*) AS n FROM shops GROUP BY name;") == expected
    assert run_query(image, "PRAGMA table_info(shops)").rows[1][1] == "name"
    assert schema_text(image) == "CREATE TABLE shops (id INTEGER, name TEXT, price REAL)"


@pytest.mark.parametrize(
    "sql",
    [
        "DROP TABLE shops",
        "DELETE FROM shops",
        "INSERT INTO shops VALUES (4, 'c', 1)",
        "WITH x AS (SELECT 9) INSERT INTO shops SELECT 9, 'x', 1",
        "CREATE TABLE other (id)",
        "CREATE TEMP TABLE other AS SELECT 1",
        "ATTACH '/tmp/stolen.sqlite' AS other",
        "VACUUM INTO '/tmp/stolen.sqlite'",
        "PRAGMA writable_schema = 1",
        "PRAGMA database_list",
        "SELECT load_extension('/lib/x.so')",
        "SELECT random()",
        "SELECT 1; SELECT 2",
        "",
        "-- nothing",
        "SELECT '\0'",
        "SELECT '\ud800'",
        "SELEC 1",
        "BEGIN",
    ],
)
def test_what_is_no_single_read_is_refused(image: bytes, file: Path, sql: str) -> None:
    before = file.read_bytes()
    for source in (image, file):
        with pytest.raises(QueryError):
            run_query(source, sql)
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        (ENDLESS.format("COUNT(*)"), "takes too long"),
        (ENDLESS.format("x") + " ORDER BY -x", "too"),
        (ENDLESS.format("x"), f"more than {MAX_ROWS} rows"),
        ("SELECT zeroblob(100000000)", "too big"),
        ("SELECT " + "(" * 300 + "1" + ")" * 300, "depth|too large|overflow"),
        ("SELECT '" + "x" * 30_000 + "'", "too large"),
    ],
)
def test_what_takes_too_much_ends(image: bytes, sql: str, why: str) -> None:
    start = time.monotonic()
    with pytest.raises(QueryError, match=why):
        run_query(image, sql)
    assert time.monotonic() - start < 60


def test_many_steps_that_take_the_square_of_their_input_end_soon(image: bytes) -> None:
    find = "instr(hex(zeroblob(24999)), hex(zeroblob(12000)) || 1)"
    start = time.monotonic()
    assert run_query(image, f"SELECT {' + '.join([find] * 10)} AS n").rows == ((0,),)
    assert time.monotonic() - start < 30, "a query has room for 18 times as many"


def test_results_differ_in_words_that_hold_no_value() -> None:
    right = Result(("a",), ((1,), (2,)))
    assert difference(Result(("b",), ((2.0,), (1.0000000000001,))), right, is_ordered=False) is None
    assert difference(Result(("b",), ((2,), (1,))), right, is_ordered=True) == "the right rows in another order"
    assert difference(Result(("a",), ((1,),)), right, is_ordered=False) == "1 row, expected 2"
    assert difference(Result(("a", "b"), ()), right, is_ordered=False) == "2 columns, expected 1"
    assert difference(Result(("a",), ((1,), (1,))), right, is_ordered=False) == "other values in the rows"
    assert difference(Result(("a",), ((1,), (None,))), right, is_ordered=False) == "other values in the rows"


def test_a_result_is_shown_by_its_first_rows(image: bytes) -> None:
    assert (
        shown(run_query(image, "SELECT * FROM shops"), 2)
        == "id | name | price\n1 | a | 0.5\n2 | b | NULL\n(1 more rows)"
    )
    assert shown(run_query(image, "SELECT id FROM shops WHERE id > 9")) == "id\n(no rows)"
