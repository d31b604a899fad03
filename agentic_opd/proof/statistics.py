"""The test of a hint: passes of continuations with and without it -> a verdict, or play on. Pure.

The continuations are compared after 4, 8, 16 ... of each arm (the looks of a group-sequential test), up to a limit, by
Fisher's exact test, one-sided in each direction. The looks share the error rate of 5% (Bonferroni). The first one has
1.5%, so that 4 passes of 4 against 0 of 4 (1/70 = 1.4%) are enough, and the later ones share the rest equally. A hint
without effect is so proven with a probability of at most 5%, and refuted with at most 5%, over all looks.
"""

from dataclasses import dataclass
from math import comb
from statistics import NormalDist

from agentic_opd.core.intervals import Estimate, difference, wilson
from agentic_opd.core.types import ProofVerdict

FIRST_LOOK = 4
"""Pairs of continuations at the first look."""
ERROR_RATE = 0.05
"""Largest probability that a hint without effect is proven, over all looks; the same for refuted."""
_FIRST_SHARE = 0.015
"""Part of `ERROR_RATE` that the first of several looks has."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Continuations of one arm with a verdict: how many were played, and how many of them passed."""

    passed: int = 0
    played: int = 0

    def and_also(self, passed: bool | None) -> "Passes":
        """Return the counts with one more continuation; None: its tests gave no verdict, and it does not count."""
        return self if passed is None else Passes(self.passed + passed, self.played + 1)


def looks(limit: int) -> tuple[int, ...]:
    """Return the pairs after which the arms are compared: 4, 8, 16 ... and `limit`."""
    pairs = [FIRST_LOOK << doublings for doublings in range(limit.bit_length()) if FIRST_LOOK << doublings < limit]
    return (*pairs, limit)


def level(look: int, count: int) -> float:
    """Return the error rate, of each direction, of a look of `count` (from 0)."""
    if count == 1:
        return ERROR_RATE
    return _FIRST_SHARE if look == 0 else (ERROR_RATE - _FIRST_SHARE) / (count - 1)


def verdict(with_hint: Passes, without: Passes, look: int, count: int) -> ProofVerdict | None:
    """Return the verdict after a look of `count` (from 0); None: play on.

    Arms of equal and unanimous outcomes end the test as open from the third look before the end on (a quarter of the
    pairs), because nothing seems to depend on the hint. To end early as open lowers the error rates.
    """
    if at_least(with_hint, without) <= level(look, count):
        return ProofVerdict.PROVEN
    if at_least(without, with_hint) <= level(look, count):
        return ProofVerdict.REFUTED
    total = with_hint.passed + without.passed
    is_unanimous = total in (0, with_hint.played + without.played) and look >= count - 3
    return ProofVerdict.OPEN if is_unanimous or look == count - 1 else None


def at_least(first: Passes, second: Passes) -> float:
    """Return the p-value of Fisher's exact test: the probability of at least as many passes in `first`, given the
    passes of both together, if they have the same pass rate. 1 for an arm without a continuation.
    """
    passed, failed = first.passed + second.passed, first.played + second.played - first.passed - second.passed
    counts = range(first.passed, min(first.played, passed) + 1)
    extreme = sum(comb(passed, count) * comb(failed, first.played - count) for count in counts)
    return extreme / comb(passed + failed, first.played)


def effect(with_hint: Passes, without: Passes, look: int, count: int) -> Estimate | None:
    """Return the pass rate with the hint minus that without it; None for an arm without a continuation.

    The interval is Newcombe's at the level of the look: each of its ends misses with about 5% over all looks together.
    """
    if not with_hint.played or not without.played:
        return None
    z = NormalDist().inv_cdf(1 - level(look, count))
    shares = [wilson(arm.passed / arm.played, arm.played, z) for arm in (without, with_hint)]
    return difference(*shares)
