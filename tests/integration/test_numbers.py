"""Every teacher row in a file equals a transformers forward pass over the ids that the file says the teacher read."""

import asyncio
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentic_opd.core.types import Message, Task
from agentic_opd.env.opd import AgenticOPDEnv
from agentic_opd.env.policy_server import PolicyServer
from agentic_opd.rollout.conversation import Completion
from agentic_opd.wire.group import TaskItem
from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks
from tests.support.scripted_judge import POSITIVE, judge_server

pytestmark = pytest.mark.vllm

TOLERANCE = 1e-3
Forward = Callable[[Sequence[int]], np.ndarray]
"""Ids [T] -> logprobs [T, V], row p about the token at p + 1."""

CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
WRITE = CALL.format("write_file", json.dumps({"path": "solution.py", "content": "# naïve 数 🙂\n"}, ensure_ascii=False))
LIST = CALL.format("terminal", '{"command": "echo é"}')

SCRIPTS: dict[str, list[str]] = {
    "only a tool call": [LIST, "Done."],
    "two identical turns": [LIST, LIST, "Done."],
    "parallel calls": ["Both.\n" + WRITE + "\n" + LIST, "Done."],
    "non-ASCII text": ["Voilà: 数 🙂 ŵ\n" + WRITE, "Ça y est."],
    "a user's reply": ["Done?", "Done."],
    "cut by max turns": [LIST] * 5,
}


def settings(url: str, judge: str, **more: Any) -> dict[str, Any]:
    return {
        "renderer": {"name": "qwen3", "options": {"enable_thinking": False}},
        "max_turns": 4,
        "max_token_length": 3072,
        "max_tokens_per_turn": 400,
        "judge": {"base_url": judge, "model_name": "judge"},
        **more,
    }


def make_env(server: Any, judge: str, **more: Any) -> AgenticOPDEnv:
    config, servers = AgenticOPDEnv.config_init()
    config = type(config)(**settings(server.base_url, judge, **more))
    servers[0].base_url, servers[0].model_name = f"{server.base_url}/v1", str(server.model)
    return AgenticOPDEnv(config, servers)


def check_rows(group: dict[str, Any], forward: Forward) -> int:
    """Compare every scored row with the forward pass; returns the number of turns checked."""
    checked = 0
    for i, tokens in enumerate(group["tokens"]):
        for turn in group["overrides"][i]["opd"]["turns"]:
            if turn["outcome"] != "scored":
                continue
            (start, end), at = turn["span"], turn["insert_at"]
            ids = tokens[:at] + turn["hint_token_ids"] + tokens[at:end]
            expected_RV = forward(ids)[-(end - start) - 1 : -1]
            for p, expected_V in zip(range(start, end), expected_RV, strict=True):
                row, got = group["distill_token_ids"][i][p], np.array(group["distill_logprobs"][i][p])
                assert row[0] == tokens[p]
                assert np.abs(got - expected_V[row]).max() < TOLERANCE, (turn["span"], p)
                # No token left out is more likely than one listed.
                left_out = np.delete(expected_V, row)
                assert len(row) == 1 or left_out.max() < got[1:].min() + TOLERANCE
            checked += 1
    return checked


@pytest.mark.parametrize(("placement", "group_size"), [("end", 2), pytest.param("last_user", 1, marks=pytest.mark.all)])
def test_real_rollouts(vllm_server: Any, forward: Forward, tmp_path: Path, placement: str, group_size: int) -> None:
    out = tmp_path / "groups.jsonl"
    with judge_server(lambda body: [POSITIVE] * body["n"]) as judge:
        env = make_env(
            *(vllm_server, judge),
            **{
                "total_steps": 4,
                "group_size": group_size,
                "hint": {"placement": placement},
                "data_path_to_save_groups": str(out),
            },
        )
        summary = asyncio.run(env.process_manager())
    assert summary.complete
    groups = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(groups) == 4
    assert sum(check_rows(group, forward) for group in groups) >= 4 * group_size
    for group in groups:
        assert group["group_overrides"]["opd"]["noise_floor"] < TOLERANCE


class ScriptedSampler:
    """Stands in for sampling alone: returns scripted texts, with the engine's own logprobs for them."""

    def __init__(self, env: AgenticOPDEnv, forward: Forward, lines: list[str]) -> None:
        self.env, self.forward, self.lines = env, forward, list(lines)
        self.prompts: list[list[int]] = []
        self.completions: list[list[int]] = []

    async def __call__(self, input_ids: Sequence[int]) -> list[Completion]:
        ids = self.env.tokenizer.encode(self.lines.pop(0) + "<|im_end|>", add_special_tokens=False)
        logprobs = self.forward([*input_ids, *ids])[len(input_ids) - 1 : -1]
        self.prompts.append([*input_ids])
        self.completions.append(ids)
        of_ids = (float(row[token]) for row, token in zip(logprobs, ids, strict=True))
        return [Completion(tuple(ids), tuple(of_ids))]


class ReplyingEnv(AgenticOPDEnv):
    async def user_reply(self, task: Task, messages: Sequence[Message]) -> str | None:
        return "Are you sure about é?" if messages[-1]["content"] == "Done?" else None


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        *((name, "end") for name in SCRIPTS),
        ("parallel calls", "last_user"),
        ("a user's reply", "last_user"),
        *(
            pytest.param(name, "last_user", marks=pytest.mark.all)
            for name in SCRIPTS
            if name not in ("parallel calls", "a user's reply")
        ),
    ],
)
def test_scripted_rollouts(
    vllm_server: Any, forward: Forward, monkeypatch: pytest.MonkeyPatch, name: str, placement: str
) -> None:
    async def roll() -> tuple[dict[str, Any], ScriptedSampler]:
        base = make_env(vllm_server, judge, group_size=1, hint={"placement": placement})
        env = ReplyingEnv(base.config, [base.servers[0].config])
        await env.setup()
        sampler = ScriptedSampler(env, forward, SCRIPTS[name])
        monkeypatch.setattr(PolicyServer, "complete", lambda self, prompt_ids, **params: sampler(prompt_ids))
        try:
            group, _ = await env.collect_trajectories(TaskItem(builtin_tasks()[0], 0))
        finally:
            await env.close()
        return group, sampler

    with judge_server(lambda body: [POSITIVE] * body["n"]) as judge:
        group, sampler = asyncio.run(roll())
    turns = group["overrides"][0]["opd"]["turns"]
    assert {turn["outcome"] for turn in turns} == {"scored"}
    assert check_rows(group, forward) == len(turns) == min(4, len(SCRIPTS[name]))
    for turn, ids in zip(turns, sampler.completions, strict=True):
        assert group["tokens"][0][slice(*turn["span"])] == ids
    for prompt, ids, after in zip(sampler.prompts, sampler.completions, sampler.prompts[1:], strict=False):
        assert after[: len(prompt) + len(ids)] == prompt + ids


def test_ids_of_a_turn_start_with_those_of_the_turn_before(vllm_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded at the wire, with the real policy."""
    sent: list[tuple[list[int], list[int]]] = []
    original = PolicyServer.complete

    async def record(self: PolicyServer, prompt_ids: Sequence[int], **params: Any) -> list[Completion]:
        completions = await original(self, prompt_ids, **params)
        sent.append(([*prompt_ids], [*completions[0].token_ids]))
        return completions

    monkeypatch.setattr(PolicyServer, "complete", record)

    async def roll() -> list[int]:
        env = make_env(vllm_server, judge, group_size=1)
        await env.setup()
        try:
            while len(sent) < 3:
                sent.clear()
                group, _ = await env.collect_trajectories(TaskItem(builtin_tasks()[2], 0))
        finally:
            await env.close()
        return group["tokens"][0]

    with judge_server(lambda body: ["\\boxed{-1}"] * body["n"]) as judge:
        tokens = asyncio.run(roll())
    for (prompt, ids), (after, _) in pairwise(sent):
        assert after[: len(prompt) + len(ids)] == prompt + ids
    assert sent[-1][0] + sent[-1][1] == tokens


def test_without_a_hint_the_teacher_is_the_student(vllm_server: Any) -> None:
    """Every turn of real rollouts, scored without a hint: the gap is the engine's noise."""
    from agentic_opd.distill.insertion import insert_hint
    from agentic_opd.distill.scoring import gaps

    async def roll() -> tuple[list[float], int]:
        env = make_env(vllm_server, judge, group_size=2)
        await env.setup()
        try:
            groups = [await env.collect(TaskItem(task, 0)) for task in builtin_tasks()[:2]]
            episodes = [episode for group in groups for episode in group.episodes]
            assert env.distiller is not None
            teacher = env.distiller.servers_of(env.servers[0].client.base_url).teacher
            largest = []
            for episode in episodes:
                (trace,) = episode.traces
                for turn in trace.turns:
                    request = insert_hint(trace, turn, turn.start, ())
                    answers = [(await teacher.score(request, 5)).rows for _ in range(3)]
                    sampled = trace.logprobs_T[turn.start : turn.end]
                    largest += [float(np.abs(gaps(sampled, rows)).max()) for rows in answers]
                    for rows in answers[1:]:
                        assert np.abs(rows.top_logprobs_RK - answers[0].top_logprobs_RK).max() < TOLERANCE
            return largest, sum(len(episode.turns) for episode in episodes)
        finally:
            await env.close()

    with judge_server(lambda body: ["\\boxed{-1}"] * body["n"]) as judge:
        largest, turns = asyncio.run(roll())
    assert len(largest) == 3 * turns >= 3 * 4
    assert max(largest) < TOLERANCE
