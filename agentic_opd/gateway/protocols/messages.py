"""Anthropic's messages: `POST /v1/messages` and `POST /v1/messages/count_tokens`. Pure.

A message's blocks become messages of the conversation as in vLLM's route of this name: tool results come before the
other blocks of their message, and text blocks are joined. What tools of Anthropic's servers did is part of the text.
Messages that end with the assistant's ask for its continuation (a prefill), which is refused.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from agentic_opd.core.text import read_json
from agentic_opd.core.types import Message
from agentic_opd.gateway.body import HOSTED, FunctionSpec, OpenModel, StopString, ignored, read_body
from agentic_opd.gateway.choice import Finished
from agentic_opd.gateway.client import Client
from agentic_opd.gateway.errors import ClientError
from agentic_opd.gateway.exchange import Begun
from agentic_opd.gateway.images import ImageUri, RequestImages
from agentic_opd.gateway.protocols.base import CommonBody, Event, Reply, WireProtocol, new_id, sse
from agentic_opd.gateway.protocols.client_tools import client_tool_of
from agentic_opd.gateway.protocols.hosted import LEFT_OUT, hosted_text
from agentic_opd.gateway.request import ReplyFormat, Request, ToolChoice, format_of, make_request, without_billing
from agentic_opd.gateway.sampler import CONTEXT_FULL

_PREFILL = "an answer that the client has begun is not continued: end the messages with the user's"
_PING = sse({"type": "ping"}, "ping")
_KINDS = {
    **{400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"},
    **{413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"},
}


class _TextBlock(OpenModel):
    type: Literal["text"]
    text: str


class _ImageSource(OpenModel):
    """The content of a picture or a document."""

    type: Literal["base64", "url", "text", "content"]
    media_type: str = ""
    data: str = ""
    url: str = ""
    content: str | list[_TextBlock] = ""

    def uri(self, field_name: str) -> ImageUri:
        """Return the picture as a URI; `field_name` is the name of this field."""
        if self.type == "url":
            return ImageUri(self.url, f"{field_name}.url")
        if self.type == "base64":
            return ImageUri(f"data:{self.media_type};base64,{self.data}", f"{field_name}.data")
        raise ClientError(
            400, f"{field_name}.type: a picture's source is base64 or url, got {self.type}", f"{field_name}.type"
        )

    def document(self, field_name: str) -> str:
        """Return the document's text; `field_name` is the name of this field."""
        if self.type == "text":
            return self.data
        if self.type == "content":
            return self.content if isinstance(self.content, str) else "\n".join(block.text for block in self.content)
        kind = self.media_type or "URL"
        raise ClientError(
            400, f"{field_name}.type: the policy reads no {kind}; send the document's text", f"{field_name}.type"
        )


class _Piece(OpenModel):
    """A text, picture or document of a message or of a tool's result."""

    type: Literal["text", "image", "document", "tool_reference"]
    text: str | None = None
    source: _ImageSource | None = None
    title: str | None = None
    context: str | None = None

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.type in ("image", "document")) != (self.source is not None):
            raise ValueError("a block of type image or document, and no other, has a source")
        return self

    def read(self, *path: str | int) -> str | ImageUri:
        """Return the text or the picture; `path` is the path of the block."""
        if self.source is None:
            return self.text or ""
        name = ".".join(map(str, (*path, "source")))
        if self.type == "image":
            return self.source.uri(name)
        return "\n".join(text for text in (self.title, self.context, self.source.document(name)) if text)


class _Block(_Piece):
    type: Literal[  # type: ignore[assignment]
        "text", "image", "document", "tool_reference", "tool_use", "tool_result", "thinking"
    ]
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool | None = None

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        needed = {"text": "text", "thinking": "thinking", "tool_use": "name", "tool_result": "tool_use_id"}
        name = needed.get(self.type)
        if name is not None and getattr(self, name) is None:
            raise ValueError(f"a block of type {self.type} needs {name}")
        return self

    def call(self, default_id: str) -> dict[str, Any]:
        """Return the call of a block of type tool_use."""
        arguments = json.dumps(self.input or {}, ensure_ascii=False)
        function = {"name": self.name or "", "arguments": arguments}
        return {"id": self.id or default_id, "type": "function", "function": function}

    def part(self, *path: str | int) -> str | ImageUri:
        """Return the text or the picture in a message, where an empty line follows a document."""
        text = self.read(*path)
        return f"{text}\n\n" if self.type == "document" else text


_Blocks = str | list[dict[str, Any]]
_READ_TYPES = ("text", "image", "document", "tool_reference", "tool_use", "tool_result", "thinking")
_HOSTED_TYPES = (
    "search_result",
    "redacted_thinking",
    "compaction",
    "container_upload",
    "tool_addition",
    "tool_removal",
)
_HOSTED_ENDS = ("_tool_use", "_tool_result", "_tool_listing")
"""Ends of the types of blocks that tools of Anthropic's servers wrote."""


class _ResultContent(OpenModel):
    content: _Blocks | None = None


class _AnthropicTurn(OpenModel):
    role: Literal["user", "assistant", "system"]
    content: _Blocks


def _hosted_part(role: str, block: dict[str, Any]) -> str | None:
    """Return the text of a block that Anthropic's servers wrote; None for a block of another type."""
    kind = block.get("type")
    if not isinstance(kind, str) or kind in _READ_TYPES:
        return None
    if role != "assistant" and kind not in _HOSTED_TYPES and not kind.endswith(_HOSTED_ENDS):
        return None
    text = "" if kind == "redacted_thinking" else hosted_text(kind, block)
    if not text:
        ignored("messages", [kind], LEFT_OUT)
    return text


class _ClientTool(OpenModel):
    type: str | None = None
    name: str | None = None
    """Some sets of tools that Anthropic's servers run have no name."""
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _AnthropicChoice(OpenModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Format(OpenModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class _OutputConfig(OpenModel):
    format: _Format | None = None
    effort: str | None = None


class _MessagesBody(CommonBody):
    messages: list[_AnthropicTurn] = Field(min_length=1)
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    system: str | list[_TextBlock] | None = None
    tools: list[_ClientTool] | None = None
    tool_choice: _AnthropicChoice | None = None
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None
    """The format of `output_config`, as earlier versions of Anthropic's clients send it."""
    stop_sequences: list[StopString] | None = None


def _conversation(body: _MessagesBody, images: RequestImages) -> list[Message]:
    blocks = [body.system] if isinstance(body.system, str) else [block.text for block in body.system or ()]
    system = "".join(map(without_billing, blocks))
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for index, turn in enumerate(body.messages):
        messages += _messages(turn, index, images)
    return messages


def _messages(turn: _AnthropicTurn, index: int, images: RequestImages) -> Iterator[Message]:
    """Yield the messages of one turn: the tool results, then the text and the pictures."""
    if isinstance(turn.content, str):
        text = without_billing(turn.content) if turn.role == "system" else turn.content
        yield {"role": turn.role, "content": text}
        return
    message: Message = {"role": turn.role, "content": ""}
    parts: list[str | ImageUri] = []
    thoughts: list[str] = []
    calls: list[Any] = []
    for position, content in enumerate(turn.content):
        path = ("messages", index, "content", position)
        if (hosted := _hosted_part(turn.role, content)) is not None:
            parts += [*(["\n\n"] if parts else []), f"{hosted}\n\n"] if hosted else []
            continue
        block = read_body(_Block, content, *path)
        if block.type == "tool_result":
            yield _tool_message(block, images, *path)
        elif block.type == "tool_use":
            calls.append(block.call(f"call_{position}"))
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type != "tool_reference":
            part = block.part(*path)
            parts.append(without_billing(part) if turn.role == "system" and isinstance(part, str) else part)
    message |= images.content(turn.role, parts)
    message |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
    if calls and turn.role == "assistant":
        message["tool_calls"] = calls
    if message["content"] or turn.role == "assistant":
        yield message


def _tool_message(block: _Block, images: RequestImages, *path: str | int) -> Message:
    """Return the message of a tool's result; `path` is the place of the block."""
    content = read_body(_ResultContent, {"content": block.content}, *path).content
    parts = [content] if isinstance(content, str) else _result_parts(content or (), *path)
    return {"role": "tool", "tool_call_id": block.tool_use_id or "", **images.content("tool", parts, "\n")}


def _result_parts(content: Sequence[dict[str, Any]], *path: str | int) -> list[str | ImageUri]:
    """Return the texts and pictures of a tool result; `path` is the place of its block."""
    parts: list[str | ImageUri] = []
    for position, part in enumerate(content):
        if (hosted := _hosted_part("tool", part)) is not None:
            parts += [hosted] if hosted else []
            continue
        piece = read_body(_Piece, part, *path, "content", position)
        if piece.type != "tool_reference":
            parts.append(piece.read(*path, "content", position))
    return parts


def _tools(tools: Sequence[_ClientTool]) -> list[FunctionSpec]:
    specs: list[FunctionSpec] = []
    for index, tool in enumerate(tools):
        fields = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        if tool.input_schema is None and tool.type not in (None, "custom"):
            if (client_tool := client_tool_of(tool.type)) is None:
                ignored("messages", [tool.type], HOSTED)
                continue
            fields = {"name": tool.name, **client_tool}
        try:
            specs.append(read_body(FunctionSpec, fields, "tools", index))
        except ClientError as error:
            name = (error.param or "").replace(".parameters", ".input_schema")
            raise ClientError(400, error.message.replace(error.param or "", name), name) from error
    return specs


def _choice(choice: _AnthropicChoice | None) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    is_parallel = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        if not choice.name:
            raise ClientError(400, "tool_choice.name: it is needed", "tool_choice.name")
        return ToolChoice("named", choice.name, is_parallel)
    return ToolChoice("required" if choice.type == "any" else choice.type, None, is_parallel)


@dataclass(slots=True)
class _MessagesReply(Reply):
    block: int = -1
    """Index of the last block of the stream."""
    open_kind: str | None = None
    """Type of the open block; None: no block is open."""

    def body(self) -> dict[str, Any]:
        finished = self.finished[0]
        reason, sequence = _stop(finished)
        return {**self._head(), "content": _blocks(finished.message), "stop_reason": reason, "stop_sequence": sequence}

    def events(self, event: Event) -> Iterator[str]:
        if isinstance(event, Begun):
            start = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None}
            yield sse({"type": "message_start", "message": start}, "message_start") + _PING
            return
        piece = event.rest if isinstance(event, Finished) else event
        if piece.reasoning:
            yield from self._into("thinking", {"thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.content:
            yield from self._into("text", {"text": ""})
            yield self._delta({"type": "text_delta", "text": piece.content})
        if isinstance(event, Finished):
            yield from self._end(event)

    def closing(self) -> str:
        return sse({"type": "message_stop"}, "message_stop")

    def failed(self, error: ClientError) -> str:
        return sse(AnthropicMessages().error(error), "error")

    def _head(self) -> dict[str, Any]:
        head = {"id": self.request.reply_format.answer_id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        return {"input_tokens": self.prompt_tokens, **cached, "output_tokens": self.completion_tokens}

    def _into(self, kind: str, empty: dict[str, Any]) -> Iterator[str]:
        """Yield the events that close an open block of another type and open one of this type."""
        if self.open_kind == kind:
            return
        yield from self._close()
        self.block, self.open_kind = self.block + 1, kind
        block = {"type": kind, **empty}
        yield sse({"type": "content_block_start", "index": self.block, "content_block": block}, "content_block_start")

    def _close(self) -> Iterator[str]:
        if self.open_kind is not None:
            if self.open_kind == "thinking":
                yield self._delta({"type": "signature_delta", "signature": ""})
            self.open_kind = None
            yield sse({"type": "content_block_stop", "index": self.block}, "content_block_stop")

    def _delta(self, delta: dict[str, Any]) -> str:
        return sse({"type": "content_block_delta", "index": self.block, "delta": delta}, "content_block_delta")

    def _end(self, finished: Finished) -> Iterator[str]:
        for block in _blocks(finished.message):
            if block["type"] == "tool_use":
                yield from self._close()
                yield from self._into("tool_use", {"id": block["id"], "name": block["name"], "input": {}})
                partial = json.dumps(block["input"], ensure_ascii=False)
                yield self._delta({"type": "input_json_delta", "partial_json": partial})
        if self.block < 0:
            yield from self._into("text", {"text": ""})
        yield from self._close()
        reason, sequence = _stop(finished)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield sse({"type": "message_delta", "delta": delta, "usage": self._usage()}, "message_delta")


def _blocks(message: Message) -> list[dict[str, Any]]:
    """Return the blocks of an answer: thinking, text, calls."""
    blocks: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    calls = message.get("tool_calls") or ()
    if message["content"] or not (calls or blocks):
        blocks.append({"type": "text", "text": message["content"]})
    for call in calls:
        function = call["function"]
        arguments = read_json(function["arguments"])
        block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        blocks.append({**block, "input": arguments if isinstance(arguments, dict) else {"value": arguments}})
    return blocks


def _stop(finished: Finished) -> tuple[str, str | None]:
    """Return Anthropic's reason of the end, and the stop string that ended the answer."""
    if finished.finish_reason == "length":
        return "max_tokens", None
    if finished.message.get("tool_calls"):
        return "tool_use", None
    return ("end_turn", None) if finished.stop_string is None else ("stop_sequence", finished.stop_string)


class AnthropicMessages(WireProtocol):
    path = "/v1/messages"
    count_path = "/v1/messages/count_tokens"
    reply = _MessagesReply
    conversation_fields = ("messages", "system", "tools", "metadata")

    def read(self, body: object, client: Client, *, counts: bool = False) -> Request:
        read = read_body(_MessagesBody, body)
        if read.max_tokens is None and not counts:
            raise ClientError(400, "max_tokens: Field required", "max_tokens")
        last = len(read.messages) - 1
        if not counts and read.messages[last].role == "assistant":
            raise ClientError(400, _PREFILL, f"messages.{last}.role")
        read.log_without_effect("messages")
        images = RequestImages()
        metadata: dict[str, Any] = read.metadata if isinstance(read.metadata, dict) else {}
        config = read.output_config or _OutputConfig()
        grammar: dict[str, Any] = {}
        if (answer_format := config.format or read.output_format) is not None:
            field_name = "output_format.schema" if config.format is None else "output_config.format.schema"
            grammar = format_of(answer_format.type, answer_format.schema_, field_name)
        return make_request(
            client.with_user_id(metadata.get("user_id")),
            read,
            _conversation(read, images),
            _tools(read.tools or ()),
            parameters={**grammar, **({"stop": read.stop_sequences} if read.stop_sequences else {})},
            choice=_choice(read.tool_choice),
            options={"reasoning_effort": config.effort} if config.effort else None,
            max_tokens=read.max_tokens,
            reply_format=ReplyFormat(new_id("msg_"), stream=bool(read.stream)),
            images=images.images,
        )

    def error(self, error: ClientError) -> dict[str, Any]:
        kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        message = error.message
        if error.code == CONTEXT_FULL:  # Anthropic's words, by which its clients know to compact.
            message = f"prompt is too long: {message}"
        elif error.param and error.param not in message:
            message = f"{error.param}: {message}"
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": new_id("req_")}
