"""The `evaluate` mode: tasks to samples, several at a time, and samples to the eval/ metrics (I/O).

`EVAL_METRICS` says what each metric is.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import fmean
from typing import IO, Any, NamedTuple, Self

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.console import LiveBar, log_console
from agentic_opd.core.errors import AlignmentError, OutputError
from agentic_opd.core.metric import Metric
from agentic_opd.core.types import Episode, Reward, Task, Verification
from agentic_opd.rollout.metrics import EPISODE_METRICS, episode_metrics

_RESAMPLES = 10_000

EVAL_METRICS = (
    Metric("eval/pass@<k>", "share", "tasks that one of k samples solves: the unbiased estimate, mean over tasks"),
    Metric("eval/pass@<k>_low", "share", "lower end of its 95% bootstrap interval"),
    Metric("eval/pass@<k>_high", "share", "upper end of it"),
    Metric("eval/tasks", "tasks", "what was evaluated"),
    Metric("eval/samples", "episodes", "what the metrics are over"),
    *(Metric(m.name.replace("train/", "eval/"), m.unit, f"as {m.name}") for m in EPISODE_METRICS),
)


@dataclass(frozen=True, slots=True)
class EvalSample:
    """One evaluated episode of a task; `index` numbers the task's samples from 0."""

    index: int
    episode: Episode

    @property
    def task(self) -> Task:
        """Whose sample it is."""
        return self.episode.task

    @property
    def verification(self) -> Verification:
        """The hidden tests' verdict."""
        if self.episode.verification is None:
            raise AlignmentError(f"a sample of {self.task.task_id!r} was never verified")
        return self.episode.verification

    @property
    def reward(self) -> Reward:
        """The score and its parts."""
        if self.episode.reward is None:
            raise AlignmentError(f"a sample of {self.task.task_id!r} has no reward")
        return self.episode.reward

    @property
    def passed(self) -> bool:
        """All hidden tests passed."""
        return self.verification.passed == self.verification.total

    def to_row(self) -> dict[str, Any]:
        """The line of samples.jsonl."""
        return {
            "task_id": self.task.task_id,
            "sample": self.index,
            "passed": self.passed,
            "score": self.reward.total,
            "correctness": self.reward.correctness,
            "efficiency": self.reward.efficiency,
            "tool_usage": self.reward.tool_usage,
            "checks_passed": self.verification.passed,
            "checks": self.verification.total,
            "outcome": self.verification.outcome.value,
            "stop_reason": self.episode.stop_reason.value,
            "turns": len(self.episode.turns),
            "tool_calls": self.episode.tool_calls,
            "tool_errors": self.episode.tool_errors,
            "messages": list(self.episode.messages),
        }


def eval_metrics(samples: Sequence[EvalSample], seed: int = 0) -> dict[str, float]:
    """The metrics of a whole evaluation.

    Args:
        samples: The same number of samples of every task, at least one.
        seed: Of the bootstrap.

    Raises:
        AlignmentError: There are none, or tasks differ in their number of samples.
    """
    passed: dict[str, list[bool]] = {}
    for sample in samples:
        passed.setdefault(sample.task.task_id, []).append(sample.passed)
    sizes = {len(row) for row in passed.values()}
    if len(sizes) != 1:
        raise AlignmentError(f"evaluation: every task needs the same number of samples, got {sorted(sizes)}")
    n = sizes.pop()
    metrics: dict[str, float] = {}
    for k in _ks(n):
        estimates = [pass_at_k(n, sum(row), k) for row in passed.values()]
        low, high = bootstrap_interval(estimates, seed)
        metrics |= {f"eval/pass@{k}": fmean(estimates), f"eval/pass@{k}_low": low, f"eval/pass@{k}_high": high}
    metrics |= {"eval/tasks": float(len(passed)), "eval/samples": float(len(samples))}
    inherited = episode_metrics([sample.episode for sample in samples])
    return metrics | {name.replace("train/", "eval/"): value for name, value in inherited.items()}


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that k samples drawn from n, of which c passed, hold one that passed (Chen et al., 2021, eq. 1).

    Raises:
        ValueError: not 0 <= c <= n, or not 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k: expected 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    return 1.0 - comb(n - c, k) / comb(n, k)


def bootstrap_interval(values: Sequence[float], seed: int = 0, level: float = 0.95) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean of `values`, one value a task: tasks are resampled, not samples."""
    array = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    # Draws of one resample a row; a block at a time, so that thousands of tasks take no gigabytes.
    blocks = max(1, len(array) * _RESAMPLES // 10_000_000)
    means = np.concatenate(
        [
            array[rng.integers(0, len(array), (len(rows), len(array)))].mean(axis=1)
            for rows in np.array_split(np.arange(_RESAMPLES), blocks)
        ]
    )
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _ks(n: int) -> list[int]:
    """1, 2, 4, ... below n, and n."""
    return sorted({*(2**i for i in range(n.bit_length()) if 2**i < n), n})


_MOST_TASK_ROWS = 40


async def evaluate_tasks(
    tasks: Sequence[Task],
    samples: int,
    roll_out: Callable[[Task], Awaitable[Episode]],
    done: Callable[[EvalSample], None],
) -> list[EvalSample]:
    """Roll out every task `samples` times; `roll_out` bounds how many run at the same time.

    Returns:
        All samples, by task and then by index.

    Raises:
        ServerError: the policy server failed. `done` was told of every sample that was finished by then.
    """

    async def one(task: Task, index: int) -> EvalSample:
        episode = await roll_out(task)
        if episode.error is not None:
            raise episode.error
        sample = EvalSample(index, episode)
        done(sample)
        return sample

    return await gather_all(one(task, index) for task in tasks for index in range(samples))


class Evaluated(NamedTuple):
    """A whole evaluation: its samples by task and then by index, and their eval/ metrics."""

    samples: list[EvalSample]
    metrics: dict[str, float]


async def evaluate(
    total: int,
    run: Callable[[Callable[[EvalSample], None]], Awaitable[Evaluated]],
    folder: Path,
    header: Text,
    console: Console | None = None,
) -> dict[str, float]:
    """Run an evaluation of `total` samples with a progress bar, every sample on disk as it comes, and a closing table.

    Args:
        total: How many samples there will be.
        run: Evaluates; it is handed what is to be told of each sample.
        folder: Where samples.jsonl is written.
        header: The first lines that a person reads.
        console: Where they read; standard error by default.

    Raises:
        OutputError: samples.jsonl can't be written.
    """
    file = SampleFile(folder)
    try:
        with EvalProgress(total, console) as progress:
            progress.console.print(header, soft_wrap=True)

            def done(sample: EvalSample) -> None:
                file.write(sample)
                progress.sample_done(sample)

            samples, metrics = await run(done)
    finally:
        file.close()
    show_evaluation(samples, metrics, progress.console)
    progress.console.print(f"metrics.json and samples.jsonl in {folder}", markup=False, highlight=False)
    return metrics


class SampleFile:
    """samples.jsonl while an evaluation runs: a line for each sample as it comes, so that none is lost."""

    def __init__(self, folder: Path) -> None:
        """Start a new file in `folder`.

        Raises:
            OutputError: it can't be written.
        """
        self.path = folder / "samples.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "metrics.json").unlink(missing_ok=True)  # An earlier run's would not go with these samples.
            self._file: IO[str] = self.path.open("w", encoding="utf-8")
        except OSError as error:
            raise OutputError(
                f"cannot write {str(self.path)!r}: {error.strerror or error}. Choose another "
                "env.data_dir_to_save_evals."
            ) from error

    def write(self, sample: EvalSample) -> None:
        """Append one sample.

        Raises:
            OutputError: the disk refused.
        """
        try:
            self._file.write(json.dumps(sample.to_row()) + "\n")
            self._file.flush()
        except OSError as error:
            raise OutputError(f"cannot write to {str(self.path)!r}: {error.strerror or error}") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class EvalProgress:
    """Shows samples as they come in: a live bar in a terminal, a line for each tenth elsewhere."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        self.console = console or log_console()
        self.total, self.done, self.passed = total, 0, 0
        self._bar = LiveBar(self.console, "samples", total)

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._bar.__exit__(*exc_info)

    def sample_done(self, sample: EvalSample) -> None:
        """A sample is finished."""
        tenths = 10 * self.done // self.total
        self.done += 1
        self.passed += sample.passed
        self._bar.show(self.done, f"{self.passed} passed")
        if not self._bar.is_live and 10 * self.done // self.total > tenths:
            self.console.print(f"sample {self.done}/{self.total}: {self.passed} passed", highlight=False)


def show_evaluation(samples: Sequence[EvalSample], metrics: dict[str, float], console: Console) -> None:
    """Print pass@k with its interval, and a row a task where they fit on a screen or two."""
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
    for name in ("eval/reward", "eval/turns", "eval/tool_errors_count"):
        table.add_row(name, f"{metrics[name]:.3g}", "")
    console.print(table, soft_wrap=True)


def _task_table(by_task: dict[str, list[EvalSample]]) -> Table:
    table = Table(title="Evaluation")
    table.add_column("task", no_wrap=True)
    for name in ("samples", "passed", "mean score", "turns"):
        table.add_column(name, justify="right", no_wrap=True)
    for task_id, rows in by_task.items():
        mean_score = sum(row.reward.total for row in rows) / len(rows)
        turns = sum(len(row.episode.turns) for row in rows)
        table.add_row(task_id, f"{len(rows)}", f"{sum(row.passed for row in rows)}", f"{mean_score:.2f}", f"{turns}")
    return table
