"""The folders of learners, one for each policy that a gateway's clients teach (I/O).

    LEARNERS/NAME/groups.jsonl     the learner's scored groups, in order, each on a line     (the gateway appends)
    LEARNERS/NAME/held_out.jsonl   conversations of sessions that are not trained on         (the gateway appends)
    LEARNERS/NAME/checkpoints, receipts, brake.jsonl, metrics.jsonl, start.json              (the trainer writes)

A learner's weights follow from its groups: a trainer that has trained on a line which is gone goes back to the last
version before it. So a deletion is the removal of lines.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from agentic_opd.core.errors import OutputError
from agentic_opd.core.files import check_regular
from agentic_opd.core.text import read_json
from agentic_opd.wire.files import whole_lines

GROUPS, HELD_OUT = "groups.jsonl", "held_out.jsonl"
LEARNER_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,79}")
"""Names of learners, which are names of folders on every file system."""


def learner_names(root: Path) -> list[str]:
    """Return the names of the learners that have groups or versions in `root`; empty if there is no such folder."""
    if not root.is_dir():
        return []
    return sorted(
        folder.name
        for folder in root.iterdir()
        if LEARNER_NAME.fullmatch(folder.name) and ((folder / GROUPS).exists() or (folder / "checkpoints").exists())
    )


def remove_sessions(folder: Path, group_ids: Collection[str], session_ids: Collection[str]) -> int:
    """Remove from a learner's files the groups with these ids or of these sessions; return the number of lines.

    A group of several sessions goes as a whole. A file that loses a line is replaced, so that a reader sees it as it
    was or as it is then.

    Raises:
        OutputError: a file can't be read or written.
    """

    def is_of_them(line: bytes) -> bool:
        names = names_of(line)
        return not names.isdisjoint(group_ids) or not names.isdisjoint(session_ids)

    return sum(_filtered(folder / name, is_of_them) for name in (GROUPS, HELD_OUT))


def remove_files(folder: Path) -> None:
    """Remove all that a gateway has written for a learner.

    Raises:
        OutputError: a file can't be removed.
    """
    for name in (GROUPS, HELD_OUT, Path(GROUPS).with_suffix(".run.json").name):
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(f"cannot remove {str(folder / name)!r}: {error.strerror or error}") from error


def names_of(line: bytes) -> set[str]:
    """Return the ids in a line of groups or of held-out conversations: of the group, of its item and its sessions."""
    try:
        row: Any = read_json(line)
    except (ValueError, RecursionError):
        return set()
    if not isinstance(row, dict):
        return set()
    of_sequences = row.get("overrides")
    entries: Iterable[Any] = (
        row,
        row.get("group_overrides"),
        *(of_sequences if isinstance(of_sequences, list) else ()),
    )
    names = {
        entry.get(name)
        for entry in entries
        if isinstance(entry, dict)
        for name in ("group_id", "item_id", "session_id")
    }
    return {name for name in names if isinstance(name, str)}


def count_lines(path: Path) -> int:
    """Return the number of whole lines of a file; 0 if there is none."""
    return sum(1 for _ in whole_lines(path)) if path.exists() else 0


def _filtered(path: Path, is_removed: Callable[[bytes], bool]) -> int:
    """Replace a file by one without some of its lines; return their number."""
    if not path.exists():
        return 0
    fresh = path.with_name(f".{path.name}.new")
    try:
        check_regular(path)
        lines = [line for line, _ in whole_lines(path)]
        rest = [line for line in lines if not is_removed(line)]
        if len(rest) < len(lines):
            with fresh.open("wb") as file:
                file.writelines(rest)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
    except OSError as error:
        raise OutputError(f"cannot rewrite {str(path)!r}: {error.strerror or error}") from error
    return len(lines) - len(rest)


def write_json(path: Path, value: Any) -> None:
    """Write a small JSON file as a whole.

    Raises:
        OutputError: it can't be written.
    """
    fresh = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(value) + "\n")
        fresh.replace(path)
    except OSError as error:
        raise OutputError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
