"""Evaluated episodes -> the eval/ metrics and the rows of samples.jsonl. Pure. `EVAL_METRICS` says what each is."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean
from typing import Any

import numpy as np

from agentic_opd.errors import AlignmentError
from agentic_opd.metric import Metric
from agentic_opd.rollout.metrics import EPISODE_METRICS, episode_metrics
from agentic_opd.types import Episode, Reward, Task, Verification

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
