"""`brake.jsonl` of a trainer -> sentences for the report, and evaluations for a curve (I/O)."""

from collections.abc import Iterable
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
    """Whether the brake replaced the version by an earlier one."""


def brake_notes(file: Path) -> list[str]:
    """Return a sentence about each roll-back of the trainer that wrote `file`.

    Raises:
        PlaceError: the file can't be read, or holds something other than verdicts.
    """
    rows = _rows(file)
    try:
        verdicts = {row["version"]: row for row in rows if "mean" in row}
        return [_roll_back(verdicts, row) for row in rows if row["verdict"] == "rolled_back"]
    except (ValueError, KeyError, TypeError) as error:
        raise _no_verdicts(file, error) from error


def evaluations(file: Path) -> list[Evaluation]:
    """Return the evaluations in the order of their versions; of a version that was evaluated again, the last one.

    Raises:
        PlaceError: the file can't be read, or holds something other than verdicts.
    """
    rows = _rows(file)
    try:
        bad = {row["bad"] for row in rows if row["verdict"] == "rolled_back"}
        by_version = {row["version"]: _evaluation(row, bad) for row in rows if "mean" in row}
    except (ValueError, KeyError, TypeError) as error:
        raise _no_verdicts(file, error) from error
    return [by_version[version] for version in sorted(by_version)]


def _rows(file: Path) -> list[dict[str, Any]]:
    try:
        rows = [read_json(line, parse_constant=refuse_constant) for line, _ in whole_lines(file)]
    except OSError as error:
        raise PlaceError(f"cannot read {str(file)!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise _no_verdicts(file, error) from error
    return rows


def _evaluation(row: dict[str, Any], bad: Iterable[int]) -> Evaluation:
    version, score, tasks = row["version"], row["mean"], row["tasks"]
    if type(version) is not int or type(tasks) is not int or tasks < 1 or not isfinite(score):
        raise ValueError(f"the verdict on version {version} has no version, mean or number of tasks")
    return Evaluation(version, score, tasks, version in bad)


def _roll_back(verdicts: dict[int, dict[str, Any]], row: dict[str, Any]) -> str:
    bad, to, new = row["bad"], row["to"], row["version"]
    verdict = verdicts[bad]
    worst = min(verdict["falls"], key=lambda fall: fall["standard_errors"])
    falls = [number for fall in verdict["falls"] for number in (fall["difference"], fall["standard_errors"])]
    if not all(map(isfinite, (verdict["mean"], *falls))):
        raise ValueError(f"the verdict on version {bad} has a number that is not finite")
    return (
        f"The brake rolled version {bad} back to version {to}, which is served as version {new}: its mean score over "
        f"{verdict['tasks']} held-out tasks was {verdict['mean']:.3f}, {-worst['difference']:.3f} "
        f"({-worst['standard_errors']:.1f} standard errors) below that of version {worst['version']}."
    )


def _no_verdicts(file: Path, error: Exception) -> PlaceError:
    return PlaceError(f"{str(file)!r} holds no verdicts of a trainer's brake: {error!r}")
