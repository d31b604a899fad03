"""How far a run is: what its folder says after a kill, and what the rest of the experiment takes.

A run's folder holds the trainer's checkpoints and metrics.jsonl, the groups, progress.json (seconds at each step), and
a folder for each measured point with point.json. A run continues from its last checkpoint; later lines are cut.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from agentic_opd.wire.files import whole_lines

FIRST_GUESS_S = 0.5
"""Seconds of a rollout or a measured episode on two cores, until one has been measured."""


class Point(NamedTuple):
    """A measured point of a curve, as results.json holds it."""

    rollouts: int
    pass_rate: float
    episodes: int


def write_json(path: Path, data: object) -> None:
    """Write it whole or not at all."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(data, indent=1) + "\n")
    fresh.replace(path)


class Progress(NamedTuple):
    """What progress.json holds of a run's training."""

    batch_size: int
    seconds: list[float]
    """At the end of each step, since the start, without the time while the run was stopped."""

    @property
    def rollouts(self) -> int:
        """Rollouts that were trained on."""
        return self.batch_size * len(self.seconds)

    @classmethod
    def of(cls, folder: Path, batch_size: int) -> "Progress":
        """Return that of a run's folder; no step if it has none."""
        path = folder / "progress.json"
        return cls(**json.loads(path.read_text())) if path.exists() else cls(batch_size, [])

    def stepped(self, step_s: float) -> "Progress":
        """Return the progress after one more step of `step_s` seconds."""
        return self._replace(seconds=[*self.seconds, (self.seconds[-1] if self.seconds else 0.0) + step_s])

    def write(self, folder: Path) -> None:
        """Write progress.json."""
        write_json(folder / "progress.json", self._asdict())


def trained_steps(folder: Path) -> int:
    """Return the step of a run's last whole checkpoint; 0 if there is none."""
    return max((int(path.name[5:]) for path in (folder / "checkpoints").glob("step-??????")), default=0)


def cut_back(folder: Path, groups: Path, step: int, batch_size: int) -> None:
    """Remove what a run wrote after the checkpoint of `step`; groups that were not trained on are made again.

    Args:
        folder: The run's folder.
        groups: Its file of groups, in the order in which the trainer received them.
        step: The checkpoint's step.
        batch_size: Rollouts of a step.
    """
    _cut(folder / "metrics.jsonl", lambda line: json.loads(line)["step"] <= step)
    rollouts = 0

    def is_trained(line: bytes) -> bool:
        nonlocal rollouts
        rollouts += len(json.loads(line)["tokens"])
        return rollouts <= step * batch_size

    _cut(groups, is_trained)
    progress = Progress.of(folder, batch_size)
    while len(progress.seconds) < step:  # The kill came after the checkpoint, before the step was seen here.
        progress = progress.stepped(0.0)
    progress._replace(seconds=progress.seconds[:step]).write(folder)


def _cut(path: Path, keeps: Callable[[bytes], bool]) -> None:
    """Cut a file of JSON lines before its first line that `keeps` refuses, or that is not whole."""
    if not path.exists():
        return
    size = 0
    for line, end in whole_lines(path):
        if not keeps(line):
            break
        size = end
    os.truncate(path, size)


def read_point(folder: Path) -> tuple[Point, float] | None:
    """Return a measured point and the seconds that it took; None if it has not been measured to its end."""
    path = folder / "point.json"
    if not path.exists():
        return None
    data = json.loads(path.read_text())
    return Point(*data["point"]), data["seconds"]


def write_point(folder: Path, point: Point, seconds: float) -> None:
    """Write a measured point."""
    write_json(folder / "point.json", {"point": point, "seconds": seconds})


def forget_weights(weights: Path, kept_steps: Iterable[int]) -> None:
    """Remove pushed weights of all steps but those in `kept` and the last five, which a server may be reading."""
    pushed = sorted(weights.glob("step-??????"))
    names = {f"step-{step:06d}" for step in kept_steps}
    for path in pushed[:-5]:
        if path.name not in names:
            shutil.rmtree(path, ignore_errors=True)
            shutil.rmtree(path.with_name(f"{path.name}-teacher"), ignore_errors=True)


class Rates(NamedTuple):
    """Seconds of a rollout that is made and trained on, and of an episode that is measured."""

    rollout_s: float
    episode_s: float
    source: str

    def hours(self, rollouts: int, episodes: int) -> float:
        """Return the expected hours."""
        return (rollouts * self.rollout_s + episodes * self.episode_s) / 3600

    def __str__(self) -> str:
        return f"{self.source}: {self.rollout_s:.2g} s a rollout, {self.episode_s:.2g} s a measured episode"


def measured_rates(out: Path) -> Rates:
    """Return the means over all steps and points below `out`. Until there is one of both, they count as equal."""
    steps = [Progress.of(path.parent, 0) for path in out.rglob("progress.json")]
    points = [measured for path in out.rglob("point.json") if (measured := read_point(path.parent))]
    rollouts, episodes = sum(progress.rollouts for progress in steps), sum(point.episodes for point, _ in points)
    trained_s = sum(progress.seconds[-1] for progress in steps if progress.seconds)
    measured_s = sum(seconds for _, seconds in points)
    rollout_s = trained_s / rollouts if rollouts else None
    episode_s = measured_s / episodes if episodes else None
    if (average := rollout_s or episode_s) is None:
        return Rates(FIRST_GUESS_S, FIRST_GUESS_S, "guessed")
    return Rates(rollout_s or average, episode_s or average, "measured")
