"""Generate SQLite databases: random schemas of two or three tables, filled with random rows. Pure, seeded.

    schema = draw_schema(rng, TRAINING)            a parent table and its children, each linked to the parent
    image = filled(schema, seed, rows=20)          bytes for `sqlite3.Connection.deserialize`

Tables of training schemas never use a noun of held-out schemas.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import date, timedelta
from random import Random
from typing import Literal, NamedTuple

Kind = Literal["id", "link", "text", "number", "date"]


def _words(text: str) -> list[str]:
    return text.split()


class Nouns(NamedTuple):
    """Nouns that name tables, in the singular; no word is in both lists."""

    parents: Sequence[str]
    children: Sequence[str]


_PARENTS = _words("""
    customer author artist doctor driver farm hotel school airline station museum club store supplier team studio garden
    baker brand chef clinic village college court dealer editor region firm forest guide harbor island journal lab lake
    market mill mine pilot planet port printer producer ranger river shop singer sponsor teacher temple theater tower
    vendor valley agent builder canal desert empire festival hostel kitchen lawyer manager
""")
_CHILDREN = _words("""
    order book painting visit ride animal room lesson loan flight train exhibit product shipment player film invoice
    plant cake device street patient race course case car article machine boat contract tree tour cruise report sample
    trip stall gem landing moon dock page song district bridge item album event test concert play light house letter
    meal medal repair sale session signal statue task trail wagon worker
""")
_HELD_OUT_PARENTS = _words("""
    cinema stadium castle bank orchard airport hospital ranch
""")
_HELD_OUT_CHILDREN = _words("""
    screening ticket tournament account apple parcel treatment horse
""")

TRAINING, NEVER_TRAINED = Nouns(_PARENTS, _CHILDREN), Nouns(_HELD_OUT_PARENTS, _HELD_OUT_CHILDREN)

_TEXTS = {
    "city": ("Oslo", "Rome", "Lima", "Cairo", "Paris", "Delhi"),
    "country": ("Norway", "Italy", "Peru", "Egypt", "France", "India"),
    "color": ("red", "blue", "green", "black", "white"),
    "category": ("small", "large", "medium", "special"),
    "status": ("open", "closed", "waiting", "done"),
    "language": ("English", "Hindi", "Spanish", "Arabic"),
    "material": ("wood", "steel", "glass", "paper"),
    "owner": ("state", "private", "shared"),
    "level": ("basic", "normal", "expert"),
    "style": ("modern", "classic", "plain"),
    "season": ("spring", "summer", "autumn", "winter"),
    "size": ("short", "long", "wide", "narrow"),
}
_NUMBERS = _words("""
    price weight age height length score speed stock rating budget distance capacity salary cost power width depth area
    volume duration
""")
_DATES = _words("""
    arrival birthday deadline delivery departure founding inspection launch opening purchase release renewal
""")
_NAMES = _words("""
    Alpha Atlas Aurora Beacon Cedar Comet Coral Delta Echo Ember Falcon Fern Gamma Harvest Horizon Iris Jade Juniper
    Lotus Lumen Maple Meadow Nova Onyx Opal Orbit Pearl Pine Quartz Raven Reef Sable Sierra Summit Terra Tulip Umber
    Vega Willow Zenith
""")


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column; a nullable column is NULL in some rows."""

    name: str
    kind: Kind
    is_nullable: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table and the name of its parent table, if it has one."""

    name: str
    noun: str
    """Noun for one row, in the singular."""
    columns: tuple[Column, ...]
    parent: str | None = None

    def of_kind(self, *kinds: Kind) -> list[Column]:
        """Return the columns of these kinds, in order."""
        return [column for column in self.columns if column.kind in kinds]

    @property
    def link(self) -> str:
        """Name of the column that refers to the parent."""
        return self.of_kind("link")[0].name


@dataclass(frozen=True, slots=True)
class Schema:
    """Tables, with parents before their children."""

    tables: tuple[Table, ...]

    def table(self, name: str) -> Table:
        """Return the table of that name."""
        return next(table for table in self.tables if table.name == name)

    @property
    def children(self) -> list[Table]:
        """The tables that have a parent."""
        return [table for table in self.tables if table.parent is not None]


def draw_schema(rng: Random, nouns: Nouns) -> Schema:
    """Draw a schema of a parent table with one or two child tables, named by `nouns`."""
    parent_noun = rng.choice(nouns.parents)
    child_nouns = rng.sample(nouns.children, rng.choice((1, 1, 2)))
    parent = Table(
        f"{parent_noun}s",
        parent_noun,
        (Column("id", "id"), Column("name", "text"), *_columns(rng, (1, 2), (1, 1), 0.5)),
    )
    children = (
        Table(
            f"{noun}s",
            noun,
            (Column("id", "id"), Column(f"{parent_noun}_id", "link"), *_columns(rng, (1, 1), (1, 2), 0.8)),
            parent.name,
        )
        for noun in child_nouns
    )
    return Schema((parent, *children))


def _columns(rng: Random, texts: tuple[int, int], numbers: tuple[int, int], dated: float) -> list[Column]:
    columns = [Column(name, "text", rng.random() < 0.3) for name in rng.sample(list(_TEXTS), rng.randint(*texts))]
    columns += [Column(name, "number", rng.random() < 0.4) for name in rng.sample(_NUMBERS, rng.randint(*numbers))]
    if rng.random() < dated:
        columns.append(Column(rng.choice(_DATES), "date", rng.random() < 0.4))
    return columns


_FIRST_ID, _FEWER = 51, 3


def filled(schema: Schema, seed: int | str, rows: int) -> bytes:
    """Return the image of a database with random rows.

    The tables differ in their number of rows, and every id is larger than any of these numbers.

    Args:
        schema: The tables to fill.
        seed: Determines the rows.
        rows: Number of rows of the first child table; each further child has three fewer, the parent half as many.
    """
    rng, rng_of_ids = Random(seed), Random(f"ids/{seed}")
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("PRAGMA page_size = 512")  # Small pages, since thousands of images are kept in memory.
        ids: dict[str, list[int]] = {}
        for table in schema.tables:
            connection.execute(_created(table))
            of_children = rows - _FEWER * sum(name != table.parent for name in ids)
            count = of_children if table.parent else max(3, rows // 2)
            # Ids have gaps and exceed all row counts, so that MAX(id) never equals a count.
            ids[table.name] = sorted(rng_of_ids.sample(range(_FIRST_ID, _FIRST_ID + 3 * count), count))
            names = rng.sample(_NAMES, count)
            for row_id, name in zip(ids[table.name], names, strict=True):
                parents = ids.get(table.parent or "", [])
                row = [_value(column, row_id, name, parents, rng) for column in table.columns]
                connection.execute(f"INSERT INTO {table.name} VALUES ({', '.join('?' * len(row))})", row)
        connection.commit()
        return connection.serialize()


def _created(table: Table) -> str:
    types = {"id": "INTEGER PRIMARY KEY", "link": "INTEGER", "text": "TEXT", "number": "INTEGER", "date": "DATE"}
    return f"CREATE TABLE {table.name} ({', '.join(f'{column.name} {types[column.kind]}' for column in table.columns)})"


def _value(column: Column, row_id: int, name: str, parents: Sequence[int], rng: Random) -> str | int | None:
    if column.is_nullable and rng.random() < 0.25:
        return None
    if column.kind == "id":
        return row_id
    if column.kind == "link":
        return rng.choice(parents)
    if column.kind == "number":
        return rng.randint(1, 99)
    if column.kind == "date":
        return (date(2020, 1, 1) + timedelta(days=rng.randrange(4 * 365))).isoformat()
    return name if column.name == "name" else rng.choice(text_values(column))


def text_values(column: Column) -> Sequence[str]:
    """Return the values that a text column may hold."""
    return _NAMES if column.name == "name" else _TEXTS[column.name]
