"""The running server: its engine and settings, the checks of ids against its model, and one request from ids to rows.

Logprobs are not turned into Python objects on the way; they come as arrays.
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
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsTensors

from agentic_opd.serving.adapters import Adapters

WEIGHTS_ROOT_VARIABLE = "AGENTIC_OPD_WEIGHTS_ROOT"
"""Names the directory that checkpoints may be loaded from; unset, none may."""
MAX_BODY_VARIABLE = "AGENTIC_OPD_MAX_BODY_MIB"
"""Says how many MiB a request's body may have."""
MAX_BODY_MIB = 4
"""Unless the variable says otherwise: about half a million token ids."""


class RefusedError(Exception):
    """The request is refused (4xx): `field` names what is wrong with it, `message` says how.

    It does not belong to the package's error tree, because this side runs without the rest of the package.
    """

    def __init__(self, field: str | None, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.field, self.message, self.status = field, message, status


@dataclass(frozen=True, slots=True)
class LoadedFiles:
    """The checkpoint that was loaded last, and what its weights are called."""

    path: str
    version: int = 0


def api_keys(args: Namespace) -> tuple[str, ...]:
    """The server's keys, as vLLM finds them: in its arguments, else in the environment."""
    return tuple(key for key in (args.api_key or [envs.VLLM_API_KEY]) if key)


@dataclass(slots=True)
class PluginState:
    """The server's engine and settings, at `app.state.agentic_opd`."""

    engine: EngineClient
    model: str
    """The name that clients call the model by."""
    api_keys: tuple[str, ...] = ()
    weights_root: Path | None = None
    loaded: LoadedFiles = LoadedFiles("")
    """What is loaded again if new weights fail on their way."""
    max_body_bytes: int = MAX_BODY_MIB * 2**20
    """A longer body is refused."""
    adapters: Adapters = field(default_factory=Adapters)
    last_version: int = 0
    """Of the weights that gave the last scores; asking the engine takes a round trip."""
    reload_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    parser: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "agentic-opd-parser"))
    """Parses long bodies, one at a time: parsing holds the interpreter's lock, 5 ms a MiB of ids and 40 of the worst.
    Between two bodies the event loop has its turn, which it would have to share with all if each had a thread."""

    @classmethod
    def of_server(cls, engine: EngineClient, args: Namespace) -> "PluginState":
        """Take the settings from where vLLM takes them: its arguments first, then the environment.

        Raises:
            ValueError: a variable has no usable value.
        """
        root = os.environ.get(WEIGHTS_ROOT_VARIABLE)
        return cls(
            engine=engine,
            model=args.served_model_name[0] if args.served_model_name else args.model,
            api_keys=api_keys(args),
            weights_root=Path(root).resolve() if root else None,
            loaded=LoadedFiles(engine.model_config.model),
            adapters=Adapters.of_engine(engine),
            max_body_bytes=_max_body_mib() * 2**20,
        )

    @property
    def max_model_len(self) -> int:
        """Tokens a sequence may hold, the one that the engine samples included."""
        return self.engine.model_config.max_model_len

    @property
    def vocab_size(self) -> int:
        """Tokens of the model's vocabulary."""
        return self.engine.model_config.get_vocab_size()

    @property
    def dtype(self) -> str:
        """What the engine computes in, by torch's name."""
        return str(self.engine.model_config.dtype).removeprefix("torch.")

    @property
    def tied_embeddings(self) -> bool:
        """The model's output head is its embedding matrix, and takes no weights of its own."""
        return bool(getattr(self.engine.model_config.hf_config, "tie_word_embeddings", False))

    @property
    def may_be_tied(self) -> bool:
        """The same, or it was in the checkpoint, where a head lies beside it that vLLM has compared and tied again."""
        return self.tied_embeddings or getattr(self.engine.model_config, "word_embeddings_untied_by_checkpoint", False)

    @property
    def max_logprobs(self) -> int:
        """Logprobs a request may ask for at each position."""
        most = self.engine.model_config.max_logprobs
        return self.vocab_size if most == -1 else most

    def check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        """Refuse ids that the model does not have, and sequences that leave no room for one more token.

        Raises:
            RefusedError: naming the id, or both lengths.
        """
        if len(token_ids) >= self.max_model_len:
            raise RefusedError(
                name, f"{len(token_ids)} tokens are too many: at most {self.max_model_len - 1} fit max_model_len"
            )
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            index = next(i for i, token in enumerate(token_ids) if not 0 <= token < self.vocab_size)
            raise RefusedError(
                f"{name}[{index}]", f"token id {token_ids[index]} is not in the vocabulary of {self.vocab_size}"
            )


def _max_body_mib() -> int:
    value = os.environ.get(MAX_BODY_VARIABLE) or str(MAX_BODY_MIB)
    if re.fullmatch("0*[1-9][0-9]{0,3}", value) is None:
        raise ValueError(f"{MAX_BODY_VARIABLE} is {value!r}; expected a whole number of MiB from 1 to 9999")
    return int(value)


def state_of(request: Request) -> PluginState:
    """The state that the plugin put on the app at start-up."""
    return request.app.state.agentic_opd


class KeepTensors(LogprobsProcessor):
    """Leaves prompt logprobs as the engine's tensors.

    vLLM's own makes Python objects of every entry of every row, on the thread that serves all requests: 50 ms for a
    prompt of 3000 tokens at 50 logprobs each, of which 150 rows are wanted.
    """

    def _update_prompt_logprobs(self, prompt_logprobs_tensors: LogprobsTensors) -> None:
        self.prompt_logprobs = prompt_logprobs_tensors  # type: ignore[assignment]  # RequestOutput hands it on as it is


async def final_output(
    engine: EngineClient, prompt: EngineInput, params: SamplingParams, adapter: LoRARequest | None = None
) -> RequestOutput:
    """Run one request to its end; cancelling this aborts it in the engine.

    Args:
        engine: The server's engine.
        prompt: What it reads.
        params: Must ask for `FINAL_ONLY` output. With `flat_logprobs`, prompt logprobs come back as `LogprobsTensors`
            if the engine is vLLM's own, else as `FlatLogprobs`.
        adapter: What reads it on top of the base weights.

    Raises:
        VLLMClientError: the engine refuses the request.
        VLLMServerError: the engine is dead, or gave the request up.
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
    """Yield what one request gives, as it comes; `params` ask for `DELTA`. Closing it aborts the request.

    Raises:
        VLLMClientError, VLLMServerError: as `final_output`.
    """
    async for output in engine.generate(prompt, params, f"opd-{uuid4().hex}", lora_request=adapter):
        _check_done(output)
        yield output


def _check_done(output: RequestOutput) -> None:
    if any(completion.finish_reason in ("abort", "error") for completion in output.outputs):
        raise RetryableRequestError("the engine gave the request up before it was done; ask again")


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
    """The last `num_rows` rows as (ids, logprobs), both [num_rows, 1 + K]; column 0 is the row's own token.

    Fewer rows come back if the engine has fewer. Rows are counted from the end, because the V1 model runner returns
    a row for every position, and the V2 runner only for those that it computed.
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
    """The version of the weights that sampled the first token; 0 are those that the server started with.

    vLLM says it of what is finished, where no adapter sampled it.
    """
    if adapter_version is not None:
        return adapter_version
    spans = (output.outputs[0] if isinstance(output, RequestOutput) else output).weight_versions
    return as_version(spans[0].version) if spans else 0


def as_version(label: str) -> int:
    """The number that a label of vLLM's weights holds; a label that is not a number is not ours and counts as 0."""
    return int(label) if label.isdecimal() else 0
