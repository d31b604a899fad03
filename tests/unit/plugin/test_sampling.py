"""Sampling: what is asked for, and which answers are refused."""

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from agentic_opd.core.errors import ServerMismatchError, ServerRequestError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.types import Completion
from agentic_opd.plugin.client import PluginClient
from agentic_opd.plugin.info import ServerInfo
from agentic_opd.plugin.sampling import Delta, SampledToken
from tests.unit.distill.fakes import Script, served

INFO = ServerInfo("m", 64, has_plugin=True)


def generated(token: int, **changes: Any) -> dict[str, Any]:
    return {"token_ids": [[token]], "logprobs": [[[{str(token): -0.5}]]], "finish_reasons": ["stop"], **changes}


def asked(script: Script, info: ServerInfo, use: Any) -> Any:
    async def run() -> Any:
        route = "/generate" if info.has_plugin else "/v1/completions"
        async with served({route: script}) as url:
            client = PluginClient(JsonClient(url, retry_s=0.0), info)
            try:
                return await use(client)
            finally:
                await client.close()

    return asyncio.run(run())


def completed(answer: Any, *, has_plugin: bool = True) -> list[Completion]:
    script = Script(json.dumps(answer))
    return asked(script, replace(INFO, has_plugin=has_plugin), lambda client: client.complete([1], {}))


def test_both_routes_give_the_same_completion() -> None:
    choice = {"token_ids": [5], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "stop"}
    assert completed({"choices": [choice]}, has_plugin=False) == completed(generated(5)) == [Completion((5,), (-0.5,))]
    assert completed(generated(5, weight_version=3, logprobs=[[[{"5": 1e-7}]]])) == [
        Completion((5,), (0.0,), "stop", 3)
    ]


@pytest.mark.parametrize(("max_adapters", "sent"), [(0, {}), (2, {"prefer_weight_version": 7})])
def test_a_version_is_asked_for_where_the_server_keeps_several(max_adapters: int, sent: dict[str, int]) -> None:
    script = Script(generated(5))
    info = replace(INFO, max_adapters=max_adapters)
    asked(script, info, lambda client: client.complete([1, 2], {"temperature": 0.5}, 7))
    assert script.bodies == [{"prompt": {"prompt_token_ids": [1, 2]}, "logprobs": 0, "temperature": 0.5, **sent}]


@pytest.mark.parametrize(
    ("has_plugin", "answer", "why"),
    [
        (True, {"status": "ok"}, "missing required field `token_ids`"),
        (True, [], "Expected `object`, got `array`"),
        (True, None, "Expected `object`, got `null`"),
        (True, generated(5) | {"logprobs": None}, "Expected `array`, got `null` - at `$.logprobs`"),
        (True, generated(5) | {"logprobs": [[[{}]]]}, "length >= 1 - at `$.logprobs[0][0][0]`"),
        (True, generated(5) | {"logprobs": [[]]}, "shorter"),
        (True, generated(5) | {"finish_reasons": []}, "shorter"),
        (True, generated(5) | {"token_ids": [[6]]}, "the logprob of token 6 is that of token 5"),
        (True, {"token_ids": [[]], "logprobs": [[]], "finish_reasons": ["stop"]}, "no token was sampled"),
        (True, {"token_ids": [], "logprobs": [], "finish_reasons": []}, "0 completions for n=1"),
        (False, {"error": "overloaded"}, "choices: Field required"),
        (False, {"choices": [{"text": "Hi", "logprobs": None, "finish_reason": "stop"}]}, "choices.0.token_ids"),
    ],
)
def test_an_odd_answer_is_an_error_that_shows_it(has_plugin: bool, answer: Any, why: str) -> None:
    with pytest.raises(ServerMismatchError, match=re.escape(why)) as caught:
        completed(answer, has_plugin=has_plugin)
    assert f"The answer: {answer!r}"[:300] in str(caught.value)


def event(**fields: Any) -> str:
    about = {"index": 0, "token_ids": [5], "logprobs": [[{"5": -0.5, "6": -0.9}]], "finish_reason": None}
    return f"data: {json.dumps({**about, 'stop_reason': None, **fields})}\n\n"


def streamed(text: str, info: ServerInfo = INFO, script: Script | None = None) -> list[Delta]:
    async def use(client: PluginClient) -> list[Delta]:
        deltas = client.sample([1], n=1, max_tokens=9, top_logprobs=1, params={"seed": 3}, interval=8)
        return [delta async for delta in deltas]

    return asked(script or Script(text), info, use)


def test_what_arrives_together_is_one_delta_for_each_choice() -> None:
    end = {"finish_reason": "stop", "stop_reason": "END", "weight_version": 3}
    found = streamed(event() + event(index=1) + event(**end) + "data: [DONE]\n\n")
    token = SampledToken(5, -0.5, ((5, -0.5),))
    assert found == [Delta(0, (token, token), "stop", "END", 3), Delta(1, (token,))]


def test_a_stream_asks_for_several_tokens_an_event() -> None:
    script = Script("data: [DONE]\n\n")
    streamed("", INFO, script)
    about = {"n": 1, "max_tokens": 9, "logprobs": 1, "stream": True, "seed": 3}
    assert script.bodies == [{"prompt": {"prompt_token_ids": [1]}, **about, "stream_interval": 8}]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('data: {"error": {"message": "secret"}}\n\n', "failed while it sampled"),
        ('data: {"index": "secret"}\n\n', "does not stream sampled tokens as the plugin does: index, token_ids"),
        (event(token_ids=[7]), "the logprob of token 7 is that of token 5"),
    ],
)
def test_an_odd_event_is_an_error_that_does_not_quote_it(text: str, why: str) -> None:
    with pytest.raises(ServerMismatchError, match=re.escape(why)) as caught:
        streamed(text)
    assert "secret" not in str(caught.value)


def test_a_refusal_holds_its_status() -> None:
    with pytest.raises(ServerRequestError) as caught:
        streamed("", script=Script(413))
    assert caught.value.status == 413


def test_a_server_that_can_not_stream_is_refused() -> None:
    with pytest.raises(ServerMismatchError, match="which streams the sampled tokens"):
        PluginClient(JsonClient("http://policy"), replace(INFO, has_plugin=False)).check_streams()
