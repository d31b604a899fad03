import asyncio
import json
from typing import Any

from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from demo_policy import POLICY_DIR

from agentic_opd.core.types import Completion, SamplingDistribution
from agentic_opd.env.policy_server import PolicyServer, ServedPolicy
from agentic_opd.plugin.client import PluginClient
from agentic_opd.plugin.info import ServerInfo


class ScriptedClient:
    """In the place of an HTTP client: gives the next answer, after the requests that came later if it is told to."""

    base_url = "http://policy"

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, Any]] = []

    async def post(self, path: str, body: Any) -> Any:
        self.requests.append((path, json.loads(json.dumps(body))))
        answer = self.answers[(place := len(self.requests)) - 1]
        for _ in range(len(self.answers) - place):
            await asyncio.sleep(0)
        return answer


def policy_server(*answers: Any, has_plugin: bool = True) -> tuple[PolicyServer, ScriptedClient]:
    client: Any = ScriptedClient(*answers)
    server = PolicyServer(APIServerConfig(model_name=str(POLICY_DIR), base_url="http://policy/v1"))
    server.use(PluginClient(client, ServerInfo("policy", 64, has_plugin=has_plugin)))
    return server, client


def generated(token: int, version: int | None = None) -> dict[str, Any]:
    answer = {"token_ids": [[token]], "logprobs": [[[{str(token): -0.5}]]], "finish_reasons": ["stop"]}
    return answer if version is None else {**answer, "weight_version": version}


COMPLETED = {"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "length"}]}


def test_episodes_that_share_a_server_each_get_the_version_of_their_own_answer() -> None:
    """The answers come back in the other order."""
    server, client = policy_server(generated(5, version=3), generated(6, version=4))
    policy = ServedPolicy(server, {"temperature": 0.3, "top_p": 0.9, "split": "eval"})

    async def both() -> list[Completion]:
        return await asyncio.gather(policy.sample([1, 2], 8), policy.sample([3], 9))

    assert asyncio.run(both()) == [
        Completion((5,), (-0.5,), "stop", weight_version=3, sampling=SamplingDistribution(0.3, top_p=0.9)),
        Completion((6,), (-0.5,), "stop", weight_version=4, sampling=SamplingDistribution(0.3, top_p=0.9)),
    ]
    body = {"prompt": {"prompt_token_ids": [1, 2]}, "logprobs": 0, "temperature": 0.3, "top_p": 0.9, "max_tokens": 8}
    assert client.requests[0] == ("/generate", body)
    assert (len(server.request_timings), len(server.eval_request_timings)) == (0, 2)


def test_without_the_plugin_completions_are_asked_for() -> None:
    server, client = policy_server(COMPLETED, has_plugin=False)
    answer = asyncio.run(server.tokens_and_logprobs_completion(input_ids=[1], model="any", max_tokens=1))
    assert answer == ([1], [[5]], [[-0.5]], ["length"]), "as Atropos reads it"
    path, body = client.requests[0]
    assert (path, body["prompt"], body["model"]) == ("/v1/completions", [1], "policy")
