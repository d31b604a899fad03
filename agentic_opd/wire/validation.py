"""Check a file of scored groups line by line (I/O): JSON, wire format, repeated groups, and attached files.

`agentic-opd validate` prints the problems; `agentic-opd train --groups` refuses a file that has any.
"""

import gzip
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import IO, NamedTuple, cast

from agentic_opd.core.attachments.files import AttachedFiles, CheckedFiles, files_beside
from agentic_opd.core.files import check_regular
from agentic_opd.core.text import read_json, refuse_constant
from agentic_opd.wire.checks import GroupChecker
from agentic_opd.wire.group import ScoredGroup

MAX_LISTED = 20
"""Number of violations that a report lists; further ones are only counted."""


class FileContents(NamedTuple):
    """Counts of a file's contents, its first violations, and the total number of violations."""

    counts: dict[str, int]
    listed: list[str]
    violations: int


class CheckedLine(NamedTuple):
    """A line of a file of groups that is not blank."""

    number: int
    """Counted from 1."""
    offset: int
    """Of its first byte in the unpacked file."""
    size: int
    """Bytes, with the newline."""
    digest: bytes
    group: ScoredGroup | None
    """None if the line can't be read as a group."""
    violations: list[str]


def validate(path: Path) -> FileContents:
    """Read `path` (JSONL, or gzipped if its name ends in .gz) line by line and check every group.

    Raises:
        OSError, EOFError, zlib.error, UnicodeDecodeError: the file can't be read.
    """
    checker = GroupChecker()
    listed: list[str] = []
    count, is_empty = 0, True
    with opened(path) as file:
        for line in checked_lines(file, checker, files_beside(path)):
            is_empty = False
            listed += line.violations[: MAX_LISTED - len(listed)]
            count += len(line.violations)
    if is_empty:
        listed, count = [NO_GROUP], 1
    counts = dict(checker.counts)
    if checker.top_k is not None:
        counts["entries of a row (K)"] = checker.top_k
    return FileContents(counts, listed, count)


NO_GROUP = "line 1: the file holds no group"


@contextmanager
def opened(path: Path) -> Generator[IO[bytes]]:
    """Open a file of groups for reading; if its name ends in .gz, it is unpacked while it is read.

    Raises:
        OSError: it can't be opened.
    """
    check_regular(path, is_read=True)
    with path.open("rb") as file:
        yield cast(IO[bytes], gzip.GzipFile(fileobj=file)) if path.suffix == ".gz" else file


def checked_lines(file: IO[bytes], checker: GroupChecker, attached: AttachedFiles) -> Iterator[CheckedLine]:
    """Check each line that is not blank. Groups that stand in the file twice are violations.

    Raises:
        OSError, EOFError, zlib.error, UnicodeDecodeError: the file can't be read.
    """
    files = CheckedFiles(attached)
    first_lines: dict[object, int] = {}
    """Digest of a line, or the identity of its group -> its line number."""
    offset = 0
    for number, data in enumerate(file, start=1):
        start, offset = offset, offset + len(data)
        text = data.decode()
        if not text.strip():
            continue
        digest = line_digest(data)
        group, violations = None, list[str]()
        if (first := first_lines.setdefault(digest, number)) != number:
            violations.append(f"line {number}: the same as line {first}")
        else:
            try:
                value = read_json(text, parse_constant=refuse_constant)
            except (ValueError, RecursionError) as error:
                violations.append(f"line {number}: not JSON: {error}")
            else:
                group, problems = checker.read(value)
                violations += [problem.message_for(f"line {number}") for problem in problems]
        for index, rollout in enumerate(() if group is None else group.rollouts):
            violations += [f"line {number}, sequence {index}: {text}" for text in files.problems(rollout.attachments)]
        # A restarted `serve` repeats its items, but gives each group a new id.
        if (name := _identity(group)) is not None and (first := first_lines.setdefault(name, number)) != number:
            violations.append(f"line {number}: {name[0]} {name[1]!r} stands in line {first} too")
        yield CheckedLine(number, start, len(data), digest, group, violations)


def line_digest(data: bytes) -> bytes:
    """Return the digest of a line, with or without its newline."""
    return blake2b(data.rstrip(b"\r\n"), digest_size=16).digest()


def _identity(group: ScoredGroup | None) -> tuple[str, str] | None:
    """Return the identity of a group, which must be unique in its file; None if the group has none."""
    if group is None or (group.group_id or group.item_id) is None:
        return None
    return ("group_id", group.group_id) if group.group_id else ("item_id", group.item_id or "")
