"""OpenAI's responses: `POST /v1/responses` and `POST /v1/responses/input_tokens`. Pure.

Items that an assistant wrote in a row (reasoning, a message, calls) are one message of the conversation, and so are all
of them until the first result of its calls. A custom tool becomes a function with the one argument `input`, and a
namespace's tools are named `NAMESPACE__NAME`, as in vLLM. Of tools that another provider ran, calls with an id are
calls, and other items are part of the assistant's text.
"""

import base64
import binascii
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agentic_opd.core.attachments.messages import IMAGE_MARK
from agentic_opd.core.text import call_arguments
from agentic_opd.core.types import Message
from agentic_opd.gateway.body import HOSTED, TEXT_OR_PICTURE, FunctionSpec, OpenModel, ignored, read_body, refusal
from agentic_opd.gateway.choice import Finished, Piece
from agentic_opd.gateway.client import Client
from agentic_opd.gateway.errors import ClientError
from agentic_opd.gateway.exchange import Begun
from agentic_opd.gateway.images import ImageUri, RequestImages
from agentic_opd.gateway.protocols.base import CommonBody, Event, Reply, WireProtocol, WithoutEffect, new_id, sse
from agentic_opd.gateway.protocols.hosted import LEFT_OUT, hosted_text, readable
from agentic_opd.gateway.protocols.tools import (
    CUSTOM_INPUT,
    CUSTOM_PARAMETERS,
    AllowedTools,
    custom_input,
    log_format,
)
from agentic_opd.gateway.request import (
    REFERENCE,
    ChatInput,
    ReplyFormat,
    Request,
    Sampling,
    ToolChoice,
    format_of,
    make_request,
    without_billing,
)
from agentic_opd.gateway.turns import Path, RecordedTurn
from agentic_opd.plugin.sampling import SampledToken

_SEPARATOR = "__"
_ANSWER_DIGITS = 32
"""Length of an answer's id after its prefix; the ids of its items begin with it."""
_SEALED = "reasoning:"
"""Beginning of the `encrypted_content` of this gateway, which holds the reasoning: some clients keep nothing else."""


class _ContentPart(OpenModel):
    type: Annotated[
        Literal["input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text", "input_image"],
        TEXT_OR_PICTURE,
    ]
    text: str = ""
    refusal: str = ""
    image_url: str | None = None

    @model_validator(mode="after")
    def _check_type(self) -> "_ContentPart":
        if self.type == "input_image" and self.image_url is None:
            raise ValueError("a part of type input_image needs image_url; files are not kept here")
        return self


_Content = str | list[_ContentPart] | None


class _MessageItem(OpenModel):
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content = None

    @model_validator(mode="after")
    def _check_content(self) -> "_MessageItem":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of the {self.role} needs a content")
        return self


class _CallItem(OpenModel):
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str | dict[str, Any] = ""
    input: str = ""


class _OutputItem(OpenModel):
    call_id: str = ""
    output: _Content = None


class _ReasoningItem(OpenModel):
    summary: list[_ContentPart] | None = None
    content: list[_ContentPart] | None = None
    encrypted_content: str | None = None


class _ToolItem(OpenModel):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class _ChosenTool(OpenModel):
    type: Literal["function", "custom"]
    name: str


class _AllowedChoice(AllowedTools):
    type: Literal["allowed_tools"]


class _TextFormat(OpenModel):
    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class _TextConfig(OpenModel):
    format: _TextFormat | None = None
    verbosity: str | None = None


class _Reasoning(OpenModel):
    effort: str | None = None
    summary: str | None = None


class _ResponsesBody(CommonBody):
    input: str | list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[_ToolItem] | None = None
    tool_choice: Literal["auto", "none", "required"] | _ChosenTool | _AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: _TextConfig | None = None
    reasoning: _Reasoning | None = None
    include: WithoutEffect[list[str]] = None
    background: Annotated[Literal[False] | None, refusal("answers are sampled while the client waits")] = None
    truncation: WithoutEffect[Literal["disabled", "auto"]] = None
    """Nothing is dropped from a prompt that is too long, which is refused."""
    conversation: Annotated[None, refusal("send previous_response_id, or the conversation's items in input")] = None
    prompt: Annotated[None, refusal("no prompts are stored here; send its text in instructions or input")] = None


@dataclass(slots=True)
class _AssistantTurn:
    """The items of one message of the assistant."""

    texts: list[str] = field(default_factory=list[str])
    thoughts: list[str] = field(default_factory=list[str])
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    reference: str | None = None
    """Id of the answer."""
    is_hosted: bool = False
    """Whether the last text describes a call of a provider's tool."""

    @property
    def is_open(self) -> bool:
        """Whether the assistant's next text belongs to this message."""
        return self.reference is None and (bool(self.calls) or self.is_hosted or not any(self.texts))

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": "\n\n".join(filter(None, self.texts))}
        if any(self.thoughts):
            message["reasoning_content"] = "\n".join(filter(None, self.thoughts))
        if self.calls:
            message["tool_calls"] = self.calls
        return message if self.reference is None else {**message, REFERENCE: self.reference}


class _Input:
    """The messages of a request's `input`, which grow by its items."""

    def __init__(self, images: RequestImages) -> None:
        self._images = images
        self._turns: list[_AssistantTurn | Message] = []

    def messages(self) -> list[Message]:
        return [turn.message() if isinstance(turn, _AssistantTurn) else turn for turn in self._turns]

    def add(self, item: dict[str, Any], index: int) -> None:
        """Add an item; raises ClientError (400) for one that has no place in a conversation."""
        is_reference = item.keys() & {"id", "role", "content"} == {"id"}
        kind = item.get("type") or ("item_reference" if is_reference else "message")
        if kind == "message":
            self._add_message(read_body(_MessageItem, item, "input", index), index)
        elif kind in ("function_call", "custom_tool_call"):
            self._add_call(kind, read_body(_CallItem, item, "input", index))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            result = read_body(_OutputItem, item, "input", index)
            content = self._images.content("tool", _parts(result.output, f"input.{index}.output"))
            self._turns.append({"role": "tool", "tool_call_id": result.call_id, **content})
        elif kind == "item_reference":
            self._add_reference(item.get("id"))
        elif kind == "reasoning":
            last = self._last()
            turn = last if last is not None and last.calls and last.is_open else self._begin()
            turn.thoughts.append(_reasoning(read_body(_ReasoningItem, item, "input", index)))
        elif isinstance(kind, str) and "content" not in item:
            self._add_hosted(kind, item)
        else:
            name = f"input.{index}.type"
            raise ClientError(400, f"{name}: items of type {str(kind)[:80]!r} are not read here", name)

    def _last(self) -> _AssistantTurn | None:
        """Return the last message, if it is the assistant's."""
        last = self._turns[-1] if self._turns else None
        return last if isinstance(last, _AssistantTurn) else None

    def _begin(self) -> _AssistantTurn:
        turn = _AssistantTurn()
        self._turns.append(turn)
        return turn

    def _open(self) -> _AssistantTurn:
        """Return the message to which the assistant's next text belongs."""
        last = self._last()
        return last if last is not None and last.is_open else self._begin()

    def _add_message(self, item: _MessageItem, index: int) -> None:
        parts = _parts(item.content, f"input.{index}.content")
        if item.role in ("system", "developer"):
            parts = [without_billing(part) if isinstance(part, str) else part for part in parts]
        content = self._images.content(item.role, parts)
        if item.role == "assistant":
            turn = self._open()
            turn.texts.append(content["content"])
            turn.is_hosted = False
        elif item.role == "user":
            self._turns.append({"role": "user", **content})
        elif content["content"]:
            self._turns.append({"role": "system", **content})

    def _add_call(self, kind: str, item: _CallItem) -> None:
        name = item.name if item.namespace is None else f"{item.namespace}{_SEPARATOR}{item.name}"
        arguments = call_arguments(item.arguments)
        if kind == "custom_tool_call":
            arguments = json.dumps({CUSTOM_INPUT: item.input}, ensure_ascii=False)
        self._call(item.call_id, name, arguments)

    def _call(self, call_id: str, name: str, arguments: str) -> None:
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        (self._last() or self._begin()).calls.append(call)

    def _add_reference(self, item_id: object) -> None:
        answer_id = f"resp_{item_id.partition('_')[2][:_ANSWER_DIGITS]}" if isinstance(item_id, str) else ""
        last = self._last()
        if last is None or last.reference != answer_id:  # One message represents all items of an answer.
            self._begin().reference = answer_id

    def _add_hosted(self, kind: str, item: dict[str, Any]) -> None:
        """Add an item of a tool that another provider offers, or leave it out if it holds nothing readable."""
        call_id = item.get("call_id")
        if isinstance(call_id, str) and kind.endswith("_call"):
            names = ("action", "actions", "operation", "arguments")
            arguments = next((item[name] for name in names if item.get(name)), None)
            text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
            self._call(call_id, kind.removesuffix("_call"), text)
        elif isinstance(call_id, str) and kind.endswith("_output"):
            self._turns.append({"role": "tool", "tool_call_id": call_id, "content": readable(item)})
        elif text := hosted_text(kind, item):
            if kind == "mcp_approval_response":
                self._turns.append({"role": "user", "content": text})
            else:
                turn = self._open()
                turn.texts.append(text)
                turn.is_hosted = True
        else:
            ignored("responses", [kind], LEFT_OUT)


def _parts(content: _Content, field_name: str) -> list[str | ImageUri]:
    if isinstance(content, str):
        return [content]
    return [
        part.text or part.refusal
        if part.image_url is None
        else ImageUri(part.image_url, f"{field_name}.{position}.image_url")
        for position, part in enumerate(content or ())
    ]


def _reasoning(item: _ReasoningItem) -> str:
    if item.content or item.summary:
        return "".join(part.text for part in item.content or item.summary or ())
    try:
        opened = base64.b64decode(item.encrypted_content or "", validate=True).decode()
    except (binascii.Error, ValueError):
        opened = ""
    if item.encrypted_content and not opened.startswith(_SEALED):
        ignored("responses", ["reasoning.encrypted_content"], LEFT_OUT)
    return opened.removeprefix(_SEALED) if opened.startswith(_SEALED) else ""


def _tools(items: Sequence[_ToolItem]) -> tuple[list[FunctionSpec], dict[str, str]]:
    """Return the tools, and `custom` or the namespace of those that are not plain functions."""
    specs: list[FunctionSpec] = []
    kinds: dict[str, str] = {}
    for index, item in enumerate(items):
        if item.type in ("function", "custom"):
            parameters = CUSTOM_PARAMETERS if item.type == "custom" else item.parameters
            fields = {"name": item.name, "description": item.description, "parameters": parameters}
            specs.append(read_body(FunctionSpec, fields, "tools", index))
            if item.type == "custom":
                kinds[specs[-1].name] = "custom"
        elif item.type == "namespace":
            for position, tool in enumerate(item.tools or ()):
                spec = read_body(FunctionSpec, tool, "tools", index, "tools", position)
                specs.append(spec.model_copy(update={"name": f"{item.name}{_SEPARATOR}{spec.name}"}))
                kinds[specs[-1].name] = f"namespace:{item.name}"
        else:
            ignored("responses", [item.type], HOSTED)
    log_format("responses", (item.format for item in items))
    return specs, kinds


def _choice(read: _ResponsesBody) -> ToolChoice:
    is_parallel = read.parallel_tool_calls is not False
    if isinstance(read.tool_choice, _ChosenTool):
        return ToolChoice("named", read.tool_choice.name, is_parallel)
    if isinstance(read.tool_choice, AllowedTools):
        return read.tool_choice.choice(is_parallel=is_parallel)
    return ToolChoice(read.tool_choice or "auto", None, is_parallel)


_ECHOED: dict[str, Any] = {
    **{"instructions": None, "metadata": {}, "parallel_tool_calls": True, "temperature": 1.0, "tool_choice": "auto"},
    **{"tools": [], "top_p": 1.0, "background": False, "max_output_tokens": None, "max_tool_calls": None},
    **{"previous_response_id": None, "prompt_cache_key": None, "reasoning": {"effort": None, "summary": None}},
    **{"safety_identifier": None, "service_tier": "default", "store": True, "text": {"format": {"type": "text"}}},
    **{"top_logprobs": 0, "truncation": "disabled", "user": None},
}
"""Fields of a request that its answer repeats, with their defaults."""


def _echo(body: object, kinds: dict[str, str], *, is_sealed: bool = False) -> dict[str, Any]:
    assert isinstance(body, dict)
    echoed = {name: default if body.get(name) is None else body[name] for name, default in _ECHOED.items()}
    echoed["service_tier"] = "default"
    return {"response": echoed, "kinds": kinds, "is_sealed": is_sealed}


@dataclass(slots=True)
class _ResponsesReply(Reply):
    sequence: int = 0
    """Number of the next event."""
    items: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The items that the stream has begun."""
    written: str = ""
    """Text of the last of them."""
    logged: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Logprobs of its text, if the client asked for them."""

    def body(self) -> dict[str, Any]:
        finished = self.finished[0]
        message = finished.message
        texts = [("reasoning", message.get("reasoning_content")), ("message", message["content"])]
        items = [self._text_item(kind, text, self._status()) for kind, text in texts if text]
        items += [self._call_item(call) for call in message.get("tool_calls") or ()]
        return self._response(items or [self._text_item("message", "", self._status())], self._status())

    def events(self, event: Event) -> Iterator[str]:
        if isinstance(event, Begun):
            start = self._response([], "in_progress")
            yield self._event("response.created", response=start)
            yield self._event("response.in_progress", response=start)
            return
        piece = event.rest if isinstance(event, Finished) else event
        if piece.reasoning:
            yield from self._write("reasoning", piece.reasoning, ())
        if piece.content:
            yield from self._write("message", piece.content, piece.tokens)
        if isinstance(event, Finished):
            yield from self._end(event)

    def closing(self) -> str:
        status = self._status()
        return self._event(f"response.{status}", response=self._response(self.items, status))

    def failed(self, error: ClientError) -> str:
        response = self._response(self.items, "failed")
        response["error"] = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=response)

    def _event(self, kind: str, **data: Any) -> str:
        event = {"type": kind, "sequence_number": self.sequence, **data}
        self.sequence += 1
        return sse(event, kind)

    def _status(self) -> str:
        return "incomplete" if self.finished[0].finish_reason == "length" else "completed"

    def _response(self, items: Sequence[dict[str, Any]], status: str) -> dict[str, Any]:
        is_over = status in ("completed", "incomplete")
        usage = {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in self.finished.values())
            },
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        return {
            "id": self.request.reply_format.answer_id,
            "object": "response",
            "created_at": self.created,
            "completed_at": self.created if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": list(items),
            **self.request.reply_format.echo["response"],
            "usage": usage if is_over else None,
        }

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}{self.request.reply_format.answer_id.removeprefix('resp_')}{new_id('')[:8]}"

    def _text_item(self, kind: str, text: str, status: str) -> dict[str, Any]:
        if kind == "reasoning":
            item = {"id": self._item_id("rs_"), "type": "reasoning", "summary": [], "content": [_part(kind, text, ())]}
            if self.request.reply_format.echo["is_sealed"]:
                item["encrypted_content"] = base64.b64encode(f"{_SEALED}{text}".encode()).decode()
            return {**item, "status": status}
        logged = () if self.request.sampling.top_logprobs is None else self.logprobs(self.tokens[0])
        content = [_part(kind, text, logged)]
        return {
            "id": self._item_id("msg_"),
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _call_item(self, call: Any) -> dict[str, Any]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        kind, _, namespace = self.request.reply_format.echo["kinds"].get(name, "").partition(":")
        if kind == "custom":
            item = {"id": self._item_id("ctc_"), "type": "custom_tool_call", "call_id": call["id"], "name": name}
            return {**item, "input": custom_input(arguments), "status": "completed"}
        item = {"id": self._item_id("fc_"), "type": "function_call", "call_id": call["id"], "name": name}
        if kind == "namespace":
            item |= {"name": name.removeprefix(f"{namespace}{_SEPARATOR}"), "namespace": namespace}
        return {**item, "arguments": arguments, "status": "completed"}

    def _write(self, kind: str, text: str, tokens: Sequence[SampledToken]) -> Iterator[str]:
        """Yield the events of new text, after those that begin its item if it is the first."""
        if not self.items or self.items[-1]["type"] != kind:
            yield from self._close()
            self.items.append({**self._text_item(kind, "", "in_progress"), "content": []})
            yield self._event("response.output_item.added", output_index=len(self.items) - 1, item=self.items[-1])
            yield self._event("response.content_part.added", **self._position(), part=_part(kind, "", ()))
        self.written += text
        if kind == "reasoning":
            yield self._event("response.reasoning_text.delta", **self._position(), delta=text)
            return
        logged = [] if self.request.sampling.top_logprobs is None else self.logprobs(tokens)
        self.logged += logged
        yield self._event("response.output_text.delta", **self._position(), delta=text, logprobs=logged)

    def _position(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}

    def _close(self, status: str = "completed") -> Iterator[str]:
        """Yield the events that end the last text."""
        if not self.items or self.items[-1]["type"] not in ("reasoning", "message"):
            return
        item, kind = self.items[-1], self.items[-1]["type"]
        part = _part(kind, self.written, self.logged)
        if kind == "reasoning":
            yield self._event("response.reasoning_text.done", **self._position(), text=self.written)
            item = {**self._text_item(kind, self.written, status), "id": item["id"]}
        else:
            fields = {"text": self.written, "logprobs": self.logged}
            yield self._event("response.output_text.done", **self._position(), **fields)
            item = {**item, "content": [part], "status": status}
        yield self._event("response.content_part.done", **self._position(), part=part)
        self.items[-1], self.written, self.logged = item, "", []
        yield self._event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _end(self, finished: Finished) -> Iterator[str]:
        calls = finished.message.get("tool_calls") or ()
        if not self.items and not calls:
            yield from self._write("message", "", ())
        yield from self._close("completed" if calls else self._status())
        for call in calls:
            item = self._call_item(call)
            name = "input" if item["type"] == "custom_tool_call" else "arguments"
            self.items.append({**item, name: "", "status": "in_progress"})
            index = len(self.items) - 1
            yield self._event("response.output_item.added", output_index=index, item=self.items[-1])
            kind = "response.custom_tool_call_input" if name == "input" else "response.function_call_arguments"
            position = {"item_id": item["id"], "output_index": index}
            yield self._event(f"{kind}.delta", **position, delta=item[name])
            yield self._event(f"{kind}.done", **position, **{name: item[name]}, name=item["name"])
            self.items[-1] = item
            yield self._event("response.output_item.done", output_index=index, item=item)


def _part(kind: str, text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def stored_response(turn: RecordedTurn, model: str, created: float) -> dict[str, Any]:
    """Return the answer of a recorded turn, which `GET /v1/responses/{id}` repeats.

    The journal holds the sampled message, but neither the ids of the answer's items nor the request's fields without
    effect.
    """
    specs = [tool["function"] for tool in turn.tools]
    kinds = {spec["name"]: "custom" for spec in specs if spec.get("parameters") == CUSTOM_PARAMETERS}
    tools = [{"type": "function", "strict": None, "parameters": None, **spec} for spec in specs]
    reply_format = ReplyFormat(turn.answer_id, echo=_echo({**turn.sampling, "tools": tools}, kinds))
    request = Request(Client(), ChatInput.of((), turn.tools, {}), Sampling({}), reply_format=reply_format)
    reply = _ResponsesReply(request, model, lambda ids: "", created=int(created))
    finished = Finished(0, turn.completion, turn.messages[-1], turn.completion.finish_reason, Piece(0, "", "", ()))
    finished = replace(finished, reasoning_tokens=turn.span.reasoning_tokens)
    reply.prompt_tokens = turn.span.start
    reply.take(finished)
    return reply.body()


_INPUT_ID = "msg_input"
"""Beginning of the id of an input item. An item reference does not find it: it would name an answer."""


def input_items(path: Path) -> list[dict[str, Any]]:
    """Return the conversation before the last turn of a path as items, without instructions.

    `GET /v1/responses/{id}/input_items` lists them. Their ids depend on the answer and their position only.
    """
    turn = path[-1]
    history = [message for earlier in path for message in earlier.messages][path[0].num_instructions : -1]
    items: list[dict[str, Any]] = []
    for message in history:
        text = message["content"].replace(IMAGE_MARK, "[picture]")
        if message["role"] == "tool":
            called = message.get("tool_call_id", "")
            items.append({"type": "function_call_output", "call_id": called, "output": text})
            continue
        if thought := message.get("reasoning_content"):
            items.append({"type": "reasoning", "summary": [], "content": [_part("reasoning", thought, ())]})
        is_answer = message["role"] == "assistant"
        if text or not is_answer:
            part = _part("message", text, ()) if is_answer else {"type": "input_text", "text": text}
            items.append({"type": "message", "role": message["role"], "content": [part]})
        for call in message.get("tool_calls") or ():
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    digits = turn.answer_id.partition("_")[2]
    return [{"id": f"{_INPUT_ID}{i}_{digits}", **item, "status": "completed"} for i, item in enumerate(items)]


class OpenAIResponses(WireProtocol):
    path = "/v1/responses"
    count_path = "/v1/responses/input_tokens"
    reply = _ResponsesReply
    history_field = "input"
    conversation_fields = ("input", "instructions", "tools", "previous_response_id", "prompt_cache_key")

    def counted(self, input_tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": input_tokens}

    def read(self, body: object, client: Client, *, counts: bool = False) -> Request:
        read = read_body(_ResponsesBody, body)
        include = read.include or ()
        instructions = without_billing(read.instructions or "")
        messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
        num_instructions = len(messages)
        images = RequestImages()
        conversation = _Input(images)
        items = [{"role": "user", "content": read.input}] if isinstance(read.input, str) else read.input
        for index, item in enumerate(items):
            conversation.add(item, index)
        messages += conversation.messages()
        read.log_without_effect("responses")
        tools, kinds = _tools(read.tools or ())
        text = (read.text and read.text.format) or _TextFormat(type="text")
        effort = read.reasoning and read.reasoning.effort
        wants_logprobs = bool(read.top_logprobs) or "message.output_text.logprobs" in include
        return make_request(
            client.with_cache_key(read.prompt_cache_key),
            read,
            messages,
            tools,
            field_name="input",
            parameters=format_of(text.type, text.schema_, "text.format.schema"),
            choice=_choice(read),
            options={"reasoning_effort": effort} if effort else None,
            max_tokens=read.max_output_tokens,
            top_logprobs=(read.top_logprobs or 0) if wants_logprobs else None,
            previous=read.previous_response_id,
            num_instructions=num_instructions,
            reply_format=ReplyFormat(
                answer_id=new_id("resp_"),
                stream=bool(read.stream),
                echo=_echo(body, kinds, is_sealed="reasoning.encrypted_content" in include),
            ),
            images=images.images,
        )
