"""`brake.jsonl` of a trainer: its verdicts, and the evaluations that they are about (I/O).

A line for each evaluation of a version, with `version`, `verdict` (good or bad), `mean`, `tasks`, `falls` and `time`;
and a line `rolled_back` for the version that replaced a bad one.
"""

from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from agentic_opd.core.errors import PlaceError
from agentic_opd.core.text import read_json, refuse_constant
from agentic_opd.wire.files import whole_lines

BRAKE_FILE = "brake.jsonl"


class Evaluation(NamedTuple):
    """An evaluation of a version of the weights on held-out tasks."""

    version: int
    score: float
    """Mean score over the tasks, 0 to 1."""
    n: int
    """Number of tasks."""
    rolled_back: bool
    """Whether the brake found it worse, so that an earlier version takes its place."""
    time: float | None = None
    """Seconds since 1970; None: the trainer did not write it."""


def evaluations(file: Path, *, may_be_missing: bool = False) -> list[Evaluation]:
    """Return the evaluations in the order of their versions; of a version that was evaluated again, the last one.

    With `may_be_missing` a file that is not there holds none.

    Raises:
        PlaceError: the file can't be read, or holds something other than verdicts.
    """
    rows = read_verdicts(file, may_be_missing=may_be_missing)
    try:
        by_version = {row["version"]: _evaluation(row) for row in rows if "mean" in row}
    except (ValueError, KeyError, TypeError) as error:
        raise no_verdicts(file, error) from error
    return [by_version[version] for version in sorted(by_version)]


def read_verdicts(file: Path, *, may_be_missing: bool = False) -> list[dict[str, Any]]:
    """Return the lines of the file; raises PlaceError as `evaluations`."""
    try:
        lines = whole_lines(file, may_be_missing=may_be_missing)
        rows = [read_json(line, parse_constant=refuse_constant) for line, _ in lines]
    except OSError as error:
        raise PlaceError(f"cannot read {str(file)!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise no_verdicts(file, error) from error
    if any(not isinstance(row, dict) for row in rows):
        raise no_verdicts(file, ValueError("a line is no object"))
    return rows


def no_verdicts(file: Path, error: Exception) -> PlaceError:
    """Return the error about a file that holds something else."""
    return PlaceError(f"{str(file)!r} holds no verdicts of a trainer's brake: {error!r}")


def _evaluation(row: dict[str, Any]) -> Evaluation:
    version, score, tasks = row["version"], row["mean"], row["tasks"]
    if type(version) is not int or type(tasks) is not int or tasks < 1 or not isfinite(score):
        raise ValueError(f"the verdict on version {version} has no version, mean or number of tasks")
    return Evaluation(version, score, tasks, row["verdict"] == "bad", row.get("time"))
