r"""Receipts: what each version of the weights was trained on, as a chain of files (I/O).

A trainer's `output_dir/receipts/step-000012.json` belongs to version 12. It names by SHA-256 the groups and hints that
the version adds to the one before it, the receipt of that one, the settings, and the files of weights. A group is named
by its line: `sed -n 3p groups.jsonl | tr -d '\n' | sha256sum`.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from agentic_opd.core.errors import OutputError, PlaceError, WireError
from agentic_opd.core.files import check_regular
from agentic_opd.core.text import json_line, read_json, refuse_constant, well_formed
from agentic_opd.wire.group import Problem, ScoredGroup, validated

FOLDER = "receipts"
"""Name of the folder of receipts in a trainer's `output_dir`."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class GroupReceipt(_Entry):
    """A group that a version was trained on."""

    sha256: str
    """Of the group's line, without its newline."""
    group_id: str | None = None
    sessions: list[str] = Field(default_factory=list[str])
    """Ids of its conversations."""
    hints: list[str] = Field(default_factory=list[str])
    """SHA-256 of the text of each hint that was scored, each once."""

    @classmethod
    def of(cls, group: ScoredGroup) -> "GroupReceipt":
        """Return the receipt of a group; its line is the one that it was read from, or else the one that it makes."""
        rollouts = group.rollouts
        sessions = (group.session_id, *(rollout.session_id for rollout in rollouts))
        turns = (turn for rollout in rollouts for turn in rollout.turns or () if turn.is_scored)
        hints = (digest_of(well_formed(turn.hint).encode()) for turn in turns if turn.hint is not None)
        return cls(
            sha256=group.line_sha256 or line_sha256(json_line(group.to_wire())),
            group_id=group.group_id,
            sessions=list(dict.fromkeys(name for name in sessions if name is not None)),
            hints=list(dict.fromkeys(hints)),
        )


class TrainedStep(_Entry):
    """A step of the trainer that changed the weights."""

    step: int
    """The version that the step led to."""
    groups: list[GroupReceipt]


class EarlierReceipt(_Entry):
    """The version from which another one continues, and the SHA-256 of its receipt's file."""

    version: int
    sha256: str


class WeightFiles(_Entry):
    """A folder with the weights of a version."""

    folder: str
    """Relative to `output_dir` if it is in there."""
    sha256: dict[str, str]
    """By the name of the file in the folder."""


class Receipt(_Entry):
    """What a version of the weights was made from."""

    version: int = Field(ge=0)
    previous: EarlierReceipt | None
    """None: the start of the chain."""
    settings: dict[str, Any]
    """Settings that determine how the groups change the weights."""
    settings_sha256: str
    steps: list[TrainedStep] = Field(default_factory=list[TrainedStep])
    """Steps since the previous version."""
    files: dict[str, WeightFiles] = Field(default_factory=dict[str, WeightFiles])
    """By `base` (what training started from), `pushed`, `checkpoint` and `final`."""

    @property
    def content(self) -> bytes:
        """The contents of its file."""
        return (json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=True) + "\n").encode()

    @property
    def groups(self) -> list[GroupReceipt]:
        return [group for step in self.steps for group in step.groups]


_RECEIPT = TypeAdapter(Receipt)


class Chain(NamedTuple):
    """The receipts from a version back to the start, and sentences on the first link that is broken, if any."""

    receipts: list[Receipt]
    differences: list[str]


def digest_of(data: bytes) -> str:
    """Return the SHA-256 in hexadecimal."""
    return sha256(data).hexdigest()


def line_sha256(line: bytes) -> str:
    """Return the SHA-256 of a line, with or without its newline."""
    return digest_of(line.rstrip(b"\r\n"))


def settings_sha256(settings: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the settings as JSON with sorted keys."""
    return digest_of(json.dumps(settings, sort_keys=True).encode())


def receipt_file(folder: Path, version: int) -> Path:
    return folder / f"step-{version:06d}.json"


def read_receipt(path: Path) -> tuple[Receipt, str]:
    """Return a receipt and the SHA-256 of its file.

    Raises:
        PlaceError: the file can't be read, or is no receipt.
    """
    try:
        check_regular(path)
        content = path.read_bytes()
        value = read_json(content, parse_constant=refuse_constant)
    except OSError as error:
        raise PlaceError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise PlaceError(f"{str(path)!r} is no receipt of a trainer: {error}") from error
    return receipt_of(value, repr(str(path))), digest_of(content)


def receipt_of(value: object, origin: str) -> Receipt:
    """Return a receipt from JSON data of `origin`.

    Raises:
        PlaceError: it is no receipt.
    """
    problems: list[Problem] = []
    receipt = validated(_RECEIPT, value, problems)
    if receipt is None:
        raise PlaceError(f"{origin} is no receipt of a trainer: {problems[0].message}")
    return receipt


def write_receipt(folder: Path, receipt: Receipt) -> str:
    """Write a receipt as a whole file, durably, and return the SHA-256 of the file.

    Raises:
        OutputError: the file can't be written.
    """
    path, content = receipt_file(folder, receipt.version), receipt.content
    fresh = path.with_name(f".{path.name}.new")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_regular(path)
        with fresh.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        raise OutputError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    return digest_of(content)


def folder_sha256(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in a folder, by its name.

    Raises:
        OutputError: a file can't be read.
    """
    digests: dict[str, str] = {}
    try:
        for path in sorted(path for path in folder.iterdir() if path.is_file()):
            with path.open("rb") as file:
                digests[path.name] = file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise OutputError(f"cannot read {str(folder)!r}: {error.strerror or error}") from error
    return digests


def find_receipt(version: Path) -> Path:
    """Return the file of a receipt: itself, the last one of an `output_dir`, or the one of a folder of weights in it.

    Raises:
        PlaceError: there is none.
    """
    if version.is_file():
        return version
    if receipts := _receipts_in(version / FOLDER):
        return receipts[-1]
    resolved = version.resolve()
    for output_dir in resolved.parents:
        for path in reversed(_receipts_in(output_dir / FOLDER)):
            folders = read_receipt(path)[0].files.values()
            if any((output_dir / files.folder).resolve() == resolved for files in folders):
                return path
    raise PlaceError(
        f"there is no receipt of {str(version)!r}: name the file of a receipt (step-000012.json in {FOLDER} of a "
        "trainer's output_dir), the output_dir (its last version), or a folder of weights in there"
    )


def _receipts_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.json"))


def read_chain(path: Path) -> Chain:
    """Read the receipts from a version back to the start.

    Raises:
        PlaceError: a file can't be read, or is no receipt.
    """
    receipt, _ = read_receipt(path)
    receipts, differences = [receipt], list[str]()
    while not differences:
        last = receipts[-1]
        if settings_sha256(last.settings) != last.settings_sha256:
            differences.append(f"version {last.version}: its settings do not have the hash that its receipt states")
        if (link := last.previous) is None:
            break
        if link.version >= last.version:
            differences.append(f"version {last.version}: its receipt names version {link.version} as the one before it")
            break
        candidates = [candidate for candidate in _files_of(link, path.parent) if candidate.exists()]
        pairs = [read_receipt(candidate) for candidate in candidates]
        matching = [earlier for earlier, digest in pairs if digest == link.sha256]
        if matching:
            receipts.append(matching[0])
            continue
        change = f"the receipt there is {pairs[0][1]}" if pairs else "there is none"
        differences.append(
            f"version {last.version} continues version {link.version} with the receipt {link.sha256}, and {change}"
        )
    return Chain(receipts, differences)


def dropped_file(folder: Path, version: int, digest: str) -> Path:
    """Return the file of the receipt of a version that a resumed run did not continue from."""
    return folder / "dropped" / f"step-{version:06d}-{digest[:8]}.json"


def _files_of(link: EarlierReceipt, folder: Path) -> list[Path]:
    """Return the files that may hold a receipt; `folder` has the one that names it."""
    dropped = dropped_file(folder.parent, link.version, link.sha256)
    return [receipt_file(folder, link.version), dropped, receipt_file(folder.parent, link.version)]


class FileCheck(NamedTuple):
    """Comparison of the files of a version's weights with its receipt."""

    files: int
    """Number of files that were read."""
    differences: list[str]
    missing: list[str]
    """Folders that are gone."""


def check_weights(receipt: Receipt, output_dir: Path) -> FileCheck:
    """Read the files of a version's weights, and compare them with its receipt.

    Raises:
        OutputError: a file can't be read.
    """
    count, differences, missing = 0, list[str](), list[str]()
    for weights in receipt.files.values():
        folder = output_dir / weights.folder
        if not folder.is_dir():
            missing.append(weights.folder)
            continue
        now = folder_sha256(folder)
        count += len(now)
        for name in sorted({*now, *weights.sha256}):
            if now.get(name) != weights.sha256.get(name):
                state = f"has the hash {now[name]}" if name in now else "is missing"
                then = weights.sha256.get(name, "no such file")
                differences.append(f"version {receipt.version}: {folder / name} {state}, and its receipt states {then}")
    return FileCheck(count, differences, missing)


def receipts_of_lines(lines: Iterable[bytes]) -> Iterator[GroupReceipt]:
    """Yield the receipt that each line of a file of groups would have; `validation` reports lines that are no group."""
    for line in lines:
        with suppress(ValueError, RecursionError, WireError):
            group = ScoredGroup.from_wire(read_json(line))
            yield GroupReceipt.of(replace(group, line_sha256=line_sha256(line)))


def check_groups(chain: Sequence[Receipt], lines: Sequence[GroupReceipt]) -> list[str]:
    """Compare the groups of a chain's receipts with those of files; return a sentence on each that differs.

    A group that was sent in parts (`group_id` G/0, G/1) must be a part of the line of G.
    """
    by_line = {line.sha256: line for line in lines}
    by_id = {line.group_id: line for line in lines}
    differences: list[str] = []
    for receipt in chain:
        for group in receipt.groups:
            name = f"version {receipt.version}: the group {group.group_id or ''} {group.sha256}".replace("  ", " ")
            if (line := by_line.get(group.sha256)) is not None:
                if (line.sessions, line.hints) != (group.sessions, group.hints):
                    differences.append(f"{name} has other sessions or hints in its line than in the receipt")
                continue
            whole_id = (group.group_id or "").rpartition("/")[0]
            whole_group = by_id.get(whole_id) if whole_id else None
            if whole_group is None or not (
                {*group.sessions} <= {*whole_group.sessions} and {*group.hints} <= {*whole_group.hints}
            ):
                differences.append(f"{name} is no line of the files")
    return differences
