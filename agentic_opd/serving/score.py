"""`POST /v1/opd/score`: the logprobs of the last tokens of given sequences.

The prefix cache is read, which vLLM does not do for prompt logprobs unless told to: for a turn that was sampled on this
server only the hint and the turn are computed. If the cache covers rows that were asked for, these were not computed
and hold garbage; such a sequence is scored again without the cache.

A sequence with `unless_weight_version` is scored only if other weights score the whole body: so a client learns in one
request how a turn looks to new weights, and nothing is computed where the weights are still those that sampled it.
"""

import asyncio
import base64
from collections.abc import Sequence
from typing import Annotated, Any, TypedDict

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMServerError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams

from agentic_opd.serving.adapters import Reader
from agentic_opd.serving.engine import (
    PluginState,
    RefusedError,
    as_version,
    final_output,
    last_rows,
    weight_version,
)
from agentic_opd.serving.web import Body, read_body

SCORE_ROUTE = 3
"""What this route understands, for clients to ask (`/v1/opd/info`): from 2 on a sequence's own `top_k` and
`unless_weight_version`, from 3 on `prefer_weight_version` and `read_by`."""
MAX_SEQUENCES = 256
"""Each is a request of its own to the engine; a turn has at most a handful."""

Count = Annotated[int, Meta(ge=1)]
Version = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class ScoredSequence(Body, frozen=True):
    """One sequence; the logprobs of its last `num_scored` tokens are wanted."""

    token_ids: Annotated[list[int], Meta(min_length=2)]
    num_scored: Count
    top_k: Count | None = None
    """In place of the body's."""
    unless_weight_version: Version | None = None
    """Its result is null if the weights have this version."""


class ScoreBody(Body, frozen=True):
    """The body of `POST /v1/opd/score`."""

    sequences: Annotated[list[ScoredSequence], Meta(min_length=1)]
    top_k: Count
    prefer_weight_version: Version | None = None
    """Of the adapters, the one to read with while it is kept."""
    read_by: Reader = "policy"

    def wanted(self, version: int) -> list[bool]:
        """Which sequences are to be scored by the weights of this version."""
        return [sequence.unless_weight_version != version for sequence in self.sequences]


class SequenceAnswer(TypedDict):
    """The rows of one sequence; arrays are base64 of little-endian elements, row by row."""

    num_scored: int
    top_k: int
    num_cached_tokens: int
    actual_logprobs: str
    """float32 [num_scored], nats, of the sequence's own tokens."""
    top_token_ids: str
    """int32 [num_scored, top_k]."""
    top_logprobs: str
    """float32 [num_scored, top_k]."""


class ScoreAnswer(TypedDict):
    """The answer of `POST /v1/opd/score`, one result a sequence, all of the same weights; null if it was not wanted."""

    weight_version: int
    results: list[SequenceAnswer | None]


def encode(array: NDArray[Any], dtype: str) -> str:
    """`array` as base64 of its elements, row by row."""
    return base64.b64encode(array.astype(dtype).tobytes()).decode("ascii")


async def score(state: PluginState, raw: bytes) -> ScoreAnswer:
    """Score every sequence of the body, all of them with the same weights."""
    if raw.count(b"{") > 1 + MAX_SEQUENCES:  # no field is a text, so each brace is an object; far cheaper than parsing
        raise RefusedError(
            "sequences", f"the body holds too many objects: at most {MAX_SEQUENCES} sequences are scored"
        )
    body = await read_body(state, raw, ScoreBody)
    check_limits(body, state)
    with state.adapters.reading(body.prefer_weight_version, body.read_by) as weights:
        if weights.version is not None:
            scored = await score_all(state.engine, body, body.wanted(weights.version), weights.adapter)
            return {"weight_version": weights.version, "results": [result and result[1] for result in scored]}
        return await _score_by_base(state, body)


async def _score_by_base(state: PluginState, body: ScoreBody) -> ScoreAnswer:
    """By the weights that the engine holds, which may change meanwhile."""
    assumed = state.last_version
    while True:
        scored = await score_all(state.engine, body, body.wanted(assumed))
        versions = {result[0] for result in scored if result is not None}
        if not versions:
            versions.add(as_version(await state.engine.get_weight_version()))
        version = state.last_version = versions.pop()
        if not versions and body.wanted(version) == body.wanted(assumed):
            return {"weight_version": version, "results": [result and result[1] for result in scored]}
        # New weights came between two of the sequences, or since the last answer.
        assumed = version


def check_limits(body: ScoreBody, state: PluginState) -> None:
    """Refuse what this server cannot score.

    Raises:
        RefusedError: naming the field.
    """
    check_top_k("top_k", body.top_k, state)
    for index, sequence in enumerate(body.sequences):
        name = f"sequences[{index}]"
        if sequence.top_k is not None:
            check_top_k(f"{name}.top_k", sequence.top_k, state)
        state.check_ids(f"{name}.token_ids", sequence.token_ids)
        if sequence.num_scored >= len(sequence.token_ids):
            raise RefusedError(
                f"{name}.num_scored",
                f"{sequence.num_scored} of {len(sequence.token_ids)} tokens cannot be scored: the first one has no "
                "logprob",
            )


def check_top_k(name: str, top_k: int, state: PluginState) -> None:
    """Refuse more logprobs a position than there are.

    Raises:
        RefusedError: with what to restart the server with.
    """
    most = min(state.max_logprobs, state.vocab_size)
    if top_k > most:
        raise RefusedError(
            name,
            f"{top_k} is more than this server returns ({most}); restart it with --max-logprobs {top_k}, or ask for "
            "less",
        )


async def score_all(
    engine: EngineClient, body: ScoreBody, wanted: Sequence[bool], adapter: LoRARequest | None = None
) -> list[tuple[int, SequenceAnswer] | None]:
    """The wanted sequences at once, in their order, None for the others; when one fails, the others are aborted."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(score_sequence(engine, sequence, sequence.top_k or body.top_k, adapter))
                if is_wanted
                else None
                for sequence, is_wanted in zip(body.sequences, wanted, strict=True)
            ]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [task and task.result() for task in tasks]


async def score_sequence(
    engine: EngineClient, sequence: ScoredSequence, top_k: int, adapter: LoRARequest | None = None
) -> tuple[int, SequenceAnswer]:
    """Score one sequence, twice if the cache covered rows that are wanted. Returns the weights' version too.

    Raises:
        VLLMServerError: the engine's rows do not fit the sequence.
    """
    prompt = tokens_input(sequence.token_ids)
    tokens = sequence.token_ids[-sequence.num_scored :]
    most_cached = len(sequence.token_ids) - sequence.num_scored - 1
    for skip_cache in (False, True):
        output = await final_output(engine, prompt, scoring_params(top_k, skip_cache=skip_cache), adapter)
        num_cached = output.num_cached_tokens or 0
        if num_cached > most_cached or output.prompt_logprobs is None:
            continue
        ids, logprobs = last_rows(output.prompt_logprobs, sequence.num_scored)
        if rows_fit(ids, logprobs, tokens):
            return weight_version(output), {
                "num_scored": sequence.num_scored,
                "top_k": ids.shape[1] - 1,
                "num_cached_tokens": num_cached,
                "actual_logprobs": encode(logprobs[:, 0], "<f4"),
                "top_token_ids": encode(ids[:, 1:], "<i4"),
                "top_logprobs": encode(logprobs[:, 1:], "<f4"),
            }
    raise VLLMServerError("the engine's prompt logprobs do not fit the tokens that they were asked for")


def scoring_params(top_k: int, *, skip_cache: bool) -> SamplingParams:
    """Prompt logprobs and nothing else: the one token that has to be sampled is not looked at."""
    return SamplingParams(
        prompt_logprobs=top_k,
        skip_reading_prefix_cache=skip_cache,
        flat_logprobs=True,
        detokenize=False,
        max_tokens=1,
        temperature=0.0,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def rows_fit(ids: NDArray[np.int32], logprobs: NDArray[np.float32], tokens: Sequence[int]) -> bool:
    """Whether rows [R, 1 + K] can be those of `tokens` [R].

    Rows that the engine read from its cache were never computed: they hold what the memory held before.
    """
    return (
        len(ids) == len(tokens)
        and np.array_equal(ids[:, 0], tokens)
        and bool(np.isfinite(logprobs[:, 0]).all())
        and not np.isnan(logprobs).any()
        and float(logprobs.max()) < 1e-3
    )
