import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from agentic_opd.core.errors import AlignmentError
from agentic_opd.env.policy_server import RenderedManagedServer
from agentic_opd.rollout.chat import Chat
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
        self.weight_version: int | None = None
        self.prompts: list[list[int]] = []
        self.params: list[dict[str, Any]] = []

    async def tokens_and_logprobs_completion(self, *, input_ids: list[int], **params: Any) -> Any:
        self.prompts.append(input_ids)
        self.params.append(params)
        ids = [self.tokenizer.encode(text, add_special_tokens=False) for text in self.answers.pop(0)]
        reasons = ["stop" if one[-1] == self.tokenizer.eos_token_id else "length" for one in ids]
        return input_ids, ids, [[CALL_LOGPROB] * len(one) for one in ids], reasons


def managed(tokenizer: Any, *answers: list[str]) -> tuple[Any, RenderedManagedServer]:
    chat = Chat(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer, TOOL_SPECS)
    server = ScriptedServer(tokenizer, *answers)
    return server, RenderedManagedServer(server, chat, temperature=1.0)  # type: ignore[arg-type]


def test_the_oldest_weights_of_a_conversation_are_remembered(tokenizer: Any) -> None:
    server, policy = managed(tokenizer, [CALL], ["Done.<|im_end|>"], ["Done.<|im_end|>"])
    seen: list[int | None] = []
    for version, messages in ((None, START), (4, START), (7, START)):
        server.weight_version = version
        asyncio.run(policy.chat_completion(messages=messages, max_tokens=64))
        seen.append(policy.weight_version)
    assert seen == [None, 4, 4]


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


def test_misaligned_answers_and_other_tools_are_refused(tokenizer: Any) -> None:
    server, policy = managed(tokenizer, ["A.<|im_end|>"], [""])

    async def misaligned(**kwargs: Any) -> Any:
        return kwargs["input_ids"], [[5, 6]], [[-0.1]], ["stop"]

    with pytest.raises(AlignmentError, match="tools differ"):
        asyncio.run(policy.chat_completion(messages=START, tools=[]))
    server.tokens_and_logprobs_completion = misaligned
    with pytest.raises(AlignmentError, match="token_ids=2, logprobs=1"):
        asyncio.run(policy.chat_completion(messages=START))
