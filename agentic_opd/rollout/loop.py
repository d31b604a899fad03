"""The agent loop. In: a task, a policy and a world. Out: a verified and rewarded `Episode`."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from agentic_opd.core.concurrency import fair_slot
from agentic_opd.core.errors import AlignmentError, RendererError, SandboxError, ServerError
from agentic_opd.core.text import well_formed
from agentic_opd.core.types import (
    Episode,
    Message,
    Recording,
    Reward,
    StopReason,
    Task,
    ToolCall,
    Turn,
    Verification,
    World,
    WorldSession,
)
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.config import RolloutConfig
from agentic_opd.rollout.conversation import Completion, Conversation

logger = logging.getLogger(__name__)


class SamplingPolicy(Protocol):
    """The policy's interface to the loop; `env.policy_server.ServedPolicy` implements it."""

    async def sample(self, prompt_ids: Sequence[int], max_tokens: int) -> Completion:
        """Sample one turn.

        Raises:
            ServerError: the policy server failed.
        """
        ...


UserReply = Callable[[Task, Sequence[Message]], Awaitable[str | None]]
"""Returns the user's reply to a turn without tool calls, the last of the messages; None ends the episode."""


@dataclass(frozen=True, slots=True)
class HintInsertion:
    """A hint's ids and their index in the ids of a turn's prompt, as in the teacher's request."""

    insert_at: int
    token_ids: tuple[int, ...]

    def inserted(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the prompt with the hint.

        Raises:
            AlignmentError: the index is not in the prompt.
        """
        if not 0 <= self.insert_at <= len(prompt_ids):
            raise AlignmentError(f"hint: to be inserted at {self.insert_at} of a prompt of {len(prompt_ids)} tokens")
        return [*prompt_ids[: self.insert_at], *self.token_ids, *prompt_ids[self.insert_at :]]


@dataclass(frozen=True, slots=True)
class FirstTurn:
    """What holds for a single sampled turn: its token limit, and a hint that later turns do not see."""

    max_tokens: int
    hint: HintInsertion | None = None


OnAnswered = Callable[[Recording, int], None]
"""Called after each answered turn, with the conversation so far and the turn's index."""


@dataclass
class AgentLoop:
    """One episode in progress: `run` it once, or `take` turns sampled elsewhere until one of them ends it."""

    task: Task
    conversation: Conversation
    session: WorldSession
    config: RolloutConfig
    user_reply: UserReply | None = None
    on_answered: OnAnswered | None = None
    tool_calls: int = 0
    tool_errors: int = 0
    broken_turns: int = 0
    changes: list[frozenset[int]] = field(default_factory=list[frozenset[int]])

    async def run(self, policy: SamplingPolicy, first_turn: FirstTurn | None = None) -> Episode:
        """Take turns until the episode ends; `first_turn` changes how the first of them is sampled.

        A server failure ends it as SERVER_ERROR. A renderer failure on a turn, or on the prompt of a later turn,
        ends it as RENDER_ERROR.
        """
        stop, failure = None, None
        try:
            while stop is None:
                stop, first_turn = await self.step(policy, first_turn), None
        except ServerError as error:
            stop, failure = StopReason.SERVER_ERROR, error
        except RendererError as error:
            turns = self.conversation.num_turns
            if not turns:
                raise
            logger.warning("an episode of %s ends after turn %d: %s", self.task.task_id, turns, error)
            stop = StopReason.RENDER_ERROR
        return self.episode(stop, failure)

    async def step(self, policy: SamplingPolicy, turn: FirstTurn | None = None) -> StopReason | None:
        """Sample one turn and answer it; return the reason if the episode ends, else None.

        The hint of `turn` is in the prompt of this turn alone: the sampled ids are appended to the ids without it.
        """
        async with fair_slot():
            prompt_ids = self.conversation.branching_prompt()
        room = min(self.config.max_token_length - len(prompt_ids), self.config.max_tokens_per_turn)
        if turn is not None:
            room = min(room, turn.max_tokens)
            prompt_ids = prompt_ids if turn.hint is None else turn.hint.inserted(prompt_ids)
        if room < 1:
            return StopReason.CONTEXT_FULL
        return await self.take(await policy.sample(prompt_ids, room))

    async def take(self, completion: Completion) -> StopReason | None:
        """Add a sampled turn and its answers; return the reason if the episode ends, else None."""
        self.changes.append(frozenset())
        try:
            async with fair_slot():
                calls = self.conversation.add(completion).tool_calls
        except RendererError as error:
            logger.warning("an episode of %s ends with turn %d: %s", self.task.task_id, len(self.changes), error)
            self.conversation.add(completion, self.conversation.chat.unparsed(completion.token_ids))
            return StopReason.RENDER_ERROR
        turn = self.conversation.turns[-1]
        if turn.truncated and turn.end >= self.config.max_token_length:
            return StopReason.CONTEXT_FULL
        answers = await self.answers(turn, calls)
        if not answers:
            return StopReason.FINISHED
        self.conversation.answer(answers)
        num_turns = self.conversation.num_turns
        if self.on_answered is not None:
            self.on_answered(self.episode(StopReason.MAX_TURNS).recording, num_turns - 1)
        if calls and await self.session.is_over(self.conversation.messages):
            return StopReason.TERMINATED
        return StopReason.MAX_TURNS if num_turns >= self.config.max_turns else None

    async def answers(self, turn: Turn, calls: Sequence[ToolCall]) -> list[Message]:
        """Return the tool results in the order of the calls, or the user's reply, or nothing."""
        if calls:
            results = [await self.session.run_tool(call) for call in calls]
            self.changes[-1] = frozenset(index for index, result in enumerate(results) if result.is_change)
            self.tool_calls += len(results)
            self.tool_errors += sum(result.is_error for result in results)
            self.broken_turns += any(result.is_error for result in results)
            return [
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": well_formed(result.content)}
                for call, result in zip(calls, results, strict=True)
            ]
        if turn.truncated:
            text = f"Your message was cut off after {turn.end - turn.start} tokens. Continue in smaller steps."
            return [{"role": "user", "content": text}]
        reply = await self.session.user_reply(self.conversation.messages)
        if reply is None and self.user_reply is not None:
            reply = await self.user_reply(self.task, self.conversation.messages)
        return [] if reply is None else [{"role": "user", "content": well_formed(reply)}]

    def episode(self, stop: StopReason, failure: Exception | None = None) -> Episode:
        return Episode(
            task=self.task,
            traces=self.conversation.traces(),
            stop_reason=stop,
            tool_calls=self.tool_calls,
            tool_errors=self.tool_errors,
            broken_turns=self.broken_turns,
            error=failure,
            changes=tuple(self.changes),
        )


def limited(config: RolloutConfig, task: Task) -> RolloutConfig:
    """Return the settings with the task's own limits."""
    return config.model_copy(update=dict(task.limits))


def first_messages(world: World, task: Task) -> list[Message]:
    """Return the messages before the first turn: system prompt, examples and prompt, or the task's own messages."""
    system = {"role": "system", "content": world.system_prompt}
    if task.messages:
        is_whole = task.messages[0]["role"] == "system" or not world.system_prompt
        return [*([] if is_whole else [system]), *task.messages]
    return [system, *task.examples, {"role": "user", "content": task.prompt}]


class FinalState(Protocol):
    """The end of a session; every `WorldSession` has it."""

    async def collect(self, messages: Sequence[Message] = ()) -> Any:
        """Return the final state, for the world's `verify`."""
        ...


SessionT = TypeVar("SessionT", bound=FinalState)


async def run_episode(
    task: Task,
    policy: SamplingPolicy,
    world: World,
    chat: ChatFormat,
    config: RolloutConfig,
    user_reply: UserReply | None = None,
    on_answered: OnAnswered | None = None,
) -> Episode:
    """Run the agent on `task`, then verify and reward the result.

    Returns:
        A verified and rewarded episode, one without a reward whose tests gave no verdict (`Episode.no_verdict`), or one
        whose `error` is the policy server's failure.

    Raises:
        RendererError: the first prompt can't be rendered.
        SandboxError: the world itself does not work, confirmed by a fresh session.
    """
    config = limited(config, task)
    conversation = Conversation(chat.with_tools(task.tools), first_messages(world, task))
    loop: AgentLoop | None = None

    async def run(session: WorldSession) -> Episode:
        nonlocal loop
        loop = AgentLoop(task, conversation, session, config, user_reply, on_answered)
        return await loop.run(policy)

    def unfinished(stop: StopReason) -> Episode | None:
        return loop.episode(stop) if loop is not None and conversation.num_turns else None

    return await verified(run, unfinished, world.session(task), task, world, config)


async def verified(
    run: Callable[[SessionT], Awaitable[Episode]],
    unfinished: Callable[[StopReason], Episode | None],
    session_scope: AbstractAsyncContextManager[SessionT],
    task: Task,
    world: World,
    config: RolloutConfig,
) -> Episode:
    """Run an episode in the session of `session_scope`, then verify and reward it; returns and raises as `run_episode`.

    An episode whose tests gave no verdict gets no reward. `unfinished` returns the episode of a sandbox that died; None
    before its first turn.
    """
    try:
        async with session_scope as session:
            episode = await run(session)
            if episode.error is not None:
                return episode
            left = await session.collect(episode.messages)
        verification = await world.verify(task, left)
    except SandboxError as error:
        await world.check()  # On a machine where no sandbox works, raise instead of returning zero rewards.
        lost = unfinished(StopReason.SANDBOX_DIED)
        if lost is None:
            raise
        return await _without_reward(lost, world, error)
    if verification.no_verdict is not None:
        why = verification.report.partition("\n")[0]
        logger.warning("an episode of %s is left out, since its tests gave no verdict: %s", task.task_id, why)
        return replace(episode, verification=verification)
    turns, worked = max(len(episode.turns), episode.requests), episode.tool_calls - episode.tool_errors
    tools = world.tools if task.tools is None else task.tools
    counts_calls: bool = getattr(world, "counts_calls", True)
    broken_turns = episode.broken_turns if counts_calls else 0
    needs_call = counts_calls and bool(tools or episode.tool_calls)  # The run of an agent's program counts as a call.
    reward = compute_reward(verification, turns, worked, broken_turns, config, needs_call=needs_call)
    return replace(episode, verification=verification, reward=reward)


async def _without_reward(episode: Episode, world: World, error: SandboxError) -> Episode:
    """Return the episode of a dead sandbox with reward 0: no result is left to verify."""
    task, turns = episode.task, len(episode.turns)
    logger.warning("an episode of %s has the reward 0: its sandbox died after turn %d: %s", task.task_id, turns, error)
    verdict = await world.verify(task, None)
    text = f"Hidden tests: 0 of {verdict.total} passed.\nThe sandbox ended early, and its files are lost."
    verdict = replace(verdict, passed=0, report=text, judge_report=text, score=None)
    reward = Reward(correctness=0.0, efficiency=0.0, tool_usage=0.0, total=0.0)
    return replace(episode, verification=verdict, reward=reward)


def compute_reward(
    verification: Verification,
    turns_used: int,
    calls_that_worked: int,
    broken_turns: int,
    config: RolloutConfig,
    *,
    needs_call: bool = True,
) -> Reward:
    """Return the parts of the reward, each in [0, 1], and their weighted sum.

    - correctness: the share of hidden checks that passed.
    - efficiency: correctness times the share of saved turns, (max_turns - turns_used) / (max_turns - 1): 1 after one
      turn, 0 after `max_turns`.
    - tool_usage: correctness times the share of turns without a broken call, (max_turns - broken_turns) / max_turns; 0
      if no call worked and `needs_call`: the task has tools, or calls were made. A command that ran and failed (a test
      that found a bug) counts as working; a call that returned `Error:` does not.

    Efficiency and tool_usage are proportional to correctness: an episode that solves nothing earns nothing. Both are
    relative to `max_turns`, so further calls or turns raise neither. `turns_used` are, for a program, all of its
    requests.
    """
    correctness, max_turns = verification.correctness, config.max_turns
    saved = (max_turns - turns_used) / (max_turns - 1) if max_turns > 1 else 1.0
    unbroken = (max_turns - broken_turns) / max_turns if calls_that_worked or not needs_call else 0.0
    efficiency = correctness * min(max(saved, 0.0), 1.0)
    tool_usage = correctness * max(unbroken, 0.0)
    total = (
        config.reward.correctness * correctness
        + config.reward.efficiency * efficiency
        + config.reward.tool_usage * tool_usage
    )
    return Reward(correctness, efficiency, tool_usage, total)
