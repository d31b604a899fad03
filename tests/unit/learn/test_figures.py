"""Corrections with their interval, guards and their bounds, and the verdict."""

from random import Random

import pytest

from agentic_opd.core.intervals import difference, mean_of_tasks, paired_difference
from agentic_opd.learn.config import GuardConfig
from agentic_opd.learn.figures import (
    AnswerFigures,
    AnswerPair,
    GradedPair,
    corrections_of,
    guards_of,
    repeated_share,
    verdict_of,
)

PLAIN = AnswerFigures(is_calling=False, calls_parse=False, repetition=0.0, tokens=20)
CALLING = AnswerFigures(is_calling=True, calls_parse=True, repetition=0.0, tokens=20)
BROKEN = AnswerFigures(is_calling=True, calls_parse=False, repetition=0.0, tokens=20)


def pairs(before: AnswerFigures, after: AnswerFigures, *, called: bool = False, count: int = 20) -> list[AnswerPair]:
    return [AnswerPair(called, has_tools=True, before=before, after=after)] * count


def graded(*shares: tuple[int, int, int]) -> list[GradedPair]:
    """Sessions of one answer: (number, corrected before, corrected after)."""
    rows = [(1 - before, 1 - after) for count, before, after in shares for _ in range(count)]
    return [GradedPair(f"s{i}", float(before), float(after)) for i, (before, after) in enumerate(rows)]


def test_the_paired_interval_is_newcombes() -> None:
    """By the formulas of his method 10: 36 pairs, of which 20, 12, 2 and 2 are yes-yes, yes-no, no-yes, no-no."""
    before, after = [1.0] * 32 + [0.0] * 4, [1.0] * 20 + [0.0] * 12 + [1.0] * 2 + [0.0] * 2
    value, low, high = paired_difference(before, after)
    assert value == pytest.approx(-10 / 36)
    a, b = mean_of_tasks(before), mean_of_tasks(after)
    phi = max(20 * 2 - 12 * 2 - 36 / 2, 0) / (32 * 4 * 22 * 14) ** 0.5
    shared = 2 * phi * (b.value - b.low) * (a.high - a.value)
    assert low == pytest.approx(value - ((b.value - b.low) ** 2 - shared + (a.high - a.value) ** 2) ** 0.5)
    assert high < 0


def test_pairs_that_go_together_are_surer_than_independent_ones() -> None:
    before, after = [1.0] * 30 + [0.0] * 30, [1.0] * 24 + [0.0] * 36
    paired, independent = paired_difference(before, after), difference(mean_of_tasks(before), mean_of_tasks(after))
    assert paired.high - paired.low < 0.7 * (independent.high - independent.low)


@pytest.mark.parametrize("values", [[0.0] * 8, [1.0] * 8, [0.0, 1.0] * 4])
def test_equal_answers_are_no_certainty(values: list[float]) -> None:
    value, low, high = paired_difference(values, values)
    assert value == 0
    assert low < 0 < high


def test_the_interval_covers_the_true_difference_about_as_often_as_it_says() -> None:
    rng, covered = Random(1), 0
    for _ in range(400):
        easy = [rng.random() for _ in range(40)]
        before = [float(rng.random() < 0.3 + 0.5 * share) for share in easy]
        after = [float(rng.random() < 0.1 + 0.5 * share) for share in easy]
        low, high = paired_difference(before, after)[1:]
        covered += low <= -0.2 <= high
    assert 0.92 <= covered / 400 <= 1.0


def test_each_session_counts_once() -> None:
    long = [GradedPair("long", 0.0, 1.0)] * 9
    corrections = corrections_of([*long, GradedPair("a", 1.0, 1.0), GradedPair("b", 0.4, 0.6)])
    assert (corrections.before.value, corrections.after.value, corrections.count) == (pytest.approx(2 / 3), 0.0, 11)
    assert corrections.to_json()["before"][3] == 11


def test_an_adapter_needs_fewer_corrections_beyond_chance() -> None:
    better = corrections_of(graded((15, 1, 0), (15, 1, 1), (30, 0, 0)))
    assert verdict_of(better, {})[0] == "adapter"
    for rows in (((3, 1, 0), (15, 1, 1), (30, 0, 0)), ((20, 1, 1), (20, 0, 0)), ((15, 0, 1), (15, 0, 0))):
        verdict, reason = verdict_of(corrections_of(graded(*rows)), {})
        assert verdict == "refused"
        assert "does not exclude" in reason


@pytest.mark.parametrize(
    ("name", "rows", "logprobs"),
    [
        ("logprob", pairs(PLAIN, PLAIN), (-0.5, -0.56)),
        (
            "calls_parse",
            pairs(CALLING, CALLING, called=True, count=18) + pairs(CALLING, BROKEN, called=True, count=2),
            None,
        ),
        ("calls_parse", pairs(CALLING, PLAIN, called=True), None),
        ("over_calling", pairs(PLAIN, PLAIN, count=18) + pairs(PLAIN, CALLING, count=2), None),
        ("repetition", pairs(PLAIN, AnswerFigures(False, False, 0.06, 20)), None),
        ("length", pairs(PLAIN, AnswerFigures(False, False, 0.0, 41)), None),
        ("length", pairs(PLAIN, AnswerFigures(False, False, 0.0, 9)), None),
    ],
)
def test_a_figure_beyond_its_bound_refuses(
    name: str, rows: list[AnswerPair], logprobs: tuple[float, float] | None
) -> None:
    guards = guards_of(rows, logprobs, GuardConfig())
    assert [guard for guard, row in guards.items() if row.fell] == [name]
    verdict, reason = verdict_of(corrections_of(graded((30, 1, 0))), guards)
    assert verdict == "refused"
    assert name in reason
    loose = GuardConfig(logprob=1, calls_parse=1, over_calling=1, repetition=1, length=9)
    assert not any(guard.fell for guard in guards_of(rows, logprobs, loose).values())


def test_a_figure_within_its_bound_or_better_is_no_fall() -> None:
    better = [*pairs(BROKEN, CALLING, called=True), *pairs(CALLING, PLAIN)]
    guards = guards_of(better, (-0.5, -0.54), GuardConfig())
    assert not any(guard.fell for guard in guards.values())
    assert (guards["calls_parse"].before, guards["calls_parse"].after) == (0.0, 1.0)


def test_a_figure_that_nothing_gives_is_none() -> None:
    guards = guards_of(pairs(PLAIN, PLAIN), None, GuardConfig())
    assert (guards["calls_parse"].before, guards["logprob"].after) == (None, None)


def test_a_figure_that_is_no_number_refuses() -> None:
    """As of weights that diverged."""
    guards = guards_of([], (-0.5, float("nan")), GuardConfig())
    assert guards["logprob"].fell
    assert not guards["calls_parse"].fell


@pytest.mark.parametrize(
    ("text", "share"),
    [("", 0.0), ("one two three", 0.0), ("a b c d e", 0.0), ("a b c d a b c d", 1 / 5), ("no " * 104, 100 / 101)],
)
def test_repeated_sequences_are_counted(text: str, share: float) -> None:
    assert repeated_share(text) == pytest.approx(share)
