"""A hint's text -> its token ids, and its position in a turn's prompt. Pure.

    tokens     P P P P P P P P | R R R          P: prompt of the turn, R: sampled tokens
    request    P P P P P H H P P P | R R R      H: the hint, inserted at `insert_at`

The other tokens are not rendered again. With placement "end", the hint is a separate user message just before the
assistant's opening; if the last message is already a user message, the hint is appended to it. With "last_user", it is
always appended to the last user message.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

from renderers import Renderer

from agentic_opd.core.errors import RendererError
from agentic_opd.core.text import control_tokens, without_control_tokens
from agentic_opd.core.types import TeacherRequest, TokenSequence, Trace, Turn

HINT_HEADER = "[user's hint / instruction]\n"

_PROBE = "A plain hint."
_CALL = {"id": "call00000", "type": "function", "function": {"name": "terminal", "arguments": '{"command": "ls"}'}}
_AFTER_RESULT: tuple[Any, ...] = (
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call00000", "name": "terminal", "content": "t"},
)
_AFTER_ANSWER: tuple[Any, ...] = (_AFTER_RESULT[0], {"role": "assistant", "content": "a"})
"""If roles must alternate, as in Gemma's template, a user message must follow an answer."""


class HintPlace(NamedTuple):
    """Position of a hint: an index into the turn's sequence, and whether it is a message or appended text."""

    insert_at: int
    as_message: bool


def hint_place(trace: Trace, turn: Turn, placement: Literal["end", "last_user"]) -> HintPlace:
    """Return the position of the hint in the prompt of `turn`."""
    before = trace.messages[turn.message_index - 1]["role"] if turn.message_index else None
    if placement == "end" and before != "user":
        return HintPlace(turn.assistant_open, as_message=True)
    return HintPlace(turn.last_user_end, as_message=False)


class HintEncoder:
    """Encodes hints for the prompts of one teacher; what does not depend on the hint is rendered once."""

    def __init__(self, renderer: Renderer, tokenizer: Any) -> None:
        self._renderer, self._tokenizer = renderer, tokenizer
        self._control = control_tokens(tokenizer)
        self._spellings = tuple(self._control.values())
        self._allowed: dict[bool, list[int]] = {}
        """Control tokens of a harmless hint, by `as_message`."""
        self._frames: dict[int, _Frame] = {}
        """By the number of messages before the hint."""

    def encode(self, hint: str, *, as_message: bool) -> tuple[int, ...]:
        """Return the tokens of `hint` in the teacher's prompt, rendered as a user message after a tool result if
        `as_message`, and otherwise as text to be appended to a user message.

        Spelled-out control tokens (`<|im_end|>`, `</tool_call>`) are broken by a space, so that a hint can't change the
        structure of the conversation.

        Raises:
            RendererError: the template does not allow a user message after a tool result, or the hint encodes to
                control tokens.
        """
        encode = self._message if as_message else self._text
        ids = encode(HINT_HEADER + without_control_tokens(self._spellings, hint))
        if as_message not in self._allowed:
            # The message's opening and close may contain control tokens; a harmless hint shows which.
            self._allowed[as_message] = self._control_ids(encode(HINT_HEADER + _PROBE))
        allowed, control_ids = self._allowed[as_message], self._control_ids(ids)
        if control_ids != allowed:
            raise RendererError(f"the hint became control tokens: expected {allowed}, got {control_ids} for {hint!r}")
        return tuple(ids)

    def _control_ids(self, ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in ids if token_id in self._control]

    def _text(self, content: str) -> list[int]:
        return self._tokenizer.encode("\n\n" + content, add_special_tokens=False)

    def _message(self, content: str) -> list[int]:
        """Return the tokens that the template adds for a user message after a tool result."""
        reason = "it rewrites earlier messages then"
        try:
            added = self._added_message(_AFTER_RESULT, content) or _bridged_message(
                self._renderer, self._tokenizer, list(_AFTER_RESULT), content
            )
        except Exception as error:  # noqa: BLE001 - a chat template may raise anything
            added, reason = None, str(error)
        try:
            added = added or self._added_message(_AFTER_ANSWER, content)
        except Exception as error:  # noqa: BLE001 - as above
            reason = str(error)
        if added is None:
            raise RendererError(
                f"the chat template can't put a user message behind a tool result ({reason}); use hint.placement: "
                "last_user"
            )
        return added

    def _added_message(self, before: Sequence[Any], content: str) -> list[int] | None:
        """Return the tokens that the template adds for a user message after `before`; None if earlier tokens change."""
        frame = self._frames.get(len(before))
        added = None if frame is None else frame.added(content)
        if added is None:  # The first hint, or the prompt's head has changed: some templates write the date.
            frame = self._frames[len(before)] = _Frame.of(self._renderer, before)
            added = frame.added(content)
        return added


def encode_hint(renderer: Renderer, tokenizer: Any, hint: str, *, as_message: bool) -> tuple[int, ...]:
    """Return the tokens of a single hint; see `HintEncoder.encode`."""
    return HintEncoder(renderer, tokenizer).encode(hint, as_message=as_message)


def insert_hint(
    sequence: TokenSequence,
    turn: Turn,
    insert_at: int,
    hint_token_ids: tuple[int, ...] = (),
    scored_from: int | None = None,
) -> TeacherRequest:
    """Return the teacher's request for a turn of a sequence with the hint's tokens at index `insert_at`.

    Without hint tokens it equals the student's context. `scored_from` is the first position to score; None: the first
    of the turn.
    """
    span = (turn.start if scored_from is None else scored_from, turn.end)
    return TeacherRequest.of(
        sequence, span, insert_at, hint_token_ids, turn.weight_version, under_grammar=turn.under_grammar
    )


@dataclass(frozen=True, slots=True)
class _Frame:
    """The messages before a hint, rendered without it."""

    renderer: Renderer
    before: tuple[Any, ...]
    without: list[int]
    opening: list[int]
    """The assistant's opening after `before`."""
    adds_opening: bool = True
    """Whether the template opens the assistant's turn after a user message but not after a tool result, as DeepSeek
    V3's does; that opening is then part of the added tokens."""

    @classmethod
    def of(cls, renderer: Renderer, before: Sequence[Any]) -> Self:
        without = renderer.render(list(before)).token_ids
        opened = renderer.render(list(before), add_generation_prompt=True).token_ids
        frame = cls(renderer, tuple(before), without, opened[len(without) :])
        probe = HINT_HEADER + _PROBE
        return replace(frame, adds_opening=frame.added(probe) != replace(frame, adds_opening=False).added(probe))

    def added(self, content: str) -> list[int] | None:
        """Return the tokens that the template adds for a user message; None if earlier tokens change."""
        after: list[Any] = [*self.before, {"role": "user", "content": content}]
        without, opening = self.without, self.opening
        extended = self.renderer.render(after).token_ids
        if extended[: len(without)] != without or len(extended) == len(without):
            return None
        if self.adds_opening:
            opened = self.renderer.render(after, add_generation_prompt=True).token_ids
            end = len(opened) - len(opening)
            if end > len(extended) and opened[: len(extended)] == extended and opened[end:] == opening:
                return opened[len(without) : end]
        return extended[len(without) :]


def _bridged_message(renderer: Renderer, tokenizer: Any, before: list[Any], content: str) -> list[int] | None:
    """Return the added tokens if the template drops earlier reasoning, by extending a prompt with sampled ids.

    without    P P | R | T T A            P: prompt, R: sampled tokens, T: tool result, A: the assistant's opening
    with       P P | R | T T H H A        H: the returned tokens; None if the other tokens differ
    """
    user, _, result = before
    prompt = renderer.render([user], add_generation_prompt=True).token_ids
    sampled = tokenizer.encode("a", add_special_tokens=False)
    without = renderer.bridge_to_next_turn(prompt, sampled, [result])
    extended = renderer.bridge_to_next_turn(prompt, sampled, [result, {"role": "user", "content": content}])
    if without is None or extended is None:
        return None
    opening = len(without.token_ids)
    while opening and without.message_indices[opening - 1] == -1:
        opening -= 1
    end = opening + len(extended.token_ids) - len(without.token_ids)
    if extended.token_ids[:opening] + extended.token_ids[end:] != without.token_ids:
        return None
    return extended.token_ids[opening:end] or None
