"""Read the solutions for `check_tasks`: rows `{"id": ..., "files": {"solution.py": ...}}` (I/O)."""

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

from agentic_opd.core.errors import DatasetError
from agentic_opd.worlds.coding.tasks.rows import FILE_SUFFIXES, Row, is_data_file, read_file

Files = dict[str, bytes]
"""Relative path -> content."""


@dataclass(frozen=True, slots=True)
class GivenSolutions:
    """Task id -> files; `unknown` lists the rows whose id belongs to no task."""

    files: dict[str, Files]
    unknown: list[str]


def read_solutions(path: Path, task_ids: Container[str]) -> GivenSolutions:
    """Return the solutions in a .jsonl (or .jsonl.gz, .parquet) file.

    Raises:
        DatasetError: the file cannot be read, a row has another form, or an id is repeated; the message names the line.
    """
    if not is_data_file(path):
        raise DatasetError(f"solutions {str(path)!r}: expected a file that ends in {', '.join(FILE_SUFFIXES)}")
    files: dict[str, Files] = {}
    places: dict[str, str] = {}
    unknown: list[str] = []
    for row in read_file(path):
        row_id, row_files = _row_id(row), _row_files(row)
        if row_id in places:
            raise DatasetError(f"{row.place}: the id {row_id!r} is already that of {places[row_id]}")
        places[row_id] = row.place
        if row_id in task_ids:
            files[row_id] = row_files
        else:
            unknown.append(f"{row.place}: no task has the id {row_id!r}")
    return GivenSolutions(files, unknown)


def _row_id(row: Row) -> str:
    for name in ("id", "task_id"):
        value = row.fields.get(name)
        if type(value) is int or (isinstance(value, str) and value):
            return str(value)
    raise DatasetError(f"{row.place}: no id, a text or an integer; there is {', '.join(row.fields) or 'nothing'}")


def _row_files(row: Row) -> Files:
    found = row.fields.get("files")
    if not isinstance(found, dict) or not found:
        raise DatasetError(
            f"{row.place}: files must be an object such as {{'solution.py': 'def f(): ...'}}, got "
            f"{type(found).__name__ if not isinstance(found, dict) else 'an empty one'}"
        )
    files: Files = {}
    for path, text in cast(dict[str, Any], found).items():
        # In a Parquet file every row has the names of all rows, with null for missing files.
        if text is None:
            continue
        if not isinstance(text, str):
            raise DatasetError(f"{row.place}: files[{path!r}] must be a text, got {type(text).__name__}")
        if not path or path.startswith("/") or ".." in PurePosixPath(path).parts:
            raise DatasetError(f"{row.place}: files[{path!r}] must be a relative path without '..'")
        files[path] = text.encode("utf-8", "surrogatepass")
    return files
