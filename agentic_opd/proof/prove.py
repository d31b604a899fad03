"""One hint: continuations of its turn with and without it -> a proof (I/O by the given function).

    look 1: 4 continuations of each arm -> verdict, or look 2: 4 more -> verdict, or look 3: 8 more ...

The continuations of a look run at the same time, in pairs of the same seed.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, Self

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.types import ProofVerdict
from agentic_opd.proof.statistics import Passes, effect, looks, verdict
from agentic_opd.rollout.replay import Continuation, ReplayError, ReplayOutcome
from agentic_opd.wire.group import ProofRecord

_SEEDS_APART = 1000
"""Distance of two pairs' seeds: the turns of a continuation have consecutive ones."""
_DECIMALS = 6


class PlayedOn(NamedTuple):
    """What a proof needs of a continuation."""

    outcome: ReplayOutcome
    passed: bool | None
    """Whether all tests passed; None without a verdict."""
    sampled_tokens: int = 0
    weight_version: int | None = None
    error: ReplayError | None = None

    @classmethod
    def of(cls, continuation: Continuation) -> Self:
        """Return what a proof needs of a continuation."""
        is_played = continuation.outcome is ReplayOutcome.PLAYED
        return cls(
            continuation.outcome,
            continuation.verification.all_passed if is_played and continuation.verification is not None else None,
            continuation.sampled_tokens,
            continuation.weight_version,
            continuation.error,
        )


class Play(Protocol):
    """Plays one continuation of a turn: see `rollout.replay.EpisodeReplay.continued`."""

    async def __call__(self, *, is_hinted: bool, seed: int) -> PlayedOn:
        """Play a continuation, with the hint in the turn's prompt or without it.

        Raises:
            ServerError, SandboxError: nothing can be played.
        """
        ...


@dataclass(frozen=True, slots=True)
class Proof:
    """The record of a turn's continuations, and what they cost."""

    record: ProofRecord
    outcomes: Counter[ReplayOutcome] = field(default_factory=Counter[ReplayOutcome])
    """Number of continuations by result."""
    seconds: float = 0.0

    @property
    def rollouts(self) -> int:
        """Number of continuations."""
        return self.outcomes.total()


@dataclass(slots=True)
class _Arm:
    """The continuations of one arm."""

    passes: Passes = field(default_factory=Passes)
    continuations: list[PlayedOn] = field(default_factory=list[PlayedOn])

    def add(self, continuation: PlayedOn) -> None:
        self.continuations.append(continuation)
        self.passes = self.passes.and_also(continuation.passed)


async def prove(
    play: Play, pairs: int, spend: Callable[[int], bool] = lambda count: True, first_seed: int = 0
) -> Proof:
    """Compare continuations of a turn with and without its hint, at most `pairs` of each; `first_seed` is that of the
    first pair.

    `spend` is asked before each look for its number of continuations; if it refuses, the verdict is open.

    Raises:
        ServerError, SandboxError: nothing can be played.
    """
    arms, start = (_Arm(), _Arm()), time.monotonic()
    result, change, counts = ProofVerdict.OPEN, None, looks(pairs)
    for look, count in enumerate(counts):
        played = await _played(play, arms, count, spend, first_seed)
        if not played:
            break
        with_hint, without = (arm.passes for arm in arms)
        decided = verdict(with_hint, without, look, len(counts))
        change = effect(with_hint, without, look, len(counts))
        if decided is not None:
            result = decided
            break
    with_hint, without = arms
    record = ProofRecord(
        without_hint=(without.passes.passed, without.passes.played),
        with_hint=(with_hint.passes.passed, with_hint.passes.played),
        verdict=result,
        effect=change and round(change.value, _DECIMALS) + 0.0,
        interval=change and (round(change.low, _DECIMALS), round(change.high, _DECIMALS)),
    )
    return _proof(record, arms, start)


async def pass_rate(play: Play, limit: int) -> Proof:
    """Play a turn that has no hint on to the end, at most `limit` times, or fewer if the first ones are unanimous.

    Raises:
        ServerError, SandboxError: nothing can be played.
    """
    arm, start = _Arm(), time.monotonic()
    for count in looks(limit):
        await _played(play, (None, arm), count)
        if arm.passes.passed in (0, arm.passes.played):
            break
    return _proof(ProofRecord((arm.passes.passed, arm.passes.played)), (arm,), start)


async def _played(
    play: Play,
    arms: tuple[_Arm | None, _Arm],
    count: int,
    spend: Callable[[int], bool] = lambda count: True,
    first_seed: int = 0,
) -> bool:
    """Add continuations to the arms (with the hint, without) up to `count` each; return False if `spend` refuses."""
    todo = [
        (arm, is_hinted, first_seed + _SEEDS_APART * pair)
        for arm, is_hinted in zip(arms, (True, False), strict=True)
        if arm is not None
        for pair in range(len(arm.continuations), count)
    ]
    if not spend(len(todo)):
        return False
    continuations = await gather_all(play(is_hinted=is_hinted, seed=seed) for _, is_hinted, seed in todo)
    for (arm, _, _), continuation in zip(todo, continuations, strict=True):
        arm.add(continuation)
    return True


def _proof(record: ProofRecord, arms: tuple[_Arm, ...], start: float) -> Proof:
    """Complete a record with the version that played, or with why nothing could be played."""
    continuations = [continuation for arm in arms for continuation in arm.continuations]
    versions = [
        continuation.weight_version for continuation in continuations if continuation.weight_version is not None
    ]
    errors = [continuation.error for continuation in continuations if continuation.error is not None]
    is_played = any(continuation.outcome is ReplayOutcome.PLAYED for continuation in continuations)
    record = replace(
        record,
        sampled_tokens=sum(continuation.sampled_tokens for continuation in continuations),
        weight_version=min(versions, default=None),
        not_replayed=str(errors[0]) if errors and not is_played else None,
    )
    outcomes = Counter(continuation.outcome for continuation in continuations)
    return Proof(record, outcomes, time.monotonic() - start)
