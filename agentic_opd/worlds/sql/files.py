"""Read questions in the formats of Spider and BIRD: a JSON list, and a folder of SQLite databases.

questions.json   [{"db_id": "shop", "question": "...", "query" or "SQL": "SELECT ...", "evidence"?: "...",
                   "examples"?: [messages]}, ...]
databases/       shop/shop.sqlite, optionally more databases of its schema: shop/shop_2.sqlite
"""

import logging
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from agentic_opd.core.errors import ConfigError
from agentic_opd.core.text import read_json
from agentic_opd.worlds.sql.engine import QueryError, Source, run_query
from agentic_opd.worlds.sql.query_process import decoded

_MADE, _SHARE, _MAX_ROWS = 3, 0.6, 2000
"""Hidden databases sampled from a shown one: their number, the share of rows kept, and the maximum rows of a table."""
_SUFFIXES = (".sqlite", ".db")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileQuestion:
    """One entry; `number` is its index in the file, counted from 0."""

    number: int
    database: str
    text: str
    sql: str
    examples: Sequence[Any] = ()


def read_questions(path: Path, databases: Path, *, skip_broken: bool = False) -> Iterator[FileQuestion]:
    """Yield the questions of a file; each one's own query must run on its shown database.

    Args:
        path: The file.
        databases: Folder of the databases.
        skip_broken: Leave wrong entries out, with a warning, instead of failing.

    Raises:
        ConfigError: The file cannot be read, a database is missing, or an entry is wrong; names the entry.
    """
    try:
        entries = read_json(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"sql_file: {path} can't be read as JSON: {error}") from error
    if not isinstance(entries, list):
        raise ConfigError(f"sql_file: {path} holds {type(entries).__name__}, expected a list of questions")
    broken = list[str]()
    for number, entry in enumerate(entries):
        try:
            question = _question(number, entry, f"sql_file: {path}, entry {number}", databases)
        except ConfigError as error:
            if not skip_broken:
                raise ConfigError(f"{error}. Leave such entries out with env.dataset_skip_broken.") from error
            broken.append(f"\n  entry {number}: {error}")
        else:
            yield question
    if broken:
        _log.warning("%d of %d entries are left out, the first ones:%s", len(broken), len(entries), "".join(broken[:5]))


def _question(number: int, entry: Any, place: str, databases: Path) -> FileQuestion:
    name, text, sql = (
        _field(entry, place, "db_id"),
        _field(entry, place, "question"),
        _field(entry, place, "query", "SQL"),
    )
    if Path(name).name != name:
        raise ConfigError(f"{place}: db_id {name!r} is no name of a folder")
    if evidence := str(entry.get("evidence") or "").strip():
        text = f"{text}\n{evidence}"
    try:
        run_query(shown_database(databases, name), sql)
    except QueryError as error:
        raise ConfigError(f"{place}: its own query fails: {error}") from error
    hidden_databases(databases, name)
    return FileQuestion(number, name, text, sql, entry.get("examples") or ())


def _field(entry: Any, place: str, *names: str) -> str:
    value = next((entry[name] for name in names if name in entry), None) if isinstance(entry, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{place} has no text as {' or '.join(names)}")
    return value


def shown_database(folder: Path, name: str) -> Path:
    """Return the path of the database that the policy sees.

    Raises:
        ConfigError: The file does not exist.
    """
    for suffix in _SUFFIXES:
        if (path := folder / name / f"{name}{suffix}").is_file():
            return path
    raise ConfigError(f"sql_databases: there is no {folder / name / name}.sqlite")


@cache
def hidden_databases(folder: Path, name: str) -> tuple[Source, ...]:
    """Return the databases that judge an answer.

    These are the other databases in the folder of the shown one. If there are none, they are the shown one itself and
    samples of its rows.

    Raises:
        ConfigError: The shown database does not exist or cannot be copied.
    """
    shown = shown_database(folder, name)
    beside = (path for path in shown.parent.iterdir() if path.suffix in _SUFFIXES and path != shown)
    others = sorted(path for path in beside if not path.name.startswith("."))  # macOS writes `._NAME.sqlite`.
    return tuple(others) or (shown, *(_part(shown, seed) for seed in range(_MADE)))


def _part(path: Path, seed: int) -> bytes:
    """Return the image of a copy with a random sample of each table's rows."""
    rng = Random(f"{path.name}/{seed}")

    def is_kept() -> bool:
        return rng.random() < _SHARE

    try:
        with (
            closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as old,
            closing(sqlite3.connect(":memory:")) as new,
        ):
            old.text_factory = decoded
            made = "SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY type = 'view'"
            for kind, name, statement in old.execute(made).fetchall():
                if kind not in ("table", "view"):
                    continue
                new.execute(statement)
                if kind == "table":
                    rows = old.execute(f'SELECT * FROM "{name}"')
                    places = ", ".join("?" * len(rows.description))
                    kept = islice((row for row in rows if is_kept()), _MAX_ROWS)
                    new.executemany(f'INSERT INTO "{name}" VALUES ({places})', kept)
            new.commit()
            return new.serialize()
    except sqlite3.Error as error:
        raise ConfigError(f"sql_databases: {path} can't be copied: {error}") from error


def is_ordered(sql: str) -> bool:
    """Whether a query orders its rows at the outermost level."""
    pieces, openings = list[str](), list[int]()
    for piece in re.findall(r"[()]|[^()]+", re.sub(r"'[^']*'|\"[^\"]*\"", "", sql)):
        pieces.append(piece)
        if piece == "(":
            openings.append(len(pieces) - 1)
        elif piece == ")" and openings:
            del pieces[openings.pop() :]
    return re.search(r"\border\s+by\b", "".join(pieces), re.IGNORECASE) is not None
