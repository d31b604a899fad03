"""Where metrics go: to Weights & Biases where that is on, else to a metrics.jsonl beside what the run writes (I/O).

A line of metrics.jsonl is a logging step: `step`, `time` (seconds since 1970), and the metrics. Tables go to W&B only.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import wandb

from agentic_opd.core.errors import ConfigError, OutputError

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
            OutputError: it can't be written.
        """
        self.place = str(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if is_continued and path.exists():
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
            self._file = path.open("a" if is_continued else "w", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"cannot write {self.place!r}: {error.strerror or error}") from error

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Sequence[Any]] = ()) -> None:
        """Append a line, without `rollouts`: they are in the file of groups.

        Raises:
            OutputError: the disk refused.
        """
        line = json.dumps({"step": step, "time": round(time.time(), 3), **metrics}, allow_nan=False)
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise OutputError(f"cannot write to {self.place!r}: {error.strerror or error}") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class WandbLog:
    """A run on Weights & Biases (or on disk, where WANDB_MODE is offline)."""

    def __init__(self, project: str, name: str | None, settings: Mapping[str, Any], group: str | None = None) -> None:
        """Start the run; W&B's own chatter is left out, `place` holds what matters of it.

        Raises:
            ConfigError: W&B takes no run, for example because nobody is logged in.
        """
        quiet = wandb.Settings(silent=True)
        wandb.setup(quiet)  # What it says before a run begins would not heed the run's own settings.
        try:
            self._run = wandb.init(project=project, name=name, group=group, config=dict(settings), settings=quiet)
        except wandb.Error as error:
            raise ConfigError(
                f"W&B takes no run: {str(error).rstrip('.')}. Run `wandb login`, set WANDB_API_KEY or "
                "WANDB_MODE=offline, or leave env.use_wandb off: metrics then go to metrics.jsonl."
            ) from error
        folder = Path(self._run.dir).parent
        self.place = f"W&B, {f'offline in {folder}' if self._run.offline else self._run.url}"

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Sequence[Any]] = ()) -> None:
        """Log a step, with the table of rollouts."""
        table = wandb.Table(columns=list(ROLLOUT_COLUMNS), data=[list(row) for row in rollouts]) if rollouts else None
        self._run.log({**metrics, **({"train/rollouts": table} if table is not None else {})}, step=step)

    def close(self) -> None:
        """Wait until all of it has arrived."""
        self._run.finish()


def metrics_path(groups: Path | None, folder: Path) -> Path:
    """metrics.jsonl beside a file of groups (with that file's name in front where it is not groups.jsonl), or else in
    `folder`.
    """
    if groups is None:
        return folder / "metrics.jsonl"
    return groups.with_name("metrics.jsonl" if groups.stem == "groups" else f"{groups.stem}.metrics.jsonl")
