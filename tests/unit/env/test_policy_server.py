import asyncio
import json
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from demo_policy import POLICY_DIR

from agentic_opd.core.errors import AlignmentError, ServerMismatchError
from agentic_opd.env.policy_server import PolicyServer, RenderedManagedServer, ServedPolicy
from agentic_opd.rollout.chat import Chat
from agentic_opd.rollout.conversation import Completion
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.worlds.coding.tools import TOOL_SPECS

START = [{"role": "system", "content": "s"}, {"role": "user", "content": "Write f."}]
CALL = '<tool_call>\n{"name": "terminal", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
CALL_LOGPROB = -0.125


class ScriptedServer:
    """Answers each request with the next scripted completions, and remembers what it was asked."""

    def __init__(self, tokenizer: Any, *answers: list[str]) -> None:
        self.tokenizer = tokenizer
        self.config = SimpleNamespace(model_name="scripted")
        self.answers = list(answers)
        self.prompts: list[list[int]] = []
        self.params: list[dict[str, Any]] = []

    async def complete(self, prompt_ids: Sequence[int], **params: Any) -> list[Completion]:
        self.prompts.append([*prompt_ids])
        self.params.append(params)
        choices = [self.tokenizer.encode(text, add_special_tokens=False) for text in self.answers.pop(0)]
        return [Completion(tuple(ids), (CALL_LOGPROB,) * len(ids)) for ids in choices]


def managed(tokenizer: Any, *answers: list[str]) -> tuple[Any, RenderedManagedServer]:
    chat = Chat(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer, TOOL_SPECS)
    server = ScriptedServer(tokenizer, *answers)
    return server, RenderedManagedServer(server, chat, temperature=1.0)  # type: ignore[arg-type]


def test_a_conversation_is_one_node_with_every_turn_unmasked(tokenizer: Any) -> None:
    server, policy = managed(tokenizer, [CALL], ["Done.<|im_end|>"])

    async def talk() -> None:
        first = await policy.chat_completion(messages=START, tools=TOOL_SPECS, max_tokens=64)
        assert first.choices[0].finish_reason == "tool_calls"
        # As a client of the OpenAI library writes it back: dumped, with None fields.
        turn = first.choices[0].message.model_dump()
        answer = {"role": "tool", "tool_call_id": "call_2_0", "name": "terminal", "content": "a.py"}
        second = await policy.chat_completion(messages=[*START, turn, answer], max_tokens=64)
        assert second.choices[0].message.content == "Done."

    asyncio.run(talk())
    (node,) = policy.get_state()["nodes"]
    sampled = [*tokenizer.encode(CALL), *tokenizer.encode("Done.<|im_end|>")]
    assert [token for token in node.masked_tokens if token != -100] == sampled
    assert [value for value in node.logprobs if value != 1.0] == [CALL_LOGPROB] * len(sampled)
    assert len(node.tokens) == len(node.masked_tokens) == len(node.logprobs)
    assert server.prompts[1][: len(server.prompts[0])] == server.prompts[0]
    assert server.prompts[1] == node.tokens[: len(server.prompts[1])]
    assert server.params[0]["stop_token_ids"] == policy.chat.stop_token_ids
    assert server.params[0]["temperature"] == 1.0


def test_other_conversations_and_choices_are_nodes_of_their_own(tokenizer: Any) -> None:
    _, policy = managed(tokenizer, ["A.<|im_end|>", "B.<|im_end|>"], ["C.<|im_end|>"], ["D.<|im_end|>"])

    async def talk() -> None:
        both = await policy.chat_completion(messages=START, n=2)
        assert [choice.message.content for choice in both.choices] == ["A.", "B."]
        await policy.chat_completion(messages=[START[0], {"role": "user", "content": "Another."}])
        # Goes on from B alone; A stays.
        turn = {"role": "assistant", "content": "B."}
        await policy.chat_completion(messages=[*START, turn, {"role": "user", "content": "More."}])

    asyncio.run(talk())
    texts = [node.full_text for node in policy.get_state()["nodes"]]
    assert len(texts) == 3
    assert sorted(text.count("<|im_start|>assistant") for text in texts) == [1, 1, 2]
    state = policy.get_state()
    policy.reset()
    assert policy.get_state()["nodes"] == []
    assert len(state["nodes"]) == 3


def test_an_edited_turn_starts_anew(tokenizer: Any) -> None:
    server, policy = managed(tokenizer, ["A.<|im_end|>"], ["B.<|im_end|>"])

    async def talk() -> None:
        await policy.chat_completion(messages=START)
        edited = {"role": "assistant", "content": "something else"}
        await policy.chat_completion(messages=[*START, edited, {"role": "user", "content": "More."}])

    asyncio.run(talk())
    assert len(policy.get_state()["nodes"]) == 2
    assert "something else" in tokenizer.decode(server.prompts[1])


def test_a_request_that_fails_leaves_the_conversation_as_it_was(tokenizer: Any) -> None:
    server, policy = managed(tokenizer, ["A.<|im_end|>"])

    async def talk() -> None:
        await policy.chat_completion(messages=START)
        more = [*START, {"role": "assistant", "content": "A."}, {"role": "user", "content": "More."}]
        with pytest.raises(IndexError):  # The script has no answer left.
            await policy.chat_completion(messages=more)
        server.answers.append(["B.<|im_end|>"])
        await policy.chat_completion(messages=more)

    asyncio.run(talk())
    (node,) = policy.get_state()["nodes"]
    assert node.full_text.count("<|im_start|>assistant") == 2


def test_other_tools_are_refused(tokenizer: Any) -> None:
    _, policy = managed(tokenizer)
    with pytest.raises(AlignmentError, match="tools differ"):
        asyncio.run(policy.chat_completion(messages=START, tools=[]))


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
    server.client, server.has_plugin = client, has_plugin
    return server, client


def generated(token: int, version: int | None = None) -> dict[str, Any]:
    answer = {"token_ids": [[token]], "logprobs": [[[{str(token): -0.5}]]], "finish_reasons": ["stop"]}
    return answer if version is None else {**answer, "weight_version": version}


COMPLETED = {"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "length"}]}


def test_episodes_that_share_a_server_each_get_the_version_of_their_own_answer() -> None:
    """The answers come back in the other order."""
    server, client = policy_server(generated(5, version=3), generated(6, version=4))
    policy = ServedPolicy(server, {"temperature": 1.0, "split": "eval"})

    async def both() -> list[Completion]:
        return await asyncio.gather(policy.sample([1, 2], 8), policy.sample([3], 9))

    assert asyncio.run(both()) == [
        Completion((5,), (-0.5,), "stop", weight_version=3),
        Completion((6,), (-0.5,), "stop", weight_version=4),
    ]
    body = {"prompt": {"prompt_token_ids": [1, 2]}, "logprobs": 0, "temperature": 1.0, "max_tokens": 8}
    assert client.requests[0] == ("/generate", body)
    assert (len(server.request_timings), len(server.eval_request_timings)) == (0, 2)


def test_without_the_plugin_completions_are_asked_for() -> None:
    server, client = policy_server(COMPLETED, has_plugin=False)
    answer = asyncio.run(server.tokens_and_logprobs_completion(input_ids=[1], model="any", max_tokens=1))
    assert answer == ([1], [[5]], [[-0.5]], ["length"]), "as Atropos reads it"
    path, body = client.requests[0]
    assert (path, body["prompt"], body["model"]) == ("/v1/completions", [1], str(POLICY_DIR))


@pytest.mark.parametrize(
    ("has_plugin", "answer", "why"),
    [
        (True, {"status": "ok"}, "token_ids: Field required"),
        (True, [], "Input should be"),
        (True, None, "Input should be"),
        (True, generated(5) | {"logprobs": None}, "logprobs: Input should be a valid list"),
        (True, generated(5) | {"logprobs": [[[{}]]]}, "at least 1 item"),
        (True, generated(5) | {"logprobs": [[]]}, "token_ids=1, logprobs=0"),
        (True, generated(5) | {"finish_reasons": []}, "shorter"),
        (True, {"token_ids": [[]], "logprobs": [[]], "finish_reasons": ["stop"]}, "no token was sampled"),
        (True, {"token_ids": [], "logprobs": [], "finish_reasons": []}, "0 completions for n=1"),
        (False, {"error": "overloaded"}, "choices: Field required"),
        (False, {"choices": [{"text": "Hi", "logprobs": None, "finish_reason": "stop"}]}, "choices.0.token_ids"),
    ],
)
def test_an_odd_answer_is_an_error_that_shows_it(has_plugin: bool, answer: Any, why: str) -> None:
    server, _ = policy_server(answer, has_plugin=has_plugin)
    with pytest.raises(ServerMismatchError, match=re.escape(why)) as caught:
        asyncio.run(server.complete([1]))
    assert f"The answer: {answer!r}"[:300] in str(caught.value)
