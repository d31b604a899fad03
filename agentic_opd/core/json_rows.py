"""The rows of a JSON file (I/O): one JSON value a line, or the elements of one JSON array."""

import gzip
import io
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentic_opd.core.text import read_json

_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class JsonRow:
    """A value of the file; `location` is its position for messages, such as `line 3`."""

    number: int
    """Number of the line or of the element, from 1."""
    location: str
    value: Any


class NotJsonError(ValueError):
    """A line is not JSON, nor is the file as a whole."""


def json_rows(path: Path, parse: Callable[[str], Any] = read_json) -> Iterator[JsonRow]:
    """Yield the rows of a file, which may be gzipped (.gz) and may begin with a byte order mark.

    A file whose first line is not a row by itself, because it is one document, is read as a whole: an array's elements
    are the rows, an object is the only row.

    Raises:
        NotJsonError: a line is not JSON; the message has its number.
        OSError, EOFError, zlib.error: the file can't be read.
    """
    number, is_first = 0, True
    try:
        with _opened(path) as file:
            lines = enumerate(file, start=1)
            while (numbered := next(lines, None)) is not None:
                number, line = numbered
                if not line.strip():
                    continue
                value, problem = _parsed(line, parse)
                if is_first and (problem is not None or isinstance(value, list)):
                    rest = file.read()
                    document, _ = _parsed(line + rest, parse)
                    if isinstance(document, list | dict):
                        elements = document if isinstance(document, list) else [document]
                        yield from (JsonRow(i, f"element {i}", element) for i, element in enumerate(elements, start=1))
                        return
                    lines = enumerate(io.StringIO(rest, newline="\n"), start=number + 1)
                if problem is not None:
                    advice = " Write one JSON object a line, as `jq -c . FILE` does." if is_first else ""
                    raise NotJsonError(f"line {number}: not valid JSON: {problem}.{advice}") from problem
                is_first = False
                yield JsonRow(number, f"line {number}", value)
    except UnicodeDecodeError as error:
        raise NotJsonError(f"after line {number}: not valid JSON: {error}") from error


def _parsed(text: str, parse: Callable[[str], Any]) -> tuple[Any, Exception | None]:
    """Return a JSON value and no error, or None and the error."""
    try:
        return parse(text), None
    except (ValueError, RecursionError) as error:
        return None, error


@contextmanager
def _opened(path: Path) -> Generator[io.TextIOWrapper]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        encoding = "utf-16" if file.peek(2)[:2] in _UTF16_MARKS else "utf-8-sig"
        yield io.TextIOWrapper(file, encoding=encoding, errors="surrogatepass", newline="\n")
