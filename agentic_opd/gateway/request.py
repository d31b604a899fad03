"""Validation of chat requests in OpenAI's format. Pure.

In: JSON. Out: `Asked`, or a `RefusedError` that names the field. Unknown fields are refused, because silently ignoring
a sampling parameter would change the sampling distribution.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from agentic_opd.core.text import call_arguments
from agentic_opd.core.types import Message
from agentic_opd.gateway.errors import RefusedError
from agentic_opd.rollout.conversation_index import identity

_DEEPEST = 257
"""Maximum nesting of objects and lists in a body. With one more level, pydantic could not serialise the tools."""
_MOST_VALUES = 2**16
"""Maximum number of values in the objects and lists of a body. Parsing takes microseconds per value."""

TurnType = Literal["main", "side"]


class _Open(BaseModel):
    """A model that ignores unknown fields, because clients send back fields that they received."""

    model_config = ConfigDict(extra="ignore")


class _Closed(BaseModel):
    """A model that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid")


class _TextPart(_Closed):
    type: Literal["text"]
    text: str


class _Function(_Open):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(_Open):
    id: str = ""
    type: Literal["function"] = "function"
    function: _Function


class _Message(_Open):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None

    def plain(self) -> Message:
        """Return the message in the package's form: its content is always a string."""
        content = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content or ())
        message: Message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        optional = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content}
        message |= {name: value for name, value in optional.items() if value is not None}
        if self.role == "assistant" and self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": text}}
                for call in self.tool_calls
                for text in [call_arguments(call.function.arguments)]
            ]
        return message


class _ToolFunction(_Closed):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
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


class _Tool(_Closed):
    type: Literal["function"]
    function: _ToolFunction


class _StreamOptions(_Closed):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class _ResponseFormat(_Open):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class _Sampling(_Closed):
    """Sampling parameters passed to vLLM unchanged, by vLLM's names. None means vLLM's default."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None


class ChatRequest(_Sampling):
    """The body of `POST /v1/chat/completions`."""

    messages: list[_Message] = Field(min_length=1)
    model: str | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: _ResponseFormat | None = None
    session_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the given sampling parameters by vLLM's names, without maximum length, `n` and logprobs."""
        given = {name: getattr(self, name) for name in _Sampling.model_fields}
        if self.response_format is not None and self.response_format.type != "text":
            schema = (self.response_format.json_schema or {}).get("schema")
            given["structured_outputs"] = {"json_object": True} if schema is None else {"json": schema}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Asked:
    """A validated chat request."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    sampling: dict[str, Any]
    """The given sampling parameters by vLLM's names, without maximum length, `n`, `stop` and logprobs."""
    stop: tuple[str, ...]
    n: int
    max_tokens: int | None
    top_logprobs: int | None
    """Number of most likely tokens to return at each position; None: no logprobs are requested."""
    stream: bool
    include_usage: bool
    model: str | None
    session: str | None
    """The client's name of the session; None: the session is found by its messages."""
    turn_type: TurnType
    is_last: bool
    """Whether the session ends with this turn."""
    group: str | None = None
    """The client's name of the session's group; None: the session forms a group by itself."""
    identities: tuple[bytes, ...] = ()
    """Digests of the messages; see `conversation_index.identity`."""
    tools_key: bytes = b""
    """Digest of the tools; see `tools_key`."""
    parts: int = 0
    """Number of messages, tool calls and tools. Each of them needs at least one prompt token."""
    size: int = 0
    """Number of characters in all texts of the prompt."""
    earlier_reasoning: int = 0
    """Characters of reasoning before the last user message, not part of `size`: some templates omit it."""

    @property
    def altered(self) -> tuple[str, ...]:
        """Names of the parameters that change the sampling distribution."""
        return tuple(_altering(self.sampling))


def read_request(
    body: object,
    *,
    max_choices: int,
    session: str | None = None,
    turn_type: str | None = None,
    is_last: bool = False,
    group: str | None = None,
) -> Asked:
    """Validate a request.

    Args:
        body: The parsed JSON.
        max_choices: Largest `n`.
        session: The session's name in the path or in a header; it overrides the body's.
        turn_type: Value of the header X-Turn-Type.
        is_last: Value of the header X-Session-Done.
        group: Value of the header X-Group-Id.

    Raises:
        RefusedError: 400, with the first invalid field.
    """
    if not isinstance(body, dict):
        raise RefusedError(400, f"the body must be a JSON object, got {type(body).__name__}")
    if turn_type not in (None, "main", "side"):
        raise RefusedError(400, f"X-Turn-Type is {turn_type[:40]!r}; expected main or side", "X-Turn-Type")
    _check_shape(body)
    try:
        request = ChatRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"] if part not in ("str", "list[_TextPart]"))
        problem = "this field is unknown here" if first["type"] == "extra_forbidden" else first["msg"]
        raise RefusedError(400, f"{field}: {problem.removeprefix('Value error, ')}", field) from error
    for wrong in _contradictions(request, max_choices):
        raise wrong
    tools = () if request.tool_choice == "none" else request.tools or ()
    sampling = request.sampling()
    stop = sampling.pop("stop", ())
    try:
        messages = tuple(message.plain() for message in request.messages)
        specs = tuple(tool.model_dump(exclude_none=True) for tool in tools)
        tools_json = json.dumps(specs, sort_keys=True)
    except RecursionError as error:
        raise RefusedError(400, "the arguments of a tool call are nested too deeply", "messages") from error
    last_user = max(index for index, message in enumerate(messages) if message["role"] == "user")
    return Asked(
        messages=messages,
        tools=specs,
        sampling=sampling,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        n=request.n or 1,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        model=request.model,
        session=session or request.session_id,
        turn_type="side" if turn_type == "side" else "main",
        is_last=is_last,
        group=group,
        identities=tuple(map(identity, messages)),
        tools_key=_digest(tools_json),
        parts=len(messages) + len(specs) + sum(len(message.get("tool_calls", ())) for message in messages),
        size=len(tools_json) + sum(map(_size, messages)) + _reasoning(messages[last_user:]),
        earlier_reasoning=_reasoning(messages[:last_user]),
    )


def tools_key(tools: Sequence[dict[str, Any]]) -> bytes:
    """Return a digest of the tools, which depends on their order."""
    return _digest(json.dumps(tools, sort_keys=True))


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


def _size(message: Message) -> int:
    texts = [text for name, text in message.items() if isinstance(text, str) and name != "reasoning_content"]
    calls = [(call["id"], *call["function"].values()) for call in message.get("tool_calls", ())]
    return sum(map(len, chain(texts, *calls))) - _inline_reasoning(message)


def _reasoning(messages: Sequence[Message]) -> int:
    return sum(len(message.get("reasoning_content", "")) + _inline_reasoning(message) for message in messages)


def _inline_reasoning(message: Message) -> int:
    """Count the characters of reasoning in an assistant's content, where some clients send it back."""
    return len("".join(message["content"].rpartition("</think>")[:2])) if message["role"] == "assistant" else 0


def _check_shape(body: object) -> None:
    """Refuse, with a RefusedError, a body with too many values to parse quickly or nested too deeply to store."""
    level, values = [body], 0
    for _ in range(_DEEPEST):
        level = [one for one in level if isinstance(one, dict | list)]
        values += sum(map(len, level))
        if values > _MOST_VALUES:
            raise RefusedError(
                400, f"the body holds more than {_MOST_VALUES} values: messages, calls, numbers and others"
            )
        level = [child for one in level for child in (one.values() if isinstance(one, dict) else one)]
        if not level:
            return
    raise RefusedError(400, f"the body is nested more than {_DEEPEST} levels deep")


def _contradictions(request: ChatRequest, max_choices: int) -> Iterator[RefusedError]:
    """Yield errors for fields that are valid separately but contradict each other."""
    for index, message in enumerate(request.messages):
        if message.content is None and message.role not in ("assistant", "tool"):
            yield RefusedError(400, f"a {message.role} message needs a content", f"messages.{index}.content")
    last = len(request.messages) - 1
    if request.messages[last].role == "assistant":
        yield RefusedError(400, "the last message must not be the assistant's", f"messages.{last}.role")
    if all(message.role != "user" for message in request.messages):
        yield RefusedError(400, "one message at least must be the user's", "messages")
    if (n := request.n or 1) > max_choices:
        yield RefusedError(400, f"n is {n}, at most {max_choices} choices are sampled (env.max_choices)", "n")
    if request.top_logprobs is not None and not request.logprobs:
        yield RefusedError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    if request.stream_options is not None and not request.stream:
        yield RefusedError(400, "stream_options needs stream: true", "stream_options")


_NEUTRAL: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": (-1, 0),
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "bad_words": [],
    "allowed_token_ids": [],
    "logit_bias": {},
    "structured_outputs": None,
}
"""Parameters that can change the sampling distribution, with the values that leave it unchanged."""


def _altering(sampling: dict[str, Any]) -> Iterator[str]:
    for name, neutral in _NEUTRAL.items():
        value = sampling.get(name)
        if value is not None and value != neutral and not (isinstance(neutral, tuple) and value in neutral):
            yield name
    if sampling.get("temperature") == 0:
        yield "temperature"
