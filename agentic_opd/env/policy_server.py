"""The policy behind Atropos' server classes, with token ids in and out (I/O).

`PolicyServer` requests sampled ids and their logprobs from one vLLM server; the agent loop uses `ServedPolicy`.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

from atroposlib.envs.server_handling.server_baseline import APIServerConfig, ReasoningConfig
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from pydantic import BaseModel, Field, ValidationError

from agentic_opd.core.errors import AlignmentError, ServerMismatchError
from agentic_opd.core.http import JsonClient
from agentic_opd.rollout.conversation import Completion

_TokenLogprobs = Annotated[list[Annotated[dict[int, float], Field(min_length=1)]], Field(min_length=1)]
"""`[{id: logprob}]`, the sampled token first."""


class _Generated(BaseModel):
    """Response of the plugin's `/generate`; each list has one entry per choice."""

    token_ids: list[list[int]]
    logprobs: list[list[_TokenLogprobs]]
    finish_reasons: list[str]
    weight_version: int | None = None

    def completions(self) -> list[Completion]:
        choices = zip(self.token_ids, self.logprobs, self.finish_reasons, strict=True)
        return [
            Completion(tuple(ids), tuple(next(iter(row[0].values())) for row in rows), reason, self.weight_version)
            for ids, rows, reason in choices
        ]


class _Logprobs(BaseModel):
    token_logprobs: list[float]


class _Choice(BaseModel):
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: str


class _Completed(BaseModel):
    """Response of vLLM's `/v1/completions`; it does not report the weight version."""

    choices: list[_Choice]

    def completions(self) -> list[Completion]:
        return [Completion(tuple(c.token_ids), tuple(c.logprobs.token_logprobs), c.finish_reason) for c in self.choices]


class PolicyServer(VLLMServer):
    """One vLLM server. Uses the plugin's `/generate`, or `/v1/completions` if `has_plugin` is False.

    Unlike its base class it keeps connections open, gives up after `client.retry_s`, and raises this package's errors.
    """

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        self.client = JsonClient(config.base_url or "", config.api_key, timeout_s=config.timeout)
        # Without a key, the base's OpenAI client would send the key of this process's environment to this server.
        config.api_key = config.api_key or "EMPTY"
        super().__init__(config, reasoning_config=reasoning_config)  # type: ignore[arg-type]
        self.has_plugin, self.has_adapters = True, False

    async def complete(
        self,
        prompt_ids: Sequence[int],
        *,
        split: str = "train",
        prefer_weight_version: int | None = None,
        **params: Any,
    ) -> list[Completion]:
        """Sample `n` completions of a prompt (one without `n`); `params` are vLLM's sampling parameters.

        If the server receives new weights as adapters, the preferred version samples while the server keeps it.

        Raises:
            ServerMismatchError: the response does not hold the sampled ids and logprobs.
            ServerRequestError: the server refused the request.
            ServerUnreachableError: no usable answer within the retry window.
        """
        if prefer_weight_version is not None and self.has_adapters:
            params["prefer_weight_version"] = prefer_weight_version
        timings = self.request_timings if split == "train" else self.eval_request_timings
        async with self.sem if split == "train" else self.eval_sem:
            start = time.monotonic()
            completions = await self._ask(prompt_ids, params)
            timings.append(time.monotonic() - start)
            del timings[: -self.config.rolling_buffer_length]
        return completions

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Implement Atropos' call: return (prompt ids, ids, logprobs, finish reasons), the last three per choice."""
        prompt_ids = list(kwargs.pop("input_ids"))
        kwargs.pop("model", None)
        got = await self.complete(prompt_ids, **kwargs)
        ids, logprobs = [[*one.token_ids] for one in got], [[*one.logprobs] for one in got]
        return prompt_ids, ids, logprobs, [one.finish_reason for one in got]

    async def _ask(self, prompt_ids: Sequence[int], params: Mapping[str, Any]) -> list[Completion]:
        if self.has_plugin:
            route, kind, extra = "/generate", _Generated, {"prompt": {"prompt_token_ids": prompt_ids}}
        else:
            route, kind = "/v1/completions", _Completed
            extra = {"model": self.config.model_name, "prompt": prompt_ids, "return_token_ids": True}
        answer: Any = await self.client.post(route, {**extra, "logprobs": 0, **params})
        try:
            completions = kind.model_validate(answer).completions()
        except ValidationError as error:
            first = error.errors()[0]
            self._refuse(route, answer, f"{'.'.join(map(str, first['loc']))}: {first['msg']}", error)
        except (AlignmentError, ValueError) as error:
            self._refuse(route, answer, str(error), error)
        if len(completions) != params.get("n", 1):
            self._refuse(route, answer, f"{len(completions)} completions for n={params.get('n', 1)}")
        return completions

    def _refuse(self, route: str, answer: Any, why: str, error: Exception | None = None) -> NoReturn:
        shown = repr(answer)
        raise ServerMismatchError(
            f"{self.client.base_url}{route} did not answer with sampled token ids and their logprobs ({why}), so "
            "rollouts can't be kept token by token. Serve the policy with vLLM; scripts/serve_vllm MODEL starts one "
            f"with everything needed. The answer: {shown[:300]}{'...' if len(shown) > 300 else ''}"
        ) from error


@dataclass(slots=True)
class ServedPolicy:
    """The policy for one episode: one server and fixed sampling parameters; a `rollout.loop.Policy`.

    The weights that sampled the first turn sample the others too, as long as the server keeps them.
    """

    server: PolicyServer
    params: Mapping[str, Any]
    weight_version: int | None = None

    async def sample(self, prompt_ids: Sequence[int], max_tokens: int) -> Completion:
        """See `rollout.loop.Policy.sample`."""
        (completion,) = await self.server.complete(
            prompt_ids, prefer_weight_version=self.weight_version, **self.params, max_tokens=max_tokens
        )
        self.weight_version = completion.weight_version
        return completion
