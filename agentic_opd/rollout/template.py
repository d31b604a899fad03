"""Render conversations with a tokenizer's own chat template, for any model: `renderer.name: default`.

The template writes the text, and a reader of `tool_formats` parses tool calls from sampled text. For a template without
tools (`tool_format: text`), the system prompt describes the tools, calls are written into the assistant's text, and
results become user messages.

In: messages and tools. Out: `RenderedTokens`, and `ParsedResponse` of sampled ids.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from renderers import DefaultRenderer, DefaultRendererConfig, ParsedResponse, RenderedTokens
from renderers.reasoning import prompt_ends_in_reasoning, scan_reasoning

from agentic_opd.core.errors import RendererError
from agentic_opd.core.text import call_arguments, control_tokens, read_json, without_control_tokens
from agentic_opd.core.types import Message
from agentic_opd.rollout.tool_formats import (
    RESULT_CLOSE,
    RESULT_OPEN,
    Reader,
    Writer,
    instructions,
    written_result,
)

_ENDING_TOKENS = 16
"""Tokens of a prompt that show whether it opens reasoning."""
_BEGIN, _END = "\ue000", "\ue001"
"""Marks around each content, to locate it in the template's text."""


class TemplateRenderer(DefaultRenderer):
    """A chat template as a renderer that attributes each token to a message and knows where a turn ends."""

    def __init__(
        self,
        tokenizer: Any,
        config: DefaultRendererConfig,
        read: Reader | None,
        write: Writer | None = None,
        *,
        call_format: str,
        lists_tools: bool = True,
        stop_token_ids: Sequence[int],
    ) -> None:
        """Probe the template with small conversations, to find out what it can render.

        Args:
            tokenizer: A tokenizer with a chat template.
            config: The template's variables, and the name of a parser of `renderers`.
            read: Parses tool calls. None: that parser does, or calls can't be parsed.
            write: Writes tool calls, because the template does not support tools.
            call_format: Name of the parser, as vLLM or `renderers` names it.
            lists_tools: The system prompt lists the tools in that case.
            stop_token_ids: Stop tokens in addition to the template's closing token.
        """
        super().__init__(tokenizer, config)
        self._read, self._write, self._lists_tools = read, write, lists_tools
        self.call_format = call_format
        self._template: Any = tokenizer.apply_chat_template
        if not self._writes_texts():
            self._template = _with_parts(tokenizer.apply_chat_template)
        self._takes_system = self._can_render("system", "user")
        self._takes_users_in_a_row = self._can_render("user", "user")
        self._takes_text = self._can_render_call("call00000", "{}")
        self._takes_objects = self._can_render_call("call00000", {}) or not self._takes_text
        arguments = {} if self._takes_objects else "{}"
        self._takes_any_id = self._can_render_call("call_0_0", arguments) or not self._can_render_call(
            "call00000", arguments
        )
        closing = self._closing_token()
        stop_ids = stop_token_ids if closing is None else (closing, *stop_token_ids)
        self._stop_token_ids = list(dict.fromkeys(stop_ids))

    @property
    def supports_tools(self) -> bool:
        """Whether tool calls can be parsed."""
        return self._read is not None or super().supports_tools

    def get_stop_token_ids(self) -> list[int]:
        """Return the stop tokens; the template's closing token comes first."""
        return list(self._stop_token_ids)

    # ------------------------------------------------------------------------------------------------- messages -> ids

    def render(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """Render the whole conversation; template text before a content belongs to that content's message."""
        text = self._text(messages, tools, add_generation_prompt)
        if not getattr(self._tokenizer, "is_fast", False):
            return super().render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = self._content_spans(messages, tools, text)
        before_opening = len(self._text(messages, tools, False)) if add_generation_prompt else len(text)
        ends = [end for _, end in spans]
        indices: list[int] = []
        is_content: list[bool] = []
        for start, _ in encoded["offset_mapping"]:
            index = min(bisect_left(ends, start + 1), len(spans) - 1)
            indices.append(index if start < before_opening else -1)
            is_content.append(spans[index][0] <= start < spans[index][1])
        return RenderedTokens(token_ids=encoded["input_ids"], message_indices=indices, is_content=is_content)

    def _apply(
        self, messages: Sequence[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        return self._tokenizer.encode(self._text(messages, tools, add_generation_prompt), add_special_tokens=False)

    def _text(self, messages: Sequence[Any], tools: Sequence[Any] | None, add_generation_prompt: bool) -> str:
        variables = {**(self.config.model_extra or {}), "add_generation_prompt": add_generation_prompt}
        if tools and self._write is None:
            variables["tools"] = list(tools)
        return self._template(self._for_template(messages, tools), tokenize=False, **variables)

    def _content_spans(self, messages: Sequence[Any], tools: Sequence[Any] | None, text: str) -> list[tuple[int, int]]:
        """Return each content's span in the text; a missing one is empty, at the previous span's end."""
        marked = self._text([_marked(message) for message in messages], tools, False)
        plain = marked.replace(_BEGIN, "").replace(_END, "")
        is_aligned = text.startswith(plain)  # If not, the template's text depends on the contents.
        spans: list[tuple[int, int]] = []
        cursor = removed = 0
        for message in messages:
            content = message["content"] if isinstance(message["content"], str) else ""
            start = marked.find(_BEGIN, cursor) if is_aligned and content.strip() else -1
            if start >= 0:
                cursor = marked.index(_END, start)
                spans.append((start - removed, cursor - removed - 1))
                removed += 2
            else:
                end = spans[-1][1] if spans else 0
                start = text.find(content.strip(), end) if content.strip() else -1
                spans.append((start, start + len(content.strip())) if start >= 0 else (end, end))
        return spans

    def _for_template(self, messages: Sequence[Any], tools: Sequence[Any] | None) -> list[Message]:
        """Return the messages in a form that the template supports."""
        write = self._write
        output: list[Message] = [
            _as_text(message, write) if write else self._with_arguments(message) for message in messages
        ]
        if not self._takes_any_id:
            output = [_with_short_ids(message) for message in output]
        if write and self._lists_tools and tools:
            description = instructions(write, tools)
            if output and output[0]["role"] == "system":
                output[0] = {**output[0], "content": f"{output[0]['content']}\n\n{description}"}
            else:
                output.insert(0, {"role": "system", "content": description})
        if not self._takes_system and len(output) > 1 and output[0]["role"] == "system" and output[1]["role"] == "user":
            system, first, *rest = output
            output = [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *rest]
        return output if self._takes_users_in_a_row else _one_a_speaker(output)

    def _with_arguments(self, message: Message) -> Message:
        """Return calls with their arguments in a form that the template can write, as objects if it can."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        functions = [call["function"] | {"arguments": self._arguments(call["function"]["arguments"])} for call in calls]
        return {
            **message,
            "tool_calls": [{**call, "function": function} for call, function in zip(calls, functions, strict=True)],
        }

    def _arguments(self, arguments: Any) -> Any:
        if not self._takes_objects:  # DeepSeek's templates join texts.
            return call_arguments(arguments)
        parsed = _parsed_arguments(arguments)
        # Templates that write one argument at a time, as Qwen3-Coder's, fail on the text of a broken call.
        return parsed if self._takes_text or isinstance(parsed, dict) else {"arguments": arguments}

    # ---------------------------------------------------------------------------------------------- sampled ids -> turn

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """Parse a turn: reasoning, if the prompt or the model opened `<think>`, content, and calls."""
        if self._opens_reasoning(prompt_ids):  # `renderers` knows no opening of a turn but ChatML's.
            prompt_ids = self._tokenizer.encode("<think>", add_special_tokens=False)
        if self._read is None:
            return super().parse_response(token_ids, tools=tools, prompt_ids=prompt_ids)
        stops = set(self._stop_token_ids)
        end = next((i for i, token in enumerate(token_ids) if token in stops), len(token_ids))
        ids = token_ids[:end]
        opened = prompt_ends_in_reasoning(self._tokenizer, prompt_ids, stop_ids=stops)
        thought = scan_reasoning(self._tokenizer, ids, prefilled=opened)
        if thought.is_open:
            return ParsedResponse(content="", reasoning_content=thought.text, reasoning_complete=False)
        text = str(self._tokenizer.decode(ids, skip_special_tokens=False))
        if thought.text is not None:
            text = text.partition("</think>")[2]
        content, calls = self._read(text)
        for special in self._tokenizer.all_special_tokens:
            content = content.replace(special, "")
        return ParsedResponse(content=content, reasoning_content=thought.text or None, tool_calls=calls)

    def _opens_reasoning(self, prompt_ids: Sequence[int] | None) -> bool:
        """Return whether a prompt ends with `<think>`, after any family's opening of the assistant's turn."""
        ending = self._tokenizer.decode(list(prompt_ids or ())[-_ENDING_TOKENS:], skip_special_tokens=False)
        return str(ending).rstrip().endswith("<think>")

    # -------------------------------------------------------------------------------------------- template properties

    def _rendered(self, *messages: Message) -> str | None:
        """Return the template's text; None if it can't render the messages."""
        try:
            return str(self._template(list(messages), tokenize=False))
        except Exception:  # noqa: BLE001 - a chat template may raise any exception
            return None

    def _can_render(self, *roles: str) -> bool:
        return self._rendered(*({"role": role, "content": "a"} for role in roles)) is not None

    def _writes_texts(self) -> bool:
        """Return whether the template writes a content that is a text; templates of vision models may need parts."""
        return _BEGIN in (self._rendered({"role": "user", "content": _BEGIN}) or "")

    def _can_render_call(self, call_id: str, arguments: object) -> bool:
        call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        answer = {"role": "tool", "tool_call_id": call_id, "name": "f", "content": "a"}
        return self._rendered({"role": "user", "content": "u"}, turn, answer) is not None

    def _closing_token(self) -> int | None:
        """Return the first control token that the template writes after an assistant's content."""
        try:
            turn = [{"role": "user", "content": "u"}, {"role": "assistant", "content": _END}]
            after = str(self._template(turn, tokenize=False)).rpartition(_END)[2]
        except Exception as error:  # as above
            raise RendererError(f"the chat template can't render an answer: {type(error).__name__}: {error}") from error
        control = control_tokens(self._tokenizer)
        return next((i for i in self._tokenizer.encode(after, add_special_tokens=False) if i in control), None)


def _with_parts(template: Any) -> Any:
    """Return a template that reads contents as lists of one text part."""

    def apply(messages: Sequence[Message], **variables: Any) -> Any:
        parts = [[{"type": "text", "text": message["content"]}] for message in messages]
        return template(
            [{**message, "content": content} for message, content in zip(messages, parts, strict=True)], **variables
        )

    return apply


def _as_text(message: Message, write: Writer) -> Message:
    """Return a message without fields that need a template with tools."""
    if message["role"] == "tool":
        content = without_control_tokens((RESULT_OPEN, RESULT_CLOSE), message["content"] or "")
        return {"role": "user", "content": written_result(content)}
    calls = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    written: list[str] = []
    for function in (call["function"] for call in calls):
        arguments = _parsed_arguments(function["arguments"])
        is_read = isinstance(arguments, dict)  # An unparsable call keeps its text.
        written.append(write(function["name"], arguments) if is_read else str(arguments))
    return {"role": "assistant", "content": "\n".join(filter(None, (message["content"], *written)))}


def _marked(message: Message) -> Message:
    """Return the message with marks around its stripped content, because a template may strip whitespace."""
    content = message["content"]
    core = content.strip() if isinstance(content, str) else ""
    if not core:
        return message
    lead, _, trail = content.partition(core)
    return {**message, "content": f"{lead}{_BEGIN}{core}{_END}{trail}"}


def _parsed_arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return read_json(arguments)
    except (ValueError, RecursionError):
        return arguments


def _with_short_ids(message: Message) -> Message:
    """Return call ids as nine letters and digits, which Mistral's template requires."""
    if "tool_call_id" in message:
        return {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [{**call, "id": _short_id(call["id"])} for call in calls]} if calls else message


def _short_id(call_id: str) -> str:
    return re.sub("[^a-zA-Z0-9]", "x", call_id)[-9:].rjust(9, "0")


def _one_a_speaker(messages: Sequence[Message]) -> list[Message]:
    """Merge consecutive user messages, for templates that require alternating roles."""
    joined: list[Message] = []
    for role, group in groupby(messages, key=itemgetter("role")):
        same = list(group)
        if role != "user" or len(same) == 1:
            joined += same
        else:
            joined.append({"role": "user", "content": "\n\n".join(message["content"] for message in same)})
    return joined
