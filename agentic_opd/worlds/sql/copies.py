"""Copies of a database that differ from it in their rows and values, but not in what relates them (I/O).

    database -> its schema without rows, and a sample of its rows -> rows dropped -> values permuted -> image

A right answer is right on each copy, however it is written: keys stay keys, references keep their targets, rows that
were equal in a column stay equal in it, and every constraint holds. An answer that repeats values of the database is
wrong on a copy: `SELECT '555' FROM phones WHERE name = 'Ann'` meets another number beside that name.

- Rows: of every other copy, a quarter is dropped, and then the rows that refer to dropped ones.
- Values: columns that share values (references, and columns of one name) form a class. Each class has one permutation
  of its different values. It is the same in all of its columns, and another one than those of other classes.
- Columns that depend on each other in a way that permutations do not keep stay as they are: a total and its parts, a
  start before its end, a year and its date, a name and its initials.

Copies are seeded: the same file gives the same copies.
"""

import re
import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import combinations, pairwise, permutations
from math import isclose
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any

from agentic_opd.core.errors import ConfigError
from agentic_opd.worlds.sql.query_process import quoted

NUM_COPIES = 12
_MOST_ROWS = 2000
"""Rows of a table in a copy, and as many again that hold a value which a question names."""
_KEPT = 0.75
_PERMUTED = 0.75
"""Probability that a class of columns is permuted; in the first copies all are."""
_ALL_PERMUTED = 2
_LOOKED_AT = 300
"""Rows of a table in which dependencies are looked for."""
_LEAST_ROWS, _LEAST_VALUES = 6, 4
"""Fewer rows or values show no dependency."""
_SHUFFLES = 20
_MOST_COLUMNS = 12
"""Columns of a table among which dependencies are looked for."""
_ROWID_NAMES = ("rowid", "_rowid_", "oid")
_DATE = re.compile(r"\d{4}-\d\d")
_LITERAL = re.compile(r"'((?:[^']|'')*)'|\"((?:[^\"]|\"\")*)\"|(?<![\w.])(\d+(?:\.\d+)?)(?![\w.])")
_NAME = r"[`\"\[]?(\w[\w ]*?)[`\"\]]?"
_JOINED = re.compile(rf"\w[`\"\]]?\.{_NAME}\s*=\s*[`\"\[]?\w[\w ]*?[`\"\]]?\.{_NAME}(?=\W|$)")

Row = list[Any]
Node = tuple[int, int]
"""A column: the numbers of its table and of its place in the table's rows."""


@dataclass(slots=True)
class _Table:
    name: str
    columns: list[str]
    """The columns of `rows`, as SQL; a row id comes first, if it is no column of the table."""
    rows: list[Row]
    is_virtual: bool
    unique: set[int] = field(default_factory=set[int])
    """Places of the columns whose values all differ."""

    def values(self, place: int) -> set[Any]:
        return {row[place] for row in self.rows} - {None}


@dataclass(frozen=True, slots=True)
class _Reference:
    """Columns of a table whose values are all in columns of another one."""

    child: int
    child_places: tuple[int, ...]
    parent: int
    parent_places: tuple[int, ...]


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
                    raise ConfigError(f"sql_databases: {self._path} can't be copied: {error}") from error
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

    @staticmethod
    def read(path: Path, queries: Sequence[str]) -> "_Source":
        literals, joined = {*_literals(queries)}, {*_joined_names(queries)}
        with tempfile.NamedTemporaryFile(suffix=".sqlite") as file:
            with _opened(path) as old, closing(sqlite3.connect(file.name, isolation_level=None)) as new:
                old.backup(new)
                new.execute("PRAGMA journal_mode = DELETE")
                new.text_factory = _lossless
                triggers = [sql for (sql,) in new.execute("SELECT sql FROM sqlite_master WHERE type = 'trigger'")]
                for (name,) in new.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
                    new.execute(f"DROP TRIGGER {quoted(name)}")
                tables = [*_tables(new, literals, Random(path.name))]
                references = [*_declared(new, tables)]
                rebuilt = [*_rebuilt(new)]
                new.execute("VACUUM")
            schema = Path(file.name).read_bytes()
        classes, inferred = _classes(tables, references, joined)
        references = [one for one in (*references, *inferred) if _holds(one, tables)]
        keys = {(one.parent, p) for one in references for p in one.parent_places}
        keys |= {(one.child, p) for one in references for p in one.child_places}
        dependent = {node for number in range(len(tables)) for node in _dependent(number, tables[number], keys)}
        fixed = {n for n, nodes in enumerate(classes) if dependent.intersection(nodes) or _is_mixed(nodes, tables)}
        return _Source(schema, [*rebuilt, *triggers], tables, references, classes, fixed)

    def copy(self, rng: Random, seed: int) -> bytes:
        """Return the image of a copy."""
        kept = [table.rows for table in self.tables]
        if seed % 2:
            kept = self._dropped(rng)
        fixed = {*self.fixed}
        if seed >= _ALL_PERMUTED:
            fixed |= {number for number in range(len(self.classes)) if rng.random() > _PERMUTED}
        state = rng.getstate()
        while True:
            rng.setstate(state)
            image, refused = self._written(self._permuted(kept, fixed, rng))
            # A constraint over several columns does not fit permuted values.
            further = {n for n, nodes in enumerate(self.classes) if refused.intersection(table for table, _ in nodes)}
            if image is not None or further <= fixed:
                break
            fixed |= further
        return image if image is not None else self._written(kept, is_strict=False)[0] or self.schema

    def _dropped(self, rng: Random) -> list[list[Row]]:
        """Return the rows of each table without some, and without those that refer to them."""
        kept = [[row for row in table.rows if len(table.rows) < 2 or rng.random() < _KEPT] for table in self.tables]
        before = -1
        while before != (before := sum(map(len, kept))):
            for one in self.references:
                there = {tuple(row[place] for place in one.parent_places) for row in kept[one.parent]}
                kept[one.child] = [
                    row
                    for row in kept[one.child]
                    if None in (key := tuple(row[place] for place in one.child_places)) or key in there
                ]
        return kept

    def _permuted(self, kept: Sequence[Sequence[Row]], fixed: set[int], rng: Random) -> list[list[Row]]:
        rows = [[[*row] for row in of_table] for of_table in kept]
        for number, nodes in enumerate(self.classes):
            values = sorted({v for table, place in nodes for v in self.tables[table].values(place)}, key=_sorting)
            moved = _permutation(values, rng)
            if number in fixed:
                continue
            for table, place in nodes:
                for row in rows[table]:
                    row[place] = moved.get(row[place], row[place])
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
    """Read the rows of each table, and delete them; a table that can't be read or emptied is left as it is."""
    kinds = {row[1]: row for row in connection.execute("PRAGMA table_list").fetchall() if row[0] == "main"}
    for name, (*_, is_without_rowid, _) in kinds.items():
        kind = kinds[name][2]
        if kind not in ("table", "virtual") or name.startswith("sqlite_"):
            continue
        with suppress(sqlite3.Error):
            about = connection.execute(f"PRAGMA table_xinfo({quoted(name)})").fetchall()
            names = [row[1] for row in about if row[6] == 0]
            columns = [*map(quoted, names)]
            keys = [row for row in about if row[5]]
            has_own_key = len(keys) == 1 and keys[0][2].upper() == "INTEGER"
            if not is_without_rowid and not has_own_key and not _is_area(connection, name):
                taken = {row[1].lower() for row in about}
                columns = [*[alias for alias in _ROWID_NAMES if alias not in taken][:1], *columns]
            selected = connection.execute(f"SELECT {', '.join(columns)} FROM {quoted(name)}")
            rows = _sample(map(list, selected), literals, rng)
            connection.execute(f"DELETE FROM {quoted(name)}")
            table = _Table(name, columns, rows, kind == "virtual")
            table.unique = {
                place for place in range(len(columns)) if len(rows) > 1 and len(table.values(place)) == len(rows)
            }
            yield table


def _is_area(connection: sqlite3.Connection, name: str) -> bool:
    """Whether a table is an R-tree, whose first column is the row id."""
    (sql,) = connection.execute("SELECT sql FROM sqlite_master WHERE name = ?", (name,)).fetchone()
    return re.search(r"\busing\s+(rtree|rtree_i32|geopoly)\b", sql, re.IGNORECASE) is not None


def _sample(rows: Iterable[Row], literals: set[Any], rng: Random) -> list[Row]:
    """Return at most `_MOST_ROWS` random rows and as many others that hold a literal, in their order."""
    named, others = dict[int, Row](), dict[int, Row]()
    slots = list[int]()
    for number, row in enumerate(rows):
        if len(named) < _MOST_ROWS and not literals.isdisjoint(map(_folded, row)):
            named[number] = row
        elif len(slots) < _MOST_ROWS:
            slots.append(number)
            others[number] = row
        elif (slot := rng.randrange(number + 1)) < _MOST_ROWS:
            del others[slots[slot]]
            slots[slot], others[number] = number, row
    return [row for _, row in sorted((named | others).items())]


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
    made = "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND rootpage = 0"
    for name, sql in connection.execute(made).fetchall():
        if re.search(r"\bcontent\s*=\s*['\"]?\w", sql, re.IGNORECASE):
            yield f"INSERT INTO {quoted(name)} ({quoted(name)}) VALUES ('rebuild')"


# --------------------------------------------------------------------------------------------------- what belongs together


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
            about = connection.execute(f"PRAGMA table_info({quoted(tables[parent].name)})").fetchall()
            own_key = [row[1] for row in sorted(about, key=lambda row: row[5]) if row[5]]
            targets = [target for *_, target in columns]
            if None in targets:
                targets = own_key
            with suppress(ValueError):
                yield _Reference(
                    child,
                    tuple(_place(table, column) for _, column, _ in columns),
                    parent,
                    tuple(_place(tables[parent], str(target)) for target in targets),
                )


def _place(table: _Table, column: str) -> int:
    return [name.lower() for name in table.columns].index(quoted(column).lower())


def _classes(
    tables: Sequence[_Table], declared: Sequence[_Reference], joined: set[frozenset[str]]
) -> tuple[list[list[Node]], list[_Reference]]:
    """Return the classes of columns that share values, and the references that no schema declares."""
    nodes = [(number, place) for number, table in enumerate(tables) for place in range(len(table.columns))]
    values = {node: tables[node[0]].values(node[1]) for node in nodes}
    root = {node: node for node in nodes}

    def find(node: Node) -> Node:
        while root[node] != node:
            node = root[node]
        return node

    def join(first: Node, second: Node) -> None:
        root[find(first)] = find(second)

    for one in declared:
        for child, parent in zip(one.child_places, one.parent_places, strict=False):
            join((one.child, child), (one.parent, parent))
    inferred = list[_Reference]()
    for first, second in combinations(nodes, 2):
        smaller, larger = sorted((first, second), key=lambda node: len(values[node]))
        if not _may_be_joined(first, second, tables, joined) or not values[smaller]:
            continue
        if 2 * len(values[smaller] & values[larger]) < len(values[smaller]):
            continue
        join(first, second)
        for child, parent in ((smaller, larger), (larger, smaller)):
            if child[0] != parent[0] and parent[1] in tables[parent[0]].unique and values[child] <= values[parent]:
                inferred.append(_Reference(child[0], (child[1],), parent[0], (parent[1],)))
                break
    classes: defaultdict[Node, list[Node]] = defaultdict(list)
    for node in nodes:
        classes[find(node)].append(node)
    return [*classes.values()], inferred


def _may_be_joined(first: Node, second: Node, tables: Sequence[_Table], joined: set[frozenset[str]]) -> bool:
    """Whether two columns have one name, or are compared by a question; ids of two kinds of things only have one name.

    Row ids of full text belong to the rows of the table whose text it is.
    """
    names = [tables[table].columns[place].strip('"').lower() for table, place in (first, second)]
    are_keys = all(place in tables[table].unique for table, place in (first, second))
    if frozenset(names) in joined:
        return not (names[0] == names[1] and first[0] == second[0])
    if first[0] == second[0]:
        return False
    if any(tables[table].is_virtual for table, _ in (first, second)):
        has_rowid = any(tables[table].is_virtual and place == 0 for table, place in (first, second))
        return names[0] == names[1] or (has_rowid and are_keys)
    return names[0] == names[1] and not (are_keys and names[0] == "id") and names[0] not in _ROWID_NAMES


def _holds(one: _Reference, tables: Sequence[_Table]) -> bool:
    there = {tuple(row[place] for place in one.parent_places) for row in tables[one.parent].rows}
    keys = [tuple(row[place] for place in one.child_places) for row in tables[one.child].rows]
    return all(None in key or key in there for key in keys)


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
    """Whether columns of a class hold texts and numbers, which SQLite may compare as one and the same."""
    kinds = {isinstance(value, str) for table, place in nodes for value in tables[table].values(place)}
    return len(nodes) > 1 and len(kinds) > 1


def _dependent(number: int, table: _Table, keys: set[Node]) -> Iterator[Node]:
    """Yield the columns of a table that depend on each other; keys only name things, and depend on nothing."""
    rows, rng = table.rows[:_LOOKED_AT], Random(table.name)
    places = [p for p in range(len(table.columns)) if (number, p) not in keys and table.columns[p] not in _ROWID_NAMES]
    columns = {place: [row[place] for row in rows] for place in places[:_MOST_COLUMNS]}
    columns = {place: values for place, values in columns.items() if len({*values} - {None}) >= _LEAST_VALUES}
    numbers = {p: values for p, values in columns.items() if all(isinstance(v, int | float | None) for v in values)}
    texts = {p: values for p, values in columns.items() if all(isinstance(v, str | None) for v in values)}
    dates = {p: values for p, values in texts.items() if all(v is None or _DATE.match(v) for v in values)}
    for group in (numbers, dates):
        for (a, first), (b, second) in permutations(group.items(), 2):
            if _depends(first, second, _is_before, rng) or (a < b and _depends(first, second, _is_monotone, rng)):
                yield from ((number, a), (number, b))
    for (a, first), (b, second) in permutations((numbers | texts).items(), 2):
        if b in texts and _depends(first, second, _is_part, rng):
            yield from ((number, a), (number, b))
    for (a, first), (b, second) in permutations(numbers.items(), 2):
        for c, third in numbers.items():
            if c not in (a, b) and _is_computed(first, second, third):
                yield from ((number, a), (number, b), (number, c))


def _depends(
    first: Sequence[Any], second: Sequence[Any], relation: Callable[[list[tuple[Any, Any]]], bool], rng: Random
) -> bool:
    """Whether a relation holds for two columns, but hardly ever if one of them is shuffled."""
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


def _is_part(pairs: list[tuple[Any, Any]]) -> bool:
    return all(str(a).casefold() in str(b).casefold() for a, b in pairs)


def _is_computed(first: Sequence[Any], second: Sequence[Any], third: Sequence[Any]) -> bool:
    """Whether the third column is the product, sum, difference or quotient of the first two, perhaps in percent."""
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


def _permutation(values: Sequence[Any], rng: Random) -> dict[Any, Any]:
    """Return a random cycle through the numbers and one through the texts, as old value -> new value.

    A single value becomes another one of its form, or stays.
    """
    moved = dict[Any, Any]()
    for kinds in ((int, float), (str,)):
        group = [value for value in values if isinstance(value, kinds)]
        rng.shuffle(group)
        moved |= zip(group, [*group[1:], *group[:1]], strict=True)
        if len(group) == 1 and rng.random() < 0.5:
            moved[group[0]] = _other(group[0])
    return moved


def _other(value: Any) -> Any:
    """Return another value of the same form."""
    if isinstance(value, int):
        return value + 1 if value < 2**62 else value - 1
    if isinstance(value, float):
        return value + 1.0
    for place in reversed(range(len(value))):
        if value[place].isascii() and value[place].isalnum():
            letter = value[place]
            following = {"9": "8", "z": "y", "Z": "Y"}.get(letter, chr(ord(letter) + 1))
            return value[:place] + following + value[place + 1 :]
    return f"{value}x"
