"""A gateway before a real vLLM server, asked by the real `openai` client; what vLLM saw is recorded between the two."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.local_server import LocalServer
from openai import AsyncOpenAI, BadRequestError

from agentic_opd.cli.validate import validate
from agentic_opd.core.processes import end_of
from agentic_opd.worlds.coding.tools import TOOL_SPECS
from tests.support.fake_plugin import FakePlugin
from tests.support.gateway import Served, served, starts_of
from tests.support.places import MODEL
from tests.support.recording_proxy import RecordingProxy, recording_proxy, seen
from tests.support.scripted_judge import POSITIVE, judge_server
from tests.support.waiting import until

pytestmark = pytest.mark.vllm

SYSTEM = {"role": "system", "content": "You are a coding agent."}
USER = {"role": "user", "content": "Write `fizzbuzz(n)` in solution.py."}
MORE = {"role": "user", "content": "It fails for 15: it must be FizzBuzz."}
CLIENTS, CONVERSATION = 64, 8


@pytest.fixture(scope="module")
def proxy(vllm_server: LocalServer) -> Iterator[RecordingProxy]:
    with recording_proxy(vllm_server.base_url) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def gateway(proxy: RecordingProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One whose judge always has the same hint."""
    questions: list[str] = []

    def judged(body: dict[str, Any]) -> list[str]:
        questions.append(body["messages"][-1]["content"])
        return [POSITIVE] * body["n"]

    with judge_server(judged) as judge:
        flags = ("--env.judge.base_url", judge, "--env.judge.model_name", "judge")
        with served(proxy.url, tmp_path_factory.mktemp("gateway"), *flags, real=True) as gateway:
            gateway.questions = questions
            yield gateway
            assert validate(gateway.folder / "groups.jsonl").violations == 0
            assert "a-key" not in gateway.log.read_text()


def message_of(answer: Any, choice: int = 0) -> dict[str, Any]:
    return answer.choices[choice].message.model_dump()


def without_marks(question: str) -> str:
    """A question without the random mark of its headings."""
    return re.sub(r"\[[0-9a-f]{8}\]", "", question)


def test_a_session_is_token_exact_judged_and_scored(gateway: Served, proxy: RecordingProxy) -> None:
    before, already_asked = len(seen(proxy)), len(gateway.questions)
    short = 12  # Too short for a whole tool call: what answers the second turn would show how the first one was, too.
    first = gateway.chat(SYSTEM, USER, session="exact", max_tokens=short)
    second = gateway.chat(SYSTEM, USER, message_of(first), MORE, session="exact", max_tokens=short)
    assert second.usage.completion_tokens > 0
    until(
        lambda: any(MORE["content"] in question for question in gateway.questions[already_asked:])
    )  # Its session is still open.
    assert gateway.ask("/sessions/exact")["state"] == "open"
    group = gateway.end("exact", reward=0.25, feedback="Still wrong.")
    (prompt_1, (ids_1,)), (prompt_2, (ids_2,)) = seen(proxy)[before:]
    assert prompt_2[: len(prompt_1) + len(ids_1)] == prompt_1 + ids_1
    assert group["tokens"] == [prompt_2 + ids_2]
    assert [token for token in group["masks"][0] if token != -100] == ids_1 + ids_2
    assert (group["scores"], group["overrides"][0]["reward"]) == ([0.25], {"client": 0.25})
    turns = group["overrides"][0]["opd"]["turns"]
    assert [turn["outcome"] for turn in turns] == ["scored", "scored"]
    assert [turn["next_state_role"] for turn in turns] == ["user", "user"]
    assert "Still wrong." in turns[1]["question"]
    asked = [without_marks(question) for question in gateway.questions[already_asked:]]
    assert [asked.count(without_marks(turn["question"])) for turn in turns] == [1, 1], "each turn is judged once"
    assert [turn["weight_version"] for turn in turns] == [0, 0]
    assert group["group_overrides"]["opd"]["noise_floor"] < 1e-3


def test_a_stream_is_the_same_session_and_comes_piece_by_piece(gateway: Served, proxy: RecordingProxy) -> None:
    before = len(seen(proxy))
    usage = {"stream_options": {"include_usage": True}, "logprobs": True}
    proxy.to_hold.append("/generate")
    proxy.release.clear()
    chunks = list[Any]()
    for chunk in gateway.chat(SYSTEM, USER, session="stream", stream=True, **usage):
        chunks.append(chunk)
        if any(choice.logprobs for choice in chunk.choices):
            proxy.release.set()
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    told = [choice.logprobs.content for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert len(told) > 1, "the first event's tokens come before the second event"
    ((prompt, (ids,)),) = seen(proxy)[before:]
    assert sum(map(len, told)) == len(ids), "each token is told, whether it is text or part of a call"
    assert chunks[-1].usage.completion_tokens == len(ids)
    assert chunks[-1].usage.prompt_tokens == len(prompt)
    answer = {"role": "assistant", "content": text, "tool_calls": [call.model_dump() for call in calls] or None}
    for _ in gateway.chat(SYSTEM, USER, answer, MORE, session="stream", stream=True):
        pass
    group = gateway.end("stream")
    later, (sampled,) = seen(proxy)[-1]
    assert later[: len(prompt) + len(ids)] == prompt + ids
    assert group["tokens"] == [later + sampled]
    assert (group["scores"], group["overrides"][0]["reward"]) == ([0.0], None)


def test_tools_and_several_choices(gateway: Served, proxy: RecordingProxy) -> None:
    before = len(seen(proxy))
    answer = gateway.chat(SYSTEM, USER, session="tools", tools=TOOL_SPECS, n=3, max_tokens=300, logprobs=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    ((prompt, sampled),) = seen(proxy)[before:]
    assert [len(choice.logprobs.content) for choice in answer.choices] == [len(ids) for ids in sampled]
    called = next((choice for choice in answer.choices if choice.message.tool_calls), None)
    if called is not None:
        (call, *more) = called.message.tool_calls
        results = [{"role": "tool", "tool_call_id": one.id, "content": "ok"} for one in (call, *more)]
        gateway.chat(SYSTEM, USER, message_of(answer, called.index), *results, session="tools", tools=TOOL_SPECS)
    group = gateway.end("tools")
    assert sorted(tokens[len(prompt) :][: len(ids)] for tokens, ids in zip(group["tokens"], sampled, strict=False))
    learned = [[token for token in mask if token != -100] for mask in group["masks"]]
    assert len(learned) == 3
    assert all(any(mask[: len(ids)] == ids for mask in learned) for ids in sampled)


@pytest.fixture(scope="module")
def javascript(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with OpenAI's library for JavaScript, and a script that uses it."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("javascript")
    script = Path(__file__).parent / "clients" / "session.mjs"
    shutil.copy(script, folder)
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", ".", "openai@6"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
    return folder


def test_a_client_in_another_language(gateway: Served, proxy: RecordingProxy, javascript: Path) -> None:
    before = len(seen(proxy))
    command = ["node", "session.mjs", f"{gateway.url}/v1", "a-key", MODEL, "javascript"]
    variables = {**os.environ, "TOOLS": json.dumps(TOOL_SPECS)}
    done = subprocess.run(command, cwd=javascript, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["chunks"] >= 3, "the role, what was said or called, and the end"
    assert (said["choices"], said["models"]) == (3, [MODEL])
    (first, (ids_1,)), (second, (ids_2,)), (third, choices) = seen(proxy)[before:]
    assert second[: len(first) + len(ids_1)] == first + ids_1
    assert third[: len(second) + len(ids_2)] == second + ids_2
    group = gateway.end("javascript")
    assert sorted(group["tokens"]) == sorted(third + ids for ids in choices)


def test_many_clients_at_once_do_not_mix(fake_server: FakePlugin, tmp_path: Path) -> None:
    async def session(client: AsyncOpenAI, number: int) -> str:
        messages: list[Any] = [SYSTEM, {"role": "user", "content": f"Say {number}."}]
        session_id = ""
        for turn in range(CONVERSATION):
            answer = await client.chat.completions.with_raw_response.create(
                model=MODEL, messages=messages, max_tokens=4
            )
            message, session_id = answer.parse().choices[0].message, answer.headers["X-Session-Id"]
            messages += [message.model_dump(), {"role": "user", "content": f"{number}: turn {turn}."}]
        return session_id

    async def talk(url: str) -> list[str]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="a-key", max_retries=0, timeout=300) as client:
            return await asyncio.gather(*(session(client, number) for number in range(CLIENTS)))

    with served(fake_server.base_url, tmp_path, "--env.opd_enabled", "false") as gateway:
        sessions = asyncio.run(talk(gateway.url))
        assert len({*sessions}) == CLIENTS
        for name in sessions:
            gateway.ask(f"/sessions/{name}/end", {})
        groups = [gateway.group(name) for name in sessions]
    for number, group in enumerate(groups):
        (messages,) = group["messages"]
        said = [message["content"] for message in messages if message["role"] == "user"]
        assert said == [f"Say {number}.", *(f"{number}: turn {turn}." for turn in range(CONVERSATION - 1))]
        assert len(starts_of(group["masks"][0])) == CONVERSATION
    assert validate(tmp_path / "groups.jsonl").violations == 0


def test_what_is_wrong_is_said_by_field(gateway: Served) -> None:
    with pytest.raises(BadRequestError) as refused:
        gateway.chat(USER, extra_body={"temperatur": 1})
    assert refused.value.param == "temperatur"
    with pytest.raises(BadRequestError) as refused:
        gateway.chat(USER, temperature=0, n=2)
    assert refused.value.param == "n", "what only vLLM knows to be wrong"
    assert gateway.chat(USER, model="gpt", max_tokens=1).model == MODEL, "the policy answers to any name"
    assert [model.id for model in gateway.client.models.list()] == [MODEL]


def test_a_killed_gateway_goes_on_with_its_sessions(proxy: RecordingProxy, tmp_path: Path) -> None:
    flags = ("--env.opd_enabled", "false")
    with served(proxy.url, tmp_path, *flags) as first:
        answer = message_of(first.chat(SYSTEM, USER))
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
    prompt, (ids,) = seen(proxy)[-1]
    with served(proxy.url, tmp_path, *flags) as second:
        history: list[Any] = [SYSTEM, USER, answer, MORE]
        raw = second.client.chat.completions.with_raw_response.create(model=MODEL, messages=history, max_tokens=20)
        later, (sampled,) = seen(proxy)[-1]
        group = second.end(raw.headers["X-Session-Id"])
        second.process.terminate()
        assert second.process.wait(30) == 0, end_of(second.log)
    assert later[: len(prompt) + len(ids)] == prompt + ids
    assert group["tokens"] == [later + sampled]
