"""Learning curves of `scripts/learn` (results.json) -> what their page shows (I/O: reads the file).

The file holds, by mode and seed, points [rollouts trained on, pass rate without hints, episodes measured].
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from agentic_opd.core.errors import PlaceError
from agentic_opd.core.intervals import Estimate, difference, mean_of_tasks
from agentic_opd.core.text import read_json


class Point(NamedTuple):
    """A point of a seed's curve, as the file holds it."""

    rollouts: int
    pass_rate: float
    episodes: int


class MeanPoint(NamedTuple):
    """The seeds' mean at a number of rollouts, with its interval (a seed is drawn), and each seed's pass rate."""

    rollouts: int
    mean: Estimate
    seeds: tuple[float, ...]


class Curve(NamedTuple):
    """One mode; `change` is that of the last point from the first."""

    mode: str
    points: tuple[MeanPoint, ...]
    change: Estimate


_FILE: TypeAdapter[dict[str, dict[str, list[Point]]]] = TypeAdapter(dict[str, dict[str, list[Point]]])


def is_curves_file(path: Path) -> bool:
    """Whether `path` is to be read as curves; groups are lines, in files that are called otherwise."""
    return path.suffix == ".json"


def read_curves(path: Path) -> tuple[Curve, ...]:
    """Read the curves of each mode, those that have a point.

    Raises:
        PlaceError: the file can't be read, or holds something else.
    """
    try:
        modes = _FILE.validate_python(read_json(path.read_bytes()))
    except OSError as error:
        raise PlaceError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise PlaceError(
            f"{str(path)!r} holds no learning curves ({why}): it must be the results.json of scripts/learn. Groups "
            "stand in a .jsonl file"
        ) from error
    curves = tuple(
        _curve(mode, tuple(seeds.values())) for mode, seeds in modes.items() if all(seeds.values()) and seeds
    )
    if not curves:
        raise PlaceError(f"{str(path)!r} holds no learning curve yet")
    return curves


def curves_data(name: str, curves: Sequence[Curve]) -> Mapping[str, Any]:
    """The curves as the page's script reads them."""
    return {
        "name": name,
        "modes": [
            {"mode": one.mode, "points": [point._asdict() for point in one.points], "change": one.change}
            for one in curves
        ],
    }


def _curve(mode: str, seeds: Sequence[Sequence[Point]]) -> Curve:
    points = tuple(_mean_point(column) for column in zip(*seeds, strict=False))
    return Curve(mode, points, difference(points[0].mean, points[-1].mean))


def _mean_point(column: Sequence[Point]) -> MeanPoint:
    rates = [min(1.0, max(0.0, point.pass_rate)) for point in column]
    mean = mean_of_tasks(rates, max(1.0, fmean(point.episodes for point in column)))
    return MeanPoint(column[0].rollouts, mean, tuple(rates))
