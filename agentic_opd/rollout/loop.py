"""The agent loop: a task, a policy and a world in, an `Episode` out, verified and rewarded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agentic_opd.core.errors import ServerError
from agentic_opd.core.types import Episode, Message, Session, StopReason, Task, ToolCall, Turn, World
from agentic_opd.rollout.chat import Prompt, TokenRecord
from agentic_opd.rollout.config import RolloutConfig
from agentic_opd.rollout.reward import RewardWeights, compute_reward


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled turn: the message it stands for, its calls, its place in the tokens, and all tokens up to its end."""

    message: Message
    tool_calls: tuple[ToolCall, ...]
    turn: Turn
    record: TokenRecord


class Policy(Protocol):
    """What the loop needs of a policy; `env.policy_server.RenderedManagedServer` is one."""

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """The ids that the next turn is sampled from; they start with everything sampled so far."""
        ...

    async def sample(self, messages: Sequence[Message], prompt: Prompt, max_tokens: int) -> Sample:
        """Sample one turn."""
        ...


class UserReply(Protocol):
    """What a user says after a turn without tool calls; None ends the episode."""

    async def __call__(self, task: Task, messages: Sequence[Message]) -> str | None:
        """Answer the last of `messages`, the assistant's."""
        ...


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """Where an episode ends; tokens count the whole sequence, prompt included."""

    max_turns: int
    max_token_length: int
    max_tokens_per_turn: int


class AgentLoop:
    """One episode in the making: `run` it once."""

    def __init__(
        self,
        task: Task,
        system_prompt: str,
        policy: Policy,
        session: Session,
        limits: LoopLimits,
        *,
        user_reply: UserReply | None = None,
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self.task = task
        self.policy = policy
        self.session = session
        self.limits = limits
        self.user_reply = user_reply
        self.on_turn = on_turn
        self.messages: list[Message] = [
            {"role": "system", "content": system_prompt},
            {"role": "user", "content": task.prompt},
        ]
        self.samples: list[Sample] = []
        self.tool_calls = 0
        self.tool_errors = 0

    async def run(self) -> Episode:
        """Take turns until one ends the episode. A failing policy server ends it too, as SERVER_ERROR."""
        stop, failure = None, None
        try:
            while stop is None:
                stop = await self.step()
        except ServerError as error:
            stop, failure = StopReason.SERVER_ERROR, error
        return self.episode(stop, failure)

    async def step(self) -> StopReason | None:
        """One turn and what answers it."""
        prompt = self.policy.prompt(self.messages)
        room = self.limits.max_token_length - len(prompt.token_ids)
        if room < 1:
            return StopReason.CONTEXT_FULL
        sample = await self.policy.sample(self.messages, prompt, min(room, self.limits.max_tokens_per_turn))
        self.samples.append(sample)
        self.messages.append(sample.message)
        self.on_turn()
        if sample.turn.truncated and room <= self.limits.max_tokens_per_turn:
            return StopReason.CONTEXT_FULL
        answers = await self.answer(sample)
        self.messages += answers
        if not answers:
            return StopReason.FINISHED
        return StopReason.MAX_TURNS if len(self.samples) >= self.limits.max_turns else None

    async def answer(self, sample: Sample) -> list[Message]:
        """The tools' results in the order of the calls, or the user's reply, or nothing."""
        if sample.tool_calls:
            return [await self.run_tool(call) for call in sample.tool_calls]
        if sample.turn.truncated:
            length = sample.turn.end - sample.turn.start
            text = f"Your message was cut off after {length} tokens. Continue in smaller steps."
            return [{"role": "user", "content": text}]
        reply = await self.user_reply(self.task, self.messages) if self.user_reply else None
        return [] if reply is None else [{"role": "user", "content": reply}]

    async def run_tool(self, call: ToolCall) -> Message:
        """Run one call; whatever goes wrong is the result that the model reads."""
        result = await self.session.run_tool(call)
        self.tool_calls += 1
        self.tool_errors += result.is_error
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.content}

    def episode(self, stop: StopReason, failure: Exception | None) -> Episode:
        """The record so far as an Episode."""
        record = self.samples[-1].record if self.samples else TokenRecord()
        return Episode(
            task=self.task,
            messages=tuple(self.messages),
            tokens_T=record.tokens_T,
            masks_T=record.masks_T,
            logprobs_T=record.logprobs_T,
            turns=tuple(sample.turn for sample in self.samples),
            stop_reason=stop,
            tool_calls=self.tool_calls,
            tool_errors=self.tool_errors,
            error=failure,
        )


async def run_episode(
    task: Task, policy: Policy, world: World, config: RolloutConfig, user_reply: UserReply | None = None
) -> Episode:
    """Run the agent on `task`, verify what it left behind, and reward it.

    Returns:
        A verified and rewarded episode, or one whose `error` says how the policy server failed.

    Raises:
        SandboxError: the world itself does not work.
    """
    limits = LoopLimits(config.max_turns, config.max_token_length, config.max_tokens_per_turn)
    async with world.session(task) as session:
        episode = await AgentLoop(task, world.system_prompt, policy, session, limits, user_reply=user_reply).run()
        if episode.error is not None:
            return episode
        left = await session.collect()
    verification = await world.verify(task, left)
    reward = compute_reward(
        verification,
        turns_used=len(episode.turns),
        max_turns=config.max_turns,
        tool_calls=episode.tool_calls,
        tool_errors=episode.tool_errors,
        weights=RewardWeights.from_config(config),
    )
    return replace(episode, verification=verification, reward=reward)
