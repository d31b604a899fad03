"""`POST /generate`: the route that Atropos' `VLLMServer` samples and reads prompt logprobs through."""

import json
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict, get_type_hints

import numpy as np
from fastapi import Request
from pydantic import TypeAdapter, ValidationError, create_model
from vllm.exceptions import VLLMValidationError
from vllm.inputs import EngineInput, tokens_input
from vllm.logprobs import PromptLogprobs, SampleLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.outputs import LogprobsTensors

from agentic_opd.serving.engine import PluginState, RefusedError, final_output, last_rows, state_of, weight_version
from agentic_opd.serving.web import Body, refusal

NOT_FOR_CLIENTS = {
    *("detokenize", "extra_args", "flat_logprobs", "output_kind", "output_text_buffer_length", "skip_clone"),
    *("prompt_logprob_start", "prompt_logprob_token_ids", "skip_reading_prefix_cache", "stream_interval"),
}
"""Fields of vLLM's sampling parameters that say how the server works, not what is sampled."""

LOWEST_LOGPROB = -9999.0
"""Stands for a logprob of minus infinity, which JSON cannot hold; vLLM's own routes use the same."""


def _sampling_fields() -> dict[str, Any]:
    hints = get_type_hints(SamplingParams, include_extras=True)
    names = [name for name in SamplingParams.__struct_fields__ if not name.startswith("_")]
    return {name: (hints[name] | None, None) for name in names if name not in NOT_FOR_CLIENTS}


SamplingBody = create_model("SamplingBody", __base__=Body, **_sampling_fields())
_TOKEN_IDS = TypeAdapter(list[int])


class GenerateAnswer(TypedDict):
    """What Atropos reads, one entry a sample; logprobs are in nats, and the row's own token comes first.

    `weight_version` is our own addition.
    """

    text: list[str]
    finish_reasons: list[str | None]
    token_ids: list[list[int]]
    prompt_token_ids: list[int] | None
    weight_version: int
    logprobs: NotRequired[list[list[list[dict[int, float]]]]]
    """[sample][token] -> `[{id: logprob}]`, if they were asked for."""
    prompt_logprobs: NotRequired[list[dict[int, float] | None]]
    """[token] -> `{id: logprob}`, if they were asked for; the first token has none (null)."""


async def generate(request: Request) -> GenerateAnswer:
    """Sample, and answer as Atropos reads it."""
    state = state_of(request)
    body = read_object(await request.body())
    prompt = await read_prompt(body.pop("prompt", None), state)
    if body.pop("stream", False):
        raise RefusedError("stream", "this route does not stream")
    if (model := body.pop("model", state.model)) != state.model:
        raise RefusedError("model", f"{model!r} is not served here; {state.model!r} is", 404)
    params = read_params(body)
    return answer(await final_output(state.engine, prompt, params), params)


def read_object(raw: bytes) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        RefusedError: it is not one.
    """
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise RefusedError(None, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RefusedError(None, "the body must be a JSON object")
    return body


async def read_prompt(prompt: Any, state: PluginState) -> EngineInput:
    """The prompt as the engine takes it; it comes as a text, ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`.

    Raises:
        RefusedError: it is none of these, empty, too long, or holds ids that the model does not have.
    """
    name = "prompt"
    if prompt is None:
        raise RefusedError(name, 'a prompt is needed: a text, or {"prompt_token_ids": [...]}')
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            raise RefusedError(name, f"expected one of prompt and prompt_token_ids, got {sorted(prompt)}")
        ((key, prompt),) = prompt.items()
        name = f"{name}.{key}"
    if isinstance(prompt, str):
        rendered: list[Any] = await state.engine.renderer.render_cmpl_async([{"prompt": prompt}])
        prompt = rendered[0]["prompt_token_ids"]
    try:
        token_ids = _TOKEN_IDS.validate_python(prompt, strict=True)
    except ValidationError as error:
        raise refusal(error, (name,)) from error
    if not token_ids:
        raise RefusedError(name, "the prompt is empty")
    state.check_ids(name, token_ids)
    return tokens_input(token_ids)


def read_params(body: dict[str, Any]) -> SamplingParams:
    """The rest of the body as vLLM's sampling parameters; null means the default.

    Without `max_tokens` as many tokens are sampled as the context holds.

    Raises:
        RefusedError: naming the parameter that is unknown or wrong.
    """
    try:
        given = SamplingBody.model_validate_json(json.dumps(body))
        values = {name: value for name in given.model_fields_set if (value := getattr(given, name)) is not None}
        values.setdefault("max_tokens", None)
        return SamplingParams(**values, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY)
    except ValidationError as error:
        first = error.errors()[0]
        raise RefusedError(str(first["loc"][0]), first["msg"]) from error
    except VLLMValidationError as error:
        raise RefusedError(error.parameter or _blamed(body, str(error)), error.args[0]) from error


def _blamed(body: dict[str, Any], message: str) -> str | None:
    """The parameter that vLLM complains of without naming it apart: the message begins with it, or it fails alone."""
    first_word = message.partition(" ")[0]
    if first_word in body or len(body) == 1:
        return first_word if first_word in body else next(iter(body))
    for name, value in body.items():
        try:
            read_params({name: value})
        except RefusedError:
            return name
    return None


def answer(output: RequestOutput, params: SamplingParams) -> GenerateAnswer:
    """The engine's output as Atropos reads it."""
    reply: GenerateAnswer = {
        "text": [completion.text for completion in output.outputs],
        "finish_reasons": [completion.finish_reason for completion in output.outputs],
        "token_ids": [list(completion.token_ids) for completion in output.outputs],
        "prompt_token_ids": output.prompt_token_ids,
        "weight_version": weight_version(output),
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
    """The last `num_rows` rows as `{id: logprob}` (nats), the row's own token first."""
    if num_rows == 0 or logprobs is None:
        return []
    ids, values = last_rows(logprobs, num_rows)
    values = np.nan_to_num(values, nan=LOWEST_LOGPROB, neginf=LOWEST_LOGPROB)
    return [dict(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
