"""95% intervals: how often they hold the truth, at the ends, and against published tables."""

from random import Random
from statistics import fmean

import pytest

from agentic_opd.core.intervals import Estimate, difference, interval, mean_of_tasks, wilson


@pytest.mark.parametrize(("share", "samples"), [(0.6, 1), (0.95, 1), (0.6, 4)])
def test_the_interval_covers_the_true_mean_about_as_often_as_it_says(share: float, samples: int) -> None:
    """Tasks differ in how hard they are: half of them are passed more often, half of them less."""
    rng = Random(0)
    covered = 0
    for _ in range(400):
        odds = [share + rng.choice((-1, 1)) * (1 - share) for _ in range(60)] if samples > 1 else [share] * 60
        values = [fmean(rng.random() < p for _ in range(samples)) for p in odds]
        low, high = interval(values, samples)
        covered += low <= share <= high
    assert 0.92 <= covered / 400 <= 0.99


@pytest.mark.parametrize(("passed", "tasks"), [(0, 5), (8, 8), (1, 1), (0, 1)])
def test_the_interval_does_not_collapse_where_all_tasks_agree(passed: int, tasks: int) -> None:
    """Wilson's for 0 of 5 and 8 of 8, by the formula's closed form at the ends: z^2 / (n + z^2)."""
    low, high = interval([1.0] * passed + [0.0] * (tasks - passed))
    width = 1.959964**2 / (tasks + 1.959964**2)
    assert (low, high) == pytest.approx((0.0, width) if passed == 0 else (1.0 - width, 1.0))


def test_the_interval_of_one_sample_a_task_is_wilsons() -> None:
    """4 of 10: 0.168 to 0.687, as in the tables."""
    low, high = interval([1.0] * 4 + [0.0] * 6)
    assert (low, high) == pytest.approx((0.1682, 0.6873), abs=5e-4)


def test_a_single_task_is_as_sure_as_its_samples() -> None:
    """Its 8 samples are what is drawn: nothing is said of other tasks."""
    assert mean_of_tasks([0.5], 8) == wilson(0.5, 8)
    assert mean_of_tasks([0.5, 0.5], 8).low == interval([0.5, 0.5], 8)[0]


def test_the_difference_is_newcombes() -> None:
    """His example: 56 of 70 against 48 of 80, 0.0524 to 0.3339 (method 10)."""
    found = difference(wilson(48 / 80, 80), wilson(56 / 70, 70))
    assert found == pytest.approx(Estimate(0.2, 0.0524, 0.3339), abs=5e-5)


def test_a_difference_of_nothing_and_all_does_not_collapse() -> None:
    found = difference(wilson(0.0, 8), wilson(1.0, 8))
    assert (found.value, found.high) == (1.0, 1.0)
    assert 0.4 < found.low < 0.7
