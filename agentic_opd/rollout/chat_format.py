"""Messages to token ids and back: prompts that extend the sampled ids, and turns parsed from them.

Message contents are rendered as text: a control token such as `<|im_end|>` in a program's output is broken by a space,
so that it cannot end a message or open one in another role. In assistant and system messages and in tool
specifications, the control tokens around reasoning and calls are kept, because they may be intended. The messages
themselves do not change.

In: a renderer of the package `renderers`, and chat messages. Out: `Prompt` (ids and the two positions where a hint may
be inserted) and `ParsedTurn`. Sampled ids are never rendered again; new ids are appended to them.
"""

import json
import math
import re
import time
from bisect import bisect_left
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from renderers import ParsedToolCall, RenderedTokens, Renderer, ToolCallParseStatus

from agentic_opd.core.attachments.prompts import AttachmentTokens, as_template_reads, place_attachments
from agentic_opd.core.errors import RendererError, RewrittenError
from agentic_opd.core.text import (
    call_arguments,
    control_tokens,
    read_json,
    well_formed,
    well_formed_json,
    without_control_tokens,
)
from agentic_opd.core.types import Attachments, Message, ToolCall, shared_length
from agentic_opd.rollout.tool_formats import with_types

_PARSE_ERRORS = {
    ToolCallParseStatus.INVALID_JSON: "the arguments are not valid JSON",
    ToolCallParseStatus.UNCLOSED_BLOCK: "the tool call was not closed before the turn ended",
    ToolCallParseStatus.MISSING_NAME: "the tool call has no name",
    ToolCallParseStatus.MALFORMED_STRUCTURE: "the tool call is malformed",
}


_BETWEEN = -2
"""Owner index of tokens between two assistant turns."""
_REASONING_END = "</think>"
_INNER = re.compile("think|tool|arg_", re.IGNORECASE)
"""Matches the control tokens inside an assistant turn: around its reasoning and its calls."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids that a turn's prompt appends to the earlier ids (for the first prompt: all ids).

    `assistant_open` and `last_user_end` are indices into the whole conversation; see `types.Turn`.
    """

    token_ids: tuple[int, ...]
    assistant_open: int
    last_user_end: int
    attachments: Attachments = ()
    """The attachments among `token_ids`, with their positions in the whole conversation."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A completion parsed as a chat message, with its tool calls, including broken ones."""

    message: Message
    tool_calls: tuple[ToolCall, ...]


_REMEMBERED, _REMEMBERED_S = 16, 60.0
"""Number of first prompts that are remembered, and for how long: the rollouts of a group begin with the same one, and
some templates write the date."""


class ChatFormat:
    """Renders and parses the conversations of one model with one set of tools."""

    def __init__(self, renderer: Renderer, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> None:
        self.renderer = renderer
        self.tokenizer = tokenizer
        self.tools: list[Any] = list(tools)
        self.attached: AttachmentTokens | None = None
        self.stop_token_ids = list(renderer.get_stop_token_ids())
        self._control = tuple(control_tokens(tokenizer).values())
        self._structural = tuple(token for token in self._control if not _INNER.search(token))
        self._written_tools: list[Any] = [self._plain_json(tool) for tool in self.tools]
        self._special_ids: frozenset[int] = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._first_prompts: dict[bytes, tuple[float, Prompt]] = {}
        """By a digest of the messages: when it was rendered, and the prompt."""

    def with_tools(self, tools: Sequence[dict[str, Any]] | None) -> "ChatFormat":
        """Return a chat of the same model with other tools; None: this one."""
        if tools is None:
            return self
        chat = copy(self)
        chat.tools, chat._written_tools = [*tools], [self._plain_json(tool) for tool in tools]
        chat._first_prompts = {}
        return chat

    def with_attachments(self, tokens: AttachmentTokens | None) -> "ChatFormat":
        """Return a chat that can render messages with these attachments; None: this one."""
        if tokens is None:
            return self
        chat = copy(self)
        chat.attached, chat._first_prompts = tokens, {}
        return chat

    def first_prompt(self, messages: Sequence[Message]) -> Prompt:
        """Render the messages before the first turn.

        `last_user_end` is the end of the last user message; without one, of the last message that is not the
        assistant's; without that, the assistant's opening.
        """
        key, now = blake2b(repr(messages).encode(errors="replace")).digest(), time.monotonic()
        rendered_at, prompt = self._first_prompts.get(key, (-math.inf, None))
        if prompt is None or now - rendered_at > _REMEMBERED_S:
            prompt = self._rendered_first_prompt(messages)
            self._first_prompts.pop(key, None)
            self._first_prompts[key] = now, prompt
            while len(self._first_prompts) > _REMEMBERED:
                self._first_prompts.pop(next(iter(self._first_prompts)), None)
        return prompt

    def _rendered_first_prompt(self, messages: Sequence[Message]) -> Prompt:
        with _renderer_errors("rendering the first prompt"):
            text, tools = self._as_text(messages), self._written_tools
            rendered = self.renderer.render(text, tools=tools, add_generation_prompt=True)  # type: ignore[arg-type]
            if not rendered.is_content and any(message["role"] == "assistant" for message in messages):
                prompt = self._located_by_difference(rendered.token_ids, text)
            else:
                prompt = self._located(rendered, messages, offset=0, last_user_end=None)
            return self._with_attached_tokens(prompt, messages, offset=0)

    def next_prompt(
        self,
        known_ids: list[int],
        start: int,
        last_user_end: int,
        history: Sequence[Message],
        new: Sequence[Message],
        sampled_from: int = 0,
    ) -> Prompt:
        """Extend a prompt and its completion by the messages that answered it.

        Args:
            known_ids: The last prompt and its completion (with its stop token unless it was cut off).
            start: Index of the completion's first id.
            last_user_end: End of the last user message's content.
            history: All messages up to and including the last turn's.
            new: The answers: tool results, user messages; empty if the assistant takes another turn directly.
            sampled_from: Index of the first message whose assistant turns were sampled in `known_ids`.

        Raises:
            RewrittenError: the chat template rewrites earlier messages, or drops sampled reasoning.
            RendererError: the template can't render the new messages.
        """
        with _renderer_errors("rendering the next prompt"):
            text = self._as_text(new)
            if (index := self._dropped_reasoning(self._as_text(history), text, sampled_from)) is not None:
                raise RewrittenError(f"the chat template drops the reasoning of message {index} when new ones follow")
            rendered = self._bridged(known_ids, start, text) if new else self._reopened(known_ids, start)
            if rendered is None:
                rendered = self._extend_by_template(known_ids, start, self._as_text(history), text)
            if rendered.token_ids[: len(known_ids)] != known_ids:
                first = shared_length(rendered.token_ids, known_ids)
                raise RendererError(
                    f"the renderer changed token {first} of the {len(known_ids)} known ones: got "
                    f"{rendered.token_ids[first : first + 3]}, expected {known_ids[first : first + 3]}; name another "
                    "renderer"
                )
            prompt = self._located(rendered, new, offset=len(known_ids), last_user_end=last_user_end)
            return self._with_attached_tokens(prompt, new, offset=len(known_ids))

    def parse(self, prompt_ids: list[int], completion_ids: Sequence[int], message_index: int) -> ParsedTurn:
        """Parse a completion into an assistant message; an unparsable call keeps its text and its error."""
        with _renderer_errors("parsing a turn"):
            parsed = self.renderer.parse_response(list(completion_ids), tools=self.tools, prompt_ids=prompt_ids)
            typed = with_types(parsed.tool_calls, self._call_format, self.tools)
            calls = tuple(_tool_call(call, f"call_{message_index}_{i}") for i, call in enumerate(typed))
        message: Message = {"role": "assistant", "content": well_formed(parsed.content)}
        if parsed.reasoning_content:
            message["reasoning_content"] = well_formed(parsed.reasoning_content)
        if calls:
            message["tool_calls"] = [_wire_call(call) for call in calls]
        return ParsedTurn(message, calls)

    def text(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of the ids, including control tokens unless they are to be skipped."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or getattr(self.tokenizer, "clean_up_tokenization_spaces", False):
            return str(self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))
        return str(backend.decode(token_ids, skip_special_tokens=skip_special_tokens))  # About five times faster.

    def reasoning_tokens(self, completion_ids: Sequence[int], message: Message) -> int:
        """Return the number of leading ids of a completion that hold its message's reasoning, including tags."""
        reasoning = (message.get("reasoning_content") or "").strip()
        text = self.text(completion_ids) if reasoning else ""
        start = text.find(reasoning)
        if not reasoning or start < 0:
            return 0
        behind = start + len(reasoning)
        closing = _REASONING_CLOSE.match(text, behind)
        end = closing.end() if closing else behind
        return bisect_left(range(len(completion_ids)), end, key=lambda n: len(self.text(completion_ids[:n])))

    @property
    def _call_format(self) -> str:
        """Name of the format of the model's tool calls: of its parser, or of its family's renderer."""
        config = getattr(self.renderer, "config", None)
        return getattr(self.renderer, "call_format", None) or getattr(config, "name", "")

    def unparsed(self, completion_ids: Sequence[int]) -> ParsedTurn:
        """Return a completion as a message with its plain text and no calls."""
        text = self.text(list(completion_ids), skip_special_tokens=True)
        return ParsedTurn({"role": "assistant", "content": well_formed(text)}, ())

    def written(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the ids of the last message, an assistant's, as rendered after its prompt, including its stop token.

        Raises:
            RendererError: the message can't be rendered, or not after a prompt of the messages before it.
        """
        prompt = self.first_prompt(messages[:-1])
        with _renderer_errors("rendering a turn"):
            text, tools = self._as_text(messages), self._written_tools
            all_ids = self.renderer.render_ids(text, tools=tools)  # type: ignore[arg-type]
        shared = shared_length(all_ids, prompt.token_ids)
        ids = all_ids[shared:]
        opened, turn = (self.text(tokens[prompt.assistant_open :]) for tokens in (prompt.token_ids, all_ids))
        is_continued = shared == len(prompt.token_ids) or (shared >= prompt.assistant_open and turn.startswith(opened))
        if is_continued and shared < len(prompt.token_ids):  # A token of the whole text reaches into the prompt's.
            ids = self.tokenizer.encode(turn[len(opened) :], add_special_tokens=False)
        closes = [i for i, token in enumerate(ids) if token in self.stop_token_ids]
        ids = tuple(ids[: closes[-1] + 1 if closes else len(ids)])
        if shared < prompt.assistant_open or not ids:
            raise RendererError(
                f"the chat template writes token {shared} otherwise when message {len(messages) - 1} follows, so the "
                "message can't be told from its prompt"
            )
        if not is_continued and (messages[-1].get("reasoning_content") or "").strip():
            raise RendererError(f"the prompt has no place for the reasoning of message {len(messages) - 1}")
        return ids

    def reads_back(self, prompt_ids: list[int], completion_ids: Sequence[int], message: Message) -> bool:
        """Return whether a turn parses to the message it was rendered from, but for calls' ids and outer space."""
        parsed = self.parse(prompt_ids, completion_ids, 0)
        names = ("content", "reasoning_content")
        pairs = [(parsed.message.get(name) or "", message.get(name) or "") for name in names]
        calls = [(call.name, call.arguments) for call in parsed.tool_calls]
        message_calls = [(call["function"]["name"], _arguments_of(call)) for call in message.get("tool_calls") or ()]
        pairs.append((json.dumps(calls, sort_keys=True), json.dumps(message_calls, sort_keys=True)))
        return all(first.strip() == second.strip() or self._same_ids(first, second) for first, second in pairs)

    def spells_calls(self, prompt_ids: list[int], completion_ids: Sequence[int], message: Message) -> bool:
        """Return whether the text of a message without calls ends with calls in the model's own format.

        Such a text is replaced by calls of the message, which render to the same ids.
        """
        parsed = self.parse(prompt_ids, completion_ids, 0)
        is_called = not message.get("tool_calls") and all(call.error is None for call in parsed.tool_calls)
        if not is_called or not parsed.tool_calls or self.spells_control_tokens(parsed.message):
            return False
        user: Message = {"role": "user", "content": "u"}
        texts = ({"role": "assistant", "content": turn["content"]} for turn in (message, parsed.message))
        plain, called = texts
        called["tool_calls"] = parsed.message["tool_calls"]
        return self.written([user, plain]) == self.written([user, called])

    def spells_control_tokens(self, message: Message) -> bool:
        """Return whether a message's text, or a name or argument of its calls, holds a control token of the model."""
        calls = [(call["function"]["name"], _arguments_of(call)) for call in message.get("tool_calls") or ()]
        texts = (message["content"], message.get("reasoning_content") or "", json.dumps(calls, ensure_ascii=False))
        return any(token in text for text in texts for token in self._control)

    def without_stop(self, text: str) -> str:
        """Return the text of a turn without the stop tokens at its end that some logs have."""
        stops = tuple(self.text([token]) for token in self.stop_token_ids)
        while (core := text.rstrip()).endswith(stops):
            text = core.removesuffix(next(stop for stop in stops if core.endswith(stop)))
        return text

    def _same_ids(self, first: str, second: str) -> bool:
        """Return whether two texts have the same ids, because the tokenizer may normalize letters."""
        encode = self.tokenizer.encode
        return encode(first.strip(), add_special_tokens=False) == encode(second.strip(), add_special_tokens=False)

    def _bridged(self, known_ids: list[int], start: int, new: list[Any]) -> RenderedTokens | None:
        """Return the ids that the renderer appends to the known ids; None if it would have to render all of them again.

        Renderers refuse a turn that ended inside its reasoning. The ids after a turn depend only on the turn's end, so
        they are taken from a turn that closes its reasoning and has the same last token.
        """
        prompt, turn = known_ids[:start], known_ids[start:]
        rendered = self.renderer.bridge_to_next_turn(prompt, turn, new, tools=self._written_tools)
        if rendered is not None or turn[-1] not in self.stop_token_ids or _REASONING_END not in self._control:
            return rendered
        closed: list[int] = [*self.tokenizer.encode(_REASONING_END, add_special_tokens=False), turn[-1]]
        bridged = self.renderer.bridge_to_next_turn(prompt, closed, new, tools=self._written_tools)
        length = len(prompt) + len(closed)
        if bridged is None or bridged.token_ids[:length] != [*prompt, *closed]:
            return None
        return RenderedTokens(
            token_ids=known_ids + bridged.token_ids[length:],
            message_indices=[-1] * len(known_ids) + bridged.message_indices[length:],
            is_content=[False] * len(known_ids) + bridged.is_content[length:] if bridged.is_content else [],
        )

    def _reopened(self, known_ids: list[int], start: int) -> RenderedTokens | None:
        """Return the known ids and another assistant opening: the bridge of a user message, without that message."""
        rendered = self._bridged(known_ids, start, [{"role": "user", "content": "u"}])
        if rendered is None:
            return None
        owners = rendered.message_indices
        opening = 1 + max((i for i, owner in enumerate(owners) if owner == 0), default=len(owners) - 1)
        indices = [i for i, owner in enumerate(owners) if owner != 0]
        return RenderedTokens(
            token_ids=[rendered.token_ids[i] for i in indices],
            message_indices=[-1 if i >= opening else _BETWEEN for i in indices],
            is_content=[rendered.is_content[i] for i in indices] if rendered.is_content else [],
        )

    def _dropped_reasoning(self, history: Sequence[Message], new: Sequence[Message], first: int) -> int | None:
        """Return the index of the first sampled reasoning if the next prompt is the same without it; else None.

        If the renderer's `thinking_retention` is set, it decides about reasoning, and nothing counts as dropped.
        """
        if not new:
            return None
        config = getattr(self.renderer, "config", None)
        if getattr(config, "thinking_retention", None) is not None:
            return None
        has_reasoning = [bool((message.get("reasoning_content") or "").strip()) for message in history]
        if True not in has_reasoning[first:]:
            return None
        index = has_reasoning.index(True, first)
        without = [
            {k: v for k, v in m.items() if i != index or k != "reasoning_content"} for i, m in enumerate(history)
        ]
        read, same = (
            self.renderer.render_ids([*before, *new], tools=self._written_tools, add_generation_prompt=True)  # type: ignore[list-item]
            for before in (history, without)
        )
        return index if read == same else None

    def _extend_by_template(
        self, known_ids: list[int], start: int, history: Sequence[Message], new: Sequence[Message]
    ) -> RenderedTokens:
        """Append the template's text after the last turn, taken from two full renders, to the known ids."""
        tools = self._written_tools
        before_new = self.renderer.render(list(history), tools=tools)  # type: ignore[arg-type]
        old, last = before_new.token_ids, len(history) - 1
        full = self.renderer.render([*history, *new], tools=tools, add_generation_prompt=True)  # type: ignore[list-item]
        if full.token_ids[: len(old)] != old:
            raise RewrittenError(
                "the chat template rewrites earlier messages when new ones follow, so the sampled tokens can't be "
                "kept. Name the model's own renderer in `renderer.name`, or use a template that only appends."
            )
        last_ids = [i for i, owner in enumerate(before_new.message_indices) if owner == last]
        turn = range(last_ids[0] if last_ids else 0, len(old))
        # Some families close no turn: the next message's role ends it.
        close = next((i for i in reversed(turn) if old[i] in self.stop_token_ids), None)
        after = self._end_of_open_turn(full, len(old), history) if close is None else close + 1
        if close is None and full.token_ids[len(old)] == known_ids[-1] and known_ids[-1] in self.stop_token_ids:
            after = len(old) + 1  # The policy sampled the next message's role, where its turn ends.
        was_closed = close is None or known_ids[-1] in self.stop_token_ids
        before = known_ids if was_closed else [*known_ids, *old[close:after]]
        shift = len(history)
        indices = [i - shift if i >= shift else -1 if i == -1 else _BETWEEN for i in full.message_indices[after:]]
        return RenderedTokens(
            token_ids=before + full.token_ids[after:],
            message_indices=[-1] * len(before) + indices,
            is_content=[False] * len(before) + full.is_content[after:] if full.is_content else [],
        )

    def _end_of_open_turn(self, full: RenderedTokens, length: int, history: Sequence[Message]) -> int:
        """Return where the last turn of `history` ends in a rendering with later messages; no stop token closes it.

        `length` is that of the history's own rendering. Text of the template behind the turn's, such as a line break,
        is not part of it. A renderer attributes the text after a message's content to the next message, so after a turn
        with calls, or without a text, only white space counts as the template's.
        """
        if not history[-1].get("tool_calls") and history[-1]["content"].strip():
            owners = enumerate(full.message_indices)
            return next((i for i, message in owners if message >= len(history)), length)
        end = length
        while end and not self.tokenizer.decode([full.token_ids[end - 1]]).strip():
            end -= 1
        return end

    def _as_text(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with their control tokens broken up, and with arguments in every call."""
        return [self._plain(message) for message in messages]

    def _plain(self, message: Message) -> Message:
        spellings = self._control if message["role"] in ("user", "tool") else self._structural
        texts = {name: message.get(name) for name in ("content", "reasoning_content", "name")}
        plain: Message = {
            name: without_control_tokens(spellings, well_formed(text))
            for name, text in texts.items()
            if isinstance(text, str)
        }
        if calls := message.get("tool_calls"):
            plain["tool_calls"] = [
                {**call, "function": self._plain_json(function | {"arguments": arguments})}
                for call in calls
                for function in [call["function"]]
                for arguments in [self._plain_arguments(function.get("arguments"))]
            ]
        return as_template_reads({**message, **plain}, self.attached)

    def _with_attached_tokens(self, prompt: Prompt, messages: Sequence[Message], offset: int) -> Prompt:
        """Return a prompt of these messages, at `offset` of the conversation, with the tokens of their attachments."""
        placed = place_attachments(prompt.token_ids, messages, self.attached, self.tokenizer, offset)
        if placed is None:
            return prompt
        assistant_open, last_user_end = placed.moved(prompt.assistant_open), placed.moved(prompt.last_user_end)
        return Prompt(placed.token_ids, assistant_open, last_user_end, placed.attachments)

    def _plain_arguments(self, arguments: Any) -> Any:
        """Return arguments unchanged, as text or object; re-encode a text in which an escape hides a control token."""
        if not isinstance(arguments, str | None):
            return arguments
        text = call_arguments(arguments)
        if "\\" in text:
            with suppress(ValueError, RecursionError):
                encoded = json.dumps(read_json(text), ensure_ascii=False)
                has_half_pairs = "\\ud" in text or "\\uD" in text
                is_plain = without_control_tokens(self._structural, encoded) == encoded
                return text if is_plain and not has_half_pairs else encoded
        return text

    def _plain_json(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return JSON data with its control tokens broken up. In JSON they can only occur inside texts."""
        text = json.dumps(data, ensure_ascii=False)
        plain = without_control_tokens(self._structural, well_formed(text))
        return data if plain == text else read_json(plain)

    def _located(
        self, rendered: RenderedTokens, messages: Sequence[Message], *, offset: int, last_user_end: int | None
    ) -> Prompt:
        """Return the ids from `offset` on as a prompt, with the positions of its two insertion points."""
        ids, owner = rendered.token_ids, rendered.message_indices
        opening = len(ids)
        while opening > offset and owner[opening - 1] == -1:
            opening -= 1
        if last_user_end is None or any(message["role"] == "user" for message in messages):
            last = _last_user(messages)
            last_user_end = opening if last is None else self._content_end(rendered, last, offset)
        return Prompt(tuple(ids[offset:]), opening, last_user_end)

    def _located_by_difference(self, ids: Sequence[int], messages: Sequence[Message]) -> Prompt:
        """Return a prompt of a renderer that does not attribute tokens to messages, as when a template writes a message
        differently if messages follow it. Its last user message ends where one more word in it changes the ids.
        """
        without = self.renderer.render_ids(list(messages), tools=self._written_tools)  # type: ignore[arg-type]
        opening = shared_length(ids, without)
        if (last := _last_user(messages)) is None:
            return Prompt(tuple(ids), opening, opening)
        longer_message = {**messages[last], "content": f"{messages[last]['content']} x"}
        changed = [*messages[:last], longer_message, *messages[last + 1 :]]
        longer = self.renderer.render_ids(changed, tools=self._written_tools, add_generation_prompt=True)  # type: ignore[arg-type]
        return Prompt(tuple(ids), opening, min(opening, shared_length(ids, longer)))

    def _content_end(self, rendered: RenderedTokens, message_index: int, offset: int) -> int:
        """Return the end of a message's last content token; without attribution, of its last visible token."""
        positions = [i for i in range(offset, len(rendered.token_ids)) if rendered.message_indices[i] == message_index]
        content = [i for i in positions if rendered.is_content[i]] if rendered.is_content else []
        if content:
            return content[-1] + 1
        end = positions[-1] + 1
        while end > positions[0] + 1 and self._is_scaffold(rendered.token_ids[end - 1]):
            end -= 1
        return end

    def _is_scaffold(self, token_id: int) -> bool:
        return token_id in self._special_ids or not self.tokenizer.decode([token_id]).strip()


def _last_user(messages: Sequence[Message]) -> int | None:
    """Return the index of the last user message; without one, of the last message that is not the assistant's."""
    users = (i for i, message in reversed([*enumerate(messages)]) if message["role"] == "user")
    fallbacks = (i for i, message in reversed([*enumerate(messages)]) if message["role"] != "assistant")
    return next(users, next(fallbacks, None))


_REASONING_CLOSE = re.compile(r"\s*(</\w+>|\[/\w+\]|<\|end\|>)?\s*")
"""Matches the end of reasoning in a turn's text, with surrounding space; `<|end|>` is that of gpt-oss."""


@contextmanager
def _renderer_errors(doing: str) -> Generator[None]:
    """Convert any exception of a renderer or a chat template to a RendererError that names the operation."""
    try:
        yield
    except RendererError:
        raise
    except Exception as error:
        raise RendererError(f"{doing} failed: {type(error).__name__}: {error}") from error


def _tool_call(call: ParsedToolCall, call_id: str) -> ToolCall:
    error = _PARSE_ERRORS.get(call.status)
    if error is None and not isinstance(call.arguments, dict):
        error = "the arguments are not a JSON object"
    if error is None and not _is_json(call.arguments):
        error = "the arguments hold a value that JSON does not have"
    arguments = call.arguments if error is None and isinstance(call.arguments, dict) else None
    return ToolCall(call_id, well_formed(call.name or ""), well_formed_json(arguments), well_formed(call.raw), error)


def _arguments_of(call: Mapping[str, Any]) -> Any:
    """Return the arguments of a message's call; a text that is not JSON stays a text."""
    arguments = call["function"]["arguments"]
    with suppress(ValueError, RecursionError):
        return read_json(arguments) if isinstance(arguments, str) else arguments
    return arguments


def _is_json(value: Any) -> bool:
    """Return whether JSON can write `value`: Python also reads NaN, Infinity, 1e400, sets and bytes."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _wire_call(call: ToolCall) -> dict[str, Any]:
    arguments = call.raw if call.arguments is None else json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
