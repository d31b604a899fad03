"""The loop with a scripted policy, the real tools and a real sandbox."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentic_opd.core.errors import RendererError, SandboxError, ServerUnreachableError
from agentic_opd.core.types import (
    Episode,
    Message,
    NoVerdict,
    Recording,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    Verification,
    VerifyOutcome,
)
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.config import RolloutConfig
from agentic_opd.rollout.conversation import Completion, Conversation
from agentic_opd.rollout.loop import AgentLoop, first_messages, run_episode
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.worlds.coding.tools import TOOL_SPECS
from agentic_opd.worlds.coding.world import CodingSession, CodingWorld
from agentic_opd.worlds.config import WorldConfig

TASK = Task("t", "Write f.", "assert True")


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


class ScriptedPolicy:
    """Says its lines in order; an exception among them is raised in its place."""

    def __init__(self, tokenizer: Any, *lines: str | Exception) -> None:
        self.tokenizer = tokenizer
        self.lines = list(lines)

    async def sample(self, prompt_ids: Sequence[int], max_tokens: int) -> Completion:
        line = self.lines.pop(0)
        if isinstance(line, Exception):
            raise line
        ids = self.tokenizer.encode(line + "<|im_end|>", add_special_tokens=False)
        kept = tuple(ids[:max_tokens])
        return Completion(kept, (-0.5,) * len(kept), "length" if len(ids) > max_tokens else "stop", weight_version=4)


class BrokenRenderer:
    """Does as its renderer does, until a tool says the word that its template chokes on."""

    def __init__(self, renderer: Any) -> None:
        self.renderer = renderer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.renderer, name)

    def bridge_to_next_turn(self, prompt: Any, completion: Any, new: list[Message], **kwargs: Any) -> Any:
        if any("choke" in message["content"] for message in new):
            raise KeyError("no such role")
        return self.renderer.bridge_to_next_turn(prompt, completion, new, **kwargs)

    def render(self, messages: list[Message], **kwargs: Any) -> Any:
        if any("choke" in message["content"] for message in messages):
            raise KeyError("no such role")
        return self.renderer.render(messages, **kwargs)

    def parse_response(self, ids: list[int], **kwargs: Any) -> Any:
        parsed = self.renderer.parse_response(ids, **kwargs)
        if "garbled" in parsed.content:
            raise ValueError("odd channel")
        return parsed


def run(
    policy: ScriptedPolicy,
    *,
    max_turns: int = 5,
    room: int = 8192,
    per_turn: int = 1024,
    user_reply: Any = None,
    on_answered: Any = None,
    task: Task = TASK,
) -> Episode:
    renderer: Any = BrokenRenderer(load_renderer(policy.tokenizer, "qwen3", {"enable_thinking": False}))
    config = RolloutConfig(max_turns=max_turns, max_token_length=room, max_tokens_per_turn=per_turn)
    world = CodingWorld(WorldConfig())

    async def episode() -> Episode:
        async with world.session(task) as session:
            conversation = Conversation(ChatFormat(renderer, policy.tokenizer, TOOL_SPECS), first_messages(world, task))
            return await AgentLoop(task, conversation, session, config, user_reply, on_answered).run(policy)

    return asyncio.run(episode())


def test_parallel_calls_run_in_order_and_a_plain_answer_finishes(tokenizer: Any) -> None:
    both = call("write_file", path="a.txt", content="hi\n") + "\n" + call("terminal", command="cat a.txt")
    episode = run(ScriptedPolicy(tokenizer, both, "Done."))
    assert episode.stop_reason is StopReason.FINISHED
    assert [m["role"] for m in episode.messages] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert [m["content"] for m in episode.messages if m["role"] == "tool"] == ["wrote 1 lines to a.txt", "hi"]
    assert [turn.message_index for turn in episode.turns] == [2, 5]
    assert (episode.tool_calls, episode.tool_errors, episode.weight_version) == (2, 0, 4)
    assert tokenizer.decode(episode.traces[0].tokens_T[episode.turns[1].start :]) == "Done.<|im_end|>"


def test_who_listens_is_told_of_each_answered_turn_before_the_next_is_sampled(tokenizer: Any) -> None:
    policy = ScriptedPolicy(tokenizer, call("terminal", command="echo 1"), call("terminal", command="echo 2"), "Done.")
    told: list[tuple[int, int, str]] = []

    def on_answered(recording: Recording, index: int) -> None:
        told.append((index, len(policy.lines), recording.messages[-1]["content"]))

    episode = run(policy, on_answered=on_answered)
    assert told == [(0, 2, "1"), (1, 1, "2")]
    assert len(episode.turns) == 3


def test_every_mistake_comes_back_as_a_result(tokenizer: Any) -> None:
    broken = "<tool_call>\n{oops\n</tool_call>"
    episode = run(ScriptedPolicy(tokenizer, call("grep", x="1") + "\n" + broken, call("write_file", path="a"), "Done."))
    results = [m["content"] for m in episode.messages if m["role"] == "tool"]
    assert [result.split(":")[0] for result in results] == ["Error"] * 3
    assert "the name must be one of" in results[0]
    assert "not valid JSON" in results[1]
    assert "needs 'content'" in results[2]
    assert (episode.tool_calls, episode.tool_errors, episode.broken_turns) == (3, 3, 2)


@pytest.mark.parametrize(
    "said",
    [
        r'{"name": "write_file", "arguments": {"path": "a", "content": "# \ud83d"}}',
        r'{"name": "terminal", "arguments": {"command": "echo \udc80"}}',
        r'{"name": "r\udfffm", "arguments": {"x\ud83d": [["\ud83d"]]}}',
        r'{"name": "terminal", "arguments": "\ud83d"}',
    ],
)
def test_half_a_surrogate_pair_ends_no_episode(tokenizer: Any, said: str) -> None:
    """Neither in the turn itself, nor in its result, nor in what a user says to it; the sampled ids stay."""

    async def user_reply(task: Task, messages: Sequence[Message]) -> str | None:
        return "and \udc80?" if len(messages) == 5 else None

    policy = ScriptedPolicy(tokenizer, f"<tool_call>\n{said}\n</tool_call>", "Done.", "Yes.")
    episode = run(policy, user_reply=user_reply)
    assert (episode.stop_reason, len(episode.turns)) == (StopReason.FINISHED, 3)
    assert json.dumps(episode.messages, ensure_ascii=False).encode()
    assert episode.messages[-2]["content"] == "and \ufffd?"
    assert said in tokenizer.decode(episode.traces[0].tokens_T)


def test_max_turns_ends_with_the_tools_answers(tokenizer: Any) -> None:
    episode = run(ScriptedPolicy(tokenizer, *[call("terminal", command="echo 1")] * 3), max_turns=2)
    assert episode.stop_reason is StopReason.MAX_TURNS
    assert len(episode.turns) == 2
    assert episode.messages[-1]["role"] == "tool"
    assert len(episode.traces[0].tokens_T) == episode.turns[-1].end


def test_a_full_context_ends_before_or_within_a_turn(tokenizer: Any) -> None:
    first = call("terminal", command="echo 1")
    policy = ScriptedPolicy(tokenizer, first, "x " * 500)
    used = run(ScriptedPolicy(tokenizer, first, "Done.")).turns[0].end
    within = run(policy, room=used + 200)
    assert within.stop_reason is StopReason.CONTEXT_FULL
    assert (len(within.turns), len(within.traces[0].tokens_T)) == (2, used + 200)
    assert within.turns[-1].truncated
    before = run(ScriptedPolicy(tokenizer, first, "Done."), room=used + 1)
    assert before.stop_reason is StopReason.CONTEXT_FULL
    assert len(before.turns) == 1


def test_a_turn_cut_off_is_told_to_go_on(tokenizer: Any) -> None:
    episode = run(ScriptedPolicy(tokenizer, "x " * 200, "Done."), per_turn=20)
    assert episode.turns[0].truncated
    assert episode.messages[3] == {
        "role": "user",
        "content": "Your message was cut off after 20 tokens. Continue in smaller steps.",
    }
    assert episode.stop_reason is StopReason.FINISHED


def test_a_user_may_reply(tokenizer: Any) -> None:
    async def reply(task: Task, messages: Sequence[Message]) -> str | None:
        return "Are you sure?" if len(messages) == 3 else None

    episode = run(ScriptedPolicy(tokenizer, "Done.", "Yes."), user_reply=reply)
    assert [m["content"] for m in episode.messages[2:]] == ["Done.", "Are you sure?", "Yes."]
    assert episode.turns[1].last_user_end > episode.turns[0].end


@pytest.mark.parametrize("turns_before", [0, 1])
def test_a_dead_server_is_an_episode_with_its_error(tokenizer: Any, turns_before: int) -> None:
    lines = [call("terminal", command="true")] * turns_before
    episode = run(ScriptedPolicy(tokenizer, *lines, ServerUnreachableError("gone")))
    assert episode.stop_reason is StopReason.SERVER_ERROR
    assert str(episode.error) == "gone"
    assert len(episode.turns) == turns_before


@pytest.mark.parametrize("second", ["garbled", call("terminal", command="echo choke")])
def test_a_renderer_that_fails_later_ends_the_episode_alone(tokenizer: Any, second: str) -> None:
    """Whether on parsing a turn or on rendering what answers it: what was sampled is kept."""
    episode = run(ScriptedPolicy(tokenizer, call("terminal", command="true"), second, "Done."))
    assert episode.stop_reason is StopReason.RENDER_ERROR
    assert episode.error is None
    assert len(episode.turns) == len(episode.changes) == 2
    assert len(episode.traces[0].tokens_T) == episode.turns[-1].end


def test_a_first_turn_that_can_not_be_parsed_is_an_episode_of_one_turn(tokenizer: Any) -> None:
    episode = run(ScriptedPolicy(tokenizer, "garbled"))
    assert episode.stop_reason is StopReason.RENDER_ERROR
    assert [message["content"] for message in episode.messages[2:]] == ["garbled"]
    assert len(episode.turns) == 1
    assert episode.traces[0].tokens_T[episode.turns[0].start : episode.turns[0].end]


def test_a_first_prompt_that_can_not_be_rendered_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(RendererError, match="rendering the first prompt failed: KeyError"):
        run(ScriptedPolicy(tokenizer), task=Task("t", "Do not choke.", "assert True"))


class MortalSession:
    """Does as its session does, until a call tells it to die."""

    def __init__(self, session: CodingSession, dies_when_left: bool) -> None:
        self.session, self.dies_when_left = session, dies_when_left

    async def run_tool(self, call: ToolCall) -> ToolResult:
        if "die" in str(call.arguments):
            raise SandboxError("it died")
        return await self.session.run_tool(call)

    async def is_over(self, messages: Sequence[Message]) -> bool:
        return False

    async def user_reply(self, messages: Sequence[Message]) -> str | None:
        return None

    async def collect(self, messages: Sequence[Message] = ()) -> Mapping[str, bytes]:
        if self.dies_when_left:
            raise SandboxError("it died")
        return await self.session.collect()


class MortalWorld(CodingWorld):
    """Sandboxes that die: while a call runs, while files are taken out, or while the tests run."""

    def __init__(self, where: str, *, is_broken: bool) -> None:
        super().__init__(WorldConfig())
        self.where, self.is_broken = where, is_broken

    @asynccontextmanager
    async def session(self, task: Task) -> AsyncGenerator[Any]:
        async with super().session(task) as session:
            yield MortalSession(session, self.where == "collect")

    async def verify(self, task: Task, left: Mapping[str, bytes] | None) -> Verification:
        if self.where == "verify" and left:
            raise SandboxError("it died")
        return await super().verify(task, left)

    async def check(self) -> None:
        if self.is_broken:
            raise SandboxError("nothing works here")


DYING_TASK = Task("t", "Write f.", "from solution import f\nassert f(1) == 1\nassert f(2) == 2\n")


def die(tokenizer: Any, where: str, *, is_broken: bool) -> Episode:
    solution = call("write_file", path="solution.py", content="def f(x): return x\n")
    last = call("terminal", command="die") if where == "run" else "Done."
    policy: Any = ScriptedPolicy(tokenizer, solution, last)
    chat = ChatFormat(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer, TOOL_SPECS)
    return asyncio.run(run_episode(DYING_TASK, policy, MortalWorld(where, is_broken=is_broken), chat, RolloutConfig()))


@pytest.mark.parametrize("where", ["run", "collect", "verify"])
def test_an_episode_whose_sandbox_died_earns_nothing_and_is_an_episode(tokenizer: Any, where: str) -> None:
    episode = die(tokenizer, where, is_broken=False)
    assert episode.stop_reason is StopReason.SANDBOX_DIED
    assert (episode.error, len(episode.turns)) == (None, 2)
    assert episode.reward is not None
    assert episode.verification is not None
    assert episode.reward.total == episode.reward.tool_usage == 0.0
    assert (episode.verification.passed, episode.verification.total) == (0, 2)
    assert "The sandbox ended early" in episode.verification.judge_report


class SilentWorld(CodingWorld):
    """Its tests never give a verdict."""

    async def verify(self, task: Task, left: Mapping[str, bytes] | None) -> Verification:
        text = "The tests did not end in time."
        return Verification(VerifyOutcome.NO_VERDICT, 0, 1, text, text, no_verdict=NoVerdict.TIMEOUT)


def test_an_episode_whose_tests_gave_no_verdict_has_no_reward(tokenizer: Any, caplog: Any) -> None:
    chat = ChatFormat(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer, TOOL_SPECS)
    policy, world = ScriptedPolicy(tokenizer, "Done."), SilentWorld(WorldConfig())
    episode = asyncio.run(run_episode(DYING_TASK, policy, world, chat, RolloutConfig()))
    assert (episode.no_verdict, episode.reward, episode.error) == (NoVerdict.TIMEOUT, None, None)
    assert episode.stop_reason is StopReason.FINISHED
    assert "gave no verdict: The tests did not end in time." in caplog.text


@pytest.mark.parametrize("where", ["run", "collect", "verify"])
def test_where_a_fresh_sandbox_does_not_work_nothing_is_rewarded(tokenizer: Any, where: str) -> None:
    with pytest.raises(SandboxError, match="nothing works here"):
        die(tokenizer, where, is_broken=True)
