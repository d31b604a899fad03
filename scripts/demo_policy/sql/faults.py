"""Wrong queries: those that the policy is taught to write now and then, others that only the judge is shown, and hints.

    taught(query)          one clause is wrong in a way that people know: AVG for SUM, `= NULL`, a filter forgotten
    habit(query)           that of them which the policy makes in nearly every such query: what it has got wrong
    untaught(query, rng)   one clause names another column or value
    mistake_of(query, text)   which of the taught ones a wrong query is; None: it is a mistake of the policy's own

A hint says the clause as it should be; which clause it is, is what the judge has to find.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random

from demo_policy.sql.databases import text_values
from demo_policy.sql.questions import Filter, Function, Query, clauses, joined, sql

_SWAPPED: dict[str, Function] = {"AVG": "SUM", "SUM": "AVG", "MIN": "MAX", "MAX": "MIN"}
_HINTS = {
    "select": ("Select {}.", "Begin with SELECT {}."),
    "from": ("Take the rows from {}.", "It needs FROM {}."),
    "on": ("Join on {}.", "The tables meet ON {}."),
    "filter": ("Filter by {}.", "It needs WHERE {}."),
    "group": ("Group by {}.", "It needs GROUP BY {}."),
    "having": ("Keep groups having {}.", "It needs HAVING {}."),
    "order": ("Order by {}.", "It needs ORDER BY {}."),
}


@dataclass(frozen=True, slots=True)
class WrongQuery:
    """A query with one wrong clause."""

    kind: str
    sql: str
    hints: tuple[str, ...]
    """What would have helped."""


def hints(query: Query, clause: str) -> tuple[str, ...]:
    """What says how a clause should be."""
    clause_text = clauses(query)[clause]
    return tuple(form.format(clause_text) for form in _HINTS[clause.split()[0]])


def quoted(hint: str) -> str:
    """The clause that a hint says."""
    starts = (form.removesuffix("{}.") for forms in _HINTS.values() for form in forms)
    return next((hint.removeprefix(start) for start in starts if hint.startswith(start)), hint).rstrip(".")


def taught(query: Query) -> list[WrongQuery]:
    """The mistakes that the policy is taught, as far as the query has room for them."""
    right = clauses(query)
    wrong_queries = list[WrongQuery]()
    for kind, clause, wrong in (*_wrong_filters(query, right), *_wrong_others(query, right)):
        changed = {name: wrong if name == clause else text for name, text in right.items()}
        text = joined({name: clause_text for name, clause_text in changed.items() if clause_text is not None})
        wrong_queries.append(WrongQuery(kind, text, hints(query, clause)))
    return wrong_queries


_HABITS: Mapping[str, Callable[[Query], bool]] = {
    "= NULL": lambda query: True,
    "wrong bound": lambda query: True,
    "wrong function": lambda query: query.function == "AVG",
    "wrong order": lambda query: not query.is_descending,
    "wrong join": lambda query: not query.group_of_parent,
}
"""Kinds of mistakes, and in which queries each is one that the policy makes as a rule."""


def habit(query: Query) -> WrongQuery | None:
    """The mistake that the policy makes in nearly every query like this; None where it has no such habit."""
    return next(
        (
            wrong_query
            for wrong_query in taught(query)
            if wrong_query.kind in _HABITS and _HABITS[wrong_query.kind](query)
        ),
        None,
    )


def _wrong_filters(query: Query, right: Mapping[str, str]) -> Iterator[tuple[str, str, str | None]]:
    """Yield kinds of mistakes, each with its clause and the wrong text of the clause; None if the clause is missing."""
    for i, condition in enumerate(query.filters):
        clause = f"filter {i}"
        yield "filter forgotten", clause, None
        if condition.comparison in ("<", ">"):
            yield "wrong direction", clause, right[clause].translate(str.maketrans("<>", "><"))
        if condition.comparison == "null":
            yield "= NULL", clause, right[clause].replace("IS NULL", "= NULL")


def _wrong_others(query: Query, right: Mapping[str, str]) -> Iterator[tuple[str, str, str | None]]:
    if query.function in _SWAPPED and query.limit is None:
        yield "wrong function", "select", clauses(replace(query, function=_SWAPPED[query.function]))["select"]
    if query.is_distinct:
        yield "DISTINCT forgotten", "select", right["select"].removeprefix("DISTINCT ")
    if query.group is not None and query.having is None and query.limit is None:
        yield "GROUP BY forgotten", "group", None
    if query.is_joined:
        yield "wrong join", "on", f"{query.table.name}.id = {query.table.parent}.id"
    if query.having is not None:
        yield "wrong bound", "having", right["having"].replace(">", ">=")
    if query.limit is not None:
        swapped = {"DESC": "ASC", "ASC": "DESC"}
        yield "wrong order", "order", " ".join(swapped.get(word, word) for word in right["order"].split())


def untaught(query: Query, rng: Random) -> WrongQuery | None:
    """Return a mistake that is not in the training data; None if the drawn one does not change the query."""
    options = [*_changed_queries(query, rng)]
    if not options:
        return None
    clause, changed_query = rng.choice(options)
    changed = clauses(query) | {clause: clauses(changed_query)[clause]}
    text = joined(changed)
    return None if text == sql(query) else WrongQuery("own", text, hints(query, clause))


def _changed_queries(query: Query, rng: Random) -> Iterator[tuple[str, Query]]:
    """Clauses, each with a query in which that clause is different."""
    table = query.table
    numbers = [column for column in table.of_kind("number", "id") if column != query.of]
    if query.of is not None and numbers:
        yield "select", replace(query, of=rng.choice(numbers))
    if query.columns:
        columns = [column for column in table.of_kind("text", "number", "date", "id") if column not in query.columns]
        if columns:
            yield "select", replace(query, columns=(*query.columns[1:], rng.choice(columns)))
        if len(query.columns) > 1:
            yield "select", replace(query, columns=query.columns[::-1])
            yield "select", replace(query, columns=query.columns[:1])
    if query.group is not None:
        groups = [column for column in table.of_kind("text") if column != query.group]
        if groups and not query.group_of_parent:
            yield "group", replace(query, group=rng.choice(groups))
    for i, condition in enumerate(query.filters):
        filters = [*query.filters]
        filters[i] = _other_filter(condition, query, rng)
        yield f"filter {i}", replace(query, filters=tuple(filters))
    if query.limit is not None:
        yield "order", replace(query, limit=query.limit + rng.choice((1, 2)))
    if query.having is not None:
        yield "having", replace(query, having=query.having + rng.choice((1, 2)))


def _other_filter(condition: Filter, query: Query, rng: Random) -> Filter:
    table = query.schema.table(query.table.parent or "") if condition.of_parent else query.table
    columns = [column for column in table.of_kind(condition.column.kind) if column != condition.column]
    if columns and rng.random() < 0.5:
        return replace(condition, column=rng.choice(columns))
    if condition.comparison == "null":
        return replace(condition, comparison="not null")
    if condition.comparison == "not null":
        return replace(condition, comparison="null")
    if condition.column.kind == "text":
        return replace(condition, value=rng.choice(text_values(condition.column)))
    if condition.comparison == "year":
        return replace(condition, value=rng.randint(2020, 2023))
    return replace(condition, value=rng.randint(1, 99)) if condition.column.kind == "number" else condition


def mistake_of(query: Query, written: str) -> WrongQuery | None:
    """Return the taught mistake that a wrong query is; None if it is another one."""
    return next((wrong_query for wrong_query in taught(query) if _plain(wrong_query.sql) == _plain(written)), None)


def _plain(text: str) -> str:
    return " ".join(text.replace(";", " ").split()).lower()
