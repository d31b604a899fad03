"""Copies of a database that differ from it in their rows and values, but not in what relates them (I/O).

    database -> its schema without rows, and a sample of its rows -> rows dropped -> values permuted -> image

A right answer is right on each copy, however it is written: keys stay keys, references keep their targets, rows that
were equal in a column stay equal in it, and every constraint holds. An answer that repeats values of the database is
wrong on a copy: `SELECT '555' FROM phones WHERE name = 'Ann'` meets another number beside that name.

- Rows: of every other copy, a quarter is dropped, and then the rows that refer to dropped ones.
- Values: columns that share values (references, and columns of one name) form a class. Each class has one permutation
  of its different values. It is the same in all of its columns, and another one than those of other classes.
- Columns that depend on each other in a way that permutations do not keep stay as they are: a total and its parts, a
  start before its end, a year and its date, a code that many rows have and its name.

Copies are seeded: the same file gives the same copies.
"""

import re
import sqlite3
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations
from math import isclose
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any

from agentic_opd.core.errors import ConfigError
from agentic_opd_environments.sql.query_process import quoted

NUM_COPIES = 12
_MOST_ROWS = 2000
"""Rows of a table in a copy, and as many again that hold a value which a question names."""
_MOST_NAMED = 50
_KEPT_SHARE = 0.75
_PERMUTED = 0.75
"""Probability that a class of columns is permuted; in the first copies all are."""
_ALL_PERMUTED = 2
_LOOKED_AT = 300
"""Rows of a table in which dependencies are looked for."""
_LEAST_ROWS, _LEAST_VALUES = 6, 4
"""Fewer rows or values show no dependency."""
_SHUFFLES = 20
_MOST_COLUMNS = 24
"""Columns of a table among which dependencies are looked for."""
_ROWID_NAMES = ("rowid", "_rowid_", "oid")
_DATE = re.compile(r"\d{4}-\d\d")
_LITERAL = re.compile(r"'((?:[^']|'')*)'|\"((?:[^\"]|\"\")*)\"|(?<![\w.])(\d+(?:\.\d+)?)(?![\w.])")
_NAME = r"[`\"\[]?(\w[\w ]*?)[`\"\]]?"
_JOINED = re.compile(rf"\w[`\"\]]?\.{_NAME}\s*=\s*[`\"\[]?\w[\w ]*?[`\"\]]?\.{_NAME}(?=\W|$)")

Row = list[Any]
Node = tuple[int, int]
"""A column: the numbers of its table and of its index in the table's rows."""


@dataclass(slots=True)
class _Table:
    name: str
    columns: list[str]
    """The columns of `rows`, as SQL; a row id comes first, if it is not a column of the table."""
    rows: list[Row]
    is_virtual: bool
    is_sampled: bool
    """Whether the database has further rows."""
    primary_key: frozenset[int]
    """Indices of its columns."""

    def values(self, index: int) -> set[Any]:
        return {row[index] for row in self.rows} - {None}

    def is_text(self, index: int) -> bool:
        """Return whether a column holds several texts and nothing else, and all of its rows were read."""
        values = self.values(index)
        return not self.is_sampled and len(values) >= _LEAST_VALUES and all(isinstance(value, str) for value in values)


@dataclass(frozen=True, slots=True)
class _Reference:
    """Columns of a table whose values are all in columns of another one."""

    child: int
    child_columns: tuple[int, ...]
    parent: int
    parent_columns: tuple[int, ...]


class Copies:
    """The copies of one database; each is made when it is first asked for. Safe to use from any thread."""

    def __init__(self, path: Path, queries: Sequence[str]) -> None:
        """Read nothing yet. `queries` are asked about the database: what they name stays in the copies.

        Args:
            path: The database.
            queries: SQL.
        """
        self._path, self._queries = path, queries
        self._images: dict[int, bytes] = {}
        self._lock = Lock()
        self._source: _Source | None = None

    def image(self, seed: int) -> bytes:
        """Return the image of a copy; `seed` is below `NUM_COPIES`.

        Raises:
            ConfigError: The database can't be copied.
        """
        with self._lock:
            if seed not in self._images:
                try:
                    self._source = self._source or _Source.read(self._path, self._queries)
                    self._images[seed] = self._source.copy(Random(f"{self._path.name}/{seed}"), seed)
                except (sqlite3.Error, OSError) as error:
                    raise ConfigError(f"env.world.databases: {self._path} can't be copied: {error}") from error
            return self._images[seed]


@dataclass(slots=True)
class _Source:
    """What all copies of a database are made of."""

    schema: bytes
    """Image of the database without triggers, and without the rows of `tables`."""
    after: list[str]
    """Statements that complete a copy: triggers, and full text of other tables that is indexed again."""
    tables: list[_Table]
    references: list[_Reference]
    classes: list[list[Node]]
    fixed: set[int]
    """Numbers of the classes that stay as they are."""

    undroppable: set[int]
    """Numbers of the tables of which no row is dropped: SQLite finds what refers to them, but equality does not."""
    literals: set[Any]
    """Values that questions name."""

    @staticmethod
    def read(path: Path, queries: Sequence[str]) -> "_Source":
        literals = {*_literals(queries)}
        with tempfile.NamedTemporaryFile(suffix=".sqlite") as file:
            with _opened(path) as old, closing(sqlite3.connect(file.name, isolation_level=None)) as new:
                old.backup(new)
                new.execute("PRAGMA journal_mode = DELETE")
                new.text_factory = _lossless
                triggers = new.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
                for name, _ in triggers:
                    new.execute(f"DROP TRIGGER {quoted(name)}")
                tables = [*_tables(new, literals, Random(path.name))]
                full = _Full(new, tables)
                references = [*_declared(new, tables)]
                classes, inferred = _classes(full, references, {*_joined_names(queries)})
                references = [reference for reference in (*references, *inferred) if full.has_parents(reference)]
                _add_parents(full, references)
                rebuilt = [*_rebuilt(new)]
                tables = _emptied(new, tables)
                new.execute("VACUUM")
            schema = Path(file.name).read_bytes()
        inexact = [reference for reference in references if not _matches_rows(reference, tables)]
        references = [reference for reference in references if reference not in inexact]
        keys = {(reference.parent, p) for reference in references for p in reference.parent_columns}
        keys |= {(reference.child, p) for reference in references for p in reference.child_columns}
        keys |= {(number, p) for number, table in enumerate(tables) for p in table.primary_key}
        dependent = {node for number in range(len(tables)) for node in _dependent(number, tables[number], keys)}
        dependent |= {(reference.parent, index) for reference in inexact for index in reference.parent_columns}
        fixed = {n for n, nodes in enumerate(classes) if dependent.intersection(nodes) or _is_mixed(nodes, tables)}
        after = [*rebuilt, *(sql for _, sql in triggers)]
        undroppable = {reference.parent for reference in inexact}
        return _Source(schema, after, tables, references, classes, fixed, undroppable, literals)

    def copy(self, rng: Random, seed: int) -> bytes:
        """Return the image of a copy."""
        remaining = [table.rows for table in self.tables]
        if seed % 2:
            remaining = self._dropped(rng)
        fixed = {*self.fixed}
        if seed >= _ALL_PERMUTED:
            fixed |= {number for number in range(len(self.classes)) if rng.random() > _PERMUTED}
        state = rng.getstate()
        while True:
            rng.setstate(state)
            image, refused = self._written(self._permuted(remaining, fixed, rng))
            # A constraint over several columns does not fit permuted values.
            further = {n for n, nodes in enumerate(self.classes) if refused.intersection(table for table, _ in nodes)}
            if image is not None or further <= fixed:
                break
            fixed |= further
        return image if image is not None else self._written(remaining, is_strict=False)[0] or self.schema

    def _dropped(self, rng: Random) -> list[list[Row]]:
        """Return the rows of each table without some, and without those that refer to them."""
        remaining = [
            [
                row
                for row in table.rows
                if len(table.rows) < 2 or rng.random() < _KEPT_SHARE or number in self.undroppable
            ]
            for number, table in enumerate(self.tables)
        ]
        before = -1
        while before != (before := sum(map(len, remaining))):
            for reference in self.references:
                parent_keys = {
                    tuple(row[index] for index in reference.parent_columns) for row in remaining[reference.parent]
                }
                remaining[reference.child] = [
                    row
                    for row in remaining[reference.child]
                    if None in (key := tuple(row[index] for index in reference.child_columns)) or key in parent_keys
                ]
        return remaining

    def _permuted(self, remaining: Sequence[Sequence[Row]], fixed: set[int], rng: Random) -> list[list[Row]]:
        rows = [[[*row] for row in of_table] for of_table in remaining]
        for number, nodes in enumerate(self.classes):
            values = sorted({v for table, index in nodes for v in self.tables[table].values(index)}, key=_sorting)
            moved = _permutation(values, rng, self.literals)
            if number in fixed:
                continue
            for table, index in nodes:
                for row in rows[table]:
                    row[index] = moved.get(row[index], row[index])
        return rows

    def _written(self, rows: Sequence[Sequence[Row]], *, is_strict: bool = True) -> tuple[bytes | None, set[int]]:
        """Return the image with these rows, or None and the numbers of the tables that refuse them.

        Without `is_strict`, a row that its table refuses is left out.
        """
        refused = set[int]()
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as new:
            new.deserialize(self.schema)
            new.execute("PRAGMA synchronous = OFF")
            new.execute("BEGIN")
            for number, table in enumerate(self.tables):
                try:
                    _insert(new, table, rows[number], is_strict=is_strict)
                except sqlite3.Error:
                    refused.add(number)
            if refused and is_strict:
                return None, refused
            for statement in self.after:
                with suppress(sqlite3.Error):
                    new.execute(statement)
            new.execute("COMMIT")
            return new.serialize(), refused


# ----------------------------------------------------------------------------------------------------- reading, writing


def _opened(path: Path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True))


def _lossless(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _tables(connection: sqlite3.Connection, literals: set[Any], rng: Random) -> Iterator[_Table]:
    """Read rows of each table; a table that can't be read is left as it is."""
    for _, name, kind, _, is_without_rowid, *_ in connection.execute("PRAGMA main.table_list").fetchall():
        if kind not in ("table", "virtual") or name.startswith("sqlite_"):
            continue
        with suppress(sqlite3.Error):
            info = connection.execute(f"PRAGMA table_xinfo({quoted(name)})").fetchall()
            columns = [quoted(row[1]) for row in info if row[6] == 0]
            keys = [row for row in info if row[5]]
            has_own_key = len(keys) == 1 and keys[0][2].upper() == "INTEGER"
            if not is_without_rowid and not has_own_key and not _is_area(connection, name):
                column_names = {row[1].lower() for row in info}
                columns = [*[alias for alias in _ROWID_NAMES if alias not in column_names][:1], *columns]
            selected = connection.execute(f"SELECT {', '.join(columns)} FROM {quoted(name)}")
            (count,) = connection.execute(f"SELECT COUNT(*) FROM {quoted(name)}").fetchone()
            rows = _sample(map(list, selected), literals, rng)
            primary_key = frozenset(columns.index(quoted(row[1])) for row in keys if quoted(row[1]) in columns)
            yield _Table(name, columns, rows, kind == "virtual", count > len(rows), primary_key)


def _emptied(connection: sqlite3.Connection, tables: Sequence[_Table]) -> list[_Table]:
    """Delete the rows of all tables, and return them; one that can't be emptied keeps its rows, and gets no others."""
    for table in tables:
        try:
            connection.execute(f"DELETE FROM {quoted(table.name)}")
        except sqlite3.Error:
            table.rows, table.columns = [], []
    return [*tables]


def _is_area(connection: sqlite3.Connection, name: str) -> bool:
    """Return whether a table is an R-tree, whose first column is the row id."""
    (sql,) = connection.execute("SELECT sql FROM sqlite_master WHERE name = ?", (name,)).fetchone()
    return re.search(r"\busing\s+(rtree|rtree_i32|geopoly)\b", sql, re.IGNORECASE) is not None


def _sample(rows: Iterable[Row], literals: set[Any], rng: Random) -> list[Row]:
    """Return at most `_MOST_ROWS` random rows and as many others that hold a literal, in their order.

    A literal that many rows hold keeps the first `_MOST_NAMED` of them.
    """
    named, unnamed, slots = dict[int, Row](), dict[int, Row](), list[int]()
    quota = Counter(dict.fromkeys(literals, _MOST_NAMED))
    for number, row in enumerate(rows):
        literals_in_row = (
            [literal for value in row if quota[literal := _folded(value)] > 0] if len(named) < _MOST_ROWS else []
        )
        if literals_in_row:
            quota.subtract(literals_in_row)
            named[number] = row
        elif len(slots) < _MOST_ROWS:
            slots.append(number)
            unnamed[number] = row
        elif (slot := rng.randrange(number + 1)) < _MOST_ROWS:
            del unnamed[slots[slot]]
            slots[slot], unnamed[number] = number, row
    return [row for _, row in sorted((named | unnamed).items())]


def _insert(connection: sqlite3.Connection, table: _Table, rows: Sequence[Row], *, is_strict: bool) -> None:
    how = "INSERT" if is_strict else "INSERT OR IGNORE"
    into = f"{how} INTO {quoted(table.name)} ({', '.join(table.columns)}) VALUES "
    plain = f"({', '.join('?' * len(table.columns))})"
    for row in rows:
        values = [_bytes(value) for value in row]
        if values == row:
            connection.execute(into + plain, row)
        else:  # A text that is not UTF-8.
            marks = ["?" if value is old else "CAST(? AS TEXT)" for value, old in zip(values, row, strict=True)]
            connection.execute(f"{into}({', '.join(marks)})", values)


def _bytes(value: Any) -> Any:
    """Return a text with bytes that are not UTF-8 as bytes, anything else as it is."""
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-8", "surrogateescape")
    return value


def _rebuilt(connection: sqlite3.Connection) -> Iterator[str]:
    """Yield statements that index again the full text of other tables."""
    virtual = "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND rootpage = 0"
    for name, sql in connection.execute(virtual).fetchall():
        if re.search(r"\bcontent\s*=\s*['\"]?\w", sql, re.IGNORECASE):
            yield f"INSERT INTO {quoted(name)} ({quoted(name)}) VALUES ('rebuild')"


# ------------------------------------------------------------------------------------------------ what belongs together


def _declared(connection: sqlite3.Connection, tables: Sequence[_Table]) -> Iterator[_Reference]:
    """Yield the foreign keys of the schema."""
    numbers = {table.name.lower(): number for number, table in enumerate(tables)}
    for child, table in enumerate(tables):
        parts: defaultdict[int, list[tuple[str, str, str | None]]] = defaultdict(list)
        for key, _, parent, column, target, *_ in connection.execute(f"PRAGMA foreign_key_list({quoted(table.name)})"):
            parts[key].append((parent, column, target))
        for columns in parts.values():
            parent = numbers.get(columns[0][0].lower())
            if parent is None:
                continue
            info = connection.execute(f"PRAGMA table_info({quoted(tables[parent].name)})").fetchall()
            primary_key = [row[1] for row in sorted(info, key=lambda row: row[5]) if row[5]]
            targets = [target for *_, target in columns]
            if None in targets:
                targets = primary_key
            with suppress(ValueError):
                yield _Reference(
                    child,
                    tuple(_index(table, column) for _, column, _ in columns),
                    parent,
                    tuple(_index(tables[parent], str(target)) for target in targets),
                )


def _index(table: _Table, column: str) -> int:
    return [name.lower() for name in table.columns].index(quoted(column).lower())


@dataclass(frozen=True, slots=True)
class _Full:
    """A database with all of its rows, and the tables that hold samples of them."""

    connection: sqlite3.Connection
    tables: Sequence[_Table]

    def has_parents(self, reference: _Reference) -> bool:
        """Return whether each key of a child is one of its parent."""
        child = self._names(reference.child, reference.child_columns)
        parent = self._names(reference.parent, reference.parent_columns)
        keys = f"SELECT {', '.join(parent)} FROM {quoted(self.tables[reference.parent].name)}"
        cursor = self.connection.execute(
            f"SELECT 1 FROM {quoted(self.tables[reference.child].name)} WHERE {self._not_null(child)} AND "
            f"({', '.join(child)}) NOT IN ({keys} WHERE {self._not_null(parent)}) LIMIT 1"
        )
        return cursor.fetchone() is None

    def parents(self, reference: _Reference, keys: Iterable[tuple[Any, ...]]) -> list[Row]:
        """Return the rows of a parent that have one of the keys."""
        parent, names = self.tables[reference.parent], self._names(reference.parent, reference.parent_columns)
        indices = [f"k{number}" for number in range(len(names))]
        self.connection.execute(f"CREATE TEMP TABLE wanted_keys ({', '.join(indices)})")
        marks = ", ".join("?" * len(indices))
        rows = [key for key in keys if [*map(_bytes, key)] == [*key]]
        self.connection.executemany(f"INSERT INTO wanted_keys VALUES ({marks})", rows)
        cursor = self.connection.execute(
            f"SELECT {', '.join(parent.columns)} FROM {quoted(parent.name)} "
            f"WHERE ({', '.join(names)}) IN (SELECT {', '.join(indices)} FROM temp.wanted_keys)"
        ).fetchall()
        self.connection.execute("DROP TABLE temp.wanted_keys")
        return [*map(list, cursor)]

    def is_unique(self, node: Node) -> bool:
        """Return whether all values of a column differ."""
        table = self.tables[node[0]]
        if not table.is_sampled:
            return 1 < len(table.rows) == len(table.values(node[1]))
        column = table.columns[node[1]]
        counts = f"SELECT COUNT(*), COUNT(DISTINCT {column}) FROM {quoted(table.name)}"
        rows, different = self.connection.execute(counts).fetchone()
        return rows == different

    def shared(self, first: Node, second: Node) -> tuple[int, int, int]:
        """Return the numbers of different values of two columns, and how many are in both."""
        if not any(self.tables[table].is_sampled for table, _ in (first, second)):
            in_first, in_second = (self.tables[table].values(index) for table, index in (first, second))
            return len(in_first), len(in_second), len(in_first & in_second)
        selected = [
            f"SELECT {(c := self.tables[table].columns[index])} FROM {quoted(self.tables[table].name)} "
            f"WHERE {c} IS NOT NULL"
            for table, index in (first, second)
        ]
        counted = [*(f"SELECT DISTINCT * FROM ({sql})" for sql in selected), " INTERSECT ".join(selected)]
        first_count, second_count, both_count = (
            self.connection.execute(f"SELECT COUNT(*) FROM ({sql})").fetchone()[0] for sql in counted
        )
        return first_count, second_count, both_count

    def _names(self, table: int, indices: Iterable[int]) -> list[str]:
        return [self.tables[table].columns[index] for index in indices]

    @staticmethod
    def _not_null(columns: Iterable[str]) -> str:
        return " AND ".join(f"{column} IS NOT NULL" for column in columns)


def _add_parents(full: _Full, references: Sequence[_Reference]) -> None:
    """Add the rows that rows of a sample refer to."""
    is_growing = True
    while is_growing:
        is_growing = False
        for reference in references:
            parent = full.tables[reference.parent]
            if not parent.is_sampled:
                continue
            parent_keys = {tuple(row[index] for index in reference.parent_columns) for row in parent.rows}
            keys = {tuple(row[index] for index in reference.child_columns) for row in full.tables[reference.child].rows}
            rows = full.parents(reference, sorted((key for key in keys - parent_keys if None not in key), key=repr))
            present = {tuple(row) for row in parent.rows}
            added = [row for row in rows if tuple(row) not in present]
            parent.rows += added
            is_growing |= bool(added)


def _classes(
    full: _Full, declared: Sequence[_Reference], joined: set[frozenset[str]]
) -> tuple[list[list[Node]], list[_Reference]]:
    """Return the classes of columns that share values, and the references that no schema declares."""
    nodes = [(number, index) for number, table in enumerate(full.tables) for index in range(len(table.columns))]
    root = {node: node for node in nodes}

    def find(node: Node) -> Node:
        while root[node] != node:
            node = root[node]
        return node

    for reference in declared:
        for child, parent in zip(reference.child_columns, reference.parent_columns, strict=False):
            root[find((reference.child, child))] = find((reference.parent, parent))
    unique = {node for node in nodes if full.is_unique(node)}
    inferred = list[_Reference]()
    for first, second in combinations(nodes, 2):
        if not _may_be_joined(first, second, full.tables, joined, unique):
            continue
        in_first, in_second, in_both = full.shared(first, second)
        if 2 * in_both < max(1, min(in_first, in_second)):
            continue
        root[find(first)] = find(second)
        inferred += [
            _Reference(child[0], (child[1],), parent[0], (parent[1],))
            for child, parent, count in ((first, second, in_first), (second, first, in_second))
            if child[0] != parent[0] and parent in unique and count == in_both
        ]
    classes: defaultdict[Node, list[Node]] = defaultdict(list)
    for node in nodes:
        classes[find(node)].append(node)
    return [*classes.values()], inferred


def _may_be_joined(
    first: Node, second: Node, tables: Sequence[_Table], joined: set[frozenset[str]], unique: set[Node]
) -> bool:
    """Return whether a question compares two columns, or their names are those of a thing and of what refers to it."""
    names = [tables[table].columns[index].strip('"').lower() for table, index in (first, second)]
    are_keys = first in unique and second in unique
    if frozenset(names) in joined:
        return not (names[0] == names[1] and first[0] == second[0])
    if first[0] == second[0]:
        return False
    # Row ids of full text belong to the rows of the table whose text it is.
    if any(tables[table].is_virtual for table, _ in (first, second)):
        has_rowid = any(tables[table].is_virtual and index == 0 for table, index in (first, second))
        return names[0] == names[1] or (has_rowid and are_keys)
    if names[0] == names[1]:
        return names[0] not in _ROWID_NAMES and not (are_keys and names[0] == "id")  # Ids of two kinds of things.
    if _is_named_after(names[0], names[1], tables[second[0]]) or _is_named_after(names[1], names[0], tables[first[0]]):
        return True
    return (first in unique or second in unique) and all(
        tables[table].is_text(index) for table, index in (first, second)
    )


def _is_named_after(name: str, key: str, table: _Table) -> bool:
    """Return whether a column's name consists of those of a table and of its key, as in `customer_id`."""
    return name != key and name.endswith(key) and name[:3] == table.name.lower()[:3]


def _matches_rows(reference: _Reference, tables: Sequence[_Table]) -> bool:
    parent_keys = {tuple(row[index] for index in reference.parent_columns) for row in tables[reference.parent].rows}
    keys = [tuple(row[index] for index in reference.child_columns) for row in tables[reference.child].rows]
    return all(None in key or key in parent_keys for key in keys)


def _literals(queries: Sequence[str]) -> Iterator[Any]:
    for single, double, number in (match.groups() for sql in queries for match in _LITERAL.finditer(sql)):
        if number is not None:
            yield float(number)
        else:
            yield (single if single is not None else double or "").replace("''", "'").strip("%").casefold()


def _folded(value: Any) -> Any:
    return value.casefold() if isinstance(value, str) else value


def _joined_names(queries: Sequence[str]) -> Iterator[frozenset[str]]:
    for match in (match for sql in queries for match in _JOINED.finditer(sql)):
        yield frozenset(name.lower() for name in match.groups())


# ------------------------------------------------------------------------------------------------- values that depend


def _is_mixed(nodes: Sequence[Node], tables: Sequence[_Table]) -> bool:
    """Return whether columns of a class hold texts and numbers, which SQLite may compare as one and the same."""
    kinds = {isinstance(value, str) for table, index in nodes for value in tables[table].values(index)}
    return len(nodes) > 1 and len(kinds) > 1


def _dependent(number: int, table: _Table, keys: set[Node]) -> Iterator[Node]:
    """Yield the columns of a table that depend on each other; keys only name things, and depend on nothing."""
    rows, rng = table.rows[:_LOOKED_AT], Random(table.name)
    indices = [n for n in range(len(table.columns)) if (number, n) not in keys and table.columns[n] not in _ROWID_NAMES]
    columns = {index: [row[index] for row in rows] for index in indices[:_MOST_COLUMNS]}
    several = {index: values for index, values in columns.items() if len({*values} - {None}) >= _LEAST_VALUES}
    numbers = {n: values for n, values in several.items() if all(isinstance(v, int | float | None) for v in values)}
    texts = {n: values for n, values in several.items() if all(isinstance(v, str | None) for v in values)}
    dates = {n: values for n, values in texts.items() if all(v is None or _DATE.match(v) for v in values)}
    relations = [
        (_is_paired, combinations(columns, 2)),
        (_is_before, (*permutations(numbers, 2), *permutations(dates, 2))),
        (_is_monotone, (*combinations(numbers, 2), *combinations(dates, 2))),
        (_is_part, ((a, b) for a, b in permutations(numbers | texts, 2) if b in texts)),
    ]
    for relation, pairs in relations:
        for a, b in pairs:
            if _depends(columns[a], columns[b], relation, rng):
                yield from ((number, a), (number, b))
    for a, b, c in permutations(numbers, 3):
        if _is_computed(columns[a], columns[b], columns[c]):
            yield from ((number, a), (number, b), (number, c))


def _depends(
    first: Sequence[Any], second: Sequence[Any], relation: Callable[[list[tuple[Any, Any]]], bool], rng: Random
) -> bool:
    """Return whether a relation holds for two columns, but hardly ever if one of them is shuffled."""
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    if len(pairs) < _LEAST_ROWS or not relation(pairs):
        return False
    shuffled = [b for _, b in pairs]
    chances = 0
    for _ in range(_SHUFFLES):
        rng.shuffle(shuffled)
        chances += relation([(a, b) for (a, _), b in zip(pairs, shuffled, strict=True)])
    return chances <= _SHUFFLES // 10


def _is_before(pairs: list[tuple[Any, Any]]) -> bool:
    return all(a <= b for a, b in pairs)


def _is_monotone(pairs: list[tuple[Any, Any]]) -> bool:
    ordered = [b for _, b in sorted(pairs)]
    return all(a <= b for a, b in pairwise(ordered)) or all(a >= b for a, b in pairwise(ordered))


def _is_paired(pairs: list[tuple[Any, Any]]) -> bool:
    """Return whether each value of two columns has one partner, such as a code of many rows and its name."""
    different = {*pairs}
    return len({a for a, _ in different}) == len({b for _, b in different}) == len(different) > 1


def _is_part(pairs: list[tuple[Any, Any]]) -> bool:
    return all(str(a).casefold() in str(b).casefold() for a, b in pairs)


def _is_computed(first: Sequence[Any], second: Sequence[Any], third: Sequence[Any]) -> bool:
    """Return whether the third column is product, sum, difference or quotient of the first two, perhaps in percent."""
    rows = [row for row in zip(first, second, third, strict=True) if None not in row]
    if len(rows) < _LEAST_ROWS:
        return False
    operations: tuple[Callable[[Any, Any], float], ...] = (
        lambda a, b: a * b,
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: a / b,
        lambda a, b: 100 * a / b,
    )
    for operation in operations:
        with suppress(ZeroDivisionError, OverflowError):
            if all(isclose(operation(a, b), c, rel_tol=1e-4, abs_tol=0.006) for a, b, c in rows):
                return True
    return False


# -------------------------------------------------------------------------------------------------------- permutations


def _sorting(value: Any) -> tuple[str, Any]:
    return ("number" if isinstance(value, int | float) else type(value).__name__, value)


def _permutation(values: Sequence[Any], rng: Random, literals: set[Any]) -> dict[Any, Any]:
    """Return a random cycle through the numbers and one through the texts, as old value -> new value.

    A single value becomes another one of its form, or stays; it stays if it is one of `literals`.
    """
    moved = dict[Any, Any]()
    for kinds in ((int, float), (str,)):
        group = [value for value in values if isinstance(value, kinds)]
        rng.shuffle(group)
        moved |= zip(group, [*group[1:], *group[:1]], strict=True)
        if len(group) == 1 and _folded(group[0]) not in literals and rng.random() < 0.5:
            moved[group[0]] = _same_form(group[0])
    return moved


def _same_form(value: Any) -> Any:
    """Return another value of the same form."""
    if isinstance(value, int):
        return value + 1 if value < 2**62 else value - 1
    if isinstance(value, float):
        return value + 1.0
    for index in reversed(range(len(value))):
        if value[index].isascii() and value[index].isalnum():
            letter = value[index]
            following = {"9": "8", "z": "y", "Z": "Y"}.get(letter, chr(ord(letter) + 1))
            return value[:index] + following + value[index + 1 :]
    return f"{value}x"
