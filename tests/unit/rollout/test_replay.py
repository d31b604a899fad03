"""Recorded episodes in a fresh session: literal cases in worlds without a sandbox."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from agentic_opd.core.errors import AlignmentError, SandboxError, ServerUnreachableError
from agentic_opd.core.types import Completion, Episode, Message, StopReason, Task
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.config import AgentConfig, RolloutConfig
from agentic_opd.rollout.loop import HintInsertion, run_episode
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.rollout.replay import (
    Continuation,
    EpisodeReplay,
    NotReplayableError,
    ReplayDivergedError,
    ReplayOutcome,
    check_replayable,
)
from agentic_opd.worlds.config import WorldConfig
from agentic_opd.worlds.custom import CustomWorld, HookedWorld, ToolError, tool

from .test_loop import ScriptedPolicy, call

TASK = Task("sum", "Count to three.", "3")
BROKEN = '<tool_call>\n{"name": "add", "arguments": {\n</tool_call>'
LINES = (
    call("add", number=1),
    call("add", number=5) + "\n" + call("add", number=-4) + "\n" + call("show"),
    BROKEN,
    "Is it three?",
    call("add", number=1),
    "It is three.",
)
"""A turn of one call, one of three, a broken call, a question that the user answers, and the end."""


class Counting(CustomWorld):
    """A number that calls add to; a user who says yes to the first answer."""

    system_prompt = "Count."

    def __init__(self) -> None:
        self.clock = count()
        self.sandbox_works = True
        self.dies_at: int | None = None
        """The call of `add` that ends the sandbox, counted over all sessions."""
        self.raises = False

    def tasks(self) -> Sequence[Task]:
        return [TASK]

    def start(self, task: Task) -> dict[str, int]:
        return {"number": 0, "replies": 0}

    @tool
    def add(self, state: dict[str, int], number: int) -> str:
        """Add.

        Args:
            number: What to add.
        """
        if next(self.clock) == self.dies_at:
            raise SandboxError("the sandbox was killed")
        if self.raises:
            raise ValueError("hook")
        if number > 9:
            raise ToolError("too large")
        state["number"] += number
        return f"The number is {state['number']}."

    @tool
    def show(self, state: dict[str, int]) -> str:
        """Show the number."""
        return str(state["number"])

    @tool
    def time(self, state: dict[str, int]) -> str:
        """Return a time."""
        return f"{'It is late. ' * 20}{next(self.clock)} s"

    def user_reply(self, task: Task, state: dict[str, int], messages: Sequence[Message]) -> str | None:
        state["replies"] += 1
        return f"Reply {state['replies']}: go on." if state["replies"] == 1 else None

    def verify(self, task: Task, state: dict[str, int]) -> tuple[float, str]:
        return float(state["number"] == 3), f"The number is {state['number']}."


class Timeless(Counting):
    def comparable(self, text: str) -> str:
        return text.rpartition(" late. ")[0]


class Mortal(HookedWorld):
    """Its check works as its hooks say, so that a sandbox can be said to work nowhere."""

    async def check(self) -> None:
        if not self.hooks.sandbox_works:  # type: ignore[attr-defined]
            raise SandboxError("no sandbox works here")


class ReadingPolicy(ScriptedPolicy):
    """Keeps the prompts and the limits."""

    def __init__(self, tokenizer: Any, *lines: str | Exception) -> None:
        super().__init__(tokenizer, *lines)
        self.prompts: list[list[int]] = []
        self.limits: list[int] = []

    async def sample(self, prompt_ids: Sequence[int], max_tokens: int) -> Completion:
        self.prompts.append([*prompt_ids])
        self.limits.append(max_tokens)
        return await super().sample(prompt_ids, max_tokens)


class Scene:
    """A world, and episodes recorded and replayed in it."""

    def __init__(self, tokenizer: Any, hooks: Counting | None = None, *, thinks: bool = False, **limits: Any) -> None:
        self.tokenizer, self.hooks = tokenizer, hooks or Counting()
        self.world = Mortal(self.hooks, WorldConfig())
        renderer = load_renderer(tokenizer, "qwen3", {} if thinks else {"enable_thinking": False})
        self.chat = ChatFormat(renderer, tokenizer, self.world.tools)
        self.config = RolloutConfig(**limits)
        self.replay = EpisodeReplay(self.world, self.chat, self.config)

    def recorded(self, *lines: str) -> Episode:
        policy = ReadingPolicy(self.tokenizer, *lines)
        return asyncio.run(run_episode(TASK, policy, self.world, self.chat, self.config))

    def continued(self, episode: Episode, turn_index: int, policy: ReadingPolicy, **options: Any) -> Continuation:
        return asyncio.run(self.replay.continued(episode.recording, turn_index, policy, **options))


def prompt_of(episode: Episode, turn_index: int) -> list[int]:
    trace, turn = [(trace, turn) for trace in episode.traces for turn in trace.turns][turn_index]
    return [*trace.tokens_T[: turn.start]]


@pytest.mark.parametrize("turn_index", range(len(LINES)))
def test_who_says_the_same_from_a_turn_on_has_the_recorded_episode(tokenizer: Any, turn_index: int) -> None:
    scene = Scene(tokenizer)
    episode = scene.recorded(*LINES)
    assert (episode.tool_calls, episode.tool_errors, episode.broken_turns, episode.stop_reason) == (
        6,
        1,
        1,
        StopReason.FINISHED,
    )
    policy = ReadingPolicy(tokenizer, *LINES[turn_index:])
    continuation = scene.continued(episode, turn_index, policy)
    assert (continuation.outcome, continuation.episode) == (ReplayOutcome.PLAYED, episode)
    assert continuation.reward == episode.reward.total > 0.7  # type: ignore[union-attr]
    assert policy.prompts == [prompt_of(episode, index) for index in range(turn_index, len(LINES))]
    assert continuation.sampled_tokens == sum(turn.end - turn.start for turn in episode.turns[turn_index:])
    assert continuation.weight_version == 4


def test_another_turn_has_another_end(tokenizer: Any) -> None:
    scene = Scene(tokenizer)
    episode = scene.recorded(*LINES)
    continuation = scene.continued(episode, 4, ReadingPolicy(tokenizer, call("show"), "Two."))
    assert [message["content"] for message in continuation.episode.messages[-2:]] == ["2", "Two."]  # type: ignore[union-attr]
    assert continuation.verification.report == "The number is 2."  # type: ignore[union-attr]
    assert continuation.reward == 0.0


def test_the_hint_is_in_the_prompt_of_its_turn_alone(tokenizer: Any) -> None:
    scene = Scene(tokenizer)
    episode = scene.recorded(*LINES)
    turn = episode.turns[4]
    hint = HintInsertion(turn.assistant_open, tuple(tokenizer.encode("Add one.")))
    policy = ReadingPolicy(tokenizer, *LINES[4:])
    continuation = scene.continued(episode, 4, policy, hint=hint)
    plain = prompt_of(episode, 4)
    assert policy.prompts[0] == [*plain[: turn.assistant_open], *hint.token_ids, *plain[turn.assistant_open :]]
    assert policy.prompts[1] == prompt_of(episode, 5)
    assert (continuation.episode, continuation.hint) == (episode, hint)


def test_both_of_a_pair_have_the_same_token_limit(tokenizer: Any) -> None:
    scene = Scene(tokenizer)
    episode = scene.recorded(*LINES)
    start = episode.turns[1].start
    hint = HintInsertion(start, (5,) * 7)
    limits: list[list[int]] = []
    scene.replay = replace(scene.replay, context=start + 107)
    for options in ({"hint": hint}, {"hint": hint, "is_hinted": False}, {}):
        policy = ReadingPolicy(tokenizer, "Done.", "Done.")
        assert scene.continued(episode, 1, policy, **options).hint == (hint if len(limits) == 0 else None)
        limits.append(policy.limits[:1])
    assert limits == [[100], [100], [107]]
    full = replace(scene.replay, context=start + 7)
    refused = asyncio.run(full.continued(episode.recording, 1, ReadingPolicy(tokenizer), hint))
    assert (refused.outcome, refused.episode) == (ReplayOutcome.NO_ROOM, None)
    with pytest.raises(AlignmentError, match="to be inserted at 9999 of a prompt"):
        scene.continued(episode, 1, ReadingPolicy(tokenizer), hint=HintInsertion(9999, (5,)))


def test_a_result_that_a_clock_is_in_ends_the_replay_with_turn_call_and_texts(tokenizer: Any) -> None:
    scene = Scene(tokenizer)
    episode = scene.recorded(call("add", number=3), call("show") + "\n" + call("time"), "Done.", "Done.")
    policy = ReadingPolicy(tokenizer)
    continuation = scene.continued(episode, 2, policy)
    error = continuation.error
    assert (continuation.outcome, continuation.episode, continuation.reward, policy.prompts) == (
        ReplayOutcome.DIVERGED,
        None,
        None,
        [],
    )
    assert isinstance(error, ReplayDivergedError)
    assert (error.turn_index, error.call) == (1, 1)
    assert (error.recorded, error.replayed) == ("...s late. It is late. 1 s", "...s late. It is late. 3 s")
    assert str(error).startswith(
        "turn 1: the result of call 1 differs: recorded '...s late. It is late. 1 s', replayed"
    )
    assert scene.continued(episode, 1, ReadingPolicy(tokenizer, "Done.", "Done.")).outcome is ReplayOutcome.PLAYED
    compared = asyncio.run(scene.replay.compared(episode.recording))
    assert (compared.equal, compared.total) == (1, 3)
    assert isinstance(compared.error, ReplayDivergedError)


def test_what_a_world_declares_to_differ_is_not_compared(tokenizer: Any) -> None:
    scene = Scene(tokenizer, Timeless())
    episode = scene.recorded(call("time"), "Done.", "Done.")
    policy = ReadingPolicy(tokenizer, "Done.", "Done.")
    continuation = scene.continued(episode, 1, policy)
    assert (continuation.outcome, continuation.episode) == (ReplayOutcome.PLAYED, episode)
    assert policy.prompts == [prompt_of(episode, 1), prompt_of(episode, 2)]


def test_another_reply_of_the_user_is_a_divergence_without_a_call(tokenizer: Any) -> None:
    scene = Scene(tokenizer)
    episode = scene.recorded("Done?", "Done.")
    scene.hooks.user_reply = lambda task, state, messages: None  # type: ignore[method-assign]
    error = scene.continued(episode, 1, ReadingPolicy(tokenizer)).error
    assert isinstance(error, ReplayDivergedError)
    assert (error.turn_index, error.call, error.recorded, error.replayed) == (0, None, "Reply 1: go on.", None)


def test_a_sandbox_that_dies_in_the_replay_is_an_outcome_where_others_work(tokenizer: Any) -> None:
    scene = Scene(tokenizer)
    episode = scene.recorded(call("add", number=1), call("add", number=2), "Done.", "Done.")
    scene.hooks.dies_at = 3
    continuation = scene.continued(episode, 2, ReadingPolicy(tokenizer))
    assert (continuation.outcome, str(continuation.error)) == (
        ReplayOutcome.SANDBOX_FAILED,
        "the sandbox ended early: the sandbox was killed",
    )
    scene.hooks.dies_at, scene.hooks.sandbox_works = 4, False
    with pytest.raises(SandboxError, match="no sandbox works here"):
        scene.continued(episode, 2, ReadingPolicy(tokenizer))


def test_a_sandbox_that_the_policy_kills_afterwards_is_an_episode_without_reward(tokenizer: Any) -> None:
    scene = Scene(tokenizer)
    episode = scene.recorded(call("add", number=1), "Done.", "Done.")
    scene.hooks.dies_at = 2
    continuation = scene.continued(episode, 1, ReadingPolicy(tokenizer, call("add", number=1)))
    assert (continuation.outcome, continuation.reward) == (ReplayOutcome.PLAYED, 0.0)
    assert continuation.episode.stop_reason is StopReason.SANDBOX_DIED  # type: ignore[union-attr]


@pytest.mark.parametrize("turn_index", [0, 1])
def test_a_hook_that_raises_is_an_outcome(tokenizer: Any, turn_index: int) -> None:
    scene = Scene(tokenizer)
    episode = scene.recorded(call("add", number=1), "Done.", "Done.")
    scene.hooks.raises = True
    continuation = scene.continued(episode, turn_index, ReadingPolicy(tokenizer, call("add", number=1)))
    assert continuation.outcome is ReplayOutcome.WORLD_FAILED
    assert "add raised ValueError: hook" in str(continuation.error)


def test_a_dead_server_is_raised(tokenizer: Any) -> None:
    scene = Scene(tokenizer)
    episode = scene.recorded(call("add", number=1), "Done.", "Done.")
    with pytest.raises(ServerUnreachableError, match="gone"):
        scene.continued(episode, 1, ReadingPolicy(tokenizer, ServerUnreachableError("gone")))


def test_limits_count_the_recorded_turns(tokenizer: Any) -> None:
    scene = Scene(tokenizer, max_turns=3)
    episode = scene.recorded(call("add", number=1), call("add", number=1), call("add", number=1))
    assert episode.stop_reason is StopReason.MAX_TURNS
    continuation = scene.continued(episode, 1, ReadingPolicy(tokenizer, call("show"), call("show"), "Never."))
    assert len(continuation.episode.turns) == 3  # type: ignore[union-attr]
    assert continuation.episode.stop_reason is StopReason.MAX_TURNS  # type: ignore[union-attr]
    shorter = Scene(tokenizer, max_turns=2)
    refused = shorter.continued(episode, 2, ReadingPolicy(tokenizer))
    assert refused.outcome is ReplayOutcome.UNREADABLE
    assert "turn 2 is beyond env.max_turns 2" in str(refused.error)
    compared = asyncio.run(scene.replay.compared(episode.recording))
    assert (compared.equal, compared.total, compared.error) == (3, 3, None)


def test_a_turn_that_was_cut_off_is_cut_off_again(tokenizer: Any) -> None:
    scene = Scene(tokenizer, max_tokens_per_turn=16)
    episode = scene.recorded("word " * 40, "Done.", "Done.")
    assert "cut off after 16 tokens" in episode.messages[3]["content"]
    assert scene.continued(episode, 1, ReadingPolicy(tokenizer, "Done.", "Done.")).episode == episode


def test_a_turn_that_is_read_as_another_message_is_refused(tokenizer: Any) -> None:
    scene = Scene(tokenizer)
    episode = scene.recorded(call("add", number=1), "Done.", "Done.")
    (trace,) = episode.traces
    messages = [*trace.messages]
    messages[2] = {**messages[2], "content": "x"}
    changed = replace(episode, traces=(replace(trace, messages=tuple(messages)),))
    refused = scene.continued(changed, 1, ReadingPolicy(tokenizer))
    assert refused.outcome is ReplayOutcome.UNREADABLE
    assert "turn 0 are read as another message" in str(refused.error)


def test_an_episode_of_several_sequences_is_replayed_in_each(tokenizer: Any) -> None:
    """The template drops the reasoning before a user's message, so that the turns after it are another sequence."""
    scene = Scene(tokenizer, thinks=True)
    lines = (
        "<think>\nOne.\n</think>\n\n" + call("add", number=2),
        "<think>\nTwo.\n</think>\n\nIs it this?",
        "<think>\nThree.\n</think>\n\n" + call("add", number=1),
        "<think>\nFour.\n</think>\n\nThree.",
    )
    episode = scene.recorded(*lines)
    assert [len(trace.turns) for trace in episode.traces] == [2, 2]
    for turn_index in range(4):
        policy = ReadingPolicy(tokenizer, *lines[turn_index:])
        assert scene.continued(episode, turn_index, policy).episode == episode
        assert policy.prompts == [prompt_of(episode, index) for index in range(turn_index, 4)]


def test_what_can_not_be_replayed_is_refused_by_name(tokenizer: Any) -> None:
    scene = Scene(tokenizer)
    check_replayable(scene.world, "counting", scene.config)
    program = RolloutConfig(agent=AgentConfig(command="agent"))
    with pytest.raises(NotReplayableError, match=r"env\.agent\.command: a program holds the conversations"):
        check_replayable(scene.world, "counting", program)

    class Shared(Counting):
        replayable = False

    for world in (HookedWorld(Shared(), WorldConfig()), object()):
        with pytest.raises(NotReplayableError, match=r"env\.world shared: its episodes can't be replayed"):
            check_replayable(world, "shared", scene.config)  # type: ignore[arg-type]


def test_a_recording_without_a_task_is_refused(tokenizer: Any) -> None:
    scene = Scene(tokenizer)
    recording = replace(scene.recorded("Done.", "Done.").recording, task=None)
    continuation = asyncio.run(scene.replay.continued(recording, 0, ReadingPolicy(tokenizer)))
    assert continuation.outcome is ReplayOutcome.TASK_MISSING
