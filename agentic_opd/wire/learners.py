"""The folders of learners, one for each policy that a gateway's clients teach (I/O).

    LEARNERS/NAME/groups.jsonl     the learner's scored groups, in order, each on a line     (the gateway appends)
    LEARNERS/NAME/held_out.jsonl   conversations of sessions that are not trained on         (the gateway appends)
    LEARNERS/NAME/checkpoints, receipts, metrics.jsonl                                       (the trainer writes)
    LEARNERS/NAME/brake.jsonl      evaluations: version, mean, tasks, verdict, time          (the trainer writes)

A learner's weights follow from its groups: a trainer that has trained on a line which is gone goes back to the last
version before it. So a deletion is the removal of lines.
"""

import fnmatch
import os
import re
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from agentic_opd.core.errors import OutputError, PlaceError
from agentic_opd.core.files import check_regular
from agentic_opd.core.text import read_json
from agentic_opd.wire.brake import BRAKE_FILE, Evaluation, evaluations
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


def names_of(line: bytes, fields: Collection[str] = ("group_id", "item_id", "session_id")) -> set[str]:
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
    names: list[Any] = [entry.get(name) for entry in entries if isinstance(entry, dict) for name in fields]
    return {name for name in names if isinstance(name, str)}


class LearnerStanding(NamedTuple):
    """A learner, as its folder shows it."""

    name: str
    sessions: int
    """Number of sessions with groups."""
    groups: int
    waiting: int
    """Number of groups that no version was trained on yet."""
    version: int
    """The newest version with a checkpoint; 0: the base weights."""
    scores: list[Evaluation]
    """Evaluations by the brake on held-out turns, in the order of the versions."""
    size_bytes: int
    """Size of all files in the folder."""


def read_standing(folder: Path) -> LearnerStanding:
    """Return a learner's standing, which another process may be changing: files that it removes are left out.

    Raises:
        PlaceError: a file can't be read.
    """
    try:
        lines = [line for line, _ in whole_lines(folder / GROUPS, may_be_missing=True)]
        version, source = _newest_version(folder / "checkpoints")
        read = sum(map(len, source.get("trained", ()))) + len(source.get("left_out", ()))
        size = _size_bytes(folder)
        scores = evaluations(folder / BRAKE_FILE, may_be_missing=True)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise PlaceError(f"the learner {folder.name} can't be read: {error}") from error
    sessions = {name for line in lines for name in names_of(line, ("session_id",))}
    return LearnerStanding(folder.name, len(sessions), len(lines), max(0, len(lines) - read), version, scores, size)


def _newest_version(checkpoints: Path) -> tuple[int, Any]:
    """Return the newest version with a checkpoint, and the state of its source of groups; (0, {}) without one."""
    names = list[str]()
    with suppress(FileNotFoundError):
        names = [path.name for path in checkpoints.iterdir()]
    for name in sorted(fnmatch.filter(names, "step-??????"), reverse=True):
        with suppress(FileNotFoundError):  # The trainer is removing this one.
            return int(name.removeprefix("step-")), read_json((checkpoints / name / "step.json").read_text())["source"]
    return 0, {}


def _size_bytes(folder: Path) -> int:
    """Return the size of all files in a folder."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += Path(parent, name).stat().st_size
    return size


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
