"""The running server's engine and settings, checks of token ids, and requests to the engine.

Prompt logprobs are returned as arrays, without a Python object for each value.
"""

import asyncio
import os
import re
from argparse import Namespace
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import numpy as np
from fastapi import Request
from numpy.typing import NDArray
from vllm import envs
from vllm.engine.protocol import EngineClient
from vllm.exceptions import RetryableRequestError
from vllm.inputs import EngineInput
from vllm.logprobs import FlatLogprobs, PromptLogprobs, SampleLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsTensors

from agentic_opd.serving.adapters import Adapters
from agentic_opd.serving.errors import RouteError
from agentic_opd.serving.images import HeldImages

WEIGHTS_ROOT_VARIABLE = "AGENTIC_OPD_WEIGHTS_ROOT"
"""Environment variable: directory that checkpoints may be loaded from; if unset, loading is refused."""
MAX_BODY_VARIABLE = "AGENTIC_OPD_MAX_BODY_MIB"
"""Environment variable: largest body of a request, in MiB."""
MAX_BODY_MIB = 4
"""Default of that variable: enough for about half a million token ids."""


@dataclass(frozen=True, slots=True)
class LoadedFiles:
    """Path and weight version of the checkpoint that was loaded last."""

    path: str
    version: int = 0


@dataclass(frozen=True, slots=True)
class Access:
    """The requests that the server accepts: those with one of its keys. Without keys `web.refusal` has the rule."""

    keys: tuple[str, ...] = ()
    host: str | None = "127.0.0.1"
    """Address that the server listens on; None: all addresses of this machine."""
    origins: tuple[str, ...] = ()
    """Web pages that the operator named, as `https://ui.example`."""
    is_socket: bool = False
    """Whether the server listens on a Unix socket, where a request's host name has no meaning."""

    @classmethod
    def of_server(cls, args: Namespace) -> "Access":
        """Read vLLM's arguments, and its environment for the key, as vLLM does."""
        origins = tuple(origin for origin in getattr(args, "allowed_origins", None) or () if origin != "*")
        return cls(
            tuple(key for key in (args.api_key or [envs.VLLM_API_KEY]) if key),
            getattr(args, "host", None) or None,
            origins,
            bool(getattr(args, "uds", None)),
        )


@dataclass(slots=True)
class PluginState:
    """The server's engine and settings, stored at `app.state.agentic_opd`."""

    engine: EngineClient
    model: str
    """The model's name in requests."""
    access: Access = Access()
    weights_root: Path | None = None
    loaded: LoadedFiles = LoadedFiles("")
    """The checkpoint that is loaded again if loading new weights fails."""
    max_body_bytes: int = MAX_BODY_MIB * 2**20
    """Largest accepted body, in bytes."""
    adapters: Adapters = field(default_factory=Adapters)
    images: HeldImages = field(default_factory=HeldImages)
    last_version: int = 0
    """Version of the weights of the last scores, cached because asking the engine takes a round trip."""
    broken: str | None = None
    """Why the weights are unusable: a load failed after a part of them had been replaced. None: they are whole."""
    reload_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    parser: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "agentic-opd-parser"))
    """Parses long bodies in one thread. Parsing holds the interpreter lock for 5 ms a MiB of ids, and up to 40 ms a MiB
    in the worst case. With one thread the event loop runs between two bodies instead of competing with many threads."""

    @classmethod
    def of_server(cls, engine: EngineClient, args: Namespace) -> "PluginState":
        """Read the settings from vLLM's arguments and the environment."""
        root = os.environ.get(WEIGHTS_ROOT_VARIABLE)
        return cls(
            engine=engine,
            model=args.served_model_name[0] if args.served_model_name else args.model,
            access=Access.of_server(args),
            weights_root=Path(root).resolve() if root else None,
            loaded=LoadedFiles(engine.model_config.model),
            adapters=Adapters.of_engine(engine),
            images=HeldImages.of_engine(engine),
            max_body_bytes=_max_body_mib() * 2**20,
        )

    @property
    def max_model_len(self) -> int:
        """Largest number of tokens of a sequence, including the sampled one."""
        return self.engine.model_config.max_model_len

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the model's vocabulary."""
        return self.engine.model_config.get_vocab_size()

    @property
    def dtype(self) -> str:
        """The engine's dtype, by torch's name: `bfloat16`."""
        return str(self.engine.model_config.dtype).removeprefix("torch.")

    @property
    def logprobs_mode(self) -> str:
        """Which logprobs the server returns, by vLLM's name: `raw_logprobs` are the policy's at temperature 1."""
        return self.engine.model_config.logprobs_mode

    @property
    def tied_embeddings(self) -> bool:
        """Whether the output head is tied to the embedding matrix and so has no separate weights."""
        return bool(getattr(self.engine.model_config.hf_config, "tie_word_embeddings", False))

    @property
    def may_be_tied(self) -> bool:
        """Whether the head may be tied inside vLLM.

        True also if the configuration ties the embeddings but the checkpoint has a head: vLLM ties a head that equals
        the embedding matrix.
        """
        return self.tied_embeddings or getattr(self.engine.model_config, "word_embeddings_untied_by_checkpoint", False)

    @property
    def max_logprobs(self) -> int:
        """Largest number of logprobs of a position in a request."""
        limit = self.engine.model_config.max_logprobs
        return self.vocab_size if limit == -1 else limit

    @property
    def named_ids(self) -> bool:
        """Whether the engine returns logprobs of given ids at positions of a prompt: vLLM's V2 model runner does."""
        is_v2 = getattr(self.engine.vllm_config, "use_v2_model_runner", False)
        return bool(is_v2) and "prompt_logprob_token_ids" in SamplingParams.__struct_fields__

    def check_weights(self) -> None:
        """Refuse to compute with weights of which only a part was replaced.

        Raises:
            RouteError: 409, of the kind `broken_weights`.
        """
        if self.broken is not None:
            raise RouteError(None, self.broken, 409, "broken_weights")

    @property
    def gpus(self) -> list[str]:
        """UUIDs of the GPUs that the engine computes on; empty on a CPU."""
        if not current_platform.is_cuda_alike():
            return []
        parallel = self.engine.vllm_config.parallel_config
        count = parallel.world_size * parallel.data_parallel_size
        return [current_platform.get_device_uuid(index) for index in range(count)]

    def check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        """Refuse ids outside of the vocabulary, and sequences that leave no room for a sampled token.

        Raises:
            RouteError: the message names the id, or both lengths.
        """
        if len(token_ids) >= self.max_model_len:
            raise RouteError(
                name, f"{len(token_ids)} tokens are too many: at most {self.max_model_len - 1} fit max_model_len"
            )
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            index = next(i for i, token in enumerate(token_ids) if not 0 <= token < self.vocab_size)
            raise RouteError(
                f"{name}[{index}]", f"token id {token_ids[index]} is not in the vocabulary of {self.vocab_size}"
            )


def _max_body_mib() -> int:
    value = os.environ.get(MAX_BODY_VARIABLE) or str(MAX_BODY_MIB)
    if re.fullmatch("0*[1-9][0-9]{0,3}", value) is None:
        raise ValueError(f"{MAX_BODY_VARIABLE} is {value!r}; expected a whole number of MiB from 1 to 9999")
    return int(value)


def state_of(request: Request) -> PluginState:
    """Return the state that the plugin stored on the app at start-up."""
    return request.app.state.agentic_opd


class KeepTensors(LogprobsProcessor):
    """Keeps prompt logprobs as the engine's tensors.

    vLLM's processor creates a Python object for each entry of each row, on the thread that serves all requests. That
    takes 50 ms for a prompt of 3000 tokens with 50 logprobs each, of which 150 rows are wanted.
    """

    def _update_prompt_logprobs(self, prompt_logprobs_tensors: LogprobsTensors) -> None:
        self.prompt_logprobs = prompt_logprobs_tensors  # type: ignore[assignment]  # RequestOutput passes it unchanged


async def final_output(
    engine: EngineClient, prompt: EngineInput, params: SamplingParams, adapter: LoRARequest | None = None
) -> RequestOutput:
    """Run one request until it has finished; cancelling this call aborts the request in the engine.

    Args:
        engine: The server's engine.
        prompt: The engine's input.
        params: Sampling parameters with `FINAL_ONLY` output. With `flat_logprobs`, prompt logprobs are returned as
            `LogprobsTensors` if the engine is an `AsyncLLM`, else as `FlatLogprobs`.
        adapter: The LoRA adapter to use; None for the base weights alone.

    Raises:
        VLLMClientError: the engine refuses the request.
        VLLMServerError: the engine is dead, or aborted the request.
    """
    request_id = f"opd-{uuid4().hex}"
    if params.flat_logprobs and params.prompt_logprobs is not None and isinstance(engine, AsyncLLM):
        output = await _with_tensors(engine, prompt, params, request_id, adapter)
    else:
        output = [output async for output in engine.generate(prompt, params, request_id, lora_request=adapter)][-1]
    _check_done(output)
    return output


async def outputs(
    engine: EngineClient, prompt: EngineInput, params: SamplingParams, adapter: LoRARequest | None = None
) -> AsyncGenerator[RequestOutput]:
    """Yield the outputs of a request with `DELTA` output in `params`. Closing the generator aborts the request."""
    async for output in engine.generate(prompt, params, f"opd-{uuid4().hex}", lora_request=adapter):
        _check_done(output)
        yield output


def _check_done(output: RequestOutput) -> None:
    if any(completion.finish_reason in ("abort", "error") for completion in output.outputs):
        raise RetryableRequestError("the engine aborted the request before it was done; send it again")


async def _with_tensors(
    engine: AsyncLLM, prompt: EngineInput, params: SamplingParams, request_id: str, adapter: LoRARequest | None
) -> RequestOutput:
    collector = await engine.add_request(request_id, prompt, params, lora_request=adapter)
    state = engine.output_processor.request_states.get(collector.request_id)
    if state is not None and state.logprobs_processor is not None:
        state.logprobs_processor = KeepTensors(**vars(state.logprobs_processor))
    try:
        output = await collector.get()
    except asyncio.CancelledError:
        await engine.abort(collector.request_id, internal=True)
        raise
    finally:
        collector.close()
    assert isinstance(output, RequestOutput)
    return output


def last_rows(
    logprobs: LogprobsTensors | SampleLogprobs | PromptLogprobs, num_rows: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the last `num_rows` rows as (ids, logprobs), both [num_rows, 1 + K]; column 0 is the row's own token.

    The result has fewer rows if the engine returned fewer. Rows are counted from the end, because the V1 model runner
    returns a row for each position, and the V2 runner only for the computed ones.
    """
    if isinstance(logprobs, LogprobsTensors):
        ids, values = logprobs.logprob_token_ids[-num_rows:], logprobs.logprobs[-num_rows:]
        return ids.cpu().numpy().astype(np.int32), values.float().cpu().numpy()
    assert isinstance(logprobs, FlatLogprobs)
    first = max(0, len(logprobs.start_indices) - num_rows)
    begin, rows = logprobs.start_indices[first], len(logprobs.start_indices) - first
    ids = np.array(logprobs.token_ids[begin:], dtype=np.int32)
    return ids.reshape(rows, -1), np.array(logprobs.logprobs[begin:], dtype=np.float32).reshape(rows, -1)


def weight_version(output: RequestOutput | CompletionOutput, adapter_version: int | None = None) -> int:
    """Return the version of the weights that sampled the first token; 0 for the initial weights.

    Without an adapter the version comes from vLLM, which reports it for finished outputs only.
    """
    if adapter_version is not None:
        return adapter_version
    spans = (output.outputs[0] if isinstance(output, RequestOutput) else output).weight_versions
    return as_version(spans[0].version) if spans else 0


def as_version(label: str) -> int:
    """Convert a label of vLLM's weights to a version; 0 for labels that are not a number, which are not ours."""
    return int(label) if label.isdecimal() else 0
