"""The `evaluate` mode: rolls out samples of tasks concurrently, and computes the eval/ metrics (I/O).

`EVAL_METRICS` describes each metric.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.console import LiveBar, start_screen
from agentic_opd.core.errors import AlignmentError, ConfigError, OPDError, PlaceError, WorldError
from agentic_opd.core.intervals import interval
from agentic_opd.core.metric import Metric
from agentic_opd.core.text import printable_line
from agentic_opd.core.types import Episode, Reward, Task, Verification
from agentic_opd.rollout.metrics import EPISODE_METRICS, episode_metrics, passes_at, powers_of_two
from agentic_opd.runs.config import RunConfig
from agentic_opd.runs.metric_log import RunMetrics
from agentic_opd.wire.files import JsonLines

logger = logging.getLogger(__name__)

EVAL_METRICS = (
    Metric(
        "eval/pass@<k>",
        "share",
        "tasks that at least one of k samples solves: unbiased estimate, mean over the tasks with k verdicts",
    ),
    Metric(
        "eval/pass@<k>_low",
        "share",
        "lower end of the 95% Wilson interval of eval/pass@<k>, with tasks as the sampled units",
    ),
    Metric("eval/pass@<k>_high", "share", "upper end of the 95% Wilson interval of eval/pass@<k>"),
    Metric("eval/tasks", "tasks", "number of evaluated tasks"),
    Metric("eval/samples", "episodes", "number of episodes that the metrics cover, or whose tests gave no verdict"),
    Metric("eval/weight_version", "version", "oldest weight version of the policy's servers when the evaluation began"),
    Metric(
        "eval/weight_version_after",
        "version",
        "newest weight version when the evaluation ended; if it differs, the weights changed meanwhile",
    ),
    *(Metric(m.name.replace("train/", "eval/"), m.unit, f"as {m.name}") for m in EPISODE_METRICS),
    Metric(
        "eval/close_failures",
        "episodes",
        "as train/close_failures, of all episodes that ended during the evaluation, those of training too",
    ),
)


@dataclass(frozen=True, slots=True)
class EvalSample:
    """One evaluated episode of a task; `index` numbers the task's samples from 0."""

    index: int
    episode: Episode

    @property
    def task(self) -> Task:
        return self.episode.task

    @property
    def verification(self) -> Verification:
        """The result of the hidden tests; raises AlignmentError if they have not run."""
        if self.episode.verification is None:
            raise AlignmentError(f"a sample of {self.task.task_id!r} was never verified")
        return self.episode.verification

    @property
    def reward(self) -> Reward:
        """The sample's reward: the score and its components."""
        if self.episode.reward is None:
            raise AlignmentError(f"a sample of {self.task.task_id!r} has no reward")
        return self.episode.reward

    @property
    def passed(self) -> bool:
        """Whether all hidden tests passed."""
        return self.verification.all_passed

    @property
    def has_verdict(self) -> bool:
        """Whether the tests gave a verdict on the solution."""
        return self.episode.no_verdict is None

    def to_row(self) -> dict[str, Any]:
        """Return the sample as JSON data; without a verdict, what depends on it is null."""
        reward = self.reward if self.has_verdict else None
        return {
            "task_id": self.task.task_id,
            "sample": self.index,
            "passed": self.passed if self.has_verdict else None,
            "score": reward and reward.total,
            "correctness": reward and reward.correctness,
            "efficiency": reward and reward.efficiency,
            "tool_usage": reward and reward.tool_usage,
            "checks_passed": self.verification.passed if self.has_verdict else None,
            "checks": self.verification.total if self.has_verdict else None,
            "outcome": self.verification.outcome.value,
            "no_verdict": self.verification.no_verdict,
            "in_process": self.verification.in_process,
            "stop_reason": self.episode.stop_reason.value,
            "turns": len(self.episode.turns),
            "tool_calls": self.episode.tool_calls,
            "tool_errors": self.episode.tool_errors,
            "weight_version": self.episode.weight_version,
            "messages": list(self.episode.messages),
        }


def eval_metrics(samples: Sequence[EvalSample]) -> dict[str, float]:
    """Return the metrics of a whole evaluation, which has the same number of samples, at least one, for every task.

    Samples without a verdict count for no task's pass@k, which leaves out tasks with fewer than k verdicts.

    Raises:
        AlignmentError: there are no samples, or tasks differ in their number of samples.
        WorldError: no sample has a verdict.
    """
    sizes = {*Counter(sample.task.task_id for sample in samples).values()}
    if len(sizes) != 1:
        raise AlignmentError(f"evaluation: every task needs the same number of samples, got {sorted(sizes)}")
    n = sizes.pop()
    passed: dict[str, list[bool]] = {sample.task.task_id: [] for sample in samples}
    for sample in samples:
        if sample.has_verdict:
            passed[sample.task.task_id].append(sample.passed)
    if not any(passed.values()):
        raise WorldError("evaluation: the tests gave no verdict on any sample; the log and samples.jsonl say why")
    metrics: dict[str, float] = {}
    for k, estimates in passes_at([*passed.values()], sorted({*powers_of_two(n), n})).items():
        low, high = interval(estimates, n)
        metrics |= {f"eval/pass@{k}": fmean(estimates), f"eval/pass@{k}_low": low, f"eval/pass@{k}_high": high}
    metrics |= {"eval/tasks": float(len(passed)), "eval/samples": float(len(samples))}
    inherited = episode_metrics([sample.episode for sample in samples])
    return metrics | {name.replace("train/", "eval/"): value for name, value in inherited.items()}


_MOST_TASK_ROWS = 40


class Evaluated(NamedTuple):
    """A finished evaluation: its samples, sorted by task and index, and the eval/ metrics."""

    samples: list[EvalSample]
    metrics: dict[str, float]


@dataclass
class Evaluator:
    """Evaluates the policy, in the `evaluate` mode or during training.

    `roll_out` limits the concurrency. `save` receives the evaluation and its duration (s). `versions`
    returns the weight versions of the policy's servers that report one.
    """

    tasks: Sequence[Task]
    roll_out: Callable[[Task], Awaitable[Episode]]
    save: Callable[[Evaluated, float], Awaitable[None]]
    versions: Callable[[], Awaitable[list[int]]]
    config: RunConfig
    metrics: RunMetrics
    _running: asyncio.Task[dict[str, float]] | None = None

    async def measure(self, on_sample: Callable[[EvalSample], None] = lambda sample: None) -> Evaluated:
        """Roll out every task `eval_samples` times, and call `on_sample` with each one; training data is unaffected.

        Raises:
            ServerError: the policy server failed; `on_sample` was called with every sample finished before.
        """
        start, before, close_failures = time.monotonic(), await self.versions(), self.metrics.close_failures()

        async def sample_task(task: Task, index: int) -> EvalSample:
            episode = await self.roll_out(task)
            if episode.error is not None:
                raise episode.error
            sample = EvalSample(index, episode)
            on_sample(sample)
            return sample

        count = self.config.eval.samples
        samples = await gather_all(sample_task(task, index) for task in self.tasks for index in range(count))
        of_weights = _of_weights(before, await self.versions())
        metrics = {**eval_metrics(samples), **of_weights}
        if (failures := self.metrics.close_failures()) is not None:
            metrics["eval/close_failures"] = float(failures - (close_failures or 0))
        evaluated = Evaluated(samples, metrics)
        self.metrics.evaluation = evaluated.metrics
        await self.save(evaluated, time.monotonic() - start)
        return evaluated

    async def beside_training(self) -> dict[str, float]:
        """Evaluate during training; a failure is logged and returns no metrics."""
        step = self.metrics.step
        try:
            metrics = (await self.measure()).metrics
        except OPDError as error:
            logger.error("the evaluation at step %d failed: %s", step, error)
            return {}
        interval = f"{metrics['eval/pass@1_low']:.2f} to {metrics['eval/pass@1_high']:.2f}"
        logger.info("evaluation at step %d: eval/pass@1 %.3f (%s)", step, metrics["eval/pass@1"], interval)
        return metrics

    def at_step(self, before: int, now: int) -> None:
        """Start an evaluation if the trainer passed a multiple of `steps_per_eval` between the two steps."""
        every = self.config.steps_per_eval
        if every > 0 and self.tasks and now // every > before // every:
            if self._is_running:
                logger.warning("the evaluation before step %d is not finished: no second one is started", now)
            else:
                self._running = asyncio.create_task(self.beside_training())

    def share(self) -> float:
        """Return the fraction of the servers that training may use now, in [0, 1]."""
        if not self._is_running or self.config.eval_handling.value == "NONE":
            return 1.0
        return 0.0 if self.config.eval_handling.value == "STOP_TRAIN" else self.config.eval_limit_ratio

    async def finish(self) -> None:
        """Wait for the running evaluation, if there is one."""
        if self._running is not None:
            await self._running

    def cancel(self) -> None:
        if self._running is not None:
            self._running.cancel()

    @property
    def _is_running(self) -> bool:
        return self._running is not None and not self._running.done()


def _of_weights(before: Sequence[int], after: Sequence[int]) -> dict[str, float]:
    """Return the weight versions before and after the evaluation, and warn if they changed."""
    if not before or not after:
        return {}
    if {*before, *after} != {before[0]}:
        logger.warning(
            "the weights changed while they were evaluated, from version %d to %d: the metrics are of both",
            min(before),
            max(after),
        )
    return {"eval/weight_version": float(min(before)), "eval/weight_version_after": float(max(after))}


async def evaluate(
    evaluation: Evaluator, folder: Path, roles: Mapping[str, str], console: Console | None = None
) -> dict[str, float]:
    """Run the `evaluate` mode: show progress, write each sample when it is finished, and print a summary table.

    `folder` is for samples.jsonl and metrics.json, `roles` (role -> model and server) for the start screen.

    Raises:
        ConfigError: no task is held out for evaluation.
        PlaceError: samples.jsonl can't be written, or holds an earlier evaluation and `overwrite` is off.
    """
    if not evaluation.tasks:
        raise ConfigError(
            "no task is held out for evaluation: raise env.eval.fraction, or name a dataset with env.eval.dataset_name"
        )
    tasks, samples = len(evaluation.tasks), evaluation.config.eval.samples
    earlier = folder / "samples.jsonl"
    if earlier.exists() and earlier.stat().st_size > 0 and not evaluation.config.overwrite:
        raise PlaceError(
            f"{str(earlier)!r} holds an earlier evaluation. Replace it with --env.overwrite, or choose another "
            "env.data_dir_to_save_evals."
        )
    file = sample_file(folder)
    try:
        with EvalProgress(tasks * samples, console) as progress:
            rows = {**roles, "samples": str(folder / "samples.jsonl")}
            progress.console.print(start_screen(f"{tasks} tasks, {samples} samples each", rows), soft_wrap=True)

            def on_sample(sample: EvalSample) -> None:
                file.write(sample.to_row())
                progress.sample_done(sample)

            evaluated = await evaluation.measure(on_sample)
    finally:
        file.close()
    show_evaluation(evaluated.samples, evaluated.metrics, progress.console)
    progress.say(f"metrics.json and samples.jsonl in {folder}")
    evaluation.metrics.flush()
    return evaluated.metrics


def sample_file(folder: Path) -> JsonLines:
    """Open a new samples.jsonl in `folder`, and delete an earlier metrics.json."""
    file = JsonLines(folder / "samples.jsonl", hint="Choose another env.data_dir_to_save_evals.")
    (folder / "metrics.json").unlink(missing_ok=True)  # It would not match the new samples.
    return file


class EvalProgress(LiveBar):
    """Progress of an evaluation: a live bar in a terminal, otherwise a line per tenth of the samples."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        super().__init__("samples", total, console=console)
        self.total, self.finished, self.passed = total, 0, 0

    def sample_done(self, sample: EvalSample) -> None:
        """Count a finished sample and update the display."""
        tenths = 10 * self.finished // self.total
        self.finished += 1
        self.passed += sample.has_verdict and sample.passed
        self.show(self.finished, f"{self.passed} passed")
        if not self.is_live and 10 * self.finished // self.total > tenths:
            self.say(f"sample {self.finished}/{self.total}: {self.passed} passed")


def show_evaluation(samples: Sequence[EvalSample], metrics: dict[str, float], console: Console) -> None:
    """Print pass@k with its interval, and a row per task if there are at most `_MOST_TASK_ROWS` tasks."""
    by_task: dict[str, list[EvalSample]] = {}
    for sample in samples:
        by_task.setdefault(sample.task.task_id, []).append(sample)
    if len(by_task) <= _MOST_TASK_ROWS:
        console.print(_task_table(by_task), soft_wrap=True)
    table = Table(title=f"{len(by_task)} tasks, {len(samples)} samples")
    table.add_column("metric", no_wrap=True)
    for name in ("value", "95% interval"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, value in metrics.items():
        if name.startswith("eval/pass@") and f"{name}_low" in metrics:
            table.add_row(name, f"{value:.3f}", f"{metrics[f'{name}_low']:.3f} to {metrics[f'{name}_high']:.3f}")
    names = ["eval/reward", "eval/turns", "eval/tool_errors_count"]
    for name in [*names, *(name for name in ("eval/no_verdict", "eval/close_failures") if metrics.get(name))]:
        table.add_row(name, f"{metrics[name]:.3g}", "")
    console.print(table, soft_wrap=True)


def _task_table(by_task: dict[str, list[EvalSample]]) -> Table:
    table = Table(title="Evaluation")
    table.add_column("task", no_wrap=True)
    has_gaps = not all(sample.has_verdict for samples in by_task.values() for sample in samples)
    for name in ("samples", "passed", "mean score", "turns", *(["no verdict"] if has_gaps else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for task_id, samples in by_task.items():
        judged = [sample for sample in samples if sample.has_verdict]
        score = f"{fmean(sample.reward.total for sample in judged):.2f}" if judged else "-"
        turns = sum(len(sample.episode.turns) for sample in samples)
        cells = [f"{len(samples)}", f"{sum(sample.passed for sample in judged)}", score, f"{turns}"]
        cells += [f"{len(samples) - len(judged)}"] if has_gaps else []
        table.add_row(Text(printable_line(task_id)), *cells)
    return table
