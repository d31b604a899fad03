"""The policy: Atropos' server classes, made token-in token-out (I/O).

`PolicyServer` asks one vLLM server for sampled ids and their logprobs. `RenderedManagedServer` keeps Atropos' contract
(`chat_completion`, `get_state`), but renders and parses with `chat.Chat` and extends sampled ids instead of rendering
them again.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.server_handling.managed_server import ManagedServer, SequenceNode
from atroposlib.envs.server_handling.server_baseline import APIServerConfig, ReasoningConfig
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from openai.types.chat.chat_completion import ChatCompletion

from agentic_opd.core.errors import AlignmentError, ServerMismatchError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.types import Message, Turn, check_lengths
from agentic_opd.rollout.chat import Chat, Prompt, TokenRecord
from agentic_opd.rollout.loop import Sample


class PolicyServer(VLLMServer):
    """One vLLM server. Asks the plugin's `/generate`, or `/v1/completions` where `has_plugin` is False.

    Unlike its base it keeps connections open, gives up after `client.retry_s`, and raises this package's errors.
    """

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        self.client = JsonClient(config.base_url or "", config.api_key, timeout_s=config.timeout)
        # The base's OpenAI client, without a key, would send the one it finds in the environment to this server.
        config.api_key = config.api_key or "EMPTY"
        super().__init__(config, reasoning_config=reasoning_config)  # type: ignore[arg-type]
        self.has_plugin = True
        self.weight_version: int | None = None
        """Of the last answer; None where the server does not say."""

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Sample from `input_ids`; returns (prompt ids, ids, logprobs, finish reasons), the last three per choice."""
        split = kwargs.pop("split", "train")
        kwargs.pop("model", None)
        timings = self.request_timings if split == "train" else self.eval_request_timings
        async with self.sem if split == "train" else self.eval_sem:
            start = time.monotonic()
            answer = await self._tokens_and_logprobs_completion_wrapper(**kwargs)
            timings.append(time.monotonic() - start)
            del timings[: -self.config.rolling_buffer_length]
        return answer

    async def _tokens_and_logprobs_completion_wrapper(
        self, **kwargs: Any
    ) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        prompt_ids = list(kwargs.pop("input_ids"))
        if self.has_plugin:
            body = {"prompt": {"prompt_token_ids": prompt_ids}, "logprobs": 0, **kwargs}
            answer = await self.client.post("/generate", body)
            self.weight_version = answer.get("weight_version")
            logprobs = [[next(iter(entry[0].values())) for entry in rows] for rows in answer["logprobs"]]
            return prompt_ids, answer["token_ids"], logprobs, answer["finish_reasons"]
        body = {
            "model": self.config.model_name,
            "prompt": prompt_ids,
            "logprobs": 0,
            "return_token_ids": True,
            **kwargs,
        }
        choices = (await self.client.post("/v1/completions", body))["choices"]
        if any(choice.get("token_ids") is None for choice in choices):
            raise ServerMismatchError(
                f"{self.client.base_url} returns no token ids, so rollouts can't be kept token by token. "
                "Serve the policy with vLLM; scripts/serve_vllm MODEL starts one with everything needed."
            )
        return (
            prompt_ids,
            [choice["token_ids"] for choice in choices],
            [choice["logprobs"]["token_logprobs"] for choice in choices],
            [choice["finish_reason"] for choice in choices],
        )


@dataclass(slots=True)
class _Thread:
    """One conversation as sampled so far: its messages up to the last turn's, and that turn's ids."""

    messages: list[Message]
    prompt: Prompt
    completion_ids: list[int]
    record: TokenRecord
    node: SequenceNode


class RenderedManagedServer(ManagedServer):
    """A ManagedServer whose prompts extend sampled ids.

    A conversation is recognised by its messages: a call whose messages start with those of an earlier call and its
    answer extends that call's node; any other starts a node of its own.
    """

    def __init__(self, server: PolicyServer, chat: Chat, **sampling: Any) -> None:
        """Wrap `server`; `sampling` (temperature, top_p, split, ...) goes with every request."""
        super().__init__(server=server, tokenizer=chat.tokenizer)
        self._policy = server
        self.chat = chat
        self.sampling = sampling
        self.weight_version: int | None = None
        """The oldest weights that a turn was sampled with; None where the server does not say."""
        self._threads: list[_Thread] = []

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """The ids that the next turn of this conversation is sampled from."""
        thread = self._find(messages)
        if thread is None:
            return self.chat.first_prompt(messages)
        known = len(thread.messages)
        return self.chat.next_prompt(thread.prompt, thread.completion_ids, thread.messages, messages[known:])

    async def sample(self, messages: Sequence[Message], prompt: Prompt, max_tokens: int) -> Sample:
        """Sample one turn from `prompt`, which must be `self.prompt(messages)`, and keep it."""
        samples, _ = await self._sample(messages, prompt, {**self.sampling, "max_tokens": max_tokens})
        return samples[0]

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Atropos' contract: messages in, one or `n` messages out, every one kept as a node for `get_state()`.

        Raises:
            AlignmentError: `tools` differ from those the renderer was made with.
        """
        messages: list[Message] = kwargs.pop("messages")
        tools = kwargs.pop("tools", None)
        if tools is not None and list(tools) != self.chat.tools:
            raise AlignmentError(f"tools differ from the {len(self.chat.tools)} this server was made with")
        for unused in ("model", "tool_choice"):
            kwargs.pop(unused, None)
        samples, reasons = await self._sample(messages, self.prompt(messages), {**self.sampling, **kwargs})
        choices = [
            {
                "index": i,
                "finish_reason": "tool_calls" if sample.tool_calls and reason == "stop" else reason,
                "message": sample.message,
            }
            for i, (sample, reason) in enumerate(zip(samples, reasons, strict=True))
        ]
        return ChatCompletion.model_validate(
            {
                "id": str(uuid.uuid4()),
                "created": int(time.time()),
                "model": self.server.config.model_name,
                "object": "chat.completion",
                "choices": choices,
            }
        )

    def reset(self) -> None:
        """Forget everything that was sampled."""
        super().reset()
        self._threads.clear()

    async def _sample(
        self, messages: Sequence[Message], prompt: Prompt, params: dict[str, Any]
    ) -> tuple[list[Sample], list[str]]:
        params.setdefault("stop_token_ids", self.chat.stop_token_ids)
        sent, ids, logprobs, reasons = await self.server.tokens_and_logprobs_completion(
            input_ids=list(prompt.token_ids), **params
        )
        if (version := self._policy.weight_version) is not None:
            self.weight_version = version if self.weight_version is None else min(self.weight_version, version)
        if tuple(sent) != prompt.token_ids:
            raise AlignmentError("the server wrapper changed the prompt's ids")
        check_lengths("choices", token_ids=len(ids), logprobs=len(logprobs), finish_reasons=len(reasons))
        before = self._find(messages)
        samples = [self._keep(before, messages, prompt, *choice) for choice in zip(ids, logprobs, reasons, strict=True)]
        if before is not None:
            self._threads = [thread for thread in self._threads if thread is not before]
            self.current_nodes = [node for node in self.current_nodes if node is not before.node]
        return samples, list(reasons)

    def _keep(
        self,
        before: _Thread | None,
        messages: Sequence[Message],
        prompt: Prompt,
        ids: list[int],
        logprobs: list[float],
        reason: str,
    ) -> Sample:
        if not ids:
            raise AlignmentError("the server sampled no token")
        start, end = len(prompt.token_ids), len(prompt.token_ids) + len(ids)
        turn = Turn(start, end, prompt.assistant_open, prompt.last_user_end, len(messages), reason == "length")
        parsed = self.chat.parse(prompt, ids, len(messages))
        record = (before.record if before else TokenRecord()).with_turn(prompt, ids, logprobs)
        node = SequenceNode(
            full_text=self.chat.tokenizer.decode(record.tokens_T),
            tokens=list(record.tokens_T),
            masked_tokens=list(record.masks_T),
            logprobs=list(record.logprobs_T),
            metadata={"finish_reason": reason},
        )
        self.current_nodes.append(node)
        self._threads.append(_Thread([*messages, parsed.message], prompt, ids, record, node))
        return Sample(parsed.message, parsed.tool_calls, turn, record)

    def _find(self, messages: Sequence[Message]) -> _Thread | None:
        keys = [_identity(message) for message in messages]
        for thread in self._threads:
            known = len(thread.messages)
            if known < len(keys) and keys[:known] == [_identity(message) for message in thread.messages]:
                return thread
        return None


def _identity(message: Message) -> tuple[Any, ...]:
    """What makes a message the same whichever way a client wrote it back (None fields, extra fields)."""
    calls = tuple(
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    )
    return message["role"], message.get("content") or "", calls, message.get("tool_call_id")
