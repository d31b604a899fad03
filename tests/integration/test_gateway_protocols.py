"""The gateway's protocols before a real vLLM server: the answers of vLLM's own routes, and calls by its grammar."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from local_server import LocalServer

from agentic_opd.worlds.coding.tools import TOOL_SPECS
from tests.support.gateway import Served, request, served
from tests.support.places import MODEL

pytestmark = pytest.mark.vllm

QUESTION = "Write `fizzbuzz(n)` in solution.py."
USER = {"role": "user", "content": QUESTION}


@pytest.fixture(scope="module")
def gateway(vllm_server: LocalServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("protocols")
    with served(vllm_server.base_url, folder, "--env.opd_enabled", "false") as gateway:
        yield gateway


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/messages", {"messages": [USER], "max_tokens": 20}, lambda answer: answer["content"][0]["text"]),
        (
            "/v1/responses",
            {"input": [USER], "max_output_tokens": 20},
            lambda answer: answer["output"][-1]["content"][0]["text"],
        ),
        ("/v1/completions", {"prompt": QUESTION, "max_tokens": 20}, lambda answer: answer["choices"][0]["text"]),
    ],
)
def test_greedy_answers_are_those_of_vllms_own_route(
    gateway: Served, vllm_server: LocalServer, path: str, body: dict[str, Any], text: Any
) -> None:
    body = {"model": MODEL, "temperature": 0, **body}
    own, ours = request(f"{vllm_server.base_url}{path}", body), gateway.ask(path, body)
    assert text(ours).strip() == text(own).strip()
    counts = ("input_tokens", "output_tokens", "prompt_tokens", "completion_tokens")
    assert {name: ours["usage"].get(name) for name in counts} == {name: own["usage"].get(name) for name in counts}


@pytest.mark.parametrize("name", [None, "run_command"])
def test_a_forced_call_is_one_that_the_tools_allow(gateway: Served, name: str | None) -> None:
    names = [tool["function"]["name"] for tool in TOOL_SPECS]
    name = name if name in names else names[-1] if name else None
    choice = {"type": "function", "function": {"name": name}} if name else "required"
    answer = gateway.chat(USER, tools=TOOL_SPECS, tool_choice=choice, session="forced", max_tokens=300, temperature=1)
    (chosen,) = answer.choices
    calls = chosen.message.tool_calls
    assert calls, chosen.message.content
    assert not chosen.message.content
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
