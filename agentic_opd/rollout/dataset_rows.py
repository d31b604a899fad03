"""A dataset's name -> its rows as plain dicts, each with the place it came from. Nothing is made of them here."""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentic_opd.errors import DatasetError

_FILE_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class Row:
    """One row; `place` says where it stands, for messages: `tasks.jsonl, line 3`."""

    place: str
    fields: dict[str, Any]


def read_rows(name: str, split: str) -> Iterator[Row]:
    """The rows of a local file, or of a dataset on the hub.

    Args:
        name: A path that ends in .jsonl, .jsonl.gz or .parquet, or a hub name such as `openai/openai_humaneval`.
        split: The split to read from the hub; local files have none.

    Raises:
        DatasetError: There is no such file or dataset, or it cannot be read.
    """
    path = Path(name).expanduser()
    if name.endswith(_FILE_SUFFIXES):
        if not path.is_file():
            raise DatasetError(f"dataset {name!r}: there is no such file (the current directory is {Path.cwd()})")
        return _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)
    if path.exists():
        raise DatasetError(f"dataset {name!r}: expected a file that ends in {', '.join(_FILE_SUFFIXES)}")
    if not _HUB_NAME.fullmatch(name):
        raise DatasetError(f"dataset {name!r} is neither a file here nor a name on the hub (OWNER/NAME)")
    return _read_hub(name, split)


def _read_jsonl(path: Path) -> Iterator[Row]:
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield Row(f"{path.name}, line {number}", _parse_line(line, f"{path.name}, line {number}"))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DatasetError(f"dataset {str(path)!r} cannot be read after line {number}: {error}") from error


def _parse_line(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DatasetError(f"{place}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise DatasetError(f"{place}: expected a JSON object, got {type(row).__name__}")
    return row


def _read_parquet(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(f"{path.name}, row {number}", fields)
    except (OSError, ArrowException) as error:
        raise DatasetError(f"dataset {str(path)!r} cannot be read: {error}") from error


def _read_hub(name: str, split: str) -> Iterator[Row]:
    import datasets

    try:
        rows: Any = datasets.load_dataset(name, split=split)
    except Exception as error:  # Network, hub, cache, parsing: the library's errors have no common root.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DatasetError(f"dataset {name!r}, split {split!r}, cannot be loaded from the hub: {reason}") from error
    for number, fields in enumerate(rows, start=1):
        yield Row(f"{name}, row {number}", fields)
