"""The gateway's protocols before a real vLLM server: the answers of vLLM's own routes, and calls by its grammar."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from agents.demo_gateway import Served as DemoServed
from bench.local_server import LocalServer
from checks.routes import PROTOCOLS
from learning.talk import User
from transformers import AutoTokenizer

from agentic_opd.cli.validate import main as validate
from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks
from agentic_opd.worlds.coding.tools import TOOL_SPECS
from tests.support.fake_plugin import FakePlugin
from tests.support.gateway import Served, request, served, starts_of
from tests.support.places import MODEL
from tests.support.scripted_judge import POSITIVE, judge_server

pytestmark = pytest.mark.vllm

QUESTION = "Write `fizzbuzz(n)` in solution.py."
USER = {"role": "user", "content": QUESTION}


@pytest.fixture(scope="module")
def gateway(vllm_server: LocalServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One whose judge always has the same hint; its groups are computed again when it has ended."""
    folder = tmp_path_factory.mktemp("protocols")
    with judge_server(lambda body: [POSITIVE] * body["n"]) as judge:
        flags = ("--env.judge.base_url", judge, "--env.judge.model_name", "judge")
        with served(vllm_server.base_url, folder, *flags) as gateway:
            yield gateway
    assert validate([str(folder / "groups.jsonl"), "--server", vllm_server.base_url]) == 0


@pytest.mark.parametrize("name", PROTOCOLS)
def test_greedy_answers_are_those_of_vllms_own_route(gateway: Served, vllm_server: LocalServer, name: str) -> None:
    """`scripts/checks/routes` compares hundreds, with tools."""
    protocol = PROTOCOLS[name]
    body = {"model": MODEL, "temperature": 0, **protocol.body(QUESTION, tools=False, limit=20, stop=None)}
    own, ours = request(f"{vllm_server.base_url}{protocol.path}", body), gateway.ask(protocol.path, body)
    assert protocol.read(ours) == protocol.read(own)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_session_is_one_sequence_judged_and_scored(gateway: Served, name: str) -> None:
    protocol, turns = PROTOCOLS[name], 3
    body = protocol.body(QUESTION, tools=True, limit=40, stop=None)
    for _ in range(turns):
        answer: Any = gateway.ask(f"/sessions/{name}{protocol.path}", {"model": MODEL, **body})
        protocol.say(body, answer, protocol.read(answer))
    group = gateway.end(name, reward=0.5)
    assert [len(starts_of(mask)) for mask in group["masks"]] == [turns]
    outcomes = [turn["outcome"] for turn in group["overrides"][0]["opd"]["turns"]]
    assert outcomes == ["scored"] * (turns - 1) + ["no_next_state"]


@pytest.mark.parametrize("name", [None, "run_command"])
def test_a_forced_call_is_one_that_the_tools_allow(gateway: Served, name: str | None) -> None:
    names = [tool["function"]["name"] for tool in TOOL_SPECS]
    name = name if name in names else names[-1] if name else None
    choice = {"type": "function", "function": {"name": name}} if name else "required"
    options = {"tools": TOOL_SPECS, "tool_choice": choice, "temperature": 1}
    answer = gateway.chat(USER, session="forced", n=4, max_tokens=300, **options)
    finished = [chosen.message for chosen in answer.choices if chosen.finish_reason != "length"]
    assert finished
    assert all(message.tool_calls and not message.content for message in finished), finished
    calls = [call for message in finished for call in message.tool_calls or ()]
    assert {call.function.name for call in calls} <= ({name} if name else {*names})
    for call in calls:
        spec = next(
            tool["function"]["parameters"] for tool in TOOL_SPECS if tool["function"]["name"] == call.function.name
        )
        assert json.loads(call.function.arguments).keys() >= {*spec.get("required", ())}


def test_at_most_one_call_where_parallel_calls_are_off(gateway: Served) -> None:
    for seed in range(4):
        options = {"parallel_tool_calls": False, "seed": seed, "max_tokens": 200}
        answer = gateway.chat(USER, tools=TOOL_SPECS, session="one by one", **options)
        assert len(answer.choices[0].message.tool_calls or ()) <= 1


def test_an_answer_by_a_schema_beside_tools_is_that_or_a_call(gateway: Served) -> None:
    schema = {"type": "object", "properties": {"day": {"enum": ["Monday", "Tuesday"]}}, "required": ["day"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "day", "schema": schema}}
    options = {"tools": TOOL_SPECS, "response_format": wanted, "temperature": 1}
    answer = gateway.chat(USER, session="by schema", n=8, max_tokens=300, **options)
    called = [choice.message for choice in answer.choices if choice.message.tool_calls]
    answered = [choice.message.content for choice in answer.choices if not choice.message.tool_calls]
    assert called, answered
    assert not any(message.content for message in called)
    braces = {str(i): 100 for token, i in AutoTokenizer.from_pretrained(MODEL).get_vocab().items() if token[0] == "{"}
    answer = gateway.chat(USER, session="by schema", max_tokens=120, logit_bias=braces, **options)
    assert re.match(r'\{\s*"day"\s*:\s*"(Monday|Tuesday)"\s*', answer.choices[0].message.content or "")


def test_turns_without_a_users_message_before_them_are_recorded_as_sampled(gateway: Served) -> None:
    """The fixture computes them again: one turn behind another one, and one behind a system prompt only."""
    history: list[Any] = [USER]
    for more in ((), [{"role": "user", "content": "Go on."}], ()):
        answer = gateway.chat(*history, session="again", max_tokens=20)
        history += [{"role": "assistant", "content": answer.choices[0].message.content}, *more]
    group = gateway.end("again", reward=0.5)
    assert [len(starts_of(mask)) for mask in group["masks"]] == [3]
    outcomes = [turn["outcome"] for turn in group["overrides"][0]["opd"]["turns"]]
    assert outcomes == ["no_next_state", "scored", "no_next_state"]
    system = {"role": "system", "content": QUESTION}
    said = gateway.chat(system, session="system", max_tokens=20).choices[0].message.content
    gateway.chat(system, {"role": "assistant", "content": said}, USER, session="system", max_tokens=20)
    group = gateway.end("system", reward=0.5)
    assert [len(starts_of(mask)) for mask in group["masks"]] == [2]
    outcomes = [turn["outcome"] for turn in group["overrides"][0]["opd"]["turns"]]
    assert outcomes == ["scored", "no_next_state"]


@pytest.mark.sandbox
def test_a_user_of_messages_makes_the_groups_of_a_user_of_chat(fake_server: FakePlugin, tmp_path: Path) -> None:
    """What `scripts/learn --talk --through messages` trains on is what it trains on through chat."""
    task, kept = builtin_tasks(with_examples=False)[0], ("tokens", "masks", "distill_token_ids", "distill_logprobs")

    async def hold(gateway: Served, through: Literal["chat", "messages"]) -> None:
        user = User.connected(DemoServed(gateway.url, "a-key", gateway.process.pid), MODEL, through)
        await user.session(task, through)
        await user.client.close()

    with served(fake_server.base_url, tmp_path) as gateway:
        for through in ("chat", "messages"):
            asyncio.run(hold(gateway, through))
        chat, messages = gateway.group("chat"), gateway.group("messages")
    assert {name: messages[name] for name in kept} == {name: chat[name] for name in kept}
    assert chat["overrides"][0]["opd"]["turns"][0]["outcome"] == "scored"
