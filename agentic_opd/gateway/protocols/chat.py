"""OpenAI's chat completions: `POST /v1/chat/completions`. Pure.

A conversation that ends with the assistant's message is answered by another one, as by OpenAI and vLLM.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from agentic_opd.core.text import call_arguments
from agentic_opd.core.types import Message
from agentic_opd.gateway.body import HOSTED, READ_MEDIA_ONLY, FunctionSpec, OpenModel, ignored, read_body
from agentic_opd.gateway.choice import Finished
from agentic_opd.gateway.client import Client
from agentic_opd.gateway.errors import ClientError
from agentic_opd.gateway.exchange import Begun
from agentic_opd.gateway.images import ImageUri, RequestImages
from agentic_opd.gateway.protocols.base import (
    STREAM_END,
    CommonBody,
    Event,
    Reply,
    WireProtocol,
    WithoutEffect,
    new_id,
    sse,
)
from agentic_opd.gateway.protocols.hosted import LEFT_OUT, hosted_text, readable
from agentic_opd.gateway.protocols.tools import (
    CUSTOM_INPUT,
    CUSTOM_PARAMETERS,
    AllowedTools,
    NamedTool,
    log_format,
    with_custom_calls,
)
from agentic_opd.gateway.request import (
    ReplyFormat,
    Request,
    ToolChoice,
    check_choices,
    format_of,
    make_request,
    without_billing,
)
from agentic_opd.plugin.sampling import SampledToken


class _ImageUrl(OpenModel):
    url: str


class _ChatPart(OpenModel):
    type: Annotated[Literal["text", "input_text", "output_text", "refusal", "image_url"], READ_MEDIA_ONLY]
    text: str = ""
    refusal: str = ""
    image_url: _ImageUrl | None = None

    @model_validator(mode="after")
    def _check_type(self) -> "_ChatPart":
        if self.type == "image_url" and self.image_url is None:
            raise ValueError("a part of type image_url needs image_url")
        return self

    def read(self, path: str) -> str | ImageUri:
        """Return the text or the picture; `path` is the name of the part."""
        if self.type == "image_url" and self.image_url is not None:
            return ImageUri(self.image_url.url, f"{path}.image_url.url")
        return self.text or self.refusal


_READ_TYPES = ("text", "input_text", "output_text", "refusal", "image_url")
_THOUGHTS = ("thinking", "reasoning", "reasoning_content")
"""Types of parts that hold an assistant's reasoning, as other providers' messages have them."""


class _CalledFunction(OpenModel):
    name: str
    arguments: str | dict[str, Any] | None = None


class _CustomCall(OpenModel):
    name: str
    input: str = ""


class _ChatCall(OpenModel):
    id: str = ""
    type: str = "function"
    function: _CalledFunction | None = None
    custom: _CustomCall | None = None

    @model_validator(mode="after")
    def _check_call(self) -> "_ChatCall":
        if self.function is None and self.custom is None:
            raise ValueError("a call needs a function or a custom tool")
        return self

    def plain(self) -> dict[str, Any]:
        """Return the call as chat templates read it."""
        if self.function is not None:
            name, arguments = self.function.name, call_arguments(self.function.arguments)
        else:
            assert self.custom is not None
            name, arguments = self.custom.name, json.dumps({CUSTOM_INPUT: self.custom.input}, ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": name, "arguments": arguments}}


class _ChatMessage(OpenModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = None
    tool_calls: list[_ChatCall] | None = None
    tool_call_id: str | None = None
    prefix: Literal[False] | None = None
    partial: Literal[False] | None = None
    """With either, some providers continue the message instead of answering it."""
    function_call: _CalledFunction | None = None
    """A call in OpenAI's form before tools, which a message of the role `function` answers."""

    def plain(self, index: int, images: RequestImages) -> Message:
        """Return the message in the package's form: its content is always a string."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        message: Message = {"role": role}
        message |= images.content(self.role, self._parts(index))
        thoughts = (self.reasoning_content, self.reasoning, self._thought() or None)
        thought = next((text for text in thoughts if text is not None), None)
        name = None if self.role == "function" else self.name
        call_id = self.name if self.role == "function" else self.tool_call_id
        optional = {"name": name, "tool_call_id": call_id, "reasoning_content": thought}
        message |= {name: value for name, value in optional.items() if value is not None}
        calls = [*(self.tool_calls or ())]
        if self.function_call is not None and not calls:
            calls = [_ChatCall(id=self.function_call.name, function=self.function_call)]
        if self.role == "assistant" and calls:
            message["tool_calls"] = [call.plain() for call in calls]
        return message

    def _parts(self, index: int) -> list[str | ImageUri]:
        if self.content is None or isinstance(self.content, str):
            text = self.content or self.refusal or ""
            return [without_billing(text) if self.role in ("system", "developer") else text]
        parts: list[str | ImageUri] = []
        for position, part in enumerate(self.content):
            path, kind = ("messages", index, "content", position), part.get("type")
            if isinstance(kind, str) and kind not in _READ_TYPES and self.role == "assistant":
                hosted = self._of_provider(kind, part)
                parts += [*(["\n\n"] if parts else []), f"{hosted}\n\n"] if hosted else []
                continue
            content = read_body(_ChatPart, part, *path).read(".".join(map(str, path)))
            if isinstance(content, str) and self.role in ("system", "developer"):
                content = without_billing(content)
            parts.append(content)
        return parts

    def _of_provider(self, kind: str, part: dict[str, Any]) -> str:
        """Return the text of a part that another provider's assistant wrote; calls are in `tool_calls` too."""
        if kind in _THOUGHTS or (kind in ("tool_use", "tool_call", "function_call") and self.tool_calls):
            return ""
        text = hosted_text(kind, part)
        if not text:
            ignored("chat completions", [kind], LEFT_OUT)
        return text

    def _thought(self) -> str:
        """Return the reasoning in the content's parts."""
        if self.role != "assistant" or not isinstance(self.content, list):
            return ""
        thoughts = [(kind, part) for part in self.content if (kind := part.get("type")) in _THOUGHTS]
        return "".join(readable([part.get(kind), part.get("text"), part.get("summary")]) for kind, part in thoughts)


class _CustomTool(OpenModel):
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class _ChatTool(OpenModel):
    model_config = ConfigDict(extra="allow")

    type: str = ""
    """The type of a tool of the client is `function` or `custom`; its provider runs any other one."""
    function: FunctionSpec | None = None
    custom: _CustomTool | None = None


class _NamedFunction(OpenModel):
    type: Literal["function"]
    function: NamedTool


class _NamedCustom(OpenModel):
    type: Literal["custom"]
    custom: NamedTool


class _AllowedFunctions(OpenModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class StreamOptions(OpenModel):
    include_usage: bool = False


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
    tool_choice: Literal["auto", "none", "required"] | _NamedFunction | _NamedCustom | _AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    response_format: _ResponseFormat | None = None
    reasoning_effort: str | None = None
    modalities: WithoutEffect[list[Literal["text"]]] = None
    return_token_ids: bool | None = None

    def choice(self) -> ToolChoice:
        is_parallel = self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, _NamedFunction):
            return ToolChoice("named", self.tool_choice.function.name, is_parallel)
        if isinstance(self.tool_choice, _NamedCustom):
            return ToolChoice("named", self.tool_choice.custom.name, is_parallel)
        if isinstance(self.tool_choice, _AllowedFunctions):
            return self.tool_choice.allowed_tools.choice(is_parallel=is_parallel)
        return ToolChoice(self.tool_choice or "auto", None, is_parallel)

    def functions(self) -> list[FunctionSpec]:
        """Return the tools that the client runs; the log names the others.

        Raises:
            ClientError: 400, a tool of type `function` has no function, or a custom tool no name.
        """
        functions: list[FunctionSpec] = []
        for index, tool in enumerate(self.tools or ()):
            if tool.function is not None:
                functions.append(tool.function)
                ignored("chat completions", (f"tools.{name}" for name in tool.model_extra or ()))
            elif tool.custom is not None:
                fields = {**tool.custom.model_dump(), "parameters": CUSTOM_PARAMETERS}
                functions.append(read_body(FunctionSpec, fields, "tools", index, "custom"))
            elif tool.type in ("function", "custom"):
                field_name = f"tools.{index}.{tool.type}"
                raise ClientError(400, f"{field_name}: Field required", field_name)
            else:
                ignored("chat completions", [tool.type or "tools"], HOSTED)
        log_format("chat completions", (tool.custom and tool.custom.format for tool in self.tools or ()))
        return functions

    def custom_tools(self) -> list[str]:
        """Return the names of the tools that take a text."""
        return [tool.custom.name for tool in self.tools or () if tool.function is None and tool.custom is not None]

    def grammar(self) -> dict[str, Any]:
        """Return vLLM's parameters for `response_format`."""
        answer_format = self.response_format or _ResponseFormat(type="text")
        schema = answer_format.json_schema and answer_format.json_schema.schema_
        return format_of(answer_format.type, schema, "response_format.json_schema.schema")


@dataclass(slots=True)
class _ChatReply(Reply):
    roles_sent: set[int] = field(default_factory=set[int])

    def body(self) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {**self._message(choice), "refusal": None},
                "logprobs": self._logprobs(self.tokens[index]),
                "finish_reason": choice.finish_reason,
                **self._token_ids(self.tokens[index]),
            }
            for index, choice in sorted(self.finished.items())
        ]
        ids = {"prompt_token_ids": list(self.prompt_ids)} if self._returns_ids else {}
        return {**self._head("chat.completion"), "choices": choices, "usage": usage(self), **ids}

    def events(self, event: Event) -> Iterator[str]:
        if isinstance(event, Begun):
            return
        piece = event.rest if isinstance(event, Finished) else event
        if piece.index not in self.roles_sent:
            self.roles_sent.add(piece.index)
            yield self._chunk(piece.index, {"role": "assistant", "content": ""}, is_first=True)
        delta = {"content": piece.content, "reasoning_content": piece.reasoning}
        delta = {name: text for name, text in delta.items() if text}
        shows_tokens = self.request.sampling.top_logprobs is not None or self._returns_ids
        if delta or (piece.tokens and shows_tokens):
            yield self._chunk(piece.index, delta, piece.tokens)
        if isinstance(event, Finished):
            for position, call in enumerate(self._message(event).get("tool_calls") or ()):
                # One call a chunk, as OpenAI and vLLM send them: some clients read the first of a chunk only.
                yield self._chunk(event.index, {"tool_calls": [{"index": position, **call}]})
            yield self._chunk(event.index, {}, finish_reason=event.finish_reason)

    def closing(self) -> str:
        if not self.request.reply_format.include_usage:
            return STREAM_END
        return sse({**self._head("chat.completion.chunk"), "choices": [], "usage": usage(self)}) + STREAM_END

    def failed(self, error: ClientError) -> str:
        return sse(ChatCompletions().error(error)) + STREAM_END

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.request.reply_format.answer_id, "object": kind, "created": self.created, "model": self.model}

    def _message(self, finished: Finished) -> dict[str, Any]:
        """Return the message; as in OpenAI's format, a tool call without text has a null content."""
        message = with_custom_calls(finished.message, self.request.reply_format.echo.get("custom_tools", ()))
        if not message["content"] and message.get("tool_calls"):
            message["content"] = None
        return message

    @property
    def _returns_ids(self) -> bool:
        """Whether the client wants the token ids of the prompt and the answer, as vLLM's route gives them."""
        return bool(self.request.reply_format.echo.get("return_token_ids"))

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        tokens: Sequence[SampledToken] = (),
        *,
        finish_reason: str | None = None,
        is_first: bool = False,
    ) -> str:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if tokens:
            choice |= {"logprobs": self._logprobs(tokens), **self._token_ids(tokens)}
        prompt = {"prompt_token_ids": list(self.prompt_ids)} if is_first and self._returns_ids else {}
        return sse({**self._head("chat.completion.chunk"), "choices": [choice], **prompt})

    def _logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, Any] | None:
        return None if self.request.sampling.top_logprobs is None else {"content": self.logprobs(tokens)}

    def _token_ids(self, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        return {"token_ids": [token.token_id for token in tokens]} if self._returns_ids else {}


def usage(reply: Reply) -> dict[str, int]:
    """Return the numbers of prompt and completion tokens."""
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


class ChatCompletions(WireProtocol):
    path = "/v1/chat/completions"
    reply = _ChatReply
    conversation_fields = ("messages", "tools", "prompt_cache_key")

    def read(self, body: object, client: Client, *, counts: bool = False) -> Request:
        read = read_body(_ChatBody, body)
        for index, message in enumerate(read.messages):
            if message.content is None and message.role not in ("assistant", "tool", "function"):
                raise ClientError(400, f"a {message.role} message needs a content", f"messages.{index}.content")
        if read.top_logprobs and not read.logprobs:
            raise ClientError(400, "top_logprobs needs logprobs: true", "top_logprobs")
        if read.stream_options is not None and not read.stream:
            raise ClientError(400, "stream_options needs stream: true", "stream_options")
        read.log_without_effect("chat completions")
        images = RequestImages()
        functions = read.functions()
        messages = [message.plain(index, images) for index, message in enumerate(read.messages)]
        return make_request(
            client.with_cache_key(read.prompt_cache_key),
            read,
            [message for message in messages if message["role"] != "system" or message["content"]],
            functions,
            parameters=read.grammar(),
            choice=read.choice(),
            options={"reasoning_effort": read.reasoning_effort} if read.reasoning_effort else None,
            n=check_choices(read.n, client),
            max_tokens=read.max_completion_tokens or read.max_tokens,
            top_logprobs=(read.top_logprobs or 0) if read.logprobs else None,
            reply_format=ReplyFormat(
                answer_id=new_id("chatcmpl-"),
                stream=bool(read.stream),
                include_usage=bool(read.stream_options and read.stream_options.include_usage),
                echo={"return_token_ids": read.return_token_ids, "custom_tools": read.custom_tools()},
            ),
            images=images.images,
        )
