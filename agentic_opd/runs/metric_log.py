"""A run's metrics: what came in since the last logging step, and where it goes (I/O).

They go to Weights & Biases if that is on, else to a metrics.jsonl beside what the run writes.

A line of metrics.jsonl is a logging step: `step`, `time` (seconds since 1970), and the metrics. Tables go to W&B only.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from agentic_opd.core.errors import ConfigError
from agentic_opd.core.types import Episode
from agentic_opd.distill.distiller import DistilledGroup
from agentic_opd.distill.metrics import aggregate
from agentic_opd.rollout.metrics import train_metrics
from agentic_opd.runs.config import RunConfig
from agentic_opd.runs.environment import FinishedGroup
from agentic_opd.runs.files import GroupFile, JsonLines
from agentic_opd.runs.loop_lag import LoopLag
from agentic_opd.wire.counts import rollout_rows

logger = logging.getLogger(__name__)

ROLLOUT_COLUMNS = ("task", "score", "hints", "text")
"""Columns of the table of rollouts."""


class MetricLog(Protocol):
    """Takes the metrics of logging steps; `place` says where they end up."""

    place: str

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Sequence[Any]] = ()) -> None:
        """Log one step; `rollouts` are rows of `ROLLOUT_COLUMNS`."""
        ...

    def close(self) -> None:
        """Make sure that all of it has arrived."""
        ...


class MetricFile:
    """A metrics.jsonl that is begun, or continued behind its last whole line."""

    def __init__(self, path: Path, *, is_continued: bool) -> None:
        """Open `path`.

        Raises:
            PlaceError: it can't be written.
        """
        self.place = str(path)
        self._lines = JsonLines(path, is_continued=is_continued)

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Sequence[Any]] = ()) -> None:
        """Append a line, without `rollouts`: they are in the file of groups.

        Raises:
            OutputError: the disk refused.
        """
        self._lines.write({"step": step, "time": round(time.time(), 3), **metrics})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class WandbLog:
    """A run on Weights & Biases (or on disk, if WANDB_MODE is offline)."""

    def __init__(self, project: str, name: str | None, settings: Mapping[str, Any], group: str | None = None) -> None:
        """Start the run; W&B's own chatter is left out, `place` holds what matters of it.

        Raises:
            ConfigError: W&B refuses the run, for example because nobody is logged in.
        """
        import wandb  # Many megabytes and a second, for those who use it.

        quiet = wandb.Settings(silent=True)
        wandb.setup(quiet)  # What it says before a run begins would not heed the run's own settings.
        try:
            self._run = wandb.init(project=project, name=name, group=group, config=dict(settings), settings=quiet)
        except wandb.Error as error:
            raise ConfigError(
                f"W&B refuses the run: {str(error).rstrip('.')}. Run `wandb login`, set WANDB_API_KEY or "
                "WANDB_MODE=offline, or leave env.use_wandb off: metrics then go to metrics.jsonl."
            ) from error
        folder = Path(self._run.dir).parent
        self.place = f"W&B, {f'offline in {folder}' if self._run.offline else self._run.url}"

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Sequence[Any]] = ()) -> None:
        """Log a step, with the table of rollouts."""
        import wandb

        table = wandb.Table(columns=list(ROLLOUT_COLUMNS), data=[list(row) for row in rollouts]) if rollouts else None
        self._run.log({**metrics, **({"train/rollouts": table} if table is not None else {})}, step=step)

    def close(self) -> None:
        """Wait until all of it has arrived."""
        self._run.finish()


def metrics_path(groups: Path | None, folder: Path) -> Path:
    """metrics.jsonl beside a file of groups (with that file's name in front if it is not groups.jsonl), or in `folder`
    if there is no such file.
    """
    if groups is None:
        return folder / "metrics.jsonl"
    return groups.with_name("metrics.jsonl" if groups.stem == "groups" else f"{groups.stem}.metrics.jsonl")


@dataclass
class RunMetrics:
    """Takes in finished groups, and logs them at each logging step.

    Args:
        config: For W&B, and for how many rollouts its table shows.
        decode: Token ids -> text, for that table.
        sample_seconds: Seconds of the latest sampling requests.
        shown: Metrics that a line about a step says.
        loop_lag: Looks at the event loop, once it is started.
    """

    config: RunConfig
    decode: Callable[[Sequence[int]], str]
    sample_seconds: Callable[[], Sequence[float]]
    shown: Sequence[str] = ()
    loop_lag: LoopLag = field(default_factory=LoopLag)
    step: int = 0
    log: MetricLog | None = None
    silent_rollouts: int = 0
    """Rollouts without a tool call, of a run that has none with one; -1: some rollout called a tool."""
    evaluation: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of the last evaluation that is not logged yet."""
    _episodes: list[Episode] = field(default_factory=list[Episode])
    _distilled: list[DistilledGroup] = field(default_factory=list[DistilledGroup])
    _rows: list[tuple[str, float, str, str]] = field(default_factory=list[tuple[str, float, str, str]])

    def add(self, finished: FinishedGroup) -> None:
        """Keep what the next logging step needs: not the arrays, many megabytes an episode."""
        self._episodes += finished.episodes
        called = any(episode.tool_calls or episode.program for episode in finished.episodes)
        if called or self.silent_rollouts < 0:
            self.silent_rollouts = -1
        else:
            self.silent_rollouts += len(finished.episodes)
        if finished.distilled is not None:
            self._distilled.append(finished.distilled)
        if self.config.use_wandb:
            most = self.config.num_rollouts_per_group_for_logging
            self._rows += rollout_rows(finished.group, self.decode, len(finished.episodes) if most == -1 else most)
            del self._rows[: -self.config.num_rollouts_to_keep]

    def current(self) -> dict[str, float]:
        """What came in since the last logging step."""
        stats = [one for group in self._distilled for one in group.stats]
        of_rollouts = train_metrics(self._episodes, self.sample_seconds(), self.loop_lag.latest())
        distilled = aggregate(stats, [group.about for group in self._distilled]) if stats else {}
        return {**of_rollouts, **self.evaluation, **distilled}

    def line(self) -> str:
        """The same for a person."""
        metrics = self.current()
        shown = [f"{name} {metrics[name]:.3g}" for name in self.shown if name in metrics]
        return ", ".join([f"{len(self._episodes)} rollouts since the last one", *shown])

    def flush(self, further: Mapping[str, float] | None = None) -> None:
        """Log what came in since the last time, and start the next logging step."""
        metrics, rows = {**(further or {}), **self.current()}, self._rows
        self._episodes, self._distilled, self._rows, self.evaluation = [], [], [], {}
        if self.log is not None and metrics:
            self.log.log(self.step, metrics, rows)

    def to_file(self, groups: GroupFile | None, folder: Path) -> None:
        """Log to a metrics.jsonl from now on, beside `groups` or in `folder`; it is continued if the groups are."""
        path = metrics_path(groups.path if groups else None, folder)
        self.log = MetricFile(path, is_continued=bool(groups.finished) if groups else not self.config.overwrite)

    def to_wandb(self, project: str, settings: Mapping[str, Any], group: str | None = None) -> None:
        """Log to a run on Weights & Biases from now on."""
        self.log = WandbLog(project, self.config.wandb_name, settings, group)

    def place(self) -> dict[str, str]:
        """Where metrics go, for the first lines that a person reads."""
        return {"metrics": self.log.place if self.log else "W&B, in the trainer's project"}

    def close(self) -> None:
        """Make sure that all that was logged has arrived, and say so if the policy called no tool in the whole run."""
        if self.silent_rollouts > 0:
            logger.warning(
                "the policy made no tool call in all %d rollouts. Does it know how? `agentic-opd doctor` shows whether "
                "its calls could be read (env.renderer, its tool_parser, env.tool_format); a small model needs an "
                "example turn before its task (examples, docs/worlds.md)",
                self.silent_rollouts,
            )
            self.silent_rollouts = 0
        self.loop_lag.stop()
        if self.log is not None:
            self.log.close()
