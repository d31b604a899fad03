"""Shares with their 95% intervals, none of which collapses to a point. Pure."""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, pvariance
from typing import NamedTuple

_Z = 1.959964
"""Standard deviations of a normal distribution that hold 95% of it around its mean."""


class Estimate(NamedTuple):
    """A share, or the difference of two, and the ends of its 95% interval."""

    value: float
    low: float
    high: float


def wilson(share: float, draws: float) -> Estimate:
    """A share of independent draws with Wilson's score interval (Wilson, 1927).

    Args:
        share: How many of the draws succeeded, in [0, 1].
        draws: How many there were; an effective number need not be whole.
    """
    centre = (share + _Z**2 / (2 * draws)) / (1 + _Z**2 / draws)
    half = _Z / (1 + _Z**2 / draws) * sqrt(share * (1 - share) / draws + _Z**2 / (4 * draws**2))
    return Estimate(share, max(0.0, centre - half), min(1.0, centre + half))


def interval(values: Sequence[float], samples: float = 1) -> tuple[float, float]:
    """The 95% interval of the mean of `values`, one value in [0, 1] a task, each of so many samples.

    Wilson's score interval with the effective sample size of the tasks (Korn and Graubard, 1998): a task is drawn, not
    a sample of it, so as many independent draws are counted as give the variance that the tasks show. If they show
    none (all passed, or none did), each task counts once: the interval never collapses to a point.
    """
    tasks, mean = len(values), fmean(values)
    variance = pvariance(values, mean) / tasks  # of the mean; with one sample a task this gives Wilson's own interval
    draws = min(max(mean * (1 - mean) / variance, 1.0), tasks * samples) if variance > 0 else tasks
    _, low, high = wilson(mean, draws)
    return low, high


def mean_of_tasks(values: Sequence[float], samples: float = 1) -> Estimate:
    """The mean of `values`, one a task, with its `interval`; of a single task, the share of its samples."""
    if len(values) == 1:
        return wilson(values[0], samples)
    return Estimate(fmean(values), *interval(values, samples))


def difference(first: Estimate, second: Estimate) -> Estimate:
    """`second` minus `first`, which are independent: Newcombe's hybrid score interval (Newcombe, 1998, method 10).

    Where both are of the same tasks, what these have in common makes the interval wider than it need be, not narrower.
    """
    value = second.value - first.value
    down = sqrt((second.value - second.low) ** 2 + (first.high - first.value) ** 2)
    up = sqrt((second.high - second.value) ** 2 + (first.value - first.low) ** 2)
    return Estimate(value, value - down, value + up)
