"""`POST /generate`: the route that Atropos' `VLLMServer` uses for sampling and prompt logprobs.

With `stream: true` the response is a stream of server-sent events, one for each engine step and choice, ending with
`[DONE]`.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, NotRequired, TypedDict, get_args, get_type_hints

import msgspec
import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.inputs import EngineInput
from vllm.logprobs import FlatLogprobs, PromptLogprobs, SampleLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.outputs import LogprobsTensors

from agentic_opd.serving.adapters import Learner
from agentic_opd.serving.engine import PluginState, final_output, last_rows, outputs, weight_version
from agentic_opd.serving.errors import RouteError
from agentic_opd.serving.images import ImageRef, ImageRefs
from agentic_opd.serving.web import Body, read_body

NOT_FOR_CLIENTS = {
    *("detokenize", "extra_args", "flat_logprobs", "output_kind", "output_text_buffer_length", "skip_clone"),
    *("prompt_logprob_start", "prompt_logprob_token_ids", "skip_reading_prefix_cache"),
}
"""Fields of vLLM's sampling parameters that control the server's internals, not the sampling."""

MAX_PARAMETERS_BYTES = 2**18
"""Largest size of a body without its prompt. Nested parameters are slow to parse, and vLLM traverses them again on the
event loop."""

LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent; vLLM's own routes use the same value."""

WholeNumber = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""The range of integers that vLLM can pass to its engine."""


def _hints(of: type) -> dict[str, Any]:
    hints = get_type_hints(of, include_extras=True)
    return {name: WholeNumber if hint in (int, int | None) else hint for name, hint in hints.items()}


def _struct_of(dataclass: Any) -> type[msgspec.Struct]:
    """Build a body type with the init fields of one of vLLM's dataclasses."""
    hints = _hints(dataclass)
    optional = [(field.name, hints[field.name] | None, None) for field in fields(dataclass) if field.init]
    return msgspec.defstruct(dataclass.__name__, optional, bases=(Body,), frozen=True, forbid_unknown_fields=True)


_HINTS = {
    name: hint
    for name, hint in _hints(SamplingParams).items()
    if name in SamplingParams.__struct_fields__ and name not in NOT_FOR_CLIENTS and not name.startswith("_")
}
_OBJECTS: dict[str, Any] = {
    name: part for name, hint in _HINTS.items() for part in get_args(hint) if is_dataclass(part)
}
"""Sampling parameters that are vLLM dataclasses: name -> class."""


class PromptPart(msgspec.Struct, frozen=True):
    """The raw prompt of a body; all other fields are skipped without creating objects."""

    prompt: msgspec.Raw = msgspec.Raw()


class PromptObject(Body, frozen=True):
    """The prompt in Atropos' format: a text, or ids, with the pictures among them in order of their offsets."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    images: ImageRefs = ()


class RoutedBody(Body, frozen=True):
    """The fields of a `POST /generate` body that are not sampling parameters."""

    prompt: str | list[int] | PromptObject | None = None
    model: str | None = None
    stream: bool | None = None
    prefer_weight_version: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Version of the adapter to sample with, if it is still loaded; otherwise the newest one samples."""
    learner: Learner | None = None
    """The learner whose adapters these are; null: those of the policy of all."""
    else_learner: Learner | None = None
    """The learner whose adapters a learner without any has."""


GenerateBody = msgspec.defstruct(
    "GenerateBody",
    [
        (name, _struct_of(_OBJECTS[name]) | None if name in _OBJECTS else hint | None, None)
        for name, hint in _HINTS.items()
    ],
    bases=(RoutedBody,),
    frozen=True,
    forbid_unknown_fields=True,
)
"""The body of `POST /generate`: `RoutedBody` and vLLM's sampling parameters."""


class GenerateAnswer(TypedDict):
    """The response in Atropos' format, one entry a sample; logprobs in nats, the row's own token first.

    `weight_version` is an addition of this package.
    """

    text: list[str]
    finish_reasons: list[str | None]
    token_ids: list[list[int]]
    prompt_token_ids: list[int] | None
    weight_version: int
    logprobs: NotRequired[list[list[list[dict[int, float]]]]]
    """[sample][token] -> `[{id: logprob}]`, if requested."""
    prompt_logprobs: NotRequired[list[dict[int, float] | None]]
    """[token] -> `{id: logprob}`, if requested; null for the first token."""


class SampledTokens(TypedDict):
    """A stream event: the tokens of one choice that were sampled since its last event."""

    index: int
    token_ids: list[int]
    logprobs: NotRequired[list[list[dict[int, float]]]]
    """[token] -> `[{id: logprob}]` as in `GenerateAnswer`, if requested."""
    finish_reason: str | None
    stop_reason: int | str | None
    """The stop string or stop token id that ended the choice; None for any other end, such as EOS."""
    weight_version: int | None
    """Version of the weights that sampled the choice's first token, in its last event; None in earlier events."""


async def generate(state: PluginState, raw: bytes) -> GenerateAnswer | AsyncGenerator[SampledTokens]:
    """Sample, and return the response in Atropos' format, or with `stream` an event for each engine step.

    Raises:
        RouteError: the body is too large or malformed, names another model, or streams prompt logprobs.
    """
    if len(raw) > MAX_PARAMETERS_BYTES:
        prompt_part = await read_body(state, raw, PromptPart)
        if len(raw) - memoryview(prompt_part.prompt).nbytes > MAX_PARAMETERS_BYTES:
            message = f"all that is not the prompt is longer than {MAX_PARAMETERS_BYTES} bytes"
            raise RouteError(None, message, 413)
    body = await read_body(state, raw, GenerateBody)
    assert isinstance(body, RoutedBody)
    if body.model is not None and body.model != state.model:
        raise RouteError("model", f"{body.model!r} is not served here; {state.model!r} is", 404)
    params = read_params(body)
    prompt = await read_prompt(body.prompt, state)
    if body.stream:
        if params.prompt_logprobs is not None:
            raise RouteError("prompt_logprobs", "prompt logprobs do not come in a stream")
        params.output_kind = RequestOutputKind.DELTA
        params.detokenize = bool(params.stop)  # In a stream only stop strings need the text.
        return _streamed(state, prompt, params, body)
    with state.adapters.reading(body.prefer_weight_version, "policy", body.learner, body.else_learner) as weights:
        output = await final_output(state.engine, prompt, params, weights.adapter)
    return answer(output, params, weights.version)


async def _streamed(
    state: PluginState, prompt: EngineInput, params: SamplingParams, body: RoutedBody
) -> AsyncGenerator[SampledTokens]:
    with state.adapters.reading(body.prefer_weight_version, "policy", body.learner, body.else_learner) as weights:
        async with aclosing(outputs(state.engine, prompt, params, weights.adapter)) as every:
            async for output in every:
                for completion in output.outputs:
                    ids, reason = list(completion.token_ids), completion.finish_reason
                    if not ids and reason is None:
                        continue
                    event = SampledTokens(
                        index=completion.index,
                        token_ids=ids,
                        finish_reason=reason,
                        stop_reason=completion.stop_reason,
                        weight_version=None if reason is None else weight_version(completion, weights.version),
                    )
                    if params.logprobs is not None:
                        event["logprobs"] = [[row] for row in as_dicts(completion.logprobs, len(ids))]
                    yield event


async def read_prompt(prompt: str | list[int] | PromptObject | None, state: PluginState) -> EngineInput:
    """Convert a prompt to the engine's input.

    Accepted forms are a text, ids, `{"prompt": text}` and `{"prompt_token_ids": ids}`.

    Raises:
        RouteError: the prompt is missing, empty, too long, or contains ids outside of the vocabulary.
    """
    name, images = "prompt", tuple[ImageRef, ...]()
    if isinstance(prompt, PromptObject):
        images = prompt.images
        if images and prompt.prompt_token_ids is None:
            raise RouteError("prompt.images", "pictures are placed among prompt_token_ids")
        if prompt.prompt is not None and prompt.prompt_token_ids is not None:
            raise RouteError(name, "expected one of prompt and prompt_token_ids, got both")
        name = "prompt.prompt" if prompt.prompt_token_ids is None else "prompt.prompt_token_ids"
        prompt = prompt.prompt if prompt.prompt_token_ids is None else prompt.prompt_token_ids
    if prompt is None:
        raise RouteError("prompt", 'a prompt is needed: a text, or {"prompt_token_ids": [...]}')
    if isinstance(prompt, str):
        rendered: list[Any] = await state.engine.renderer.render_cmpl_async([{"prompt": prompt}])
        token_ids: list[int] = rendered[0]["prompt_token_ids"]
    else:
        token_ids = prompt
    if not token_ids:
        raise RouteError(name, "the prompt is empty")
    state.check_ids(name, token_ids)
    return await state.images.engine_input(state.engine, "prompt.images", token_ids, images)


def read_params(body: RoutedBody) -> SamplingParams:
    """Convert the rest of the body to vLLM's sampling parameters; null means the default.

    Without `max_tokens`, sampling is limited only by the context length.

    Raises:
        RouteError: a parameter is invalid; the error names it.
    """
    values: dict[str, Any] = {name: value for name in _HINTS if (value := getattr(body, name)) is not None}
    for name in values.keys() & _OBJECTS:
        members = msgspec.structs.asdict(values[name])
        try:
            values[name] = _OBJECTS[name](**{key: value for key, value in members.items() if value is not None})
        except VLLMValidationError as error:
            raise RouteError(name, error.args[0]) from error
    return make_params(values)


def make_params(values: dict[str, Any]) -> SamplingParams:
    """Build vLLM's sampling parameters.

    Raises:
        RouteError: a parameter is invalid; the error names it if it can be determined.
    """
    values = values if "max_tokens" in values else {**values, "max_tokens": None}
    try:
        return SamplingParams(**values, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY)
    except VLLMValidationError as error:
        raise RouteError(error.parameter or _blamed(values, str(error)), error.args[0]) from error


def _blamed(values: dict[str, Any], message: str) -> str | None:
    """Find the parameter of a vLLM error that has no `parameter`: the message's first word, or one that fails alone."""
    first_word = message.partition(" ")[0]
    if first_word in values or len(values) == 1:
        return first_word if first_word in values else next(iter(values))
    for name, value in values.items():
        try:
            make_params({name: value})
        except RouteError:
            return name
    return None


def answer(output: RequestOutput, params: SamplingParams, adapter_version: int | None = None) -> GenerateAnswer:
    """Convert the engine's output to Atropos' format."""
    reply: GenerateAnswer = {
        "text": [completion.text for completion in output.outputs],
        "finish_reasons": [completion.finish_reason for completion in output.outputs],
        "token_ids": [list(completion.token_ids) for completion in output.outputs],
        "prompt_token_ids": output.prompt_token_ids,
        "weight_version": weight_version(output, adapter_version),
    }
    if params.logprobs is not None:
        reply["logprobs"] = [
            [[row] for row in as_dicts(completion.logprobs, len(completion.token_ids))] for completion in output.outputs
        ]
    if params.prompt_logprobs is not None:
        reply["prompt_logprobs"] = [None, *as_dicts(output.prompt_logprobs, len(output.prompt_token_ids or ()) - 1)]
    return reply


def as_dicts(
    logprobs: LogprobsTensors | SampleLogprobs | PromptLogprobs | None, num_rows: int
) -> list[dict[int, float]]:
    """Return the last `num_rows` rows as `{id: logprob}` (nats), the row's own token first."""
    if num_rows == 0 or logprobs is None:
        return []
    if isinstance(logprobs, FlatLogprobs):
        # Rows vary in length: where vLLM merged outputs that were not read in time, a row has the sampled token once,
        # elsewhere twice if it is among the top ones too.
        bounds = zip(logprobs.start_indices[-num_rows:], logprobs.end_indices[-num_rows:], strict=True)
        return [_as_dict(logprobs.token_ids[a:b], logprobs.logprobs[a:b]) for a, b in bounds]
    ids, values = last_rows(logprobs, num_rows)
    values = np.nan_to_num(values, nan=LOWEST_LOGPROB, neginf=LOWEST_LOGPROB)
    return [dict(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]


def _as_dict(ids: Sequence[int], values: Sequence[float]) -> dict[int, float]:
    return {
        token: value if value > LOWEST_LOGPROB else LOWEST_LOGPROB for token, value in zip(ids, values, strict=True)
    }
