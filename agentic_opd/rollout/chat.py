"""Messages to token ids and back: prompts that extend what was sampled, and turns parsed from sampled ids.

What users, tasks and tools wrote is text: a `<|im_end|>` that a program prints is broken by a space before it is
rendered, so that it can't end a message or open one in another's name. The messages themselves stay as they are.

In: a `renderers` renderer and chat messages. Out: `Prompt` (ids and the two places where a hint may enter) and
`ParsedTurn`. Sampled ids are never rendered again: every prompt of a conversation starts with the ids of the one
before it and of its completion.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from renderers import ParsedToolCall, RenderedTokens, Renderer, ToolCallParseStatus

from agentic_opd.core.errors import AlignmentError, RendererError
from agentic_opd.core.text import control_tokens, without_control_tokens
from agentic_opd.core.types import IGNORED, PROMPT_LOGPROB, Message, ToolCall, check_lengths

_PARSE_ERRORS = {
    ToolCallParseStatus.INVALID_JSON: "the arguments are not valid JSON",
    ToolCallParseStatus.UNCLOSED_BLOCK: "the tool call was not closed before the turn ended",
    ToolCallParseStatus.MISSING_NAME: "the tool call has no name",
    ToolCallParseStatus.MALFORMED_STRUCTURE: "the tool call is malformed",
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a turn is sampled from; see `types.Turn` for the two places."""

    token_ids: tuple[int, ...]
    assistant_open: int
    last_user_end: int
    last_role: str


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A completion as the chat message it stands for, and its tool calls, broken ones included."""

    message: Message
    tool_calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A sequence as sampled so far: ids, masks (-100 where not sampled) and logprobs (1.0 where not sampled)."""

    tokens_T: tuple[int, ...] = ()
    masks_T: tuple[int, ...] = ()
    logprobs_T: tuple[float, ...] = ()

    def with_turn(self, prompt: Prompt, ids: Sequence[int], logprobs: Sequence[float]) -> "TokenRecord":
        """The record with one more turn; `prompt` must start with what the record holds."""
        check_lengths("completion", token_ids=len(ids), logprobs=len(logprobs))
        known = len(self.tokens_T)
        if prompt.token_ids[:known] != self.tokens_T:
            raise AlignmentError(f"the prompt of the next turn does not start with the {known} tokens before it")
        added = len(prompt.token_ids) - known
        return TokenRecord(
            (*prompt.token_ids, *ids),
            (*self.masks_T, *[IGNORED] * added, *ids),
            (*self.logprobs_T, *[PROMPT_LOGPROB] * added, *logprobs),
        )


class Chat:
    """Renders and parses the conversations of one model with one set of tools. Stateless."""

    def __init__(self, renderer: Renderer, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> None:
        self.renderer = renderer
        self.tokenizer = tokenizer
        self.tools: list[Any] = list(tools)
        self.stop_token_ids = list(renderer.get_stop_token_ids())
        self._control = tuple(control_tokens(tokenizer).values())
        self._special_ids: frozenset[int] = frozenset(getattr(tokenizer, "all_special_ids", ()))

    def first_prompt(self, messages: Sequence[Message]) -> Prompt:
        """Render the messages before the first turn; at least one must be the user's."""
        rendered = self.renderer.render(self._as_text(messages), tools=self.tools, add_generation_prompt=True)  # type: ignore[arg-type]
        return self._place(rendered, messages, offset=0, before=None)

    def next_prompt(
        self, prompt: Prompt, completion_ids: Sequence[int], history: Sequence[Message], new: Sequence[Message]
    ) -> Prompt:
        """Extend `prompt` and its completion by the messages that answered it.

        Args:
            prompt: What the last turn was sampled from.
            completion_ids: What was sampled, its stop token included unless it was cut off.
            history: All messages up to and including the last turn's.
            new: What answered it: tool results, user messages.

        Returns:
            A prompt that starts with `prompt.token_ids` and `completion_ids`, exactly.

        Raises:
            RendererError: the chat template rewrites earlier messages.
        """
        sampled = [*prompt.token_ids, *completion_ids]
        rendered = self.renderer.bridge_to_next_turn(
            list(prompt.token_ids),
            list(completion_ids),
            self._as_text(new),  # type: ignore[arg-type]
            tools=self.tools,
        )
        if rendered is None:
            rendered = self._extend_by_template(prompt, completion_ids, self._as_text(history), self._as_text(new))
        if rendered.token_ids[: len(sampled)] != sampled:
            raise RendererError("the renderer changed ids that were already sampled; name another renderer")
        return self._place(rendered, new, offset=len(sampled), before=prompt)

    def parse(self, prompt: Prompt, completion_ids: Sequence[int], turn_index: int) -> ParsedTurn:
        """Parse a completion into the assistant's message; a call that can't be parsed keeps its text and its error."""
        parsed = self.renderer.parse_response(list(completion_ids), tools=self.tools, prompt_ids=list(prompt.token_ids))
        calls = tuple(_tool_call(call, f"call_{turn_index}_{i}") for i, call in enumerate(parsed.tool_calls))
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        if calls:
            message["tool_calls"] = [_wire_call(call) for call in calls]
        return ParsedTurn(message, calls)

    def _extend_by_template(
        self, prompt: Prompt, completion_ids: Sequence[int], history: Sequence[Message], new: Sequence[Message]
    ) -> RenderedTokens:
        """What the template adds after the last turn, taken from two full renders and put behind the sampled ids."""
        old = self.renderer.render_ids(list(history), tools=self.tools)  # type: ignore[arg-type]
        full = self.renderer.render([*history, *new], tools=self.tools, add_generation_prompt=True)  # type: ignore[list-item]
        closes = [i for i, token in enumerate(old) if token in self.stop_token_ids]
        if full.token_ids[: len(old)] != old or not closes:
            raise RendererError(
                "the chat template rewrites earlier messages when new ones follow, so the sampled tokens can't be "
                "kept. Name the model's own renderer in `renderer`, or use a template that only appends."
            )
        after = closes[-1] + 1
        sampled = [*prompt.token_ids, *completion_ids]
        if completion_ids[-1] not in self.stop_token_ids:
            sampled.append(old[closes[-1]])
        shift = len(history)
        indices = [i - shift if i >= shift else -1 for i in full.message_indices[after:]]
        return RenderedTokens(
            token_ids=sampled + full.token_ids[after:],
            message_indices=[-1] * len(sampled) + indices,
            is_content=[False] * len(sampled) + full.is_content[after:] if full.is_content else [],
        )

    def _as_text(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with no control token spelled out in what users and tools wrote."""
        return [
            {**message, "content": without_control_tokens(self._control, message["content"])}
            if message["role"] in ("user", "tool") and isinstance(message["content"], str)
            else message
            for message in messages
        ]

    def _place(
        self, rendered: RenderedTokens, messages: Sequence[Message], *, offset: int, before: Prompt | None
    ) -> Prompt:
        ids, owner = rendered.token_ids, rendered.message_indices
        opening = len(ids)
        while opening > offset and owner[opening - 1] == -1:
            opening -= 1
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if users:
            last_user_end = self._content_end(rendered, users[-1])
        elif before is not None:
            last_user_end = before.last_user_end
        else:
            raise RendererError("the first prompt holds no user message")
        return Prompt(tuple(ids), opening, last_user_end, messages[-1]["role"])

    def _content_end(self, rendered: RenderedTokens, message_index: int) -> int:
        """Index behind the last content token of a message (behind its last visible token, without attribution)."""
        own = [i for i, owner in enumerate(rendered.message_indices) if owner == message_index]
        content = [i for i in own if rendered.is_content[i]] if rendered.is_content else []
        if content:
            return content[-1] + 1
        end = own[-1] + 1
        while end > own[0] + 1 and self._is_scaffold(rendered.token_ids[end - 1]):
            end -= 1
        return end

    def _is_scaffold(self, token_id: int) -> bool:
        return token_id in self._special_ids or not self.tokenizer.decode([token_id]).strip()


def _tool_call(call: ParsedToolCall, call_id: str) -> ToolCall:
    error = _PARSE_ERRORS.get(call.status)
    if error is None and not isinstance(call.arguments, dict):
        error = "the arguments are not a JSON object"
    arguments = call.arguments if error is None and isinstance(call.arguments, dict) else None
    return ToolCall(call_id, call.name or "", arguments, call.raw, error)


def _wire_call(call: ToolCall) -> dict[str, Any]:
    arguments = call.raw if call.arguments is None else json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
