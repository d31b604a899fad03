"""The rows of a parquet or Arrow file, as `datasets` and pandas write them (I/O)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentic_opd.core.text import read_json

_PARQUET, _ARROW_FILE, _ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
_ROWS_AT_ONCE = 1024


class NoTableError(ValueError):
    """The file is not a table, or is damaged."""


def is_table(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is parquet or Arrow."""
    return head.startswith((_PARQUET, _ARROW_FILE, _ARROW_STREAM))


def table_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file as JSON values: a time is its text, and bytes are null.

    Raises:
        NoTableError: the file can't be read.
        OSError: the file can't be opened.
    """
    import pyarrow as pa
    from pyarrow import parquet

    with path.open("rb") as file:
        head = file.read(6)
        file.seek(0)
        try:
            if head.startswith(_PARQUET):
                batches = parquet.ParquetFile(file).iter_batches(_ROWS_AT_ONCE)
            elif head.startswith(_ARROW_FILE):
                reader = pa.ipc.open_file(file)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            else:
                batches = iter(pa.ipc.open_stream(file))
            for batch in batches:
                for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                    for fields in batch.slice(start, _ROWS_AT_ONCE).to_pylist():
                        yield read_json(json.dumps(fields, default=_as_json))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise NoTableError(f"a parquet or Arrow file that can't be read: {error}") from error


def _as_json(value: Any) -> str | None:
    return None if isinstance(value, bytes) else str(value)
