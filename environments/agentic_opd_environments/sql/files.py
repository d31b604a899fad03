"""Read questions in the formats of Spider and BIRD: a JSON list or a line each, and a folder of SQLite databases.

questions.json   [{"db_id": "shop", "question": "...", "query" or "SQL": "SELECT ...", "evidence"?: "...",
                   "examples"?: [messages]}, ...]
databases/       shop/shop.sqlite, optionally more databases of its schema: shop/shop_2.sqlite; or shop.sqlite alone

Without more databases, copies of the visible one judge the answers (`copies.py`). Each question has those that change
the result of its own query.
"""

import logging
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentic_opd.core.errors import ConfigError
from agentic_opd.core.files import LFS_POINTER, check_regular
from agentic_opd.core.json_rows import json_rows
from agentic_opd_environments.sql.copies import NUM_COPIES, Copies
from agentic_opd_environments.sql.engine import QueryError, Source, difference
from agentic_opd_environments.sql.order import Expected, expected

_JUDGING = 3
"""Copies that judge an answer, besides the visible database."""
_NAMED = 5
_SUFFIXES = (".sqlite", ".db", ".sqlite3", ".db3")
_FROM_OTHERS = {
    ".sql": "sqlite3 {database} < {file}",
    ".csv": "sqlite3 {database} '.import --csv {file} {table}'",
    ".tsv": "sqlite3 {database} '.mode tabs' '.import {file} {table}'",
}
"""Suffix of a file that is no database -> the command that makes one of it."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileQuestion:
    """One entry; `number` is its index in the file, counted from 0."""

    number: int
    database: str
    text: str
    sql: str
    visible: Path
    """The database that the policy sees."""
    examples: Sequence[Any] = ()
    hidden: tuple[Source, ...] = ()
    """The databases that judge an answer."""
    is_guarded: bool = True
    """Whether some hidden database gives other values, so that an answer that repeats visible values is wrong."""
    cuts_tie: bool = False
    """Whether the question's own query keeps some of several rows that it does not order among each other."""


def read_questions(path: Path, databases: Path, *, skip_broken: bool = False) -> Iterator[FileQuestion]:
    """Yield the questions of a file; each one's own query must run on its visible database.

    Args:
        path: The file.
        databases: Folder of the databases.
        skip_broken: Leave wrong entries out, and those whose own query cuts a tie, with a warning, instead of failing.

    Raises:
        ConfigError: The file cannot be read, a database is missing, or an entry is wrong; names the entry.
    """
    try:
        check_regular(path, is_read=True)
        rows = [*json_rows(path)]
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise ConfigError(f"env.world.file: {path} can't be read as JSON: {error}") from error
    entries = [row.value for row in rows]
    if len(entries) == 1 and isinstance(entries[0], dict) and "db_id" not in entries[0]:
        name = next((name for name, value in entries[0].items() if isinstance(value, list)), None)
        advice = "" if name is None else f": `jq .{name}` takes its list out"
        raise ConfigError(f"env.world.file: {path} is an object, expected a list of questions{advice}")
    if not entries:
        raise ConfigError(f"env.world.file: {path} holds no question")
    notes = _Notes(skip_broken)
    for number, question in enumerate(_questions(entries, path, databases)):
        if not isinstance(question, ConfigError):
            notes.add(number, question)
            if not (skip_broken and question.cuts_tie):
                yield question
        elif skip_broken:
            notes.broken.append(f"\n  entry {number}: {question}")
        else:
            raise ConfigError(f"{question}. Leave such entries out with env.world.skip_broken.") from question
    notes.log(len(entries))


class _Notes:
    """Faults of entries, for one warning of each kind."""

    def __init__(self, skip_broken: bool) -> None:
        self.broken, self._cut, self._unguarded = list[str](), list[str](), list[str]()
        self._skip_broken = skip_broken

    def add(self, number: int, question: FileQuestion) -> None:
        """Note the faults of a question that can be asked."""
        if question.cuts_tie:
            self._cut.append(f"\n  entry {number}: {question.sql}")
        if not question.is_guarded and not (self._skip_broken and question.cuts_tie):
            self._unguarded.append(f"\n  entry {number}: {question.sql}")

    def log(self, count: int) -> None:
        """Log the notes on `count` entries."""
        remedy = "they are left out" if self._skip_broken else "leave them out with env.world.skip_broken"
        for named, text in (
            (self.broken, "are left out"),
            (self._cut, f"have a query that keeps some of several equal rows, so that right answers differ; {remedy}"),
            (self._unguarded, "have no hidden database with other values: an answer may repeat those of the result"),
        ):
            if named:
                examples = "".join(named[:_NAMED])
                _log.warning("%d of %d entries %s, the first ones:%s", len(named), count, text, examples)


def _questions(entries: Sequence[Any], path: Path, databases: Path) -> Iterator[FileQuestion | ConfigError]:
    """Yield each entry's question with its hidden databases, or the fault of the entry."""
    read = list[FileQuestion | ConfigError]()
    for number, entry in enumerate(entries):
        try:
            read.append(_question(number, entry, f"env.world.file: {path}, entry {number}", databases))
        except ConfigError as error:
            read.append(error)
    queries: defaultdict[Path, list[str]] = defaultdict(list)
    for question in read:
        if isinstance(question, FileQuestion):
            queries[question.visible].append(question.sql)
    copies = {visible: Copies(visible, sql) for visible, sql in queries.items()}

    def judged(question: FileQuestion | ConfigError) -> FileQuestion | ConfigError:
        if isinstance(question, ConfigError):
            return question
        try:
            return _with_hidden(question, copies[question.visible], databases)
        except QueryError as error:
            return ConfigError(
                f"env.world.file: {path}, entry {question.number}: its own query fails on {question.visible}: "
                f"{str(error).rstrip('.')}{_lfs_advice(question.visible)}"
            )
        except ConfigError as error:
            return error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(judged, read)


def _question(number: int, entry: Any, entry_name: str, databases: Path) -> FileQuestion:
    name, text, sql = (
        _field(entry, entry_name, "db_id"),
        _field(entry, entry_name, "question"),
        _field(entry, entry_name, "query", "SQL", "sql"),
    )
    if all(isinstance(entry.get(field), str) for field in ("query", "SQL")) and entry["query"] != entry["SQL"]:
        raise ConfigError(f"{entry_name} has two queries, query and SQL: leave one out")
    if Path(name).name != name:
        raise ConfigError(f"{entry_name}: db_id {name!r} is not the name of a folder")
    if evidence := str(entry.get("evidence") or "").strip():
        text = f"{text}\n{evidence}"
    return FileQuestion(number, name, text, sql, _database_file(databases, name), entry.get("examples") or ())


def _field(entry: Any, entry_name: str, *names: str) -> str:
    value = next((entry[name] for name in names if name in entry), None) if isinstance(entry, dict) else None
    if not isinstance(value, str) or not value.strip():
        fields = f" (its fields are {', '.join(map(str, entry))[:200]})" if isinstance(entry, dict) and entry else ""
        raise ConfigError(f"{entry_name} has no text as {' or '.join(names)}{fields}")
    return value


def _database_file(folder: Path, name: str) -> Path:
    """Return the path of a database.

    Raises:
        ConfigError: The file does not exist.
    """
    for parent in (folder / name, folder):
        for suffix in _SUFFIXES:
            if (path := parent / f"{name}{suffix}").is_file():
                return path
    missing = f"env.world.databases: there is no {folder / name / name}.sqlite"
    files = sorted(path for path in (folder / name).glob("*") if not path.name.startswith("."))
    if not files:
        raise ConfigError(missing)
    listed = ", ".join(path.name for path in files[:_NAMED]) + (", ..." if len(files) > _NAMED else "")
    command = next((_FROM_OTHERS[path.suffix] for path in files if path.suffix in _FROM_OTHERS), None)
    file = next((path for path in files if path.suffix in _FROM_OTHERS), files[0])
    advice = "rename its database" if command is None else f"make it, as `{command}` does"
    advice = advice.format(database=f"{name}.sqlite", file=file.name, table=file.stem)
    raise ConfigError(f"{missing}, but {listed}: {advice}")


def _lfs_advice(path: Path) -> str:
    """Return what to do if a file is a pointer of Git LFS; empty for others."""
    with path.open("rb") as file:
        is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
    return ": it is a pointer of Git LFS, `git lfs pull` fetches the file" if is_pointer else ""


def _with_hidden(question: FileQuestion, copies: Copies, databases: Path) -> FileQuestion:
    """Return a question with the databases that judge its answers.

    These are the other databases in the folder of the visible one, if that is its own. If there are none, they are the
    visible one itself and copies of it, with other values and other rows.

    Raises:
        QueryError: The question's own query fails on the visible database.
        ConfigError: The visible database cannot be copied.
    """
    own_result = expected(question.visible, question.sql)
    folder = question.visible.parent
    paths = (path for path in (folder.iterdir() if folder != databases else ()) if path.suffix in _SUFFIXES)
    # macOS writes `._NAME.sqlite`.
    beside = sorted(path for path in paths if path != question.visible and not path.name.startswith("."))
    if beside:
        results = [result for path in beside if (result := _result(path, question.sql)) is not None]
        is_guarded, cuts_tie = (
            any(_has_other_values(own_result, result) for result in results),
            any(result.cuts_tie for result in results),
        )
        return replace(question, hidden=(*beside,), is_guarded=is_guarded, cuts_tie=own_result.cuts_tie or cuts_tie)
    guards, changed, similar = list[bytes](), list[bytes](), list[bytes]()
    for seed in range(NUM_COPIES):
        image = copies.image(seed)
        result = _result(image, question.sql)
        if result is None or (result.cuts_tie and not own_result.cuts_tie):
            continue
        if len(own_result.result.rows) == 1 < len(result.result.rows):
            similar.append(image)  # Two largest values where the visible database has one, say.
        elif _has_other_values(own_result, result):
            guards.append(image)
        else:
            is_same = difference(result.result, own_result.result, is_ordered=False) is None
            (similar if is_same else changed).append(image)
        if len(guards) == _JUDGING:
            break
    judging = [*guards, *changed, *similar][:_JUDGING]
    return replace(question, hidden=(question.visible, *judging), is_guarded=bool(guards), cuts_tie=own_result.cuts_tie)


def _result(source: Source, sql: str) -> Expected | None:
    try:
        return expected(source, sql)
    except QueryError:
        return None


def _has_other_values(visible: Expected, copied: Expected) -> bool:
    """Return whether an answer that repeats values of the visible result, with its condition or without, is wrong.

    The other result then has a row that the visible one lacks, or only some of several different visible rows.
    """
    visible_rows, copied_rows = {*visible.result.rows}, {*copied.result.rows}
    return not copied_rows <= visible_rows or (len(visible_rows) > 1 and 0 < len(copied_rows) < len(visible_rows))
