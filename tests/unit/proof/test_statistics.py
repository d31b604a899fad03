"""The sequential test: literal p-values, error rates under the null, power, and intervals that agree with verdicts."""

from itertools import product
from random import Random

import pytest

from agentic_opd.core.types import ProofVerdict
from agentic_opd.proof.statistics import ERROR_RATE, Passes, at_least, effect, level, looks, verdict

LIMIT = 16


def test_looks_double_up_to_the_limit() -> None:
    assert [looks(limit) for limit in (4, 8, 12, 16, 32)] == [
        (4,),
        (4, 8),
        (4, 8, 12),
        (4, 8, 16),
        (4, 8, 16, 32),
    ]
    assert looks(2) == (2,)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_looks_share_the_error_rate(count: int) -> None:
    assert sum(level(look, count) for look in range(count)) == pytest.approx(ERROR_RATE)


def test_p_values_are_those_of_fishers_exact_test() -> None:
    assert at_least(Passes(4, 4), Passes(0, 4)) == pytest.approx(1 / 70)
    assert at_least(Passes(0, 4), Passes(4, 4)) == 1
    assert at_least(Passes(8, 8), Passes(3, 8)) == pytest.approx(56 / 4368)
    # The lady tasting tea: three of four cups (Fisher, 1935).
    assert at_least(Passes(3, 4), Passes(1, 4)) == pytest.approx(17 / 70)
    assert at_least(Passes(0, 0), Passes(2, 4)) == 1


def test_four_pairs_are_enough_for_a_clear_case() -> None:
    assert verdict(Passes(4, 4), Passes(0, 4), 0, 3) is ProofVerdict.PROVEN
    assert verdict(Passes(0, 4), Passes(4, 4), 0, 3) is ProofVerdict.REFUTED
    assert verdict(Passes(4, 4), Passes(1, 4), 0, 3) is None
    assert verdict(Passes(4, 4), Passes(4, 4), 0, 3) is ProofVerdict.OPEN
    assert verdict(Passes(0, 4), Passes(0, 4), 0, 3) is ProofVerdict.OPEN
    assert verdict(Passes(9, 16), Passes(8, 16), 2, 3) is ProofVerdict.OPEN


def test_unanimous_arms_end_the_test_after_a_quarter_of_the_pairs() -> None:
    looks_of_64 = (Passes(4, 4), Passes(8, 8), Passes(16, 16))
    assert [verdict(arm, arm, look, 5) for look, arm in enumerate(looks_of_64)] == [None, None, ProofVerdict.OPEN]


def test_continuations_without_a_verdict_do_not_count() -> None:
    assert Passes(1, 2).and_also(None) == Passes(1, 2)
    assert Passes(1, 2).and_also(True) == Passes(2, 3)
    assert verdict(Passes(0, 0), Passes(4, 4), 0, 3) is ProofVerdict.OPEN
    assert effect(Passes(0, 0), Passes(4, 4), 0, 3) is None


def test_an_effect_has_newcombes_interval_at_the_level_of_its_look() -> None:
    clear = effect(Passes(4, 4), Passes(0, 4), 0, 3)
    assert clear is not None
    assert clear == pytest.approx((1.0, 0.2353, 1.0), abs=1e-4)


def test_the_interval_of_a_proven_hint_is_above_0() -> None:
    for look, pairs in enumerate(looks(LIMIT)):
        for with_hint, without in product(range(pairs + 1), repeat=2):
            arms = Passes(with_hint, pairs), Passes(without, pairs)
            change = effect(*arms, look, 3)
            assert change is not None
            if verdict(*arms, look, 3) is ProofVerdict.PROVEN:
                assert change.low > 0, arms
            if verdict(*arms, look, 3) is ProofVerdict.REFUTED:
                assert change.high < 0, arms


def played(random: Random, with_rate: float, without_rate: float, shared: float = 0.0) -> tuple[ProofVerdict, int]:
    """Return the verdict on a hint, and the pairs that it took; a share of the pairs has the same draw in both arms."""
    arms = [Passes(), Passes()]
    counts = looks(LIMIT)
    for look, pairs in enumerate(counts):
        while arms[0].played < pairs:
            first, second = random.random(), random.random()
            second = first if random.random() < shared else second
            arms = [arms[0].and_also(first < with_rate), arms[1].and_also(second < without_rate)]
        if (result := verdict(arms[0], arms[1], look, len(counts))) is not None:
            return result, pairs
    raise AssertionError("the last look gives a verdict")


@pytest.mark.slow
@pytest.mark.parametrize("shared", [0.0, 0.5])
@pytest.mark.parametrize("rate", [0.05, 0.2, 0.5, 0.8, 0.95])
def test_a_hint_without_effect_is_rarely_proven_or_refuted(rate: float, shared: float) -> None:
    """10,000 hints: at most 5% of each, with every look; pairs whose arms share their draws make errors rarer."""
    random = Random(f"{rate}/{shared}")
    verdicts = [played(random, rate, rate, shared)[0] for _ in range(10_000)]
    for wrong in (ProofVerdict.PROVEN, ProofVerdict.REFUTED):
        assert verdicts.count(wrong) / len(verdicts) <= ERROR_RATE


@pytest.mark.parametrize(
    ("rates", "proven", "pairs"), [((1.0, 0.0), 1.0, 4), ((0.95, 0.05), 0.97, 6), ((0.9, 0.3), 0.9, 12)]
)
def test_a_hint_that_helps_is_proven_soon(rates: tuple[float, float], proven: float, pairs: float) -> None:
    random = Random(0)
    results = [played(random, *rates) for _ in range(2000)]
    assert sum(result is ProofVerdict.PROVEN for result, _ in results) / 2000 >= proven
    assert sum(result is ProofVerdict.REFUTED for result, _ in results) == 0
    assert sum(count for _, count in results) / 2000 <= pairs
