"""Recorded episodes in a fresh session: the recorded calls again, then the policy from a turn on (I/O).

    Recording, turn k -> the calls of the turns before k run again; each result is compared with the recorded one
    the recorded prompt of turn k (+ a hint, for this turn alone) -> the policy's turns -> verification and reward

The calls run in `AgentLoop.take`, as in an episode. The recorded ids are the prompts: nothing is rendered again.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

from agentic_opd.core.errors import ConfigError, OPDError
from agentic_opd.core.types import Episode, Recording, Verification, World
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.config import RolloutConfig
from agentic_opd.rollout.loop import AgentLoop, HintInsertion, SamplingPolicy, UserReply


class ReplayOutcome(StrEnum):
    """Result of replaying a recorded episode to a turn, and of playing on from there."""

    PLAYED = "played"
    """The policy played on to the end, and the episode has a verdict."""
    NO_VERDICT = "no_verdict"
    """The policy played on to the end, and the tests gave no verdict."""
    NO_ROOM = "no_room"
    """The turn's prompt with the hint leaves no room for a token."""
    DIVERGED = "diverged"
    """A call that ran again gave another result, or the user another reply."""
    SANDBOX_FAILED = "sandbox_failed"
    """The sandbox ended early while the recorded calls ran again."""
    WORLD_FAILED = "world_failed"
    """A hook of the world raised."""
    UNREADABLE = "unreadable"
    """The recording can't be replayed with these settings: another renderer, other limits, or pictures."""
    TASK_MISSING = "task_missing"
    """The world of these settings has no task of the recording's name."""
    TASK_CHANGED = "task_changed"
    """The task's messages before the first turn are not the recorded ones."""


class ReplayError(OPDError):
    """A recorded episode can't be replayed to a turn; `outcome` says why."""

    def __init__(self, outcome: ReplayOutcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class ReplayDivergedError(ReplayError):
    """An answer to a recorded turn differs from the recorded one.

    `call` is the number of the turn's call, counted from 0; None: the user's reply, or the end of the episode.
    `recorded` and `replayed` are the texts, shortened.
    """

    def __init__(self, turn_index: int, call: int | None, recorded: str, replayed: str) -> None:
        answer = "the user's reply" if call is None else f"the result of call {call}"
        super().__init__(
            ReplayOutcome.DIVERGED, f"turn {turn_index}: {answer} is {replayed!r}, recorded is {recorded!r}"
        )
        self.turn_index, self.call, self.recorded, self.replayed = turn_index, call, recorded, replayed


class NotReplayableError(ConfigError):
    """The settings' episodes can't be replayed; the message names the world or the setting, and says why."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """Result of replaying an episode to a turn and playing on from there.

    `episode` is given if the outcome is PLAYED or NO_VERDICT. Its turns before `turn_index` are the recorded ones.
    """

    turn_index: int
    outcome: ReplayOutcome
    episode: Episode | None = None
    hint: HintInsertion | None = None
    """The hint in the prompt of turn `turn_index`; the trace of the episode does not hold it."""
    error: ReplayError | None = None
    """Why the episode was not played."""

    @property
    def verification(self) -> Verification | None:
        return None if self.episode is None else self.episode.verification

    @property
    def reward(self) -> float | None:
        """Total reward; None unless the outcome is PLAYED."""
        return None if self.episode is None or self.episode.reward is None else self.episode.reward.total

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled from turn `turn_index` on."""
        turns = () if self.episode is None else self.episode.turns[self.turn_index :]
        return sum(turn.end - turn.start for turn in turns)

    @property
    def weight_version(self) -> int | None:
        """Oldest version of the weights that sampled one of these turns; None if no server reports it."""
        turns = () if self.episode is None else self.episode.turns[self.turn_index :]
        return min((turn.weight_version for turn in turns if turn.weight_version is not None), default=None)


@dataclass(frozen=True, slots=True)
class ComparedTurns:
    """Result of running all recorded calls of an episode again.

    `equal` turns gave the recorded answers; `error` ended the replay in the turn after these. `total` is the number of
    recorded turns.
    """

    equal: int
    total: int
    error: ReplayError | None = None


@dataclass(frozen=True, slots=True)
class EpisodeReplay:
    """Replays recorded episodes of a world; `config` holds the limits and rewards of an episode, as in the run."""

    world: World
    chat: ChatFormat
    config: RolloutConfig
    user_reply: UserReply | None = None
    context: int | None = None
    """Number of tokens that the policy's server reads; None: `max_token_length`."""

    def check(self) -> None:
        """Raise NotReplayableError if the world can't replay, or a program holds the conversations."""
        raise NotImplementedError

    @asynccontextmanager
    async def session(self, recording: Recording, turn_index: int) -> AsyncGenerator[AgentLoop]:
        """Yield a loop in a fresh session, as it was before turn `turn_index`: `run` plays on from there.

        Its conversation's prompt is the recorded ids of this turn.

        Raises:
            ReplayDivergedError: a call gave another result than the recorded one.
            ReplayError: the recording can't be replayed for another reason; see `ReplayError.outcome`.
            SandboxError: no sandbox works on this machine.
        """
        raise NotImplementedError
        yield

    async def continued(
        self,
        recording: Recording,
        turn_index: int,
        policy: SamplingPolicy,
        hint: HintInsertion | None = None,
        *,
        is_hinted: bool = True,
    ) -> Continuation:
        """Replay an episode to a turn; from this turn on the policy plays to the end. Then verify and reward it.

        The hint is in the prompt of this turn alone. With `is_hinted=False` the policy does not read it, but the turn
        has the token limit that it has with the hint, so that the two can be compared.

        Raises:
            ServerError: the policy server failed.
            SandboxError: no sandbox works on this machine.
        """
        raise NotImplementedError

    async def compared(self, recording: Recording) -> ComparedTurns:
        """Run the calls of all recorded turns again, and compare the results.

        Raises:
            SandboxError: no sandbox works on this machine.
        """
        raise NotImplementedError
