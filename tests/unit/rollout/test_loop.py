"""The loop with a scripted policy, the real tools and a real sandbox."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from agentic_opd.core.errors import ServerUnreachableError
from agentic_opd.core.types import Episode, Message, StopReason, Task, Turn
from agentic_opd.rollout.chat import Chat, Prompt, TokenRecord
from agentic_opd.rollout.loop import AgentLoop, LoopLimits, Sample
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.worlds.coding.config import CodingConfig
from agentic_opd.worlds.coding.tools import TOOL_SPECS
from agentic_opd.worlds.coding.world import CodingWorld

TASK = Task("t", "Write f.", "assert True")


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


class ScriptedPolicy:
    """Says its lines in order, through the real chat; an exception among them is raised in its place."""

    def __init__(self, tokenizer: Any, *lines: str | Exception) -> None:
        self.chat = Chat(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer, TOOL_SPECS)
        self.lines = list(lines)
        self.record = TokenRecord()
        self.last: tuple[Prompt, list[int], list[Message]] | None = None

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        if self.last is None:
            return self.chat.first_prompt(messages)
        prompt, ids, history = self.last
        return self.chat.next_prompt(prompt, ids, history, messages[len(history) :])

    async def sample(self, messages: Sequence[Message], prompt: Prompt, max_tokens: int) -> Sample:
        line = self.lines.pop(0)
        if isinstance(line, Exception):
            raise line
        ids = self.chat.tokenizer.encode(line + "<|im_end|>", add_special_tokens=False)
        truncated = len(ids) > max_tokens
        ids = ids[:max_tokens]
        start = len(prompt.token_ids)
        turn = Turn(start, start + len(ids), prompt.assistant_open, prompt.last_user_end, len(messages), truncated)
        parsed = self.chat.parse(prompt, ids, len(messages))
        self.record = self.record.with_turn(prompt, ids, [-0.5] * len(ids))
        self.last = (prompt, ids, [*messages, parsed.message])
        return Sample(parsed.message, parsed.tool_calls, turn, self.record)


def run(
    policy: ScriptedPolicy, *, max_turns: int = 5, room: int = 8192, per_turn: int = 1024, **kwargs: Any
) -> Episode:
    async def episode() -> Episode:
        async with CodingWorld(CodingConfig()).session(TASK) as session:
            limits = LoopLimits(max_turns, room, per_turn)
            return await AgentLoop(TASK, "You are an agent.", policy, session, limits, **kwargs).run()

    return asyncio.run(episode())


def test_parallel_calls_run_in_order_and_a_plain_answer_finishes(tokenizer: Any) -> None:
    both = call("write_file", path="a.txt", content="hi\n") + "\n" + call("terminal", command="cat a.txt")
    episode = run(ScriptedPolicy(tokenizer, both, "Done."))
    assert episode.stop_reason is StopReason.FINISHED
    assert [m["role"] for m in episode.messages] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert [m["content"] for m in episode.messages if m["role"] == "tool"] == ["wrote 1 lines to a.txt", "hi"]
    assert [turn.message_index for turn in episode.turns] == [2, 5]
    assert (episode.tool_calls, episode.tool_errors) == (2, 0)
    assert tokenizer.decode(episode.tokens_T[episode.turns[1].start :]) == "Done.<|im_end|>"


def test_every_mistake_comes_back_as_a_result(tokenizer: Any) -> None:
    broken = "<tool_call>\n{oops\n</tool_call>"
    episode = run(ScriptedPolicy(tokenizer, call("grep", x="1") + "\n" + broken, call("write_file", path="a"), "Done."))
    results = [m["content"] for m in episode.messages if m["role"] == "tool"]
    assert [result.split(":")[0] for result in results] == ["Error"] * 3
    assert "unknown tool 'grep'" in results[0]
    assert "not valid JSON" in results[1]
    assert "needs 'content'" in results[2]
    assert (episode.tool_calls, episode.tool_errors) == (3, 3)


def test_max_turns_ends_with_the_tools_answers(tokenizer: Any) -> None:
    episode = run(ScriptedPolicy(tokenizer, *[call("terminal", command="echo 1")] * 3), max_turns=2)
    assert episode.stop_reason is StopReason.MAX_TURNS
    assert len(episode.turns) == 2
    assert episode.messages[-1]["role"] == "tool"
    assert len(episode.tokens_T) == episode.turns[-1].end


def test_a_full_context_ends_before_or_within_a_turn(tokenizer: Any) -> None:
    first = call("terminal", command="echo 1")
    policy = ScriptedPolicy(tokenizer, first, "x " * 500)
    used = run(ScriptedPolicy(tokenizer, first, "Done.")).turns[0].end
    within = run(policy, room=used + 200)
    assert within.stop_reason is StopReason.CONTEXT_FULL
    assert (len(within.turns), len(within.tokens_T)) == (2, used + 200)
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
