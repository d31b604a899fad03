"""A run's metrics, collected per logging step and logged to Weights & Biases or to a metrics.jsonl (I/O).

W&B is used if it is on; otherwise metrics.jsonl is written beside the run's other files.

A line of metrics.jsonl is a logging step: `step`, `time` (seconds since 1970), and the metrics. Tables go to W&B only.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentic_opd.core.errors import ConfigError
from agentic_opd.core.metric import Metric
from agentic_opd.core.types import Episode
from agentic_opd.distill.alarms import RepetitionWatch
from agentic_opd.distill.distiller import DistilledGroup
from agentic_opd.distill.metrics import aggregate
from agentic_opd.rollout.metrics import group_metrics, repetitions, train_metrics
from agentic_opd.runs.config import RunConfig
from agentic_opd.runs.environment import FinishedGroup
from agentic_opd.wire.counts import rollout_rows
from agentic_opd.wire.files import GroupFile, JsonLines

logger = logging.getLogger(__name__)

RUN_METRICS = (
    Metric(
        "train/close_failures",
        "episodes",
        "episodes of the step, failed, cancelled and evaluated ones too, whose state the world's hook close did not "
        "close: it raised or exceeded tool_timeout_s; the log has the cause. Left out if the world has no such hook",
    ),
)
"""Metrics of the run beside those of its episodes and of distillation."""

ROLLOUT_COLUMNS = ("task", "score", "hints", "text")
"""Columns of the table of rollouts."""
_SLEEP_S = 0.02
_LATEST = 1000


class MetricFile(JsonLines):
    """A metrics.jsonl, new or appended to after its last whole line."""

    @property
    def destination(self) -> str:
        return str(self.path)

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Sequence[Any]] = ()) -> None:
        """Append a line, without `rollouts`, which are in the file of groups; raise OutputError if that fails."""
        self.write({"step": step, "time": round(time.time(), 3), **metrics})


class WandbLog:
    """A run on Weights & Biases (or on disk, if WANDB_MODE is offline)."""

    def __init__(self, project: str, name: str | None, settings: Mapping[str, Any], group: str | None = None) -> None:
        """Start the run without W&B's console output; `destination` holds the run's URL or folder.

        Raises:
            ConfigError: W&B refuses the run, for example because of a missing login.
        """
        import wandb  # The import is slow, and needed only with W&B.

        quiet = wandb.Settings(silent=True)
        wandb.setup(quiet)  # Output before the run begins ignores the run's settings.
        try:
            self._run = wandb.init(project=project, name=name, group=group, config=dict(settings), settings=quiet)
        except wandb.Error as error:
            raise ConfigError(
                f"W&B refuses the run: {str(error).rstrip('.')}. Run `wandb login`, set WANDB_API_KEY or "
                "WANDB_MODE=offline, or leave env.use_wandb off: metrics then go to metrics.jsonl."
            ) from error
        folder = Path(self._run.dir).parent
        self.destination = f"W&B, {f'offline in {folder}' if self._run.offline else self._run.url}"

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Sequence[Any]] = ()) -> None:
        """Log a step, with the table of rollouts."""
        import wandb

        table = {}
        if rollouts:
            table["train/rollouts"] = wandb.Table(columns=list(ROLLOUT_COLUMNS), data=[list(row) for row in rollouts])
        self._run.log({**metrics, **table}, step=step)

    def close(self) -> None:
        """Wait until everything is uploaded, and finish the run."""
        self._run.finish()


def metrics_path(groups: Path | None, folder: Path) -> Path:
    """Return the path of metrics.jsonl: beside the file of groups, or in `folder` if `groups` is None.

    Beside a file NAME.jsonl other than groups.jsonl, it is NAME.metrics.jsonl.
    """
    if groups is None:
        return folder / "metrics.jsonl"
    return groups.with_name("metrics.jsonl" if groups.stem == "groups" else f"{groups.stem}.metrics.jsonl")


class LoopLag:
    """Samples the event loop's lag, which delays every episode, as the excess duration of short sleeps."""

    def __init__(self) -> None:
        self._latest = deque[float](maxlen=_LATEST)
        self._sampler: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._sampler = asyncio.create_task(self._sample())

    def latest(self) -> Sequence[float]:
        """Return the latest lags in seconds, from about the last 20 seconds."""
        return tuple(self._latest)

    def stop(self) -> None:
        if self._sampler is not None:
            self._sampler.cancel()

    async def _sample(self) -> None:
        while True:
            start = time.monotonic()
            await asyncio.sleep(_SLEEP_S)
            self._latest.append(time.monotonic() - start - _SLEEP_S)


@dataclass(frozen=True, slots=True)
class _Collected:
    """What a run collected between two logging steps."""

    episodes: Sequence[Episode]
    passed: Sequence[Sequence[bool]]
    """For each group, whether its rollouts with a verdict passed."""
    distilled: Sequence[DistilledGroup]
    evaluation: Mapping[str, float]
    sample_seconds: Sequence[float]
    lags: Sequence[float]
    close_failures: int | None
    """None: the world has no hook `close`."""

    def metrics(self) -> dict[str, float]:
        """Compute the metrics; this takes tens of milliseconds for some dozens of groups."""
        stats = [episode for group in self.distilled for episode in group.stats]
        of_rollouts = train_metrics(self.episodes, self.sample_seconds, self.lags)
        distilled = aggregate(stats, [group.metadata for group in self.distilled]) if stats else {}
        metrics = {**of_rollouts, **group_metrics(self.passed), **self.evaluation, **distilled}
        if self.close_failures is not None and (metrics or self.close_failures > 0):
            metrics["train/close_failures"] = float(self.close_failures)
        return metrics


@dataclass
class RunMetrics:
    """Collects finished groups, and logs their metrics at each logging step.

    `decode` gives the text of token ids for W&B's table of rollouts, `sample_seconds` the durations of the latest
    sampling requests. `line_metrics` names the metrics in `line`. `close_failures` returns how many states of the run
    the world's hook `close` did not close; None: the world has no such hook. `expects_calls` returns whether there are
    tools, so that a run without a tool call deserves a warning.
    """

    config: RunConfig
    decode: Callable[[Sequence[int]], str]
    sample_seconds: Callable[[], Sequence[float]]
    line_metrics: Sequence[str] = ()
    close_failures: Callable[[], int | None] = lambda: None
    expects_calls: Callable[[], bool] = lambda: True
    loop_lag: LoopLag = field(default_factory=LoopLag)
    step: int = 0
    log: MetricFile | WandbLog | None = None
    evaluation: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of the latest evaluation, until they are logged."""
    _num_rollouts: int = 0
    _has_calls: bool = False
    """Whether a rollout of the run called a tool, or a program acted in it."""
    _logged_close_failures: int = 0
    _repetition: RepetitionWatch = field(default_factory=RepetitionWatch)
    _passed: list[list[bool]] = field(default_factory=list[list[bool]])
    """For each group, whether its rollouts with a verdict passed."""
    _episodes: list[Episode] = field(default_factory=list[Episode])
    _distilled: list[DistilledGroup] = field(default_factory=list[DistilledGroup])
    _rows: list[tuple[str, float, str, str]] = field(default_factory=list[tuple[str, float, str, str]])

    def add(self, finished: FinishedGroup) -> None:
        """Keep the data for the next logging step, without the arrays (many megabytes per episode)."""
        self.add_episodes(finished.episodes)
        verdicts = [episode.verification for episode in finished.episodes if episode.reward is not None]
        self._passed.append([verdict.all_passed for verdict in verdicts if verdict is not None])
        if finished.distilled is not None:
            self._distilled.append(finished.distilled)
        if self.config.use_wandb:
            limit = self.config.num_rollouts_per_group_for_logging
            self._rows += rollout_rows(finished.group, self.decode, len(finished.episodes) if limit == -1 else limit)
            del self._rows[: -self.config.num_rollouts_to_keep]

    def add_episodes(self, episodes: Sequence[Episode]) -> None:
        """Keep episodes for the next logging step; alone if they make no group."""
        self._episodes += episodes
        self._num_rollouts += len(episodes)
        self._has_calls |= any(episode.tool_calls or episode.program for episode in episodes)
        if warning := self._repetition.saw(share for episode in episodes for share in repetitions(episode)):
            logger.warning("%s", warning)

    def current(self) -> dict[str, float]:
        """Return the metrics since the last logging step."""
        return self._collected().metrics()

    def flush(self, further: Mapping[str, float] | None = None) -> None:
        """Log the metrics since the last logging step, and start the next one."""
        metrics = {**(further or {}), **self.current()}
        self._log(self.step, metrics, self._started_anew())

    async def log_step(self) -> str:
        """Log as `flush`, but compute the metrics in a thread; return the `line_metrics` as text."""
        collected, step = self._collected(), self.step
        rows = self._started_anew()
        metrics = await asyncio.to_thread(collected.metrics)
        self._log(step, metrics, rows)
        values = [f"{name} {metrics[name]:.3g}" for name in self.line_metrics if name in metrics]
        return ", ".join([f"{len(collected.episodes)} rollouts since the last one", *values])

    def _collected(self) -> "_Collected":
        """Return the data collected since the last logging step."""
        total = self.close_failures()
        failures = None if total is None else total - self._logged_close_failures
        seconds, lags = self.sample_seconds(), self.loop_lag.latest()
        return _Collected(
            self._episodes, self._passed, self._distilled, self.evaluation, tuple(seconds), lags, failures
        )

    def _started_anew(self) -> Sequence[Sequence[Any]]:
        """Start the next logging step; return the rows of W&B's table of the last one."""
        rows = self._rows
        self._episodes, self._distilled, self._rows, self._passed, self.evaluation = [], [], [], [], {}
        self._logged_close_failures = self.close_failures() or 0
        return rows

    def _log(self, step: int, metrics: Mapping[str, float], rows: Sequence[Sequence[Any]]) -> None:
        if self.log is not None and metrics:
            self.log.log(step, metrics, rows)

    def to_file(self, groups: GroupFile | None, folder: Path) -> None:
        """Log to a metrics.jsonl beside `groups` or in `folder`; it is appended to if the groups are resumed."""
        path = metrics_path(groups.path if groups else None, folder)
        self.log = MetricFile(path, is_continued=bool(groups.finished) if groups else not self.config.overwrite)

    def to_wandb(self, project: str, settings: Mapping[str, Any], name: str | None, group: str | None = None) -> None:
        """Log to a new run of Weights & Biases in place of the file."""
        self.log = WandbLog(project, name, settings, group)

    def destination(self) -> dict[str, str]:
        """Return the destination of metrics, for the start screen."""
        return {"metrics": self.log.destination if self.log else "W&B, in the trainer's project"}

    def close(self) -> None:
        """Close the log, and warn if the policy called no tool in the whole run, although there are tools."""
        if self._num_rollouts and not self._has_calls and self.expects_calls():
            logger.warning(
                "the policy made no tool call in all %d rollouts. Does it know how? `agentic-opd doctor` shows whether "
                "its calls could be read (env.renderer.name, its tool_parser, env.renderer.tool_format); a small model "
                "needs an example turn before its task (examples, docs/worlds.md)",
                self._num_rollouts,
            )
            self._num_rollouts = 0
        self.loop_lag.stop()
        if self.log is not None:
            self.log.close()
