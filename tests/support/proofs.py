"""Continuations without a world: outcomes by arm and seed."""

from collections.abc import Callable

from agentic_opd.core.types import (
    Episode,
    NoVerdict,
    Reward,
    StopReason,
    Task,
    Trace,
    Turn,
    Verification,
    VerifyOutcome,
)
from agentic_opd.proof.prove import PlayedOn
from agentic_opd.rollout.replay import Continuation, ReplayError, ReplayOutcome

VERSION = 7
_TRACE = Trace(
    messages=({"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}),
    tokens_T=(1, 2, 3),
    masks_T=(-100, -100, 3),
    logprobs_T=(1.0, 1.0, -0.5),
    turns=(Turn(2, 3, 2, 1, 1, weight_version=VERSION),),
)


def continuation(passed: bool | None) -> Continuation:
    """Return a continuation that passed or failed; None: its tests gave no verdict."""
    if passed is None:
        verification = Verification(VerifyOutcome.NO_VERDICT, 0, 1, "", "", no_verdict=NoVerdict.TIMEOUT)
        outcome, reward = ReplayOutcome.NO_VERDICT, None
    else:
        verification = Verification(VerifyOutcome.RAN, int(passed), 1, "", "")
        outcome, reward = ReplayOutcome.PLAYED, Reward(float(passed), 0.0, 0.0, float(passed))
    task = Task("t", "p", hidden_tests="h")
    episode = Episode(task, (_TRACE,), StopReason.FINISHED, verification=verification, reward=reward)
    return Continuation(0, outcome, episode)


def diverged() -> Continuation:
    error = ReplayError(ReplayOutcome.DIVERGED, "turn 0: the result of call 0 is '2', recorded is '1'")
    return Continuation(1, error.outcome, error=error)


class ScriptedPlay:
    """Plays by a function of the arm and the pair's number; `played` holds each arm and seed."""

    def __init__(self, outcome: Callable[[bool, int], Continuation]) -> None:
        self._outcome = outcome
        self.played: list[tuple[bool, int]] = []

    async def __call__(self, *, is_hinted: bool, seed: int) -> PlayedOn:
        self.played.append((is_hinted, seed))
        return PlayedOn.of(self._outcome(is_hinted, seed // 1000))


def passing(with_hint: str, without: str) -> ScriptedPlay:
    """Return a play whose pairs pass (+), fail (-) or have no verdict (?), by arm; the last one is repeated."""
    passed = {"+": True, "-": False, "?": None}

    def outcome(is_hinted: bool, pair: int) -> Continuation:
        signs = with_hint if is_hinted else without
        return continuation(passed[signs[min(pair, len(signs) - 1)]])

    return ScriptedPlay(outcome)
