"""Lifts: pass rates of hinted turns that were sampled again with and without their hint (I/O: one file).

`scripts/learning/measure_hints FILE --samples N` writes the file beside the groups, as `groups.hints.json` beside
`groups.jsonl`; the report reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from agentic_opd.core.errors import PlaceError
from agentic_opd.core.files import check_regular
from agentic_opd.core.intervals import Estimate, difference, mean_of_tasks
from agentic_opd.core.text import read_json


@dataclass(frozen=True, slots=True)
class ResampledTurn:
    """One turn of a file: how many of `samples` passed verification with its hint in the prompt, and without.

    `line` (from 1), `index` and `turn` (from 0) locate the turn in the file.
    """

    line: int
    index: int
    turn: int
    task_id: str
    hint: str
    evidence: tuple[str, ...]
    samples: int
    passed_with: int
    passed_without: int

    @property
    def key(self) -> tuple[int, int, int]:
        return self.line, self.index, self.turn


class Lift(NamedTuple):
    """Mean pass rates over turns with and without hints, and their difference, with 95% intervals."""

    turns: int
    with_hint: Estimate
    without_hint: Estimate
    lift: Estimate


@dataclass(frozen=True, slots=True)
class Lifts:
    """Contents of the file: the settings of the measurement, the number of `planned` turns, and the measured ones."""

    samples: int
    temperature: float
    policy_model: str
    weight_version: int | None
    planned: int
    turns: tuple[ResampledTurn, ...]


def hint_key(hint: str) -> str:
    """Return the hint's text without differences in spaces, case and final stops."""
    return " ".join(hint.casefold().split()).rstrip(" .!")


def evidence_key(evidence: Sequence[str]) -> str:
    """Return the kinds of evidence as one name."""
    return ", ".join(evidence) or "unknown"


def lift_of(turns: Sequence[ResampledTurn]) -> Lift:
    """Return the lift over at least one turn.

    The sampling unit of the intervals is the turn (`mean_of_tasks`); for a single turn it is the turn's samples.
    """
    samples = sum(turn.samples for turn in turns) / len(turns)
    with_hint = mean_of_tasks([turn.passed_with / turn.samples for turn in turns], samples)
    without = mean_of_tasks([turn.passed_without / turn.samples for turn in turns], samples)
    return Lift(len(turns), with_hint, without, difference(without, with_hint))


def lifts_path(groups: Path) -> Path:
    """Return the path of the lifts of a file of groups."""
    return (groups.with_suffix("") if groups.suffix == ".gz" else groups).with_suffix(".hints.json")


_FILE = TypeAdapter(Lifts)


def read_lifts(path: Path) -> Lifts | None:
    """Read the file; return None if it does not exist.

    Raises:
        PlaceError: the file can't be read.
    """
    try:
        check_regular(path)
        return _FILE.validate_python(read_json(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise PlaceError(
            f"cannot read {str(path)!r}, the lifts of the hints ({why}): measure them again with "
            "scripts/learning/measure_hints, or remove the file"
        ) from error
