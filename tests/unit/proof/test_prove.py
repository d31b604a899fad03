import asyncio
from collections import Counter

import pytest

from agentic_opd.core.types import ProofVerdict
from agentic_opd.proof.prove import pass_rate, prove
from agentic_opd.rollout.replay import ReplayOutcome
from agentic_opd.wire.group import ProofRecord
from tests.support.proofs import VERSION, ScriptedPlay, continuation, diverged, passing


def test_a_clear_hint_is_proven_by_four_pairs_of_the_same_seeds() -> None:
    play = passing("+", "-")
    proof = asyncio.run(prove(play, 16))
    interval = (0.235306, 1.0)
    assert proof.record == ProofRecord((0, 4), (4, 4), ProofVerdict.PROVEN, 1.0, interval, VERSION, 8)
    assert proof.rollouts == 8
    seeds = Counter(play.played)
    assert seeds == {(is_hinted, 1000 * pair): 1 for is_hinted in (True, False) for pair in range(4)}


def test_a_hint_that_harms_is_refuted() -> None:
    record = asyncio.run(prove(passing("-", "+"), 16)).record
    assert (record.verdict, record.effect, record.interval) == (ProofVerdict.REFUTED, -1.0, (-1.0, -0.235306))


@pytest.mark.parametrize(("signs", "played"), [("+", 8), ("-", 8), ("+-+-", 32)])
def test_a_hint_without_effect_stays_open_and_costs_little_where_nothing_varies(signs: str, played: int) -> None:
    proof = asyncio.run(prove(passing(signs, signs), 16))
    assert (proof.record.verdict, proof.record.effect, proof.rollouts) == (ProofVerdict.OPEN, 0.0, played)


def test_continuations_without_a_verdict_are_not_counted() -> None:
    proof = asyncio.run(prove(passing("?+++++", "??-----"), 8))
    assert (proof.record.with_hint, proof.record.without_hint) == ((7, 7), (0, 6))
    assert proof.outcomes == {ReplayOutcome.PLAYED: 13, ReplayOutcome.NO_VERDICT: 3}
    nothing = asyncio.run(prove(passing("?", "?"), 16)).record
    assert nothing == ProofRecord((0, 0), (0, 0), ProofVerdict.OPEN, None, None, VERSION, 8)


def test_a_turn_that_can_not_be_replayed_says_why() -> None:
    proof = asyncio.run(prove(ScriptedPlay(lambda is_hinted, pair: diverged()), 16))
    why = "turn 0: the result of call 0 is '2', recorded is '1'"
    assert proof.record == ProofRecord((0, 0), (0, 0), ProofVerdict.OPEN, not_replayed=why)
    assert proof.outcomes == {ReplayOutcome.DIVERGED: 8}


def test_a_replay_that_differs_now_and_then_leaves_its_continuation_out() -> None:
    play = ScriptedPlay(lambda is_hinted, pair: diverged() if pair == 2 and is_hinted else continuation(is_hinted))
    record = asyncio.run(prove(play, 8)).record
    assert (record.with_hint, record.without_hint, record.not_replayed) == ((7, 7), (0, 8), None)
    assert record.verdict is ProofVerdict.PROVEN


def test_a_spent_budget_leaves_a_hint_open() -> None:
    asked: list[int] = []

    def spend(count: int) -> bool:
        asked.append(count)
        return sum(asked) <= 16

    proof = asyncio.run(prove(passing("++-+", "+-+-"), 16, spend))
    assert asked == [8, 8, 16]
    assert (proof.record.verdict, proof.rollouts, proof.record.with_hint) == (ProofVerdict.OPEN, 16, (7, 8))
    unpaid = asyncio.run(prove(passing("+", "-"), 16, lambda count: False))
    assert (unpaid.record, unpaid.rollouts) == (ProofRecord((0, 0), (0, 0), ProofVerdict.OPEN), 0)


@pytest.mark.parametrize(("signs", "counts"), [("+", (4, 4)), ("-", (0, 4)), ("+---", (1, 8))])
def test_a_turn_without_a_hint_has_a_pass_rate(signs: str, counts: tuple[int, int]) -> None:
    proof = asyncio.run(pass_rate(passing("", signs), 8))
    assert proof.record == ProofRecord(counts, weight_version=VERSION, sampled_tokens=counts[1])
