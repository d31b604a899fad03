"""`POST /v1/opd/score`: the logprobs of the last tokens of given sequences.

The prefix cache is read, which vLLM does not do for prompt logprobs unless told to: for a turn that was sampled on this
server only the hint and the turn are computed. If the cache covers rows that were asked for, these were not computed
and hold garbage; such a sequence is scored again without the cache.
"""

import asyncio
import base64
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
from fastapi import Request
from numpy.typing import NDArray
from pydantic import Field
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMServerError
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from agentic_opd.serving.engine import PluginState, RefusedError, final_output, last_rows, state_of, weight_version
from agentic_opd.serving.web import Body, read_body


class ScoredSequence(Body):
    """One sequence; the logprobs of its last `num_scored` tokens are wanted."""

    token_ids: list[int] = Field(min_length=2)
    num_scored: int = Field(ge=1)


class ScoreBody(Body):
    """The body of `POST /v1/opd/score`."""

    sequences: list[ScoredSequence] = Field(min_length=1)
    top_k: int = Field(ge=1)


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
    """The answer of `POST /v1/opd/score`, one result a sequence, all of the same weights."""

    weight_version: int
    results: list[SequenceAnswer]


def encode(array: NDArray[Any], dtype: str) -> str:
    """`array` as base64 of its elements, row by row."""
    return base64.b64encode(array.astype(dtype).tobytes()).decode("ascii")


async def score(request: Request) -> ScoreAnswer:
    """Score every sequence of the body, all of them with the same weights."""
    state = state_of(request)
    body = await read_body(request, ScoreBody)
    check_limits(body, state)
    while True:
        scored = await score_all(state.engine, body)
        versions = {version for version, _ in scored}
        if len(versions) == 1:
            return {"weight_version": versions.pop(), "results": [answer for _, answer in scored]}
        # New weights came between two of the sequences.


def check_limits(body: ScoreBody, state: PluginState) -> None:
    """Refuse what this server cannot score.

    Raises:
        RefusedError: naming the field.
    """
    if body.top_k > min(state.max_logprobs, state.vocab_size):
        raise RefusedError(
            "top_k",
            f"{body.top_k} is more than this server returns ({min(state.max_logprobs, state.vocab_size)}); "
            f"restart it with --max-logprobs {body.top_k}, or ask for less",
        )
    for index, sequence in enumerate(body.sequences):
        name = f"sequences[{index}]"
        state.check_ids(f"{name}.token_ids", sequence.token_ids)
        if sequence.num_scored >= len(sequence.token_ids):
            raise RefusedError(
                f"{name}.num_scored",
                f"{sequence.num_scored} of {len(sequence.token_ids)} tokens cannot be scored: the first one has no "
                "logprob",
            )


async def score_all(engine: EngineClient, body: ScoreBody) -> list[tuple[int, SequenceAnswer]]:
    """All sequences at once, in their order; when one fails, the others are aborted."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(score_sequence(engine, sequence, body.top_k)) for sequence in body.sequences]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [task.result() for task in tasks]


async def score_sequence(engine: EngineClient, sequence: ScoredSequence, top_k: int) -> tuple[int, SequenceAnswer]:
    """Score one sequence, twice if the cache covered rows that are wanted. Returns the weights' version too.

    Raises:
        VLLMServerError: the engine's rows do not fit the sequence.
    """
    prompt = tokens_input(sequence.token_ids)
    tokens = sequence.token_ids[-sequence.num_scored :]
    most_cached = len(sequence.token_ids) - sequence.num_scored - 1
    for skip_cache in (False, True):
        output = await final_output(engine, prompt, scoring_params(top_k, skip_cache=skip_cache))
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
