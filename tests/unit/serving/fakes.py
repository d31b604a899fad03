"""An engine that knows a table of bigram logprobs, behind the plugin's real routes."""

import asyncio
import warnings
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="the plugin runs inside vLLM, which is not installed")

with warnings.catch_warnings():  # torch's and vLLM's own deprecations
    warnings.simplefilter("ignore")
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
    from vllm.inputs import TokensInput
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
    from vllm.platforms import current_platform as current_platform
    from vllm.sampling_params import SamplingParams

    from agentic_opd.serving.adapters import Adapters as Adapters
    from agentic_opd.serving.engine import MAX_BODY_MIB as MAX_BODY_MIB
    from agentic_opd.serving.engine import MAX_BODY_VARIABLE as MAX_BODY_VARIABLE
    from agentic_opd.serving.engine_process import MOST_CACHED
    from agentic_opd.serving.errors import RouteError as RouteError
    from agentic_opd.serving.plugin import OPDEndpointPlugin
    from agentic_opd.serving.reload import tensor_shapes as tensor_shapes
    from agentic_opd.serving.web import MOST_SHOWN as MOST_SHOWN
    from agentic_opd.serving.web import PARSED_AT_ONCE as PARSED_AT_ONCE
    from agentic_opd.serving.web import KeyGuard as KeyGuard

VOCAB = 8
TABLE_VV = np.log(np.random.default_rng(0).dirichlet(np.ones(VOCAB), size=VOCAB)).astype(np.float32)
"""Row: the token before; column: the token."""


@dataclass
class ModelConfig:
    """What the plugin reads of vLLM's."""

    max_model_len: int = 16
    max_logprobs: int = 4
    model: str = "somewhere/policy"
    hf_config: Any = field(default_factory=Namespace)
    dtype: str = "torch.bfloat16"
    logprobs_mode: str = "raw_logprobs"
    word_embeddings_untied_by_checkpoint: bool = False
    is_multimodal_model: bool = False

    def get_vocab_size(self) -> int:
        return VOCAB


class Renderer:
    """One token a character: `a` is 0."""

    async def render_cmpl_async(self, prompts: list[dict[str, str]]) -> list[dict[str, list[int]]]:
        return [{"prompt_token_ids": [ord(c) - ord("a") for c in prompt["prompt"]]} for prompt in prompts]


def flat_row(flat: FlatLogprobs, before: int, token: int, top_k: int) -> None:
    """Append what vLLM says of `token` after `before`."""
    row = TABLE_VV[before]
    ids = [token, *np.argsort(-row)[:top_k].tolist()]
    flat.append_fast(ids, row[ids].tolist(), [1] * len(ids), [None] * len(ids))  # type: ignore[arg-type]


def vllm_config(**parts: Any) -> Namespace:
    """vLLM's own, as far as the plugin reads it."""
    workers = Namespace(world_size=1, data_parallel_size=1)
    return Namespace(**{"lora_config": None, "weight_transfer_config": None, "parallel_config": workers, **parts})


@dataclass
class TableEngine:
    """Does what vLLM's engine does, as far as the plugin can see.

    `cached` tokens of every prompt are in its prefix cache; rows of cached positions hold garbage, as vLLM's do. With
    `limits_hits` a request may limit what it takes from there, as `engine_process` makes vLLM do.
    """

    cached: int = 0
    limits_hits: bool = False
    failure: Exception | None = None
    hang: bool = False
    version: str = "default"
    model_config: ModelConfig = field(default_factory=ModelConfig)
    vllm_config: Any = field(default_factory=lambda: vllm_config())
    renderer: Renderer = field(default_factory=Renderer)
    requests: list[SamplingParams] = field(default_factory=list)
    read_by: list[str | None] = field(default_factory=list)
    """The folder's name of each request's adapter."""
    gate: asyncio.Event | None = None
    began: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: int = 0
    calls: list[str] = field(default_factory=list)
    broken_paths: tuple[str, ...] = ()
    load_error: Exception = field(default_factory=lambda: RuntimeError("the worker could not load it"))
    replaced: list[str] | None = None
    """Layers that a worker replaced before its load failed."""
    on_pause: Callable[[], None] = lambda: None
    resumed_twice: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(
        self, prompt: TokensInput, params: SamplingParams, request_id: str, *, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        self.requests.append(params)
        self.read_by.append(lora_request and Path(lora_request.lora_path).name)
        self.began.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        if self.hang:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.aborted += 1
                raise
        ids = prompt["prompt_token_ids"]
        cached = 0 if params.skip_reading_prefix_cache else min(self.cached, len(ids) - 1)
        if self.limits_hits and params.extra_args:
            cached = min(cached, params.extra_args[MOST_CACHED])
        outputs = [self._completion(index, ids[-1], params) for index in range(params.n)]
        rows, named = self._prompt_rows(ids, cached, params), self._named(ids, cached, params)
        yield RequestOutput(
            *(request_id, None, ids, rows, outputs, True),
            num_cached_tokens=cached,
            prompt_token_id_logprobs=named,
        )

    def _named(self, ids: list[int], cached: int, params: SamplingParams) -> np.ndarray | None:
        """What vLLM's V2 runner says of the named ids; nothing if the first of their rows is cached."""
        if params.prompt_logprob_token_ids is None:
            return None
        assert self.vllm_config.use_v2_model_runner
        start = params.prompt_logprob_start or 0
        rows = TABLE_VV[ids[start:-1]]
        return None if start < cached else np.take_along_axis(rows, np.asarray(params.prompt_logprob_token_ids), 1)

    def _prompt_rows(self, ids: list[int], cached: int, params: SamplingParams) -> FlatLogprobs | None:
        if params.prompt_logprobs is None:
            return None
        flat = FlatLogprobs()
        flat.append(None)
        for p in range(1, len(ids)):
            garbage = p - 1 < cached
            flat_row(flat, ids[p - 1], (ids[p] + 1) % VOCAB if garbage else ids[p], params.prompt_logprobs)
        return flat

    def _completion(self, index: int, before: int, params: SamplingParams) -> CompletionOutput:
        flat = FlatLogprobs()
        ids = [(before + 1 + step) % VOCAB for step in range(params.max_tokens or 3)]
        for previous, token in zip([before, *ids], ids, strict=False):
            flat_row(flat, previous, token, params.logprobs or 0)
        text = "".join(chr(ord("a") + token) for token in ids)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=ids,
            cumulative_logprob=None,
            logprobs=None if params.logprobs is None else flat,
            finish_reason="length",
            weight_versions=[WeightVersionSpan(self.version, 0, len(ids))],
        )

    async def get_weight_version(self) -> str:
        return self.version

    async def update_weight_version(self, new_version: str) -> None:
        self.calls.append(f"version {new_version}")
        self.version = new_version

    async def pause_generation(self, *, mode: str) -> None:
        self.calls.append(f"pause {mode}")
        self.on_pause()

    async def resume_generation(self) -> None:
        self.calls.append("resume")
        if self.calls.count("resume") == 2:
            self.resumed_twice.set()

    async def add_lora(self, lora_request: Any) -> bool:
        name = Path(lora_request.lora_path).name
        if name in self.broken_paths:
            raise self.load_error
        self.calls.append(f"add {lora_request.lora_int_id} {name}")
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        self.calls.append(f"remove {lora_id}")
        return True

    async def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return True

    async def collective_rpc(self, method: str, kwargs: dict[str, str] | None = None) -> list[list[str] | None] | None:
        await asyncio.sleep(0.01)
        if method == "settle_weights":
            return [self.replaced]
        assert kwargs is not None
        name = Path(kwargs["weights_path"]).name
        self.calls.append(f"load {name}")
        if name in self.broken_paths:
            raise self.load_error
        return None


async def app_of(engine: TableEngine, api_key: str | None = None, **listens: Any) -> FastAPI:
    """The plugin's routes on `engine`, with vLLM's own exception handlers around them, at 127.0.0.1."""
    app = FastAPI()
    app.state.args = Namespace(log_error_stack=False)
    app.state.server, app.state.engine_client = Namespace(should_exit=False), Namespace(errored=False, is_running=True)
    plugin = OPDEndpointPlugin()
    plugin.attach_router(app)
    init_exception_handler(app)
    about = {"served_model_name": ["policy"], "model": "somewhere/policy", "host": "127.0.0.1", **listens}
    args = Namespace(api_key=[api_key] if api_key else None, **about)
    await plugin.init_state(engine, app.state, args)  # type: ignore[arg-type]
    return app


def client_of(engine: TableEngine, api_key: str | None = None, **listens: Any) -> TestClient:
    """A client of these routes, whose bodies are JSON."""
    app = asyncio.run(app_of(engine, api_key, **listens))
    headers = {"Content-Type": "application/json"}
    return TestClient(app, "http://127.0.0.1", raise_server_exceptions=False, headers=headers)
