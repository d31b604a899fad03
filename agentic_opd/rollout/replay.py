"""Recorded episodes in a fresh session: the recorded calls again, then the policy from a turn on (I/O).

    Recording, turn k -> the calls of the turns before k run again; each result is compared with the recorded one
    the recorded prompt of turn k (+ a hint, for this turn alone) -> the policy's turns -> verification and reward

The calls run in `AgentLoop.take`, as in an episode. The recorded ids are the prompts: nothing is rendered again.
"""

from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile, zip_longest
from typing import Any, cast

from agentic_opd.core.errors import ConfigError, DatasetError, OPDError, SandboxError, WorldError
from agentic_opd.core.types import (
    Completion,
    Episode,
    Message,
    Recording,
    ReplayableWorld,
    StopReason,
    Task,
    Verification,
    World,
    shared_length,
)
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.config import RolloutConfig
from agentic_opd.rollout.conversation import Conversation
from agentic_opd.rollout.loop import (
    AgentLoop,
    FirstTurn,
    HintInsertion,
    SamplingPolicy,
    UserReply,
    limited,
    verified,
)


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
    """A hook of the world raised, or the task's data can't be used."""
    UNREADABLE = "unreadable"
    """The recording can't be replayed with these settings: another renderer, other limits, or attachments."""
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

    `call` is the number of the turn's call, counted from 0; None: the turn has no calls, and the user's reply differs.
    `recorded` and `replayed` are the texts around the first difference; None: there was no answer.
    """

    def __init__(self, turn_index: int, call: int | None, recorded: str | None, replayed: str | None) -> None:
        self.turn_index, self.call = turn_index, call
        start = max(shared_length(recorded or "", replayed or "") - _CONTEXT_CHARS, 0)
        self.recorded, self.replayed = (_excerpt(text, start) for text in (recorded, replayed))
        answer = "the user's reply" if call is None else f"the result of call {call}"
        super().__init__(
            ReplayOutcome.DIVERGED,
            f"turn {turn_index}: {answer} differs: recorded {self.recorded!r}, replayed {self.replayed!r}",
        )


_CONTEXT_CHARS, _EXCERPT_CHARS = 20, 120
"""Number of equal characters that an excerpt begins with, and its length."""


def _excerpt(text: str | None, start: int) -> str | None:
    if text is None:
        return None
    end = start + _EXCERPT_CHARS
    return f"{'...' if start else ''}{text[start:end]}{'...' if end < len(text) else ''}"


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

    def is_rollout_of(self, recording: Recording) -> bool:
        """Return whether this is an ordinary rollout of the recording's task: with a verdict, from the first turn on,
        whose prompt is the recorded one, without a hint.
        """
        if self.outcome is not ReplayOutcome.PLAYED or self.episode is None or self.hint is not None or self.turn_index:
            return False
        played, recorded = self.episode.traces[0], recording.traces[0]
        prompts = (trace.tokens_T[: trace.turns[0].start] for trace in (played, recorded))
        return next(prompts) == next(prompts)

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

    Of `total` turns with a recorded answer, the first `equal` gave this answer; `error` ended the replay in the next.
    """

    equal: int
    total: int
    error: ReplayError | None = None


@dataclass(frozen=True, slots=True)
class ReplayedSession:
    """A fresh session in which recorded turns have been answered again."""

    loop: AgentLoop
    """The episode before the next recorded turn: its conversation's prompt is the recorded ids of this turn."""

    async def collect(self, messages: Sequence[Message] = ()) -> Any:
        """Return the final state of the episode, for the world's `verify`."""
        return await self.loop.session.collect(messages)


def check_replayable(world: World, world_name: str, config: RolloutConfig) -> ReplayableWorld:
    """Return the world if episodes of these settings can be replayed; nothing is started.

    Raises:
        NotReplayableError: a program holds the conversations, or the world can't replay.
    """
    if config.agent.command is not None:
        raise NotReplayableError(
            "env.agent.command: a program holds the conversations, and it can't be started again in the middle of one. "
            "Replay needs the package's own agent loop"
        )
    if not getattr(world, "replayable", False) or not hasattr(world, "comparable"):
        raise NotReplayableError(
            f"env.world {world_name}: its episodes can't be replayed, because its sessions can't be started again with "
            "the same results (replayable is not True, or it has no comparable; see docs/worlds.md)"
        )
    return cast(ReplayableWorld, world)


@dataclass(frozen=True, slots=True)
class EpisodeReplay:
    """Replays recorded episodes of a world; `config` holds the limits and rewards of an episode, as in the run."""

    world: ReplayableWorld
    chat: ChatFormat
    config: RolloutConfig
    user_reply: UserReply | None = None
    context: int | None = None
    """Number of tokens that the policy's server reads; None: `max_token_length`."""

    @asynccontextmanager
    async def session(self, recording: Recording, turn_index: int) -> AsyncGenerator[ReplayedSession]:
        """Yield a fresh session in which the calls of the turns before `turn_index` have run again.

        Raises:
            ReplayDivergedError: a call gave another result than the recorded one.
            ReplayError: the recording can't be replayed for another reason; see `ReplayError.outcome`.
            SandboxError: no sandbox works on this machine.
        """
        task = _task_of(recording)
        config = limited(self.config, task)
        if turn_index >= config.max_turns:
            raise _unreadable(f"turn {turn_index} is beyond env.max_turns {config.max_turns}")
        conversation = Conversation.before_turn(self.chat.with_tools(task.tools), recording, 0)
        try:
            async with AsyncExitStack() as stack:
                with _typed_failures():
                    session = await stack.enter_async_context(self.world.session(task))
                    loop = AgentLoop(task, conversation, session, config, self.user_reply)
                    for index in range(turn_index):
                        await self._answer_again(loop, recording, index)
                    loop.conversation = Conversation.before_turn(conversation.chat, recording, turn_index)
                yield ReplayedSession(loop)
        except ReplayError as error:
            if error.outcome is ReplayOutcome.SANDBOX_FAILED:
                await self.world.check()  # On a machine where no sandbox works, raise that.
            raise

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
        loop: AgentLoop | None = None

        async def play(replayed: ReplayedSession) -> Episode:
            nonlocal loop
            loop = replayed.loop
            return await loop.run(policy, first_turn)

        def unfinished(stop: StopReason) -> Episode | None:
            return loop.episode(stop) if loop is not None and loop.conversation.num_turns > turn_index else None

        read_hint = hint if is_hinted else None
        try:
            task = _task_of(recording)
            config = limited(self.config, task)
            first_turn = FirstTurn(self.room(recording, turn_index, hint), read_hint)
            scope = self.session(recording, turn_index)
            episode = await verified(play, unfinished, scope, task, self.world, config)
        except ReplayError as error:
            return Continuation(turn_index, error.outcome, hint=read_hint, error=error)
        except (WorldError, DatasetError) as error:
            failure = ReplayError(ReplayOutcome.WORLD_FAILED, str(error))
            return Continuation(turn_index, failure.outcome, hint=read_hint, error=failure)
        if episode.error is not None:
            raise episode.error
        outcome = ReplayOutcome.PLAYED if episode.no_verdict is None else ReplayOutcome.NO_VERDICT
        return Continuation(turn_index, outcome, episode, read_hint)

    async def compared(self, recording: Recording) -> ComparedTurns:
        """Run the calls of all recorded turns again, and compare the answers, except after a last turn without any.

        Raises:
            SandboxError: no sandbox works on this machine.
        """
        is_answered = recording.turns[-1].message_index + 1 < len(recording.messages)
        total, equal = len(recording.turns) - (not is_answered), 0
        try:
            async with self.session(recording, 0) as replayed:
                for index in range(total):
                    with _typed_failures():
                        await self._answer_again(replayed.loop, recording, index)
                    equal += 1
        except ReplayError as error:
            return ComparedTurns(equal, total, error)
        return ComparedTurns(equal, total)

    def room(self, recording: Recording, turn_index: int, hint: HintInsertion | None) -> int:
        """Return the token limit of a turn whose prompt may hold the hint.

        Raises:
            ReplayError: the prompt with the hint leaves no room for a token, or the recording has no task.
        """
        config, turn = limited(self.config, _task_of(recording)), recording.turns[turn_index]
        context = config.max_token_length if self.context is None else self.context
        room = min(config.max_token_length, context - len(hint.token_ids if hint else ())) - turn.start
        if room < 1:
            raise ReplayError(ReplayOutcome.NO_ROOM, f"the turn's prompt of {turn.start} tokens leaves no room")
        return min(room, config.max_tokens_per_turn)

    async def _answer_again(self, loop: AgentLoop, recording: Recording, turn_index: int) -> None:
        """Take a recorded turn in the loop, and compare its answers with the recorded ones."""
        loop.conversation = Conversation.before_turn(loop.conversation.chat, recording, turn_index)
        trace, turn = [(trace, turn) for trace in recording.traces for turn in trace.turns][turn_index]
        span = slice(turn.start, turn.end)
        reason = "length" if turn.truncated else "stop"
        ids, logprobs = trace.tokens_T[span], trace.logprobs_T[span]
        stop = await loop.take(Completion(ids, logprobs, reason, turn.weight_version, turn.sampling))
        message, *replayed = loop.conversation.messages[turn.message_index :]
        recorded_message, *following = trace.messages[turn.message_index :]
        recorded = [*takewhile(lambda answer: answer["role"] != "assistant", following)]
        if message != recorded_message:
            raise _unreadable(f"the tokens of turn {turn_index} are read as another message than the recorded one")
        if stop in (StopReason.CONTEXT_FULL, StopReason.RENDER_ERROR) and recorded:
            raise _unreadable(f"the episode ends as {stop} with turn {turn_index}, but the recorded one continued")
        has_calls = bool(message.get("tool_calls"))
        compared = self.world.comparable if has_calls else str
        pairs = zip_longest((answer["content"] for answer in recorded), (answer["content"] for answer in replayed))
        for number, (old, new) in enumerate(pairs):
            if old is None or new is None or compared(old) != compared(new):
                raise ReplayDivergedError(turn_index, number if has_calls else None, old, new)


@contextmanager
def _typed_failures() -> Generator[None]:
    """Convert a failure of the world while recorded calls run again."""
    try:
        yield
    except SandboxError as error:
        raise ReplayError(ReplayOutcome.SANDBOX_FAILED, f"the sandbox ended early: {error}") from error
    except (WorldError, DatasetError) as error:
        raise ReplayError(ReplayOutcome.WORLD_FAILED, str(error)) from error


def _unreadable(problem: str) -> ReplayError:
    return ReplayError(
        ReplayOutcome.UNREADABLE, f"{problem}: replay with the renderer, the tools and the limits of the recording run"
    )


def _task_of(recording: Recording) -> Task:
    if recording.task is None:
        raise ReplayError(ReplayOutcome.TASK_MISSING, f"the recording {recording.name!r} has no task")
    return recording.task
