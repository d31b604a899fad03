"""Proofs of turns of a file: a journal beside it while they are made, then the file with them (I/O).

`groups.proofs.jsonl` beside `groups.jsonl` has a line for each finished proof:

    {"sha256": of the groups}    {"turn": [line, sequence, turn], "proof": {...}}    ...    {"sha256": with the proofs}

`write_groups` replaces the groups by those with the proofs in their records, as a whole, and removes the journal. The
last line is written before that. After a kill at any moment the next `ProofJournal` finishes what is left.
"""

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from agentic_opd.core.errors import OutputError, PlaceError
from agentic_opd.core.files import check_regular
from agentic_opd.core.text import json_line, read_json
from agentic_opd.wire.files import FileLock, JsonLines, whole_lines
from agentic_opd.wire.group import ProofRecord

_RECORD = TypeAdapter(ProofRecord)


class TurnPosition(NamedTuple):
    """Position of a turn in a file of groups: `line` from 1, `sequence` in the group and `turn` in it from 0."""

    line: int
    sequence: int
    turn: int


class ProofJournal:
    """The finished proofs of a file of groups, which is locked against other writers until `close`."""

    def __init__(self, groups: Path) -> None:
        """Lock the file, and write the proofs of an earlier journal into it.

        Raises:
            PlaceError: the file is gzipped, or can't be written, or it has changed since the earlier journal was begun.
            OutputError: another process writes the file.
        """
        if groups.suffix == ".gz":
            raise PlaceError(f"{str(groups)!r} is gzipped, and proofs are written into the file: unpack it first")
        self.groups, self.path = groups, groups.with_suffix(".proofs.jsonl")
        self._proofs: dict[TurnPosition, ProofRecord] = {}
        self._lines: JsonLines | None = None
        try:
            check_regular(groups)
            groups.open("r+b").close()
            self._lock = FileLock(groups, "FILE")
            try:
                with groups.open("rb") as file:  # Another process may have written it just before the lock.
                    self._digest = hashlib.file_digest(file, "sha256").hexdigest()
                check_regular(self.path)
                if self.path.exists():
                    self._finish_earlier()
            except BaseException:
                self._lock.release()
                raise
        except OSError as error:
            raise PlaceError(
                f"cannot open {str(groups)!r} to write proofs into it: {error.strerror or error}"
            ) from error

    def add(self, position: TurnPosition, proof: ProofRecord) -> None:
        """Append a finished proof; it is on disk when this returns.

        Raises:
            OutputError: the write failed.
        """
        self._append({"turn": list(position), "proof": _RECORD.dump_python(proof, mode="json")})
        self._proofs[position] = proof

    def write_groups(self) -> None:
        """Write the proofs into the file of groups, and remove the journal.

        Raises:
            OutputError: the file can't be written; the journal is kept.
        """
        if not self._proofs:
            return
        part, digest = self.groups.with_name(f"{self.groups.name}.part"), hashlib.sha256()
        try:
            with part.open("wb") as file:
                for line in _with_proofs(self.groups, self._proofs):
                    digest.update(line)
                    file.write(line)
                file.flush()
                os.fsync(file.fileno())
            self._append({"sha256": digest.hexdigest()})
            part.replace(self.groups)
            self.path.unlink()
        except OSError as error:
            raise OutputError(f"cannot write {str(self.groups)!r}: {error.strerror or error}") from error
        self.close_lines()
        self._digest = digest.hexdigest()
        self._proofs.clear()

    def close(self) -> None:
        """Close the journal, which is kept if there is one, and unlock the file."""
        self.close_lines()
        self._lock.release()

    def close_lines(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _append(self, row: dict[str, Any]) -> None:
        if self._lines is None:
            is_continued = self.path.exists()
            self._lines = JsonLines(self.path, is_continued=is_continued)
            if not is_continued:
                self._lines.write({"sha256": self._digest})
        self._lines.write(row, durable=True)

    def _finish_earlier(self) -> None:
        """Read the journal of an earlier process, and do what it left."""
        digests: list[str] = []
        try:
            for line, _ in whole_lines(self.path):
                row = read_json(line)
                if "sha256" in row:
                    digests.append(row["sha256"])
                else:
                    self._proofs[TurnPosition(*row["turn"])] = _RECORD.validate_python(row["proof"])
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            raise PlaceError(f"{str(self.path)!r} is not a journal of proofs ({error}): move it away") from error
        if digests[:1] not in ([], [self._digest]) and self._digest not in digests:
            raise PlaceError(
                f"{str(self.path)!r} holds {len(self._proofs)} proofs of turns of {str(self.groups)!r}, which has "
                "changed since. Restore that file, or remove the journal"
            )
        if digests[:1] == [self._digest] and self._proofs:
            self.write_groups()
        else:  # The groups have its proofs, or it has none.
            self._proofs.clear()
            self.path.unlink()


def _with_proofs(groups: Path, proofs: dict[TurnPosition, ProofRecord]) -> Iterator[bytes]:
    """Yield the lines of a file with the proofs in their turns' records; other lines are unchanged."""
    by_line: dict[int, dict[TurnPosition, ProofRecord]] = defaultdict(dict)
    for position, proof in proofs.items():
        by_line[position.line][position] = proof
    with groups.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number not in by_line:
                yield line
                continue
            group = read_json(line)
            for position, proof in by_line[number].items():
                record = group["overrides"][position.sequence]["opd"]["turns"][position.turn]
                record["proof"] = _RECORD.dump_python(proof, mode="json")
            yield json_line(group)
