"""A rollout whose chat template rewrites earlier messages: several sequences, one rollout.

prompts    u        u R1 u      u R1 u R2 u     R: what the template keeps of a turn
turns        T1            T2               T3
"""

import asyncio
import json
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from agentic_opd.atropos.outbox import parts
from agentic_opd.core.types import (
    IGNORED,
    Episode,
    Message,
    Reward,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    Trace,
    Verification,
    VerifyOutcome,
)
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.config import RolloutConfig
from agentic_opd.rollout.conversation import Conversation
from agentic_opd.rollout.loop import AgentLoop
from agentic_opd.rollout.renderer import check_round_trip, load_renderer
from agentic_opd.training.advantages import group_advantages
from agentic_opd.training.batch import make_batch
from agentic_opd.wire.checks import GroupChecker
from agentic_opd.wire.counts import RunCounts
from agentic_opd.wire.group import ScoredGroup, ScoredRollout
from agentic_opd.worlds.coding.tools import TOOL_SPECS

from .test_loop import ScriptedPolicy, call

START: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "Write f."}]
TASK = Task("t", "Write f.", "assert True")


class Replies:
    """A place whose tool says ok, and whose user answers each turn without calls but the policy's last."""

    def __init__(self, policy: ScriptedPolicy) -> None:
        self.policy = policy

    async def run_tool(self, call: ToolCall) -> ToolResult:
        return ToolResult("ok", is_change=True)

    async def is_over(self, messages: Any) -> bool:
        return False

    async def user_reply(self, messages: Any) -> str | None:
        return "Yes." if self.policy.lines else None

    async def collect(self, messages: Any = ()) -> Any:
        return None


def thought(reasoning: str, text: str) -> str:
    return f"<think>\n{reasoning}\n</think>\n\n{text}"


LINES = (
    thought("One.", "Looking." + call("terminal", command="ls")),
    thought("Two.", "Is it this?"),
    thought("Three.", "And this?"),
    thought("Four.", "Done."),
)
"""The first two are one sequence, for a tool answers the first; a user answers the others."""


def rolled_out(tokenizer: Any, *lines: str, reward: float = 0.5) -> Episode:
    chat = ChatFormat(load_renderer(tokenizer, "qwen3", {}), tokenizer, TOOL_SPECS)
    policy = ScriptedPolicy(tokenizer, *lines)
    session: Any = Replies(policy)
    episode = asyncio.run(AgentLoop(TASK, Conversation(chat, START), session, RolloutConfig(max_turns=9)).run(policy))
    verdict = Verification(VerifyOutcome.RAN, 1, 2, "", "")
    return replace(episode, verification=verdict, reward=Reward(0.5, 0.0, 0.0, reward))


def sampled_text(tokenizer: Any, rollout: ScoredRollout | Trace) -> str:
    return tokenizer.decode([token for token in rollout.masks_T if token != IGNORED])


def group_of(*episodes: Episode) -> ScoredGroup:
    return ScoredGroup(
        tuple(
            ScoredRollout.of(episode, trace, include_messages=True, session_id=str(number))
            for number, episode in enumerate(episodes)
            for trace in episode.traces
        ),
        item_id="t#0",
        task_id="t",
        group_id="g",
    )


def test_a_user_of_a_model_that_thinks_makes_branches_and_a_tool_does_not(tokenizer: Any) -> None:
    episode = rolled_out(tokenizer, *LINES)
    assert episode.stop_reason is StopReason.FINISHED
    first, second, third = episode.traces
    assert [len(trace.turns) for trace in episode.traces] == [2, 1, 1]
    assert sampled_text(tokenizer, first) == f"{LINES[0]}<|im_end|>{LINES[1]}<|im_end|>"
    assert sampled_text(tokenizer, second) == f"{LINES[2]}<|im_end|>"
    assert sampled_text(tokenizer, third) == f"{LINES[3]}<|im_end|>"
    assert "One." not in tokenizer.decode(second.tokens_T), "as the template writes it at inference"
    assert [message["content"] for message in first.messages[-2:]] == ["Is it this?", "Yes."]
    assert third.messages == episode.messages == second.messages + third.messages[len(second.messages) :]
    assert [(one.message_index, one.why) for one in second.context_turns] == [(2, "shared"), (4, "shared")]
    assert episode.changes == (frozenset({0}), *(frozenset(),) * 3)


def test_a_rollout_without_reasoning_is_one_sequence(tokenizer: Any) -> None:
    episode = rolled_out(tokenizer, "Is it this?", "Done.")
    assert len(episode.traces) == 1


def test_an_episode_that_ends_before_its_next_turn_keeps_the_sequence_before(tokenizer: Any) -> None:
    chat = ChatFormat(load_renderer(tokenizer, "qwen3", {}), tokenizer, TOOL_SPECS)
    conversation = Conversation(chat, START)
    policy = ScriptedPolicy(tokenizer, LINES[1])
    conversation.add(asyncio.run(policy.sample(conversation.prompt(), 999)))
    conversation.answer([{"role": "user", "content": "Yes."}])
    conversation.branching_prompt()
    assert [trace.tokens_T[-1] for trace in conversation.traces()] == [chat.stop_token_ids[0]]


def test_each_rollout_counts_once_and_its_reward_reaches_every_turn(tokenizer: Any) -> None:
    """Three sequences of a rollout with 1, two single ones with 0: the mean is 1/3, not 3/5."""
    long, *short = rolled_out(tokenizer, *LINES, reward=1.0), *(rolled_out(tokenizer, "Done.", reward=0.0),) * 2
    group = group_of(long, *short)
    wire = json.loads(json.dumps(group.to_wire()))
    assert GroupChecker().read(wire).problems == []
    assert ScoredGroup.from_wire(wire).to_wire() == wire
    counts = RunCounts()
    counts.add(group)
    assert (counts.total.rollouts, counts.total.score, counts.total.assistant_turns) == (3, 1.0, 6)
    batch = make_batch([group])
    advantages = group_advantages(
        batch.scores_B, batch.groups_B, batch.rewarded_B, compared_BS=batch.compared_BS, divide_by_std=False
    )
    assert advantages.tolist() == pytest.approx([2 / 3] * 3 + [-1 / 3] * 2)


def test_the_items_of_the_api_are_compared_with_all_rollouts(tokenizer: Any) -> None:
    """Of each rollout one sequence goes in the group's item, the other branches go alone; all know all scores."""
    group = group_of(rolled_out(tokenizer, *LINES, reward=1.0), rolled_out(tokenizer, "Done.", reward=0.0))
    items = list(parts(group, 2))
    assert [(item.group_id, len(item.rollouts)) for item in items] == [("g/0", 2), ("g/1", 1), ("g/2", 1)]
    assert [item.rollout_scores for item in items] == [(1.0, 0.0)] * 3
    every = [sampled_text(tokenizer, one) for item in items for one in item.rollouts]
    assert sorted(every) == sorted(sampled_text(tokenizer, one) for one in group.rollouts), "each token once"
    for item in items:
        read = ScoredGroup.from_wire(json.loads(json.dumps(item.to_wire())))
        batch = make_batch([read])
        advantages = group_advantages(batch.scores_B, batch.groups_B, compared_BS=batch.compared_BS)
        assert torch.allclose(advantages, batch.scores_B * 2 - 1, atol=1e-3)


def test_a_group_whose_scores_lack_a_sequence_is_refused(tokenizer: Any) -> None:
    group = replace(group_of(rolled_out(tokenizer, "Done.", reward=0.25)), rollout_scores=(1.0, 0.0))
    (problem,) = GroupChecker().read(group.to_wire()).problems
    assert "rollout_scores" in problem.message


MOVING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if tools and loop.index0 == ns.last %}<tools>{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}\n'
    "</tool_call>"
    "{% if c.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Mistral's: tools stand before the last user message, so they move; ids of calls have nine characters."""


def test_a_template_that_moves_its_tools_makes_branches_too(tokenizer: Any) -> None:
    moving = copy(tokenizer)
    moving.chat_template = MOVING
    chat = ChatFormat(load_renderer(moving, "default", {"tool_parser": "hermes"}), moving, TOOL_SPECS)
    check_round_trip(chat)
    policy = ScriptedPolicy(moving, call("terminal", command="ls"), "Is it this?", "Done.")
    session: Any = Replies(policy)
    episode = asyncio.run(AgentLoop(TASK, Conversation(chat, START), session, RolloutConfig()).run(policy))
    assert [len(trace.turns) for trace in episode.traces] == [2, 1]
    first, second = ("".join(moving.decode(trace.tokens_T).split()) for trace in episode.traces)
    assert first.index("<tools>") < first.index("Writef.")
    assert second.index("<tools>") > second.index("Writef.")
    assert second.count("Isitthis?") == 1
