"""Generate questions over generated databases, each with the query that answers it. Pure, seeded.

A question is a `Query`, built from independent parts such as a join or a limit. `sql` writes it in a fixed form, `text`
in many phrasings. The set of its parts is its combination. Training never has the held-out combinations, although it
has each of their parts.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from random import Random
from typing import Literal

from agentic_opd_environments.sql.engine import Result, difference, run_query
from demo_policy.sql.databases import (
    NEVER_TRAINED,
    TRAINING,
    Column,
    Nouns,
    Schema,
    Table,
    draw_schema,
    filled,
    text_values,
)

Function = Literal["COUNT", "AVG", "SUM", "MIN", "MAX"]
Comparison = Literal[">", "<", "=", "year", "null", "not null"]

HELD_OUT = (
    frozenset({"join", "null"}),
    frozenset({"group", "year"}),
    frozenset({"distinct", "number"}),
    frozenset({"limit", "date"}),
)
"""Pairs of parts that never occur together in a training question."""

SHOWN_ROWS, HIDDEN_ROWS = 12, (20, 26, 32)
"""Number of rows of the first child table: in the shown database, and in each hidden one."""


@dataclass(frozen=True, slots=True)
class Filter:
    """A condition on a column of the query's table or, with a join, of its parent."""

    column: Column
    comparison: Comparison
    value: str | int | None = None
    of_parent: bool = False

    @property
    def part(self) -> str:
        """Name of this condition among the parts of a combination."""
        if self.comparison in ("null", "not null"):
            return "null"
        return "year" if self.comparison == "year" else self.column.kind


@dataclass(frozen=True, slots=True)
class Query:
    """A query of one of three shapes.

    It returns rows (`columns`), one number (`function`), or a number for each value of a column (`group`).
    """

    schema: Schema
    table: Table
    columns: tuple[Column, ...] = ()
    function: Function | None = None
    of: Column | None = None
    """Column that `function` aggregates; None counts rows."""
    filters: tuple[Filter, ...] = ()
    group: Column | None = None
    group_of_parent: bool = False
    having: int | None = None
    """Keep only groups with more rows than this number."""
    order: Column | None = None
    """Column that orders rows; groups are always ordered by their computed number."""
    is_descending: bool = True
    limit: int | None = None
    is_distinct: bool = False

    @property
    def is_joined(self) -> bool:
        """Whether the query needs the parent's columns."""
        return self.group_of_parent or any(condition.of_parent for condition in self.filters)

    @property
    def parts(self) -> frozenset[str]:
        """The query's combination: the names of its parts."""
        flags = {
            "rows": bool(self.columns),
            "number": self.function not in (None, "COUNT"),
            "count": self.function == "COUNT",
            "group": self.group is not None,
            "join": self.is_joined,
            "having": self.having is not None,
            "limit": self.limit is not None,
            "distinct": self.is_distinct,
        }
        return frozenset(
            {name for name, is_there in flags.items() if is_there} | {condition.part for condition in self.filters}
        )

    @property
    def is_held_out(self) -> bool:
        """Whether the query contains a held-out pair of parts."""
        return any(pair <= self.parts for pair in HELD_OUT)


# ------------------------------------------------------------------------------------------------------------ as SQL


def sql(query: Query) -> str:
    """Return the query as SQL."""
    return joined(clauses(query))


def clauses(query: Query) -> dict[str, str]:
    """Return the query's clauses in order, without keywords; conditions are named `filter 0`, `filter 1` and so on."""
    names = _Names(query)
    selected = [names.qualified(column) for column in query.columns]
    if query.group is not None:
        selected.append(names.grouped)
    if query.function is not None:
        selected.append(names.number)
    text_by_clause = {
        "select": ("DISTINCT " if query.is_distinct else "") + ", ".join(selected),
        "from": query.table.name,
    }
    if query.is_joined:
        parent = query.table.parent
        text_by_clause |= {"join": f"{parent}", "on": f"{query.table.name}.{query.table.link} = {parent}.id"}
    text_by_clause |= {f"filter {i}": _condition(condition, names) for i, condition in enumerate(query.filters)}
    if query.group is not None:
        text_by_clause["group"] = names.grouped
    if query.having is not None:
        text_by_clause["having"] = f"COUNT(*) > {query.having}"
    if query.limit is not None:
        by = names.number if query.order is None else names.qualified(query.order)
        text_by_clause["order"] = f"{by} {'DESC' if query.is_descending else 'ASC'} LIMIT {query.limit}"
    return text_by_clause


_KEYWORDS = {"select": "SELECT", "from": "FROM", "join": "JOIN", "on": "ON", "group": "GROUP BY", "having": "HAVING"}


def joined(text_by_clause: Mapping[str, str]) -> str:
    """Join the clauses of `clauses` into one query."""
    words = list[str]()
    for name, clause in text_by_clause.items():
        if name.startswith("filter"):
            words += ["AND" if "WHERE" in words else "WHERE", clause]
        else:
            words += [_KEYWORDS.get(name, "ORDER BY"), clause]
    return " ".join(words)


@dataclass(frozen=True, slots=True)
class _Names:
    """Column names as SQL, qualified by their table if the query has a join."""

    query: Query

    def qualified(self, column: Column, *, of_parent: bool = False) -> str:
        if not self.query.is_joined:
            return column.name
        return f"{self.query.table.parent if of_parent else self.query.table.name}.{column.name}"

    @property
    def grouped(self) -> str:
        assert self.query.group is not None
        return self.qualified(self.query.group, of_parent=self.query.group_of_parent)

    @property
    def number(self) -> str:
        return f"{self.query.function}({'*' if self.query.of is None else self.qualified(self.query.of)})"


def _condition(condition: Filter, names: _Names) -> str:
    name = names.qualified(condition.column, of_parent=condition.of_parent)
    if condition.comparison in ("null", "not null"):
        return f"{name} IS {condition.comparison.upper()}"
    if condition.comparison == "year":
        return f"strftime('%Y', {name}) = '{condition.value}'"
    value = condition.value if isinstance(condition.value, int) else f"'{condition.value}'"
    return f"{name} {condition.comparison} {value}"


# -------------------------------------------------------------------------------------------------------- as a question

_FUNCTIONS = {
    "AVG": ("average", "mean"),
    "SUM": ("total", "summed"),
    "MIN": ("lowest", "smallest"),
    "MAX": ("highest", "largest"),
}


def text(query: Query, rng: Random) -> str:
    """Return the question in words, in a phrasing that `rng` draws."""
    nouns = query.table.name
    where = _where(query, rng)
    if query.columns:
        columns = " and ".join(column.name for column in query.columns)
        if query.is_distinct:
            question = rng.choice(("Which different {c} are there among the {t}", "List each {c} of the {t} once"))
        elif query.limit is not None:
            assert query.order is not None
            superlative = rng.choice(("highest", "largest") if query.is_descending else ("lowest", "smallest"))
            first_rows = f"{query.limit} {nouns}" if query.limit > 1 else query.table.noun
            question = f"{rng.choice(('Show', 'List'))} the {{c}} of the {first_rows}"
            where = f" with the {superlative} {query.order.name}{where and f', among those{where}'}"
        else:
            question = rng.choice(("Show the {c} of all {t}", "List the {c} of the {t}", "What {c} do the {t} have"))
        end = "?" if question.startswith("Wh") else "."
        return f"{question.format(c=columns, t=nouns)}{where}{end}"
    number = _number(query, rng)
    if query.group is None:
        start = "" if query.of is None else rng.choice(("what is ", "find "))
        return f"{start}{number}{where}{'.' if number.startswith('count') or start == 'find ' else '?'}"
    group = f"{query.group.name} of the {query.table.parent}" if query.group_of_parent else query.group.name
    question = rng.choice((f"For each {group}, {number}{where}", f"By {group}: {number}{where}"))
    if query.having is not None:
        question += rng.choice(("; only groups of more than {n} {t}", "; keep groups with over {n} {t}")).format(
            n=query.having, t=nouns
        )
    if query.limit is not None:
        superlative = rng.choice(("highest", "largest") if query.is_descending else ("lowest", "smallest"))
        question += f"; only the {superlative} {query.limit if query.limit > 1 else 'one'}"
    return f"{question}."


def _number(query: Query, rng: Random) -> str:
    if query.of is None:
        return rng.choice(("how many {t} are there", "count the {t}")).format(t=query.table.name)
    assert query.function is not None
    return f"the {rng.choice(_FUNCTIONS[query.function])} {query.of.name} of the {query.table.name}"


def _where(query: Query, rng: Random) -> str:
    mine = [_phrase(condition, rng) for condition in query.filters if not condition.of_parent]
    theirs = [_phrase(condition, rng) for condition in query.filters if condition.of_parent]
    phrase = f" with {' and '.join(mine)}" if mine else ""
    if theirs:
        parent = query.schema.table(query.table.parent or "").noun
        article = "an" if parent[0] in "aeiou" else "a"
        phrase += f"{' and' if mine else ''} of {article} {parent} with {' and '.join(theirs)}"
    return phrase


def _phrase(condition: Filter, rng: Random) -> str:
    name, value = condition.column.name, condition.value
    forms: dict[str, tuple[str, ...]] = {
        "null": (f"no {name}", f"a missing {name}"),
        "not null": (f"a known {name}", f"some {name}"),
        "year": (f"{name} in {value}", f"{name} in the year {value}"),
        "=": (f"{name} {value}", f"the {name} {value}"),
    }
    if condition.column.kind == "date":
        forms |= {">": (f"{name} after {value}", f"{name} later than {value}")}
        forms |= {"<": (f"{name} before {value}", f"{name} earlier than {value}")}
    else:
        forms |= {">": (f"{name} above {value}", f"more than {value} {name}")}
        forms |= {"<": (f"{name} below {value}", f"less than {value} {name}")}
    return rng.choice(forms[condition.comparison])


# ---------------------------------------------------------------------------------------------------------- generating


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its query, and the images of its shown and hidden databases."""

    query: Query
    text: str
    visible: bytes
    hidden: tuple[bytes, ...]


def questions(seed: int | str, *, held_out: bool, nouns: Iterable[Nouns] = repeat(TRAINING)) -> Iterator[Question]:
    """Yield questions, one for each item of `nouns`.

    Args:
        seed: Determines the questions.
        held_out: Yield evaluation questions. In every three, the first has a held-out schema, the second a held-out
            combination, the third both.
        nouns: Nouns for the tables of each question whose schema is not held out.
    """
    rng = Random(f"sql/{seed}/{held_out}")
    for number, named in enumerate(nouns):
        kind = number % 3 if held_out else None
        pair = rng.choice(HELD_OUT) if kind in (1, 2) else None
        yield _drawn(rng, pair, NEVER_TRAINED if kind in (0, 2) else named)


_TRIES_A_SCHEMA = 20


def _drawn(rng: Random, pair: frozenset[str] | None, nouns: Nouns) -> Question:
    """Draw a sound question that contains the held-out `pair`, or no held-out pair if it is None."""
    while True:
        schema = draw_schema(rng, nouns)
        fillings = rng.randrange(2**32)
        drawn = (draw_query(schema, rng) for _ in range(_TRIES_A_SCHEMA))
        fitting = (query for query in drawn if query and (pair <= query.parts if pair else not query.is_held_out))
        query = next(fitting, None)
        images = _sound_images(query, fillings) if query else None
        if query and images:
            text_of_query = text(query, rng)
            return Question(query, text_of_query[0].upper() + text_of_query[1:], images[0], tuple(images[1:]))


def draw_query(schema: Schema, rng: Random) -> Query | None:
    """Draw a query over the schema; return None if no column is left for a filter."""
    table = rng.choice([*schema.tables, *schema.children])
    parent = None if table.parent is None else schema.table(table.parent)
    query = Query(schema, table)
    shape = rng.choice(("rows", "rows", "number", "number", "group", "group"))
    if shape == "rows":
        columns = table.of_kind("text", "number", "date")
        if rng.random() < 0.25:
            query = replace(query, columns=(rng.choice(_repeated(table)),), is_distinct=True)
        else:
            query = replace(query, columns=tuple(rng.sample(columns, min(len(columns), rng.choice((1, 1, 2))))))
            if rng.random() < 0.35:
                numbers = table.of_kind("number", "date")
                query = replace(query, order=rng.choice(numbers), limit=rng.choice((1, 2, 3)))
    else:
        query = replace(query, function="COUNT")
        if rng.random() < 0.6:
            functions: tuple[Function, ...] = ("AVG", "SUM", "MIN", "MAX")
            query = replace(query, function=rng.choice(functions), of=rng.choice(table.of_kind("number")))
    if shape == "group":
        of_parent = parent is not None and rng.random() < 0.5
        group = rng.choice(_repeated(parent if of_parent and parent else table))
        query = replace(query, group=group, group_of_parent=of_parent)
        if rng.random() < 0.3:
            query = replace(query, having=rng.choice((2, 3, 4)))
        elif rng.random() < 0.3:
            query = replace(query, limit=rng.choice((1, 2)))
    query = replace(query, is_descending=rng.random() < 0.6)
    filtered = rng.choice((0, 1, 1, 1, 2)) if shape != "number" else rng.choice((0, 1, 1, 2))
    used = {query.of, query.group, query.order}
    filters = list[Filter]()
    for _ in range(filtered):
        of_parent = parent is not None and rng.random() < 0.45
        columns = [
            c for c in (parent if of_parent and parent else table).of_kind("text", "number", "date") if c not in used
        ]
        if not columns:
            return None
        column = rng.choice(columns)
        used.add(column)
        filters.append(_draw_filter(column, of_parent, rng))
    return replace(query, filters=tuple(filters))


def _repeated(table: Table) -> list[Column]:
    """Return the columns whose values repeat across rows."""
    return [column for column in table.of_kind("text") if column.name != "name"]


def _draw_filter(column: Column, of_parent: bool, rng: Random) -> Filter:
    if column.is_nullable and rng.random() < 0.5:
        return Filter(column, rng.choice(("null", "null", "not null")), None, of_parent)
    if column.kind == "text":
        return Filter(column, "=", rng.choice(text_values(column)), of_parent)
    if column.kind == "number":
        return Filter(column, rng.choice((">", "<")), rng.randint(20, 80), of_parent)
    if rng.random() < 0.5:
        return Filter(column, "year", rng.randint(2020, 2023), of_parent)
    when = f"{rng.randint(2020, 2023)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    return Filter(column, rng.choice((">", "<")), when, of_parent)


def _sound_images(query: Query, fillings: int) -> list[bytes] | None:
    """Return the shown database and the hidden ones; None if the query is not sound on them.

    A sound query has a result other than NULL and 0 on each database, and no tie affects its order. At most two of the
    results are equal. Removing a part of the query changes the result on some hidden database.
    """
    written = sql(query)
    images, results = list[bytes](), list[Result]()
    for i, rows in enumerate((SHOWN_ROWS, *HIDDEN_ROWS)):
        images.append(filled(query.schema, fillings + i, rows))
        results.append(run_query(images[-1], written))
        if all(value in (None, 0) for row in results[-1].rows for value in row):
            return None
        if query.limit is not None and not _is_untied(query, images[-1]):
            return None
    hidden = list(zip(images, results, strict=True))[1:]
    is_ordered = query.limit is not None
    is_needed = (
        any(difference(run_query(image, sql(less)), result, is_ordered=is_ordered) for image, result in hidden)
        for less in _lesser(query)
    )
    return images if len({result.rows for result in results}) >= len(results) - 1 and all(is_needed) else None


def _lesser(query: Query) -> Iterator[Query]:
    """Yield the query without each of its filters and DISTINCT, and with other bounds of HAVING."""
    for condition in query.filters:
        yield replace(query, filters=tuple(remaining for remaining in query.filters if remaining != condition))
    if query.having is not None:
        yield replace(query, having=query.having - 1)
        yield replace(query, having=query.having + 1)
    if query.is_distinct:
        yield replace(query, is_distinct=False)


def _is_untied(query: Query, image: bytes) -> bool:
    """Whether the first `limit` rows and the next one have distinct order keys other than NULL."""
    assert query.limit is not None
    ordered = sql(replace(query, limit=1000))
    name = ordered.rpartition(" ORDER BY ")[2].rsplit(" ", 3)[0]
    keys = ordered.replace("SELECT ", f"SELECT {name}, ", 1)
    values = [row[0] for row in run_query(image, keys).rows]
    first_values = values[: query.limit + 1]
    return len(values) >= query.limit and None not in first_values and len(set(first_values)) == len(first_values)
