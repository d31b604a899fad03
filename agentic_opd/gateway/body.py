"""The fields of a request's body, validated and named in errors. Pure.

In: JSON. Out: a pydantic model, or a `ClientError` that names the field. A parameter that would change what is sampled
is honoured or refused, never ignored. Any other unknown field is named in the log.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from agentic_opd.core.types import MOST_SCORE
from agentic_opd.gateway.client import LONGEST_NAME
from agentic_opd.gateway.errors import ClientError

logger = logging.getLogger(__name__)

_DEEPEST = 257
"""Maximum nesting of objects and lists in a body. With one more level, pydantic could not serialise the tools."""
_MOST_VALUES = 2**16
"""Maximum number of values in the objects and lists of a body. Parsing takes microseconds per value."""

Model = TypeVar("Model", bound=BaseModel)


class OpenModel(BaseModel):
    """A model that ignores unknown fields, because clients send back fields that they received.

    A null field counts as left out, because some clients write all fields of their library.
    """

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict) or None not in value.values():
            return value
        required = {info.alias or name for name, info in cls.model_fields.items() if info.is_required()}
        return {name: item for name, item in value.items() if item is not None or name in required}


class ClosedModel(BaseModel):
    """A model that refuses unknown fields, unless they are null: some clients write all fields of their library."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None or name in cls.model_fields}


def refusal(advice: str) -> BeforeValidator:
    """Refuse every value but null and false of a field that can't be honoured, with advice."""

    def check(value: object) -> object:
        if value is not None and value is not False:
            raise ValueError(f"this can't be honoured here: {advice}")
        return value

    return BeforeValidator(check)


def _refuse_media(kind: object) -> object:
    if isinstance(kind, str) and kind in ("file", "input_file", "input_audio", "audio_url", "video_url"):
        raise ValueError(f"the policy reads no part of type {kind}; send its text")
    return kind


TEXT_OR_PICTURE = BeforeValidator(_refuse_media)
"""Refuses parts of a content that no policy reads, with advice."""


class EndingBody(ClosedModel):
    """The body of `POST /sessions/{name}/end`."""

    reward: Annotated[float, Field(ge=-MOST_SCORE, le=MOST_SCORE)] | None = None
    feedback: Annotated[str, Field(max_length=100_000)] | None = None
    group: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)] | None = None


StopString = Annotated[str, Field(min_length=1)]


class FunctionSpec(OpenModel):
    """A tool that the client runs."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _check_schema(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema and schema.get("type", "object") != "object":
            raise ValueError(f"a tool's parameters are a JSON schema of an object, got type {schema['type']!r}")
        if schema and not isinstance(schema.get("properties", {}), dict):
            raise ValueError("properties must be an object of JSON schemas")
        return schema

    def in_chat(self) -> dict[str, Any]:
        """Return the tool as chat templates read it."""
        return {"type": "function", "function": self.model_dump(exclude_none=True)}


class SamplingFields(OpenModel):
    """Sampling parameters passed to vLLM unchanged, by vLLM's names. None means vLLM's default."""

    model_config = ConfigDict(extra="allow")

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | list[StopString] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    structured_outputs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    """The template's option of this name, as some providers' APIs take it."""
    session_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    @field_validator("structured_outputs")
    @classmethod
    def _drop_empty(cls, grammar: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return None for a grammar whose kinds are all at vLLM's defaults."""
        is_set = grammar and any(value is not None and value is not False for value in grammar.values())
        return grammar if is_set else None

    def sampling_parameters(self) -> dict[str, Any]:
        """Return the sampling parameters by vLLM's names, `stop` as a list. Empty lists and maps are left out."""
        no_parameters = {"chat_template_kwargs", "enable_thinking", "session_id"}
        parameters = {name: getattr(self, name) for name in SamplingFields.model_fields if name not in no_parameters}
        if isinstance(self.stop, str):
            parameters["stop"] = [self.stop]
        return {name: value for name, value in parameters.items() if value not in (None, [], {})}

    @property
    def template_options(self) -> dict[str, Any]:
        """The options of the chat template."""
        named = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**named, **(self.chat_template_kwargs or {})}

    def unknown_fields(self) -> list[str]:
        """Return the names of the fields that are not read and do not concern sampling.

        Raises:
            ClientError: 400, an unknown field would change what is sampled, or there are too many of them.
        """
        unknown = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        if len(unknown) > _MOST_UNKNOWN:
            raise ClientError(400, f"the body has more than {_MOST_UNKNOWN} unknown fields")
        for name, value in unknown.items():
            parameter = sampling_name(name)
            if parameter is not None and not any(value == neutral for neutral in _NOT_OFFERED.get(parameter, ())):
                fields = type(self).model_fields
                hint = next((f"; send {field}" for field in _IN_ITS_PLACE.get(parameter, ()) if field in fields), "")
                if parameter != name and parameter in fields:
                    hint = f"; did you mean {parameter}?"
                raise ClientError(
                    400, f"{name}: this field is unknown here, and it would change what is sampled{hint}", name
                )
        return [*unknown]


def read_body(model: type[Model], body: object, *path: str | int) -> Model:
    """Validate JSON as `model`.

    Raises:
        ClientError: 400, with the first invalid field.
    """
    if not path:
        if not isinstance(body, dict):
            raise ClientError(400, f"the body must be a JSON object, got {type(body).__name__}")
        _check_shape(body)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        locations = [(*_path(details["loc"], body),) for details in errors]
        same_field = [index for index, location in enumerate(locations) if location[:1] == locations[0][:1]]
        # Of a type's alternatives, report the one that was read furthest.
        furthest = max(same_field, key=lambda index: len(locations[index]))
        name = ".".join(map(str, [*path, *locations[furthest]]))
        problem = errors[furthest]["msg"].partition(" or instance of")[0]
        if errors[furthest]["type"] == "extra_forbidden":
            problem = "this field is unknown here"
        raise ClientError(400, f"{name}: {problem.removeprefix('Value error, ')}", name) from error
    except RecursionError as error:
        raise ClientError(400, "the body is nested too deeply", ".".join(map(str, path)) or None) from error


def _path(location: Sequence[str | int], body: object) -> Iterator[str | int]:
    """Yield the parts of an error's location that are keys of the body, without the names of pydantic's types."""
    for index, part in enumerate(location):
        is_key = part in body if isinstance(body, dict) else isinstance(body, list) and isinstance(part, int)
        if is_key:
            body = body[part]  # type: ignore[index]
        if is_key or (index == len(location) - 1 and isinstance(body, dict) and "[" not in str(part)):
            yield part


_named: set[str] = set()
"""What the log has named."""
_MOST_NAMED = 1000
PLAIN_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
"""Names that a client chose are written to the log only in this form."""


HOSTED = "not offered to the policy, because only its provider runs or describes it"


def ignored(where: str, names: Iterable[str], why: str = "accepted, and without effect here") -> None:
    """Name in the log, once, each field of a request that changes nothing here."""
    entries = {f"{where}: {name if PLAIN_NAME.fullmatch(name) else '(another)'}" for name in names}
    new = entries - _named
    if new and len(_named) < _MOST_NAMED:
        _named.update(new)
        logger.info("%s: %s", why, ", ".join(sorted(new)))


def _check_shape(body: object) -> None:
    """Refuse, with a ClientError, a body with too many values to parse quickly or nested too deeply to store."""
    level, values = [body], 0
    for _ in range(_DEEPEST):
        level = [value for value in level if isinstance(value, dict | list)]
        values += sum(map(len, level))
        if values > _MOST_VALUES:
            raise ClientError(
                400, f"the body holds more than {_MOST_VALUES} values: messages, calls, numbers and others"
            )
        level = [child for value in level for child in (value.values() if isinstance(value, dict) else value)]
        if not level:
            return
    raise ClientError(400, f"the body is nested more than {_DEEPEST} levels deep")


_MOST_UNKNOWN = 64
"""Largest number of unknown fields of a body."""
_NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    # vLLM's fields that name the sampling, the prompt or the answer's text.
    **{"use_beam_search": (False,), "length_penalty": (1,), "watermarking": (False,), "thinking_token_budget": ()},
    **{"repetition_detection": (), "vllm_xargs": ({},), "logits_processors": ([],), "skip_special_tokens": (True,)},
    **{"prompt_logprobs": (), "logprob_token_ids": ([],), "truncate_prompt_tokens": (-1,), "echo": (False,)},
    **{"add_generation_prompt": (True,), "continue_final_message": (False,), "add_special_tokens": (False,)},
    **{"documents": ([],), "chat_template": (), "mm_processor_kwargs": ({},), "media_io_kwargs": ({},)},
    **{"prompt_embeds": (), "previous_input_messages": ([],), "lora_request": ()},
    # Fields of one protocol of the gateway that another one does not have.
    **{"messages": (), "input": (), "prompt": (), "system": ("", []), "instructions": ("",), "suffix": ("",)},
    **{"tools": ([],), "tool_choice": ("auto", "none"), "parallel_tool_calls": (True,), "n": (1,), "best_of": (1,)},
    **{"max_tokens": (), "max_completion_tokens": (), "max_output_tokens": (), "stop_sequences": ([],)},
    **{"response_format": ({"type": "text"},), "output_config": ({},), "output_format": ()},
    **{"text": ({}, {"format": {"type": "text"}}), "logprobs": (False,), "top_logprobs": (0,)},
    **{"reasoning_effort": (), "functions": ([],), "function_call": ("auto", "none"), "audio": ()},
    # Names of other servers and providers.
    **{"sampling_params": ({},), "generation_config": ({},), "parameters": ({},), "options": ({},)},
    **{"extra_body": ({},), "max_new_tokens": (), "min_new_tokens": (0,), "num_predict": (), "n_predict": ()},
    **{"max_tokens_to_sample": (), "do_sample": (True,), "num_beams": (1,), "typical_p": (1,), "top_a": (0,)},
    **{"tfs_z": (1,), "top_n_sigma": (), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "no_repeat_ngram_size": (0,)},
    **{"repeat_penalty": (1,), "repeat_last_n": (), "penalty_alpha": (0,), "smoothing_factor": (0,)},
    **{"dry_multiplier": (0,), "xtc_probability": (0,), "mirostat": (0,), "dynatemp_range": (0,), "min_temp": ()},
    **{"random_seed": (), "grammar": ("",), "regex": ("",), "ebnf": ("",), "json_schema": ({},), "stop_regex": ([],)},
    **{"custom_logit_processor": (), "lora_path": (), "thinking_budget": (), "reasoning_budget": ()},
    **{"guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (), "prefix": ("",)},
    **{"stop_words": ([],), "beam_width": (1,), "candidate_count": (1,), "max_length": (), "min_length": (0,)},
    **{"eos_token_id": (), "banned_tokens": ([],), "negative_prompt": ("",), "guidance_scale": (1,), "input_ids": ()},
    **{"system_prompt": ("",), "system_instruction": (), "contents": (), "prompt_mode": (), "safe_prompt": (False,)},
}
"""Fields that would change the answer and are not offered, or not by every protocol: name -> values that do not."""
_LENGTH = ("max_completion_tokens", "max_output_tokens", "max_tokens")
_FORMAT = ("response_format", "text", "output_config")
_IN_ITS_PLACE: dict[str, tuple[str, ...]] = {
    **{
        "messages": ("input",),
        "input": ("messages",),
        "prompt": ("messages", "input"),
        "contents": ("messages", "input"),
    },
    **dict.fromkeys(
        ("system", "instructions", "system_prompt", "system_instruction"), ("instructions", "system", "messages")
    ),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"), _LENGTH),
    **dict.fromkeys(("num_predict", "n_predict", "max_tokens_to_sample", "max_length"), _LENGTH),
    **dict.fromkeys(("response_format", "output_config", "output_format", "text", "json_schema"), _FORMAT),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ("structured_outputs",)),
    **dict.fromkeys(("regex", "ebnf", "grammar"), ("structured_outputs",)),
    **dict.fromkeys(("stop_sequences", "stop_words"), ("stop",)),
    **{"functions": ("tools",), "function_call": ("tool_choice",), "candidate_count": ("n",), "random_seed": ("seed",)},
    **{"repeat_penalty": ("repetition_penalty",), "banned_tokens": ("bad_words",)},
    **{"reasoning_effort": ("reasoning", "output_config"), "chat_template": ("chat_template_kwargs",)},
}
"""Fields that a client may send in place of a refused one; those of its protocol are named."""
_FAMILIES = ("guided", "mirostat", "dynatemp")
"""Beginnings of further such names."""
_LIKE = 0.87
"""Least similarity of a misspelled name, as `difflib` measures it."""
_SHORTEST_LIKE = 6
"""Shorter names are too much like each other, such as `seed` and `speed`."""


@lru_cache(maxsize=1024)
def sampling_name(name: str) -> str | None:
    """Return the parameter of sampling that an unknown field means, also in another spelling; None: it names none."""
    plain = _plain_spelling(name)
    if plain.startswith(_FAMILIES):
        return name
    parameter = _spellings().get(plain)
    if parameter is None and _SHORTEST_LIKE <= len(plain) <= 2 * _SHORTEST_LIKE + 16:
        close = get_close_matches(
            plain, [spelling for spelling in _spellings() if len(spelling) >= _SHORTEST_LIKE], 1, _LIKE
        )
        parameter = _spellings()[close[0]] if close else None
    return parameter


@lru_cache(maxsize=1)
def _spellings() -> dict[str, str]:
    """Return the names of all parameters of sampling by their plain spelling."""
    names = (SamplingFields.model_fields.keys() - {"session_id"}) | _NOT_OFFERED.keys()
    return {_plain_spelling(name): name for name in sorted(names)}


def _plain_spelling(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())
