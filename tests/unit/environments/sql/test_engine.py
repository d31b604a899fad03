"""Queries that a model wrote can read, and nothing else; what they take is bounded."""

import resource
import signal
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from agentic_opd_environments.sql import engine
from agentic_opd_environments.sql.engine import (
    QueryError,
    Result,
    Value,
    difference,
    result_text,
    run_query,
    schema_text,
)
from agentic_opd_environments.sql.query_process import MAX_ROWS

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


@pytest.mark.slow
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
    with pytest.raises(QueryError, match=why):
        run_query(image, sql)


COUNTED = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < {})"
LONG = ",".join(["printf('%.*c', 400000000, 'x')"] * 8)
WIDE = ",".join(["a"] * 1990)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sql", "why"),
    [
        (f"SELECT {LONG}", "takes too long"),
        (f"{COUNTED.format(12)}, a AS (SELECT zeroblob(20000) AS a) SELECT {WIDE} FROM c, a", "more than 8 MiB"),
        (f"{COUNTED.format(9000)} SELECT hex(zeroblob(1000)) FROM c", "more than 8 MiB"),
        (
            f"{COUNTED.format(50000)} SELECT COUNT(DISTINCT hex(zeroblob(20000)) || n) FROM c",
            "too (much memory|long)",
        ),
    ],
    ids=["long steps", "wide rows", "long rows", "a large set"],
)
@pytest.mark.processes
def test_what_steps_do_not_count_takes_a_process_and_not_this_one(image: bytes, sql: str, why: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(QueryError, match=why):
        run_query(image, sql)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_maxrss - before.ru_maxrss < 100_000, "KiB of this process"
    assert after.ru_utime - before.ru_utime < 1
    assert run_query(image, "SELECT COUNT(*) FROM shops").rows == ((3,),), "the next query has a process"


def test_full_text_and_ranges_are_searched_and_their_own_tables_are_not_shown() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(
            "CREATE VIRTUAL TABLE notes USING fts5 (body); INSERT INTO notes VALUES ('a red car'), ('a bike');"
            "CREATE VIRTUAL TABLE old USING fts4 (body); INSERT INTO old VALUES ('a red car'), ('a bike');"
            "CREATE VIRTUAL TABLE areas USING rtree (id, low, high); INSERT INTO areas VALUES (1, 0, 1), (2, 3, 4);"
            "CREATE VIEW red AS SELECT body FROM notes WHERE notes MATCH 'red'"
        )
        image = connection.serialize()
    assert run_query(image, "SELECT COUNT(*) FROM notes WHERE notes MATCH 'car'").rows == ((1,),)
    assert run_query(image, "SELECT highlight(notes, 0, '[', ']') FROM notes('red')").rows == (("a [red] car",),)
    assert run_query(image, "SELECT body FROM old WHERE body MATCH 'bi*'").rows == (("a bike",),)
    assert run_query(image, "SELECT id FROM areas WHERE low > 2").rows == ((2,),)
    assert [line.split()[2] for line in schema_text(image).split("\n")] == ["TABLE", "TABLE", "TABLE", "red"]
    for sql in ("INSERT INTO notes VALUES ('x')", "INSERT INTO notes(notes) VALUES ('optimize')", "DROP TABLE notes"):
        with pytest.raises(QueryError):
            run_query(image, sql)


def test_threads_ask_at_the_same_time(image: bytes) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda number: run_query(image, f"SELECT {number} + COUNT(*) FROM shops").rows, range(64))
    assert [*found] == [((number + 3,),) for number in range(64)]


def test_values_come_back_as_they_are(image: bytes) -> None:
    sql = "SELECT 9223372036854775807, 1e308 * 10, 0.1, x'00ff', 'é\u2028', NULL, ''"
    assert run_query(image, sql).rows == ((2**63 - 1, float("inf"), 0.1, b"\x00\xff", "é\u2028", None, ""),)


def test_results_differ_in_words_that_hold_no_value() -> None:
    right = Result(("a",), ((1,), (2,)))
    assert difference(Result(("b",), ((2.0,), (1.0000000000001,))), right, is_ordered=False) is None
    assert difference(Result(("b",), ((2,), (1,))), right, is_ordered=True) == "the right rows in another order"
    assert difference(Result(("a",), ((1,),)), right, is_ordered=False) == "1 row, expected 2"
    assert difference(Result(("a", "b"), ()), right, is_ordered=False) == "2 columns, expected 1"
    assert difference(Result(("a",), ((1,), (1,))), right, is_ordered=False) == "other values in the rows"
    assert difference(Result(("a",), ((1,), (None,))), right, is_ordered=False) == "other values in the rows"


@pytest.mark.parametrize(
    ("got", "expected", "is_right"),
    [
        (1.0000000005, 1.0000000004999999, True),
        (0.1 + 0.2, 0.3, True),
        (0.1 + 0.2 - 0.3, 0.0, True),
        (2, 2.0000000000001, True),
        (1e300, 1e300 * (1 + 1e-13), True),
        (1e300, 1e300 * (1 + 1e-12), False),
        (12025550101.0, 12025550102.0, False),
        (2.0, 2.0000000000000004, True),
        (2460370.9187500002, 2460370.9166666665, False),
        (1700000000000.5, 1700000000001.5, False),
        (10_000_000_000_000_001, 1e16, False),
        (float("inf"), 1e308, False),
        (5e-324, 0.0, True),
        (1.00000001, 1.0, False),
        (1e-9, 2e-9, False),
        (10_000_000_001, 10_000_000_002, False),
        ("2.50", "2.5", False),
        ("2.5", 2.5, False),
        (None, 0.0, False),
    ],
)
def test_floats_are_equal_by_their_distance(got: Value, expected: Value, is_right: bool) -> None:
    found = difference(Result(("a",), ((got,),)), Result(("a",), ((expected,),)), is_ordered=True)
    assert (found is None) is is_right


def test_floats_that_are_equal_do_not_reorder_rows() -> None:
    """Sorted by the first column, the two rows would not meet their own."""
    right = Result(("a", "b"), ((0.1 + 0.2, "x"), (0.3, "y")))
    same = Result(("a", "b"), ((0.3, "x"), (0.1 + 0.2, "y")))
    assert difference(same, right, is_ordered=True) is None
    assert difference(Result(("a", "b"), ((0.3, "x"), (0.3, "x"))), right, is_ordered=False) is not None


PAIRS = {
    "phones": ("SELECT phone FROM u WHERE name = 'b'", "SELECT phone FROM u WHERE name = 'a'"),
    "seconds": ("SELECT MAX(ts) FROM u", "SELECT MIN(ts) FROM u"),
    "microseconds": ("SELECT MAX(fine) FROM u", "SELECT MIN(fine) FROM u"),
    "cents": ("SELECT cents FROM u WHERE name = 'b'", "SELECT cents FROM u WHERE name = 'a'"),
    "tiny": ("SELECT tiny FROM u WHERE name = 'b'", "SELECT tiny FROM u WHERE name = 'a'"),
    "zero for a tiny number": ("SELECT tiny - tiny FROM u WHERE name = 'a'", "SELECT tiny FROM u WHERE name = 'a'"),
    "large ids": ("SELECT large FROM u WHERE name = 'b'", "SELECT large FROM u WHERE name = 'a'"),
    "minutes": ("SELECT julianday('2024-03-01 10:03')", "SELECT julianday('2024-03-01 10:00')"),
    "swapped": ("SELECT name, fine FROM u", "SELECT CASE name WHEN 'a' THEN 'b' ELSE 'a' END, fine FROM u"),
}


@pytest.fixture
def measured() -> bytes:
    """Stored numbers that are close to each other: ids, times, money, constants of nature."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(
            "CREATE TABLE u (name TEXT, phone REAL, ts REAL, fine REAL, cents REAL, tiny REAL, large REAL)"
        )
        rows = [
            ("a", 12025550101, 1700000000, 1700000000.000001, 12345678901.23, 1.602176634e-19, 2.0**60),
            ("b", 12025550102, 1700000001, 1700000000.000002, 12345678901.24, 3.204353268e-19, 2.0**60 + 256),
        ]
        connection.executemany("INSERT INTO u VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        connection.commit()
        return connection.serialize()


@pytest.mark.parametrize("name", PAIRS)
def test_stored_numbers_are_compared_exactly(name: str, measured: bytes) -> None:
    got, expected = (run_query(measured, sql) for sql in PAIRS[name])
    assert difference(got, expected, is_ordered=False) == "other values in the rows"
    assert difference(expected, expected, is_ordered=True) is None


@pytest.mark.parametrize(
    ("sql", "same"),
    [
        ("SELECT SUM(price) * 1.0 / COUNT(price) FROM p", "SELECT AVG(price) FROM p"),
        ("SELECT SUM(price) FROM p", "SELECT SUM(price) FROM (SELECT price FROM p ORDER BY price DESC)"),
        ("SELECT id, SUM(price * 1.1) FROM p GROUP BY id % 7", "SELECT id, SUM(price) * 1.1 FROM p GROUP BY id % 7"),
        ("SELECT SUM(price) * 100.0 / 7.7 - 100 FROM p", "SELECT (SUM(price) - 7.7) * 100.0 / 7.7 FROM p"),
        ("SELECT price / 3.0 FROM p", "SELECT price * (1 / 3.0) FROM p"),
        ("SELECT price - price * 3 / 3 FROM p", "SELECT 0 FROM p"),
        ("SELECT price + 0.2 FROM p WHERE id = 1", "SELECT 0.1 + 0.2"),
    ],
)
def test_what_is_computed_in_another_way_is_equal(sql: str, same: str) -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE p (id INTEGER PRIMARY KEY, price REAL)")
        prices = [(number, number / 10 + (number * 7919 % 101) / 37 * (number > 1)) for number in range(1, 3000)]
        connection.executemany("INSERT INTO p VALUES (?, ?)", prices)
        connection.commit()
        image = connection.serialize()
    assert difference(run_query(image, sql), run_query(image, same), is_ordered=False) is None


def test_a_chain_of_near_numbers_is_not_one_number() -> None:
    """Each number is near the next one, but the first is not near the last; each id belongs to its own number."""
    numbers = [1 + step * 2.0**-43 for step in range(2000)]
    right = Result(("id", "n"), tuple(enumerate(numbers)))
    swapped = Result(("id", "n"), tuple(enumerate(reversed(numbers))))
    assert difference(swapped, right, is_ordered=False) == "other values in the rows"
    near = Result(("id", "n"), tuple((id, number + 2.0**-44) for id, number in enumerate(numbers)))
    assert difference(near, right, is_ordered=True) is None
    several = Result(("n",), tuple((number,) for number in [*numbers[:1000], *numbers[:1000]]))
    assert difference(several, Result(("n",), tuple((n,) for n in numbers)), is_ordered=False) is not None


def test_rows_are_paired_though_the_nearest_row_is_taken() -> None:
    """The identical rows pair first and must part again: a-a leaves b-c, too far apart; a-c and b-a are near."""
    a, b, c = 1.0 + 2.0**-43, 1.0 + 2.0**-43 + 2.0**-42, 1.0 + 2.0**-52
    mine, theirs = Result(("n", "m"), ((a, 0.5), (b, 0.5))), Result(("n", "m"), ((a, 0.5), (c, 0.5)))
    assert difference(mine, theirs, is_ordered=False) is None
    assert difference(Result(("n", "m"), ((b, 0.5), (b, 0.5))), theirs, is_ordered=False) is not None


@pytest.mark.slow
@pytest.mark.parametrize("distinct", [1, 10_000])
def test_pairing_many_rows_is_quick(distinct: int) -> None:
    rows = tuple((0.5, 1 / 3 + number % distinct) for number in range(10_000))
    moved = tuple((0.5 + 2.0**-50, n + 2.0**-50) for _, n in reversed(rows))
    start = time.process_time()
    assert difference(Result(("a", "b"), moved), Result(("a", "b"), rows), is_ordered=False) is None
    spread = tuple((0.5 + number * 2.0**-53, 1 / 3) for number in range(10_000))
    assert difference(Result(("a", "b"), spread), Result(("a", "b"), rows), is_ordered=False) is not None
    assert time.process_time() - start < 20


def test_a_result_is_shown_by_its_first_rows(image: bytes) -> None:
    assert (
        result_text(run_query(image, "SELECT * FROM shops"), 2)
        == "id | name | price\n1 | a | 0.5\n2 | b | NULL\n(1 more rows)"
    )
    assert result_text(run_query(image, "SELECT id FROM shops WHERE id > 9")) == "id\n(no rows)"


def test_a_query_process_that_is_stopped_ends_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it is sent a database that does not fit into the pipe."""
    monkeypatch.setattr(engine, "MAX_SECONDS", 0.1)
    monkeypatch.setattr(engine, "_SPARE_S", 0.1)
    for source in (bytes(2**22), b""):
        process = engine._QueryProcess()
        process._process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(QueryError, match="takes too long"):
                process.answer(source, {"sql": "SELECT 1"})
        finally:
            process.end()
