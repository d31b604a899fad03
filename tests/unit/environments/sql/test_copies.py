"""Copies of a database: right answers stay right on them, whatever the database holds; repeated values do not."""

import json
import logging
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from agentic_opd_environments.sql.copies import NUM_COPIES, Copies
from agentic_opd_environments.sql.engine import Source, difference, run_query
from agentic_opd_environments.sql.files import FileQuestion, read_questions
from agentic_opd_environments.sql.order import expected, is_ordered

pytestmark = pytest.mark.slow

SHOP = """
CREATE TABLE customers (
    id INTEGER PRIMARY KEY, first TEXT, last TEXT UNIQUE, city TEXT CHECK (length(city) = 4), phone TEXT NOT NULL
);
CREATE TABLE orders (
    id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers,
    qty INT, price REAL, total REAL, day TEXT, year INT, code TEXT
);
CREATE TABLE notes (order_code TEXT, customer_id INT, text TEXT);
CREATE VIEW spent AS
SELECT last, SUM(total) AS sum FROM customers c JOIN orders o ON o.customer_id = c.id GROUP BY c.id;
"""


def made(folder: Path, name: str, script: str) -> Path:
    path = folder / name / f"{name}.sqlite"
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)
        connection.commit()
    return path


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("shop"), Random(1)
    path = made(folder, "shop", SHOP)
    with closing(sqlite3.connect(path)) as connection:
        for n in range(1, 41):
            phone = f"555-{rng.randrange(10**6):06}"
            row = (3 * n, f"First{n % 17}", f"Last{n}", ("Rome", "Oslo", "Bern", "Wien")[n % 4], phone)
            connection.execute("INSERT INTO customers VALUES (?, ?, ?, ?, ?)", row)
        for n in range(1, 121):
            qty, price, year = rng.randrange(1, 9), round(5 + 90 * rng.random(), 2), rng.randrange(2018, 2024)
            day = f"{year}-{rng.randrange(1, 13):02}-{rng.randrange(1, 28):02}"
            row = (2 * n + 1, 3 * rng.randrange(1, 41), qty, price, round(qty * price, 2), day, year, f"x{n}")
            connection.execute("INSERT INTO orders VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            connection.execute("INSERT INTO notes VALUES (?, ?, ?)", (f"x{n}", row[1], f"note {n % 50}"))
        connection.commit()
    return path


def questions(folder: Path, name: str, queries: Sequence[str]) -> list[FileQuestion]:
    file = folder / "questions.json"
    file.write_text(json.dumps([{"db_id": name, "question": "q", "query": sql} for sql in queries]))
    return [*read_questions(file, folder)]


def is_right(question: FileQuestion, answer: str) -> bool:
    def agrees(database: Source) -> bool:
        right = expected(database, question.sql)
        got = run_query(database, answer)
        return difference(got, right.result, is_ordered=is_ordered(question.sql), tie_ends=right.tie_ends) is None

    return all(map(agrees, question.hidden))


REFORMULATED = [
    (
        "SELECT phone FROM customers WHERE last = 'Last7'",
        "SELECT c.phone FROM customers AS c WHERE c.last LIKE 'last7'",
        "SELECT MAX(phone) FROM customers GROUP BY last HAVING last = 'Last7'",
    ),
    (
        "SELECT COUNT(*) FROM orders",
        "SELECT COUNT(o.id) FROM orders o JOIN customers c ON o.customer_id = c.id",
        "SELECT SUM(1) FROM orders WHERE customer_id IN (SELECT id FROM customers)",
    ),
    ("SELECT SUM(total) FROM orders", "SELECT SUM(qty * price) FROM orders WHERE total = round(qty * price, 2)"),
    ("SELECT COUNT(*) FROM orders WHERE year = 2020", "SELECT COUNT(*) FROM orders WHERE day LIKE '2020-%'"),
    (
        "SELECT last, COUNT(*) FROM customers c JOIN orders o ON o.customer_id = c.id GROUP BY c.id",
        "SELECT last, COUNT(*) FROM orders JOIN customers ON customers.id = customer_id GROUP BY last",
        "SELECT last, n FROM (SELECT customer_id i, COUNT(*) n FROM orders GROUP BY 1) JOIN customers ON id = i",
    ),
    (
        "SELECT last FROM customers WHERE id NOT IN (SELECT customer_id FROM orders)",
        "SELECT last FROM customers c LEFT JOIN orders o ON o.customer_id = c.id WHERE o.id IS NULL",
        "SELECT last FROM customers EXCEPT SELECT last FROM customers JOIN orders ON customer_id = customers.id",
    ),
    (
        "SELECT city, AVG(total) FROM customers c JOIN orders o ON o.customer_id = c.id GROUP BY city ORDER BY 2 DESC",
        "SELECT city, SUM(total)/COUNT(*) FROM customers c, orders WHERE c.id = customer_id GROUP BY 1 ORDER BY 2 DESC",
    ),
    (
        "SELECT last, sum FROM spent ORDER BY sum DESC LIMIT 3",
        "SELECT last, SUM(total) FROM customers c JOIN orders ON customer_id = c.id GROUP BY 1 ORDER BY 2 DESC LIMIT 3",
    ),
    (
        "SELECT first, last FROM customers WHERE city = 'Rome' ORDER BY first",
        "SELECT first, last FROM customers WHERE city = 'Rome' ORDER BY first, last DESC",
    ),
    (
        "SELECT c.last FROM customers c JOIN orders o ON o.customer_id = c.id WHERE o.code = 'x5'",
        "SELECT last FROM customers JOIN notes ON notes.customer_id = id WHERE order_code = 'x5'",
        "SELECT last FROM customers WHERE id = (SELECT customer_id FROM orders WHERE code = 'x5')",
    ),
    (
        "SELECT DISTINCT city FROM customers WHERE id IN (SELECT customer_id FROM orders WHERE total > 500)",
        "SELECT city FROM customers c JOIN orders o ON o.customer_id = c.id WHERE qty * price > 500 GROUP BY city",
    ),
    (
        "SELECT last FROM customers ORDER BY phone LIMIT 1",
        "SELECT last FROM customers WHERE phone = (SELECT MIN(phone) FROM customers)",
    ),
    ("SELECT MAX(total) - MIN(total) FROM orders", "SELECT MAX(qty * price) - MIN(qty * price) FROM orders"),
]


@pytest.mark.slow
def test_right_answers_are_right_however_they_are_written(shop: Path) -> None:
    asked = questions(shop.parent.parent, "shop", [queries[0] for queries in REFORMULATED])
    assert all(question.is_guarded and not question.cuts_tie for question in asked)
    for question, queries in zip(asked, REFORMULATED, strict=True):
        assert [is_right(question, answer) for answer in queries] == [True] * len(queries), queries
        results = {run_query(database, question.sql).rows for database in question.hidden}
        assert len(results) > 1


LOOKUPS = [
    *(("customers", column, f"last = 'Last{n}'") for n in range(1, 9) for column in ("phone", "city", "id", "first")),
    *(("customers", column, f"id = {3 * n}") for n in range(1, 9) for column in ("phone", "city", "last")),
    *(("orders", column, f"code = 'x{n}'") for n in range(1, 9) for column in ("day", "total", "customer_id", "qty")),
]


@pytest.mark.slow
def test_values_copied_from_the_result_are_wrong_also_beside_their_key(shop: Path) -> None:
    asked = questions(shop.parent.parent, "shop", [f"SELECT {c} FROM {table} WHERE {key}" for table, c, key in LOOKUPS])
    for question, (table, column, key) in zip(asked, LOOKUPS, strict=True):
        ((value,),) = run_query(question.visible, question.sql).rows
        literal = f"'{value}'" if isinstance(value, str) else repr(value)
        for answer in (
            f"SELECT {literal}",
            f"SELECT {literal} FROM {table} WHERE {key}",
            f"SELECT {literal} WHERE EXISTS (SELECT 1 FROM {table} WHERE {key})",
            f"SELECT {column} FROM {table} WHERE {column} = {literal} LIMIT 1",
            f"SELECT CASE WHEN {key} THEN {literal} END FROM {table} WHERE {key}",
        ):
            assert not is_right(question, answer), answer
        assert is_right(question, question.sql)


ODD = {
    "stored and virtual columns": (
        "CREATE TABLE t (k TEXT, a INT, b INT AS (a * 2) STORED, c INT AS (a + 1)); "
        "INSERT INTO t (k, a) VALUES ('x', 1), ('y', 5), ('z', 7)",
        "SELECT b, c FROM t WHERE k = 'y'",
    ),
    "full text": (
        "CREATE VIRTUAL TABLE t USING fts5 (body, title); "
        "INSERT INTO t VALUES ('a red car', 'p'), ('two cars', 'q'), ('a car', 'r'), ('none', 's')",
        "SELECT title FROM t WHERE t MATCH 'red'",
    ),
    "older full text": (
        "CREATE VIRTUAL TABLE t USING fts4 (body, title); "
        "INSERT INTO t VALUES ('a red car', 'p'), ('two cars', 'q'), ('a car', 'r'), ('none', 's')",
        "SELECT title FROM t WHERE t MATCH 'red'",
    ),
    "full text of another table": (
        "CREATE TABLE docs (id INTEGER PRIMARY KEY, body TEXT, author TEXT); "
        "CREATE VIRTUAL TABLE f USING fts5 (body, content = 'docs', content_rowid = 'id'); "
        "CREATE TRIGGER made AFTER INSERT ON docs BEGIN INSERT INTO f (rowid, body) VALUES (new.id, new.body); END; "
        "INSERT INTO docs VALUES (1, 'red car', 'ann'), (2, 'blue', 'bob'), (5, 'green bike', 'eve'), (7, 'pen', 'al')",
        "SELECT author FROM docs JOIN f ON f.rowid = docs.id WHERE f MATCH 'green'",
    ),
    "full text without content": (
        "CREATE TABLE u (k TEXT, v TEXT); CREATE VIRTUAL TABLE t USING fts5 (body, content = ''); "
        "INSERT INTO u VALUES ('a', 'b'), ('c', 'd'), ('e', 'f'); INSERT INTO t (rowid, body) VALUES (1, 'red')",
        "SELECT v FROM u WHERE k = 'a'",
    ),
    "ranges": (
        "CREATE VIRTUAL TABLE areas USING rtree (id, low, high); "
        "CREATE TABLE places (id INTEGER PRIMARY KEY, name TEXT); "
        "INSERT INTO areas VALUES (1, 0, 1), (2, 3, 4), (3, 5, 6), (4, 7, 8); "
        "INSERT INTO places VALUES (1, 'a'), (2, 'b'), (3, 'c'), (4, 'd')",
        "SELECT name FROM places JOIN areas USING (id) WHERE low > 2 AND high < 5",
    ),
    "odd names": (
        """CREATE TABLE "order by ""x"" \u00fc" ("group" TEXT, "a b" INT, [select] TEXT, `q"t` TEXT, "rowid" TEXT);
        INSERT INTO "order by ""x"" \u00fc" VALUES 
        ('g', 1, 's', 'q', 'r'), ('h', 2, 't', 'u', 'v'), ('i', 3, 'w', 'x', 'y')""",
        """SELECT "group", `q"t` FROM "order by ""x"" \u00fc" WHERE [a b] = 2""",
    ),
    "views": (
        'CREATE TABLE t (a TEXT, b INT); CREATE VIEW "my view" AS SELECT a, b * 2 AS c FROM t; '
        "CREATE VIEW broken AS SELECT x FROM gone; INSERT INTO t VALUES ('x', 1), ('y', 2), ('z', 3)",
        "SELECT c FROM \"my view\" WHERE a = 'y'",
    ),
    "triggers": (
        "CREATE TABLE t (a TEXT, b INT); CREATE TABLE log (x); INSERT INTO t VALUES ('x', 1), ('y', 2), ('z', 3); "
        "CREATE TRIGGER said BEFORE INSERT ON t BEGIN INSERT INTO log VALUES (new.a); END; "
        "CREATE TRIGGER kept BEFORE DELETE ON t BEGIN SELECT RAISE(ABORT, 'no'); END",
        "SELECT b FROM t WHERE a = 'y'",
    ),
    "without row ids": (
        "CREATE TABLE t (k TEXT PRIMARY KEY, v TEXT) WITHOUT ROWID; INSERT INTO t VALUES ('x', 1), ('y', 2), ('z', 3)",
        "SELECT v FROM t WHERE k = 'y'",
    ),
    "strict types": (
        "CREATE TABLE t (k INT PRIMARY KEY, v TEXT, r REAL, b BLOB, x ANY) STRICT; "
        "INSERT INTO t VALUES (1, 'a', 1.5, x'00', 7), (2, 'b', 2.5, x'01', 'q'), (3, 'c', 3.5, x'02', 2.5)",
        "SELECT v, r FROM t WHERE k = 2",
    ),
    "constraints": (
        "CREATE TABLE t (a INT, b INT, c TEXT CHECK (c IN ('m', 'f')), n TEXT, CHECK (a < b), UNIQUE (a, c)); "
        "CREATE UNIQUE INDEX u ON t (b) WHERE c = 'm'; CREATE INDEX e ON t (lower(c)); "
        "INSERT INTO t VALUES (1, 2, 'm', 'p'), (3, 9, 'f', 'q'), (5, 6, 'm', 'r'), (7, 8, 'f', 's')",
        "SELECT n FROM t WHERE a = 3",
    ),
    "keys of two columns, and of its own table": (
        "CREATE TABLE p (x INT, y TEXT, n TEXT, PRIMARY KEY (x, y)); "
        "CREATE TABLE c (px INT, py TEXT, z TEXT, FOREIGN KEY (px, py) REFERENCES p (x, y) ON DELETE CASCADE); "
        "CREATE TABLE e (id INTEGER PRIMARY KEY, boss INT REFERENCES e, name TEXT); "
        "INSERT INTO p VALUES (1, 'a', 'one'), (1, 'b', 'two'), (2, 'a', 'three'), (3, 'c', 'four'); "
        "INSERT INTO c VALUES (1, 'a', 'u'), (1, 'b', 'v'), (3, 'c', 'w'), (NULL, 'a', 'n'); "
        "INSERT INTO e VALUES (1, NULL, 'top'), (2, 1, 'mid'), (3, 2, 'low')",
        "SELECT n FROM p JOIN c ON px = x AND py = y WHERE z = 'w'",
    ),
    "texts that are no UTF-8": (
        "CREATE TABLE t (a TEXT, b TEXT, d BLOB); "
        "INSERT INTO t VALUES (CAST(x'636166e9' AS TEXT), 'k', x'ff00'), ('tea', 'l', x'01'), ('milk', 'm', NULL)",
        "SELECT hex(a) FROM t WHERE b = 'k'",
    ),
    "UTF-16": (
        "PRAGMA encoding = 'UTF-16'; CREATE TABLE t (k TEXT, v TEXT); "
        "INSERT INTO t VALUES ('\u00e4', 'A'), ('\u00f6', 'B'), ('\u00fc', 'C')",
        "SELECT v FROM t WHERE k = '\u00f6'",
    ),
    "write-ahead log": (
        "PRAGMA journal_mode = WAL; CREATE TABLE t (k TEXT, v TEXT); INSERT INTO t VALUES ('a', 1), ('b', 2), ('c', 3)",
        "SELECT v FROM t WHERE k = 'b'",
    ),
    "collations": (
        "CREATE TABLE t (k TEXT COLLATE NOCASE UNIQUE, v TEXT); INSERT INTO t VALUES ('Ab', 1), ('aC', 2), ('b', 3)",
        "SELECT v FROM t WHERE k = 'AB'",
    ),
    "one row": ("CREATE TABLE t (k TEXT, v TEXT); INSERT INTO t VALUES ('host', '10.0.0.1')", "SELECT v FROM t"),
    "two rows": (
        "CREATE TABLE t (k TEXT, v REAL); INSERT INTO t VALUES ('a', 1.5), ('b', 2.5)",
        "SELECT v FROM t WHERE k = 'a'",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_any_database_is_copied_with_its_constraints(name: str, tmp_path: Path) -> None:
    script, sql = ODD[name]
    path = made(tmp_path, "odd", script)
    before = path.read_bytes()
    (question,) = questions(tmp_path, "odd", [sql])
    assert question.is_guarded
    assert len(question.hidden) == 4
    assert is_right(question, sql)
    assert path.read_bytes() == before
    names = "SELECT type, name, sql FROM sqlite_master ORDER BY type, name"
    with closing(sqlite3.connect(path)) as connection:
        schema = connection.execute(names).fetchall()
    for image in question.hidden[1:]:
        assert isinstance(image, bytes)
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.deserialize(image)
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
            assert connection.execute(names).fetchall() == schema


def test_columns_that_depend_on_each_other_keep_their_values(tmp_path: Path) -> None:
    path = made(
        tmp_path,
        "trips",
        "CREATE TABLE trips (id INTEGER PRIMARY KEY, code TEXT, country TEXT, begin TEXT, end TEXT, year INT, "
        "a REAL, b REAL, sum REAL, first TEXT, full TEXT, rank INT, points REAL, note TEXT)",
    )
    rng, rows = Random(3), list[tuple[object, ...]]()
    for n in range(1, 61):
        year, month, a, b = 2000 + n % 20, rng.randrange(1, 10), rng.randrange(1, 50) / 4, rng.randrange(1, 50) / 4
        begin, end, first = f"{year}-0{month}-01", f"{year}-0{month}-1{n % 9}", f"Given{n}"
        code = n % 7
        rows.append(
            (
                n,
                f"c{code}",
                f"Country {9 - code}",
                begin,
                end,
                year,
                a,
                b,
                a + b,
                first,
                f"{first} Family",
                n,
                900.0 / n,
                f"note {n * 37 % 61}",
            )
        )
    with closing(sqlite3.connect(path)) as connection:
        connection.executemany(f"INSERT INTO trips VALUES ({', '.join('?' * len(rows[0]))})", rows)
        connection.commit()
    for seed in range(NUM_COPIES):
        image = Copies(path, []).image(seed)
        kept = run_query(
            image,
            "SELECT COUNT(*), SUM(substr(begin, 1, 4) = CAST(year AS TEXT)), SUM(begin <= end), SUM(a + b = sum), "
            "SUM(full LIKE first || ' %'), SUM(substr(code, 2) = CAST(9 - substr(country, 9) AS TEXT)), "
            "SUM(points = 900.0 / rank) FROM trips",
        )
        assert len({*kept.rows[0]}) == 1, kept
        assert run_query(image, "SELECT note, code FROM trips WHERE id < 9").rows != tuple(
            (r[13], r[1]) for r in rows[:8]
        )


def test_copies_are_seeded(shop: Path) -> None:
    images = [Copies(shop, []).image(seed) for seed in range(3)]
    assert [Copies(shop, []).image(seed) for seed in range(3)] == images
    assert len({*images, *(Copies(shop, []).image(seed) for seed in range(3, NUM_COPIES))}) == NUM_COPIES


@pytest.mark.slow
def test_a_large_database_is_sampled_with_what_its_rows_refer_to_and_what_questions_name(tmp_path: Path) -> None:
    path = made(tmp_path, "bank", "CREATE TABLE a (a_id INTEGER PRIMARY KEY, owner TEXT, city TEXT)")
    with closing(sqlite3.connect(path)) as connection:
        rows = ((n, f"owner {n}", f"c{n % 70}") for n in range(1, 9001))
        connection.executemany("INSERT INTO a VALUES (?, ?, ?)", rows)
        connection.execute("CREATE TABLE t (t_id INTEGER PRIMARY KEY, a_id INT, kind TEXT)")  # No foreign key.
        moves = ((n, n * 7919 % 9000 + 1, "ab"[n % 2]) for n in range(1, 20001))
        connection.executemany("INSERT INTO t VALUES (?, ?, ?)", moves)
        connection.commit()
    queries = [
        ("SELECT city FROM a WHERE owner = 'owner 8001'", "SELECT MAX(city) FROM a WHERE owner = 'owner 8001'"),
        (
            "SELECT COUNT(*) FROM t WHERE kind = 'a'",
            "SELECT COUNT(*) FROM t JOIN a ON a.a_id = t.a_id WHERE kind = 'a'",
        ),
        (
            "SELECT owner FROM a JOIN t USING (a_id) WHERE t_id = 19999",
            "SELECT owner FROM a WHERE a_id IN (SELECT a_id FROM t WHERE t_id = 19999)",
        ),
    ]
    for question, (_, same) in zip(questions(tmp_path, "bank", [sql for sql, _ in queries]), queries, strict=True):
        assert question.is_guarded
        assert is_right(question, same)
        assert all(isinstance(image, Path) or len(image) < path.stat().st_size for image in question.hidden)


def test_questions_that_nothing_guards_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made(tmp_path, "odd", "CREATE TABLE t (a INT)")
    with caplog.at_level(logging.WARNING):
        (question,) = questions(tmp_path, "odd", ["SELECT 1"])
    assert not question.is_guarded
    assert "1 of 1 entries have no hidden database with other values" in caplog.text
    assert "entry 0: SELECT 1" in caplog.text
