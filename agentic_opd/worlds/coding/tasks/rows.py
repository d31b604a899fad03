"""Read a dataset's rows as plain dicts, each with its place for messages; the rows are not interpreted here.

A name is the first of these that applies:

    tasks.jsonl, .jsonl.gz, .parquet    a file; also .json and .json.gz
    a folder of such files              all of them in sorted order; if files are named after splits (`test.jsonl`,
                                        `x-test-00000-of-00002.parquet`), those of the requested split
    a folder of `save_to_disk`          as `datasets` wrote it
    any other folder                    a copy of a dataset on the hub, read by `datasets.load_dataset`
    OWNER/NAME, OWNER/NAME:CONFIG       a dataset on the hub, and one of its configurations
"""

import logging
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentic_opd.core.errors import DatasetError
from agentic_opd.core.files import LFS_POINTER
from agentic_opd.core.json_rows import NotJsonError, json_rows
from agentic_opd.core.text import read_json
from agentic_opd.worlds.coding.hidden_tests.digits import many_digits

logger = logging.getLogger(__name__)

FILE_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
_NAMED_SUFFIXES = (*FILE_SUFFIXES, ".json", ".json.gz")
"""Of a file that a setting names; in a folder, .json files describe the data."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row; `location` is for messages, for example `tasks.jsonl, line 3`."""

    location: str
    fields: dict[str, Any]


def is_data_file(path: Path) -> bool:
    """Return whether `path` is a file with a suffix that `read_file` supports."""
    return path.name.endswith(FILE_SUFFIXES) and path.is_file()


def read_file(path: Path) -> Iterator[Row]:
    """Return the rows of a file of JSON (lines or an array), which may be gzipped, or of parquet."""
    return _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)


def _read_jsonl(path: Path) -> Iterator[Row]:
    number = 0
    try:
        for row in json_rows(path, _parse):
            number, location = row.number, f"{path.name}, {row.location}"
            if not isinstance(row.value, dict):
                raise DatasetError(f"{location}: expected a JSON object, got {type(row.value).__name__}")
            yield Row(location, row.value)
    except NotJsonError as error:
        if path.read_bytes()[: len(LFS_POINTER)] == LFS_POINTER:
            raise DatasetError(f"{path.name} is a pointer of Git LFS: `git lfs pull` fetches the file") from error
        raise DatasetError(f"{path.name}, {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"dataset {str(path)!r} cannot be read after line {number}: {error}") from error


def _parse(text: str) -> Any:
    with many_digits():
        return read_json(text)


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


_HUB_NAME = re.compile(r"(?P<path>[\w-][\w.-]*(/[\w-][\w.-]*)?)(:(?P<config>[\w.+-]+))?")
_SPLIT_NAME = re.compile(r"(?<![a-zA-Z])(train|test|validation|valid|val|dev|eval)(?![a-zA-Z])")
_MAX_LISTED = 20


def read_rows(name: str, split: str) -> Iterator[Row]:
    """Return the rows of a dataset: a file, whose `split` is ignored, a folder or a name on the hub.

    Raises:
        DatasetError: The dataset or the split does not exist, or it cannot be read.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _read_folder(path, split)
    if name.endswith(_NAMED_SUFFIXES):
        if not path.is_file():
            raise DatasetError(f"dataset {name!r}: there is no such file (the current directory is {Path.cwd()})")
        return read_file(path)
    if path.exists():
        raise DatasetError(f"dataset {name!r}: expected a file that ends in {', '.join(_NAMED_SUFFIXES)}, or a folder")
    if (match := _HUB_NAME.fullmatch(name)) is None:
        raise DatasetError(
            f"dataset {name!r} is neither a file or folder here nor a name on the hub (OWNER/NAME or OWNER/NAME:CONFIG)"
        )
    return _read_hub(match["path"], match["config"], split)


# -------------------------------------------------------------------------------------------------------------- folders


def _read_folder(folder: Path, split: str) -> Iterator[Row]:
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        return _read_saved(folder, split)
    files = sorted(path for path in folder.iterdir() if is_data_file(path))
    if files and not _has_hub_card(folder):
        return (row for path in _files_of(files, split, folder) for row in read_file(path))
    if not any(path.is_file() for path in folder.rglob("*")):
        raise DatasetError(f"dataset {str(folder)!r}: the folder is empty")
    return _read_hub(str(folder), None, split, f"In the folder there is {_listed(folder)}.")


def _files_of(files: Sequence[Path], split: str, folder: Path) -> list[Path]:
    """Return the files of `split` if files are named after splits, else all files."""
    named = {path: match[0] for path in files if (match := _SPLIT_NAME.search(path.name))}
    if not named:
        return list(files)
    chosen = [path for path, split_name in named.items() if split_name == split]
    if not chosen:
        raise DatasetError(
            f"dataset {str(folder)!r}: no file of the split {split!r}; there is {_listed(folder)}. Name another split, "
            "or one file."
        )
    return chosen


def _has_hub_card(folder: Path) -> bool:
    """Return whether README.md assigns files to splits."""
    card = folder / "README.md"
    return card.is_file() and "data_files:" in card.read_text(encoding="utf-8", errors="replace")


def _listed(folder: Path) -> str:
    names = sorted(f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir())
    rest = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + rest


# ------------------------------------------------------------------------------------------------- through `datasets`


def _read_saved(folder: Path, split: str) -> Iterator[Row]:
    import datasets

    hint = f"In the folder there is {_listed(folder)}."
    loaded = _load(lambda: datasets.load_from_disk(str(folder)), f"dataset {str(folder)!r} cannot be loaded", hint)
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DatasetError(
                f"dataset {str(folder)!r}: no split {split!r}; there is {', '.join(map(str, loaded)) or 'none'}"
            )
        loaded = loaded[split]
    return _rows(loaded, folder.name)


def _read_hub(name: str, config: str | None, split: str, in_folder: str = "") -> Iterator[Row]:
    import datasets

    full_name = f"{name}:{config}" if config else name
    failure = f"dataset {full_name!r}, split {split!r}, cannot be loaded" + ("" if in_folder else " from the hub")
    hint = in_folder or "There is no file or folder of that name here either."
    if not in_folder:
        logger.info("dataset %r is no file or folder here: it is loaded from the hub or its cache", full_name)
    loaded = _load(lambda: datasets.load_dataset(name, config, split=split), failure, hint)
    return _rows(loaded, Path(name).name if in_folder else full_name)


def _load(load: Callable[[], Any], failure: str, hint: str) -> Any:
    try:
        return load()
    except Exception as error:  # The library's errors have no common base class.
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DatasetError(f"{failure}: {reason.rstrip('.')}. {hint}") from error


def _rows(loaded: Any, name: str) -> Iterator[Row]:
    for number, fields in enumerate(loaded, start=1):
        yield Row(f"{name}, row {number}", fields)
