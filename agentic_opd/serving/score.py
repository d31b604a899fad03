"""`POST /v1/opd/score`: the logprobs of the last tokens of given sequences.

The prefix cache is enabled, which vLLM disables for prompt logprobs by default, and limited to the tokens before the
scored ones: rows that the cache covers are not computed and contain garbage. For a turn that was sampled on this
server, only the hint and the turn are computed, also if there is no hint. Where the limit has no effect
(`engine_process` did not run), such a sequence is scored again without the cache.

With `ids_of`, a sequence is also scored at the ids that rows of other sequences hold. Only vLLM's V2 model runner takes
ids by name, so `/v1/opd/info` reports whether this server does (`named_ids`).

A sequence with `unless_weight_version` is skipped if the weights that score the body have that version. A client can
thus request the logprobs of a turn under new weights, and nothing is computed if the weights are still those that
sampled the turn.
"""

import asyncio
import base64
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMServerError
from vllm.inputs import EngineInput
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams

from agentic_opd.serving.adapters import Learner, Reader
from agentic_opd.serving.engine import PluginState, as_version, final_output, last_rows, weight_version
from agentic_opd.serving.engine_process import MOST_CACHED
from agentic_opd.serving.errors import RouteError
from agentic_opd.serving.images import ImageRefs
from agentic_opd.serving.web import Body, read_body

MAX_SEQUENCES = 256
"""Largest number of sequences of a body. Each is a separate engine request; a turn needs only a few."""

Count = Annotated[int, Meta(ge=1)]
Index = Annotated[int, Meta(ge=0)]
Version = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class ScoredSequence(Body, frozen=True):
    """A sequence of which the last `num_scored` tokens are scored."""

    token_ids: Annotated[list[int], Meta(min_length=2)]
    num_scored: Count
    top_k: Count | None = None
    """Overrides the body's `top_k`."""
    unless_weight_version: Version | None = None
    """If the weights have this version, the sequence is not scored and its result is null."""
    images: ImageRefs = ()
    """The pictures among the tokens, in order of their offsets; see `images`."""
    ids_of: tuple[Index, ...] = ()
    """Sequences of the body with the same scored tokens, at whose `top_token_ids` this one is scored too."""


class ScoreBody(Body, frozen=True):
    """The body of `POST /v1/opd/score`."""

    sequences: Annotated[list[ScoredSequence], Meta(min_length=1)]
    top_k: Count
    prefer_weight_version: Version | None = None
    """Version of the adapter to score with, if it is still loaded; otherwise the newest one scores."""
    read_by: Reader = "policy"
    learner: Learner | None = None
    """The learner whose adapters these are; null: those of the policy of all."""
    else_learner: Learner | None = None
    """The learner whose adapters a learner without any has."""

    def are_scored(self, version: int) -> list[bool]:
        """Return for each sequence whether weights of this version should score it."""
        return [sequence.unless_weight_version != version for sequence in self.sequences]


class SequenceAnswer(TypedDict):
    """The scores of one sequence; arrays are base64 of little-endian elements in row-major order."""

    num_scored: int
    top_k: int
    num_cached_tokens: int
    actual_logprobs: str
    """float32 [num_scored]: logprobs (nats) of the sequence's own tokens."""
    top_token_ids: str
    """int32 [num_scored, top_k]: ids of the most probable tokens."""
    top_logprobs: str
    """float32 [num_scored, top_k]: logprobs (nats) of these."""
    named_logprobs: NotRequired[str]
    """float32 [num_scored, sum of the top_k of `ids_of`]: logprobs (nats) at the ids of these sequences, in order."""


class ScoredRows(NamedTuple):
    """A scored sequence: the version of its weights, its result, and the ids of its rows, int32 [num_scored, top_k]."""

    version: int
    result: SequenceAnswer
    ids_RK: NDArray[np.int32]


class ScoreAnswer(TypedDict):
    """The response of `POST /v1/opd/score`: one result a sequence, all by the same weights; null for skipped ones."""

    weight_version: int
    results: list[SequenceAnswer | None]


def encode(array: NDArray[Any], dtype: str) -> str:
    """Encode an array as base64 of its elements in row-major order."""
    return base64.b64encode(array.astype(dtype).tobytes()).decode("ascii")


async def score(state: PluginState, raw: bytes) -> ScoreAnswer:
    """Score the sequences of the body, all with the same weights.

    Raises:
        RouteError: the body is malformed, or exceeds a limit of this server.
    """
    if raw.count(b"{") > 1 + MAX_SEQUENCES:  # Each brace opens an object; counting is far cheaper than parsing.
        raise RouteError("sequences", f"the body holds too many objects: at most {MAX_SEQUENCES} sequences are scored")
    body = await read_body(state, raw, ScoreBody)
    check_limits(body, state)
    with state.adapters.reading(body.prefer_weight_version, body.read_by, body.learner, body.else_learner) as weights:
        if weights.version is not None:
            scored = await score_all(state, body, body.are_scored(weights.version), weights.adapter)
            return {"weight_version": weights.version, "results": [rows and rows.result for rows in scored]}
        return await _score_by_base(state, body)


async def _score_by_base(state: PluginState, body: ScoreBody) -> ScoreAnswer:
    """Score with the base weights; try again if they change in between."""
    assumed = state.last_version
    while True:
        scored = await score_all(state, body, body.are_scored(assumed))
        versions = {rows.version for rows in scored if rows is not None}
        if not versions:
            versions.add(as_version(await state.engine.get_weight_version()))
        version = state.last_version = versions.pop()
        if not versions and body.are_scored(version) == body.are_scored(assumed):
            return {"weight_version": version, "results": [rows and rows.result for rows in scored]}
        # New weights were loaded between two sequences, or since the last response.
        assumed = version


def check_limits(body: ScoreBody, state: PluginState) -> None:
    """Refuse sequences that this server can't score.

    Raises:
        RouteError: a limit is exceeded; the error names the field.
    """
    check_top_k("top_k", body.top_k, state)
    for index, sequence in enumerate(body.sequences):
        name = f"sequences[{index}]"
        if sequence.top_k is not None:
            check_top_k(f"{name}.top_k", sequence.top_k, state)
        state.check_ids(f"{name}.token_ids", sequence.token_ids)
        if sequence.num_scored >= len(sequence.token_ids):
            raise RouteError(
                f"{name}.num_scored",
                f"{sequence.num_scored} of {len(sequence.token_ids)} tokens cannot be scored: the first one has no "
                "logprob",
            )
    if any(sequence.ids_of for sequence in body.sequences):
        check_ids_of(body, state)


def check_ids_of(body: ScoreBody, state: PluginState) -> None:
    """Refuse `ids_of` that this server can't score, or that do not fit the sequences.

    Raises:
        RouteError: the message says what is wrong.
    """
    for index, sequence in enumerate(body.sequences):
        name = f"sequences[{index}].ids_of"
        if sequence.ids_of and not state.named_ids:
            raise RouteError(name, "this server's model runner scores no named ids; see named_ids of /v1/opd/info")
        count = 0
        for number in sequence.ids_of:
            source = body.sequences[number] if number < len(body.sequences) else None
            if source is None or source.unless_weight_version is not None:
                raise RouteError(name, f"{number} is not a sequence of the body, or not one that is always scored")
            if source.token_ids[-source.num_scored :] != sequence.token_ids[-sequence.num_scored :]:
                raise RouteError(name, f"sequence {number} has other scored tokens")
            count += source.top_k or body.top_k
        if count:
            check_top_k(name, count, state)
    try:
        TopologicalSorter({number: sequence.ids_of for number, sequence in enumerate(body.sequences)}).prepare()
    except CycleError as error:
        raise RouteError("sequences", f"ids_of of {error.args[1]} refer to each other in a cycle") from error


def check_top_k(name: str, top_k: int, state: PluginState) -> None:
    """Refuse a `top_k` above the server's limit or the vocabulary's size.

    Raises:
        RouteError: `top_k` is too large; the message names the option that raises the limit.
    """
    limit = min(state.max_logprobs, state.vocab_size)
    if top_k > limit:
        raise RouteError(
            name,
            f"{top_k} is more than this server returns ({limit}); restart it with --max-logprobs {top_k}, or ask for "
            "less",
        )


async def score_all(
    state: PluginState, body: ScoreBody, are_scored: Sequence[bool], adapter: LoRARequest | None = None
) -> list[ScoredRows | None]:
    """Score the sequences concurrently, those of `ids_of` first; if one fails, abort the others.

    Returns:
        One entry per sequence, in order; None for the sequences that are not to be scored (`are_scored`).

    Raises:
        Exception: the first failure of a sequence.
    """
    tasks: list[asyncio.Task[ScoredRows] | None] = []

    async def score_one(index: int) -> ScoredRows:
        sequence = body.sequences[index]
        named = [await task for number in sequence.ids_of if (task := tasks[number]) is not None]
        ids = np.concatenate([rows.ids_RK for rows in named], axis=1) if named else None
        name = f"sequences[{index}].images"
        prompt = await state.images.engine_input(state.engine, name, sequence.token_ids, sequence.images)
        return await score_sequence(state.engine, prompt, sequence, sequence.top_k or body.top_k, adapter, ids)

    try:
        async with asyncio.TaskGroup() as group:
            for index, is_scored in enumerate(are_scored):
                tasks.append(group.create_task(score_one(index)) if is_scored else None)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [task and task.result() for task in tasks]


async def score_sequence(
    engine: EngineClient,
    prompt: EngineInput,
    sequence: ScoredSequence,
    top_k: int,
    adapter: LoRARequest | None = None,
    named_RN: NDArray[np.int32] | None = None,
) -> ScoredRows:
    """Score a sequence, also at the ids `named_RN`; score it again without the cache if that covered requested rows.

    Raises:
        VLLMServerError: the engine's rows do not match the sequence.
    """
    tokens = sequence.token_ids[-sequence.num_scored :]
    most_cached = len(sequence.token_ids) - sequence.num_scored - 1
    for skip_cache in (False, True):
        params = scoring_params(top_k, None if skip_cache else most_cached)
        if named_RN is not None:
            params.prompt_logprob_token_ids, params.prompt_logprob_start = named_RN, most_cached
        output = await final_output(engine, prompt, params, adapter)
        num_cached = output.num_cached_tokens or 0
        if num_cached > most_cached or output.prompt_logprobs is None:
            continue
        ids, logprobs = last_rows(output.prompt_logprobs, sequence.num_scored)
        named = None if named_RN is None else output.prompt_token_id_logprobs
        if rows_fit(ids, logprobs, tokens) and (named is None) == (named_RN is None):
            result: SequenceAnswer = {
                "num_scored": sequence.num_scored,
                "top_k": ids.shape[1] - 1,
                "num_cached_tokens": num_cached,
                "actual_logprobs": encode(logprobs[:, 0], "<f4"),
                "top_token_ids": encode(ids[:, 1:], "<i4"),
                "top_logprobs": encode(logprobs[:, 1:], "<f4"),
            }
            if named is not None:
                result["named_logprobs"] = encode(named, "<f4")
            return ScoredRows(weight_version(output), result, ids[:, 1:])
    raise VLLMServerError("the engine's prompt logprobs do not fit the tokens that they were asked for")


def scoring_params(top_k: int, most_cached: int | None) -> SamplingParams:
    """Build sampling parameters that request prompt logprobs; vLLM must sample one token, which is ignored.

    At most `most_cached` tokens are taken from the prefix cache; None: it is not read.
    """
    return SamplingParams(
        prompt_logprobs=top_k,
        skip_reading_prefix_cache=most_cached is None,
        extra_args=None if most_cached is None else {MOST_CACHED: most_cached},
        flat_logprobs=True,
        detokenize=False,
        max_tokens=1,
        temperature=0.0,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def rows_fit(ids: NDArray[np.int32], logprobs: NDArray[np.float32], tokens: Sequence[int]) -> bool:
    """Return whether rows [R, 1 + K] are plausible logprobs of `tokens` [R].

    Rows covered by the prefix cache are not computed and contain uninitialised memory.
    """
    return (
        len(ids) == len(tokens)
        and np.array_equal(ids[:, 0], tokens)
        and bool(np.isfinite(logprobs[:, 0]).all())
        and not np.isnan(logprobs).any()
        and float(logprobs.max()) < 1e-3
    )
