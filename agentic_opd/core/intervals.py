"""Shares with intervals, usually of 95%, that never collapse to a point. Pure."""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, pvariance
from typing import NamedTuple

_Z = 1.959964
"""Half width, in standard deviations, of the central 95% of a normal distribution."""


class Estimate(NamedTuple):
    """A share, or the difference of two shares, with the ends of its interval."""

    value: float
    low: float
    high: float


def wilson(share: float, draws: float, z: float = _Z) -> Estimate:
    """Return a share of independent draws with Wilson's score interval (Wilson, 1927). `draws` may be a fraction.

    `z` is the half width of the interval, in standard deviations of a normal distribution; default: a 95% interval.
    """
    centre = (share + z**2 / (2 * draws)) / (1 + z**2 / draws)
    half = z / (1 + z**2 / draws) * sqrt(share * (1 - share) / draws + z**2 / (4 * draws**2))
    return Estimate(share, max(0.0, centre - half), min(1.0, centre + half))


def interval(values: Sequence[float], samples: float = 1) -> tuple[float, float]:
    """Return the 95% interval of the mean of `values`: one value in [0, 1] per task, each from `samples` samples.

    This is Wilson's score interval with the effective sample size of the tasks (Korn and Graubard, 1998). Tasks, not
    single samples, are drawn independently, so the effective number of draws is the one that gives the variance between
    tasks. If that variance is 0 (all passed, or none did), each task counts as one draw. The interval
    therefore never collapses to a point.
    """
    tasks, mean = len(values), fmean(values)
    variance = pvariance(values, mean) / tasks  # of the mean; with one sample a task this gives Wilson's own interval
    draws = min(max(mean * (1 - mean) / variance, 1.0), tasks * samples) if variance > 0 else tasks
    _, low, high = wilson(mean, draws)
    return low, high


def mean_of_tasks(values: Sequence[float], samples: float = 1) -> Estimate:
    """Return the mean of `values`, one per task, with its `interval`; for one task, the interval of its samples."""
    if len(values) == 1:
        return wilson(values[0], samples)
    return Estimate(fmean(values), *interval(values, samples))


def difference(first: Estimate, second: Estimate) -> Estimate:
    """Return `second` minus `first` with Newcombe's hybrid score interval (Newcombe, 1998, method 10).

    The method assumes independent estimates. If both are over the same tasks, their positive correlation makes the
    interval too wide, not too narrow.
    """
    value = second.value - first.value
    down = sqrt((second.value - second.low) ** 2 + (first.high - first.value) ** 2)
    up = sqrt((second.high - second.value) ** 2 + (first.value - first.low) ** 2)
    return Estimate(value, value - down, value + up)


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Return the mean of `second` minus that of `first`, with a value in [0, 1] per task of the same tasks.

    This is Newcombe's hybrid score interval for pairs (Newcombe, 1998, method 10 of the paper on paired data): that of
    `difference`, less what the correlation of the pairs explains. The correction for continuity lowers the covariance
    by 1/(2 n), so that the interval never collapses to a point.
    """
    before, after = mean_of_tasks(first), mean_of_tasks(second)
    pairs = zip(first, second, strict=True)
    covariance = fmean((a - before.value) * (b - after.value) for a, b in pairs)
    if covariance > 0:
        covariance = max(0.0, covariance - 1 / (2 * len(first)))
    spread = sqrt(pvariance(first, before.value) * pvariance(second, after.value))
    shared = 2 * covariance / spread if spread else 0.0
    value = after.value - before.value

    def half(end: float, other_end: float) -> float:
        return sqrt(max(0.0, end**2 - shared * end * other_end + other_end**2))

    down = half(after.value - after.low, before.high - before.value)
    up = half(after.high - after.value, before.value - before.low)
    return Estimate(value, value - down, value + up)
