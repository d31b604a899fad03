"""What hints are worth, measured: hinted turns that were sampled again with and without their hint (I/O: one file).

`scripts/measure_hints FILE --samples N` writes it beside the groups, as `groups.hints.json` beside `groups.jsonl`; the
report reads it.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from agentic_opd.core.errors import OutputError, PlaceError
from agentic_opd.core.intervals import Estimate, difference, mean_of_tasks
from agentic_opd.core.text import read_json


@dataclass(frozen=True, slots=True)
class ResampledTurn:
    """One turn of a file: how many of `samples` passed the world's verdict with its hint in the prompt, and without.

    `line` (from 1), `index` and `turn` (from 0) say where it stands.
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
    def place(self) -> tuple[int, int, int]:
        """Where it stands in the file."""
        return self.line, self.index, self.turn


class Lift(NamedTuple):
    """What hints do to the pass rate: the mean over turns with and without them, and the difference."""

    turns: int
    with_hint: Estimate
    without_hint: Estimate
    lift: Estimate


@dataclass(frozen=True, slots=True)
class Lifts:
    """The file: how it was measured, and each turn; `planned` turns were to be measured."""

    samples: int
    temperature: float
    policy_model: str
    weight_version: int | None
    planned: int
    turns: tuple[ResampledTurn, ...]


def hint_key(hint: str) -> str:
    """What a hint says, whatever its spaces, its letters' case and its last stop."""
    return " ".join(hint.casefold().split()).rstrip(" .!")


def evidence_key(evidence: Sequence[str]) -> str:
    """What judges were shown together, as one name."""
    return ", ".join(evidence) or "unknown"


def lift_of(turns: Sequence[ResampledTurn]) -> Lift:
    """The lift over at least one turn.

    Turns are what is drawn (`mean_of_tasks`): the interval says how hints do on turns like these. For a single turn,
    its samples are drawn, and it is about this turn.
    """
    samples = sum(turn.samples for turn in turns) / len(turns)
    with_hint = mean_of_tasks([turn.passed_with / turn.samples for turn in turns], samples)
    without = mean_of_tasks([turn.passed_without / turn.samples for turn in turns], samples)
    return Lift(len(turns), with_hint, without, difference(without, with_hint))


def lifts_by(turns: Iterable[ResampledTurn], key: Callable[[ResampledTurn], str]) -> dict[str, Lift]:
    """The lift of the turns that have `key` in common, the largest first."""
    groups: dict[str, list[ResampledTurn]] = defaultdict(list)
    for turn in turns:
        groups[key(turn)].append(turn)
    lifts = {name: lift_of(own) for name, own in groups.items()}
    return dict(sorted(lifts.items(), key=lambda item: -item[1].lift.value))


def lifts_path(groups: Path) -> Path:
    """Where the lifts of a file of groups lie."""
    return (groups.with_suffix("") if groups.suffix == ".gz" else groups).with_suffix(".hints.json")


def write_lifts(path: Path, lifts: Lifts) -> None:
    """Write the file, whole or not at all.

    Raises:
        OutputError: it can't be written.
    """
    about = asdict(lifts)
    for name, key in (("by_hint", _hint), ("by_evidence", _evidence)):
        about[name] = {text: lift._asdict() for text, lift in lifts_by(lifts.turns, key).items()}
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(json.dumps(about, indent=1, allow_nan=False) + "\n")
        part.replace(path)
    except OSError as error:
        raise OutputError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


_FILE = TypeAdapter(Lifts)


def read_lifts(path: Path) -> Lifts | None:
    """Read the file; None if there is none.

    Raises:
        PlaceError: it can't be read.
    """
    try:
        return _FILE.validate_python(read_json(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise PlaceError(
            f"cannot read {str(path)!r}, the lifts of the hints ({why}): measure them again with "
            "scripts/measure_hints, or remove the file"
        ) from error


def _hint(turn: ResampledTurn) -> str:
    return hint_key(turn.hint)


def _evidence(turn: ResampledTurn) -> str:
    return evidence_key(turn.evidence)
