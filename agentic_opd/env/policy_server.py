"""The policy behind Atropos' server classes: `PolicyServer` for Atropos, `ServedPolicy` for an episode (I/O)."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atroposlib.envs.server_handling.server_baseline import APIServerConfig, ReasoningConfig
from atroposlib.envs.server_handling.vllm_server import VLLMServer

from agentic_opd.core.http import JsonClient
from agentic_opd.core.types import Completion, SamplingDistribution
from agentic_opd.plugin.client import PluginClient


class PolicyServer(VLLMServer):
    """One vLLM server, as Atropos configures it; call `use` before the first request.

    Unlike its base class it keeps connections open, gives up after `client.retry_s`, and raises this package's errors.
    """

    plugin: PluginClient

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        self.client = JsonClient(config.base_url or "", config.api_key, timeout_s=config.timeout)
        # Without a key, the base's OpenAI client would send the key of this process's environment to this server.
        config.api_key = config.api_key or "EMPTY"
        super().__init__(config, reasoning_config=reasoning_config)  # type: ignore[arg-type]

    def use(self, plugin: PluginClient) -> None:
        """Send further requests through `plugin`, a connected client of this server."""
        self.plugin, self.config.model_name = plugin, plugin.info.model

    async def complete(
        self, prompt_ids: Sequence[int], *, split: str = "train", weight_version: int | None = None, **params: Any
    ) -> list[Completion]:
        """Sample completions as `PluginClient.complete` does, within the request limit of the split."""
        timings = self.request_timings if split == "train" else self.eval_request_timings
        async with self.sem if split == "train" else self.eval_sem:
            start = time.monotonic()
            completions = await self.plugin.complete(prompt_ids, params, weight_version)
            timings.append(time.monotonic() - start)
            del timings[: -self.config.rolling_buffer_length]
        return completions

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Implement Atropos' call: return (prompt ids, ids, logprobs, finish reasons), the last three per choice."""
        prompt_ids = list(kwargs.pop("input_ids"))
        kwargs.pop("model", None)
        choices = await self.complete(prompt_ids, **kwargs)
        ids, logprobs = [[*choice.token_ids] for choice in choices], [[*choice.logprobs] for choice in choices]
        return prompt_ids, ids, logprobs, [choice.finish_reason for choice in choices]


@dataclass(slots=True)
class ServedPolicy:
    """The policy for one episode: one server and fixed sampling parameters; a `rollout.loop.Policy`.

    The weights that sampled the first turn sample the others too, as long as the server keeps them.
    """

    server: PolicyServer
    params: Mapping[str, Any]
    weight_version: int | None = None
    seed: int | None = None
    """Seed of the first turn; the turns after it have the following numbers. None: the server draws."""

    async def sample(self, prompt_ids: Sequence[int], max_tokens: int) -> Completion:
        """Sample one completion with the weights that sampled the first turn, if the server still has them."""
        params: dict[str, Any] = {**self.params, "max_tokens": max_tokens}
        if self.seed is not None:
            params["seed"] = self.seed
            self.seed += 1
        (completion,) = await self.server.complete(prompt_ids, weight_version=self.weight_version, **params)
        self.weight_version = completion.weight_version
        return replace(completion, sampling=SamplingDistribution.of_parameters(self.params))
