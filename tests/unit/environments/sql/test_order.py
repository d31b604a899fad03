"""What a query's order leaves open: ties that any order fits, and ties that a limit cuts."""

import sqlite3
from contextlib import closing

import pytest

from agentic_opd_environments.sql.engine import QueryError, difference, run_query
from agentic_opd_environments.sql.order import expected, is_ordered

ROWS = [(1, "a", 5, "x"), (2, "b", 5, "x"), (3, "c", 3, "y"), (4, "d", 3, "y"), (5, "e", 1, "z")]


@pytest.fixture(scope="module")
def image() -> bytes:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT, price INTEGER, kind TEXT)")
        connection.executemany("INSERT INTO t VALUES (?, ?, ?, ?)", ROWS)
        connection.commit()
        return connection.serialize()


@pytest.mark.parametrize(
    ("sql", "cuts_tie"),
    [
        ("SELECT name FROM t ORDER BY price DESC LIMIT 1", True),
        ("SELECT name FROM t ORDER BY price DESC LIMIT 2", False),
        ("SELECT name FROM t ORDER BY price LIMIT 1", False),
        ("SELECT name FROM t ORDER BY price LIMIT 1, 1", True),
        ("SELECT name FROM t ORDER BY price DESC LIMIT 1 OFFSET 4;", False),
        ("SELECT price FROM t ORDER BY price DESC LIMIT 1", False),
        ("SELECT name FROM t ORDER BY price DESC, id LIMIT 1", False),
        ("SELECT name FROM t LIMIT 2", True),
        ("SELECT name FROM t LIMIT 9", False),
        ("SELECT COUNT(*) FROM t LIMIT 1", False),
        ("SELECT kind FROM t GROUP BY kind ORDER BY COUNT(*) DESC -- the largest\nLIMIT 1 -- one", True),
        ("SELECT kind FROM t GROUP BY kind ORDER BY COUNT(*) /* LIMIT 2 */ LIMIT 1", False),
        ("SELECT name FROM t UNION SELECT kind FROM t ORDER BY 1 LIMIT 3", False),
        ("SELECT name FROM t WHERE id = (SELECT id FROM t ORDER BY price DESC LIMIT 1)", True),
        ("SELECT name FROM t WHERE price = (SELECT price FROM t ORDER BY price DESC LIMIT 1)", False),
        ("SELECT n FROM (SELECT name AS n, price AS p FROM t ORDER BY p DESC LIMIT 3) ORDER BY n", True),
        ("WITH w AS (SELECT name FROM t ORDER BY price LIMIT 2) SELECT COUNT(*) FROM w", False),
        ("SELECT name FROM t WHERE name = ' order by limit ' OR id IN (SELECT id FROM t WHERE id = 1 LIMIT 1)", False),
        ('SELECT name AS "limit 1" FROM t ORDER BY "limit 1"', False),
    ],
)
def test_a_limit_that_cuts_a_tie_is_found(image: bytes, sql: str, cuts_tie: bool) -> None:
    found = expected(image, sql)
    assert found.cuts_tie is cuts_tie
    assert found.result == run_query(image, sql)


def test_ties_may_come_in_any_order_and_other_rows_not(image: bytes) -> None:
    sql = "SELECT name FROM t ORDER BY price"
    right = expected(image, sql)
    assert right.tie_ends == (1, 3, 5)
    for answer, is_right in (
        ("SELECT name FROM t ORDER BY price, name DESC", True),
        ("SELECT name FROM t ORDER BY price, id % 3", True),
        ("SELECT name FROM t ORDER BY price DESC", False),
        ("SELECT name FROM t ORDER BY name", False),
    ):
        got = run_query(image, answer)
        assert (difference(got, right.result, is_ordered=True, tie_ends=right.tie_ends) is None) is is_right, answer


def test_a_query_that_fails_is_an_error(image: bytes) -> None:
    with pytest.raises(QueryError, match="no such table"):
        expected(image, "SELECT x FROM nowhere ORDER BY x LIMIT 1")


def test_only_the_outermost_order_matters() -> None:
    assert is_ordered("SELECT a FROM t ORDER  BY a")
    assert is_ordered("SELECT a FROM t ORDER /* ( */ BY a")
    assert not is_ordered("SELECT a FROM (SELECT a FROM t ORDER BY a LIMIT 3)")
    assert not is_ordered("SELECT a FROM t WHERE b = ' order by '")
    assert not is_ordered("SELECT a, RANK() OVER (ORDER BY b) FROM t -- order by a")
