"""OpenAI's chat completions: `POST /v1/chat/completions`. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agentic_opd.core.text import call_arguments
from agentic_opd.core.types import Message
from agentic_opd.gateway.choice import Finished
from agentic_opd.gateway.client import Client
from agentic_opd.gateway.errors import ClientError
from agentic_opd.gateway.images import ImageUri, RequestImages
from agentic_opd.gateway.protocols.base import DONE, CommonBody, Event, Reply, WireProtocol, WithoutEffect, new_id, sse
from agentic_opd.gateway.request import (
    Asked,
    ClosedModel,
    FunctionSpec,
    OpenModel,
    ToolChoice,
    check_choices,
    format_of,
    make_asked,
    read_body,
)
from agentic_opd.gateway.sampler import Begun
from agentic_opd.plugin.sampling import SampledToken


class _ImageUrl(OpenModel):
    url: str


class _ChatPart(OpenModel):
    type: Literal["text", "refusal", "image_url"]
    text: str = ""
    refusal: str = ""
    image_url: _ImageUrl | None = None

    @model_validator(mode="after")
    def _check_type(self) -> "_ChatPart":
        if self.type == "image_url" and self.image_url is None:
            raise ValueError("a part of type image_url needs image_url")
        return self


class _CalledFunction(OpenModel):
    name: str
    arguments: str | dict[str, Any] | None = None


class _ChatCall(OpenModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: _CalledFunction


class _ChatMessage(OpenModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_ChatPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = None
    tool_calls: list[_ChatCall] | None = None
    tool_call_id: str | None = None

    def plain(self, index: int, images: RequestImages) -> Message:
        """Return the message in the package's form: its content is always a string."""
        message: Message = {"role": "system" if self.role == "developer" else self.role}
        message |= images.content(self.role, self._parts(index))
        thought = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        optional = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": thought}
        message |= {name: value for name, value in optional.items() if value is not None}
        if self.role == "assistant" and self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": text}}
                for call in self.tool_calls
                for text in [call_arguments(call.function.arguments)]
            ]
        return message

    def _parts(self, index: int) -> list[str | ImageUri]:
        if isinstance(self.content, str):
            return [self.content]
        at = f"messages.{index}.content"
        return [
            ImageUri(part.image_url.url, f"{at}.{place}.image_url.url")
            if part.image_url is not None
            else part.text or part.refusal
            for place, part in enumerate(self.content or ())
        ]


class _ChatTool(ClosedModel):
    type: Literal["function"]
    function: FunctionSpec
    cache_control: Any = None


class _NamedFunction(OpenModel):
    name: str


class _NamedChoice(OpenModel):
    type: Literal["function"]
    function: _NamedFunction


class StreamOptions(ClosedModel):
    include_usage: bool = False
    include_obfuscation: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class _JsonSchema(OpenModel):
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class _ResponseFormat(OpenModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _ChatBody(CommonBody):
    messages: list[_ChatMessage] = Field(min_length=1)
    n: Annotated[int, Field(ge=1)] | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[_ChatTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: _ResponseFormat | None = None
    reasoning_effort: str | None = None
    verbosity: WithoutEffect[str] = None
    prediction: WithoutEffect[dict[str, Any]] = None
    modalities: WithoutEffect[list[Literal["text"]]] = None
    cache_control: WithoutEffect[dict[str, Any]] = None
    reasoning: WithoutEffect[dict[str, Any]] = None
    thinking: WithoutEffect[dict[str, Any]] = None
    usage: WithoutEffect[dict[str, Any]] = None
    provider: WithoutEffect[dict[str, Any]] = None
    include_reasoning: WithoutEffect[bool] = None

    def choice(self) -> ToolChoice:
        given, parallel = self.tool_choice, self.parallel_tool_calls is not False
        if isinstance(given, _NamedChoice):
            return ToolChoice("named", given.function.name, parallel)
        return ToolChoice(given or "auto", None, parallel)

    def grammar(self) -> dict[str, Any]:
        """Return vLLM's parameters for `response_format`."""
        wanted = self.response_format or _ResponseFormat(type="text")
        schema = wanted.json_schema and wanted.json_schema.schema_
        return format_of(wanted.type, schema, "response_format.json_schema.schema")


@dataclass(slots=True)
class _ChatReply(Reply):
    roles_sent: set[int] = field(default_factory=set[int])

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {**_message(one), "refusal": None},
                "logprobs": self._logprobs(self.tokens[index]),
                "finish_reason": one.finish_reason,
            }
            for index, one in sorted(self.finished.items())
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": usage(self)}

    def events(self, event: Event) -> Iterator[str]:
        if isinstance(event, Begun):
            return
        piece = event.rest if isinstance(event, Finished) else event
        if piece.index not in self.roles_sent:
            self.roles_sent.add(piece.index)
            yield self._chunk(piece.index, {"role": "assistant", "content": ""})
        delta = {"content": piece.content, "reasoning_content": piece.reasoning}
        delta = {name: text for name, text in delta.items() if text}
        if delta or (piece.tokens and self.asked.top_logprobs is not None):
            yield self._chunk(piece.index, delta, logprobs=self._logprobs(piece.tokens))
        if isinstance(event, Finished):
            calls = event.message.get("tool_calls") or ()
            if calls:
                yield self._chunk(event.index, {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
            yield self._chunk(event.index, {}, finish_reason=event.finish_reason)

    def closing(self) -> str:
        if not self.asked.include_usage:
            return DONE
        return sse({**self._head("chat.completion.chunk"), "choices": [], "usage": usage(self)}) + DONE

    def failed(self, error: ClientError) -> str:
        return sse(ChatCompletions().error(error)) + DONE

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.asked.answer_id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return sse({**self._head("chat.completion.chunk"), "choices": [choice]})

    def _logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, Any] | None:
        return None if self.asked.top_logprobs is None else {"content": self.logprobs(tokens)}


def usage(reply: Reply) -> dict[str, int]:
    """Return the numbers of prompt and completion tokens."""
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


def _message(finished: Finished) -> dict[str, Any]:
    """Return the message; as in OpenAI's format, a tool call without text has a null content."""
    message = dict(finished.message)
    if not message["content"] and message.get("tool_calls"):
        message["content"] = None
    return message


class ChatCompletions(WireProtocol):
    path = "/v1/chat/completions"
    reply = _ChatReply

    def read(self, body: object, client: Client, *, counts: bool = False) -> Asked:
        read = read_body(_ChatBody, body)
        for index, message in enumerate(read.messages):
            if message.content is None and message.role not in ("assistant", "tool"):
                raise ClientError(400, f"a {message.role} message needs a content", f"messages.{index}.content")
        if read.top_logprobs is not None and not read.logprobs:
            raise ClientError(400, "top_logprobs needs logprobs: true", "top_logprobs")
        if read.stream_options is not None and not read.stream:
            raise ClientError(400, "stream_options needs stream: true", "stream_options")
        read.log_without_effect("chat completions")
        images = RequestImages()
        return make_asked(
            client.with_cache_key(read.prompt_cache_key),
            read,
            [message.plain(index, images) for index, message in enumerate(read.messages)],
            [tool.function for tool in read.tools or ()],
            sampling=read.grammar(),
            choice=read.choice(),
            template={"reasoning_effort": read.reasoning_effort} if read.reasoning_effort else None,
            n=check_choices(read.n, client),
            max_tokens=read.max_completion_tokens or read.max_tokens,
            top_logprobs=(read.top_logprobs or 0) if read.logprobs else None,
            stream=bool(read.stream),
            include_usage=bool(read.stream_options and read.stream_options.include_usage),
            answer_id=new_id("chatcmpl-"),
            images=images.given,
        )
