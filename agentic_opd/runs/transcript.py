r"""Tokens and masks -> messages and turns: conversations of environments that return no messages. Pure.

    <|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n4.<|im_end|>
    |- before     -||- content    -||- between user and assistant       -||- sampled

A chat template writes the same text between two contents of given roles. These texts are found by rendering small
conversations with marked contents, and a sequence is split at them. Sampled tokens are never split: the mask gives the
turns.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.text import control_tokens
from agentic_opd.core.types import IGNORED, ContextTurn, Message, Trace, Turn, sampled_spans, shared_length
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.wire.group import ScoredRollout

_MARK = "zqxqz"
_START = "the beginning"
"""Role before the first content."""
_SAMPLED = "a sampled turn"
"""Role of an assistant's content that was sampled, with its stop token: the text after it is without one."""

_SHAPES = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("user", "user"),
    ("user", "assistant", "assistant"),
    ("user", "assistant", "tool"),
    ("user", "assistant", "tool", "assistant"),
    ("user", "assistant", "tool", "tool"),
    ("user", "assistant", "tool", "user"),
    ("user", "assistant", "system", "user"),
)
"""Roles of the rendered conversations; if two roles have the same text before them, the first one is read."""


def without_second_stops(rollout: ScoredRollout, stop_ids: Sequence[int]) -> list[int]:
    """Return the positions that are not an unsampled repetition of the stop token before them.

    Atropos' ManagedServer writes such repetitions. The stop token before one may be unsampled too:
    `ManagedServer.completion` masks the turns before the last one.
    """
    tokens, masks = rollout.tokens_T, rollout.masks_T
    return [
        position
        for position in range(len(tokens))
        if position == 0
        or masks[position] != IGNORED
        or tokens[position] != tokens[position - 1]
        or tokens[position] not in stop_ids
    ]


def end_of_turn(tokens: Sequence[int], span: tuple[int, int], stop_ids: Sequence[int]) -> int:
    """Return the end of a sampled span's turn: some masks extend beyond the stop token, over tokens of the template."""
    start, end = span
    return next((position + 1 for position in range(start, end) if tokens[position] in stop_ids), end)


@dataclass(frozen=True, slots=True)
class _Content:
    """A content in a piece of text, the role that it belongs to, and where the text that closes it ends."""

    role: str
    start: int
    end: int
    closed: int


class TranscriptReader:
    """Splits sequences at the texts that a renderer writes between contents."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._following: dict[str, dict[str, str]] = {}
        """Role -> text after its content -> role of the next content."""
        self._closing: dict[str, str] = {}
        """Role -> text after its content if nothing follows."""
        for roles, opens, tools in product(_SHAPES, (False, True), (None, [])):
            self._learn(roles, tools, opens=opens)
        self._patterns = {
            role: re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))
            for role, texts in self._following.items()
        }

    def _learn(self, roles: Sequence[str], tools: list[Any] | None, *, opens: bool) -> None:
        messages: list[Any] = [{"role": role, "content": _MARK} for role in roles]
        try:
            ids = self._chat.renderer.render_ids(messages, tools=tools, add_generation_prompt=opens)
        except Exception:  # noqa: BLE001 - a chat template may raise anything for roles that it does not know
            return
        pieces = self._chat.text(ids).split(_MARK)
        if len(pieces) != len(roles) + 1:
            return
        chain = [_START, *roles]
        if opens:
            chain.append("assistant")
        else:
            self._closing.setdefault(roles[-1], pieces[-1])
        for before, after, text in zip(chain, chain[1:], pieces, strict=False):
            self._add(before, after, text)
            if before == "assistant":
                self._add(_SAMPLED, after, text)
                self._add(_SAMPLED, after, self._behind_close(text))
        self._closing.setdefault(_SAMPLED, self._behind_close(self._closing.get("assistant", "")))

    def _add(self, before: str, after: str, text: str) -> None:
        if text.strip():
            self._following.setdefault(before, {}).setdefault(text, after)

    def _behind_close(self, text: str) -> str:
        """Return the text after the control token that it begins with: a sampled turn holds the stop token."""
        control = control_tokens(self._chat.tokenizer).values()
        return next((text.removeprefix(token) for token in control if text.startswith(token)), text)

    def trace(self, rollout: ScoredRollout) -> Trace:
        """Return the trace of a rollout, its messages read from its tokens.

        Raises:
            AlignmentError: its tokens are not of the renderer's chat template.
        """
        chat = self._chat
        positions = without_second_stops(rollout, chat.stop_token_ids)
        tokens, masks = ([values[cursor] for cursor in positions] for values in (rollout.tokens_T, rollout.masks_T))
        versions = {record.span: record.weight_version for record in rollout.turns or ()}
        messages: list[Message] = []
        turns: list[Turn] = []
        role, cursor, user_end = _START, 0, 0
        for number, (start, end) in enumerate(sampled_spans(masks), start=1):
            cursor = self._behind_stops(tokens, cursor, start)
            text = chat.text(tokens[cursor:start])
            *contents, opened = self._contents(text, role)
            if opened.role != "assistant" or not contents or _is_interrupted(contents[0], text):
                end_of_text = repr(text if len(text) <= 120 else f"...{text[-117:]}")
                raise AlignmentError(
                    f"turn {number}: the {start - cursor} tokens before it, {end_of_text}, open no assistant's message"
                )
            behind = tokens[cursor:start]
            new = contents[role != _START :]
            messages += [_message(content, text) for content in new]
            users = [content for content in new if content.role == "user"]
            if users or (new and not user_end):
                user_end = cursor + self._tokens_until(behind, (users or new)[-1].end)
            stop = end_of_turn(tokens, (start, end), chat.stop_token_ids)
            ids = tokens[start:stop]
            message = chat.parse(tokens[:start], ids, len(messages)).message
            turn_span = (positions[start], positions[end - 1] + 1)
            turns.append(
                Turn(
                    start=turn_span[0],
                    end=turn_span[1],
                    assistant_open=positions[min(start, cursor + self._tokens_until(behind, contents[-1].closed))],
                    last_user_end=positions[user_end],
                    message_index=len(messages),
                    truncated=ids[-1] not in chat.stop_token_ids,
                    weight_version=versions.get(turn_span),
                    reasoning_tokens=chat.reasoning_tokens(ids, message),
                )
            )
            messages.append(message)
            role, cursor = _SAMPLED, stop
        if not turns:
            raise AlignmentError("its mask covers no token")
        text = chat.text(tokens[self._behind_stops(tokens, cursor, len(tokens)) :])
        messages += [
            _message(tail, text) for tail in self._contents(text, role)[1:] if text[tail.start : tail.end].strip()
        ]
        sampled = {turn.message_index for turn in turns}
        unsampled = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i not in sampled]
        return with_turns(rollout, messages, turns, [ContextTurn(index, "not_sampled") for index in unsampled])

    def _behind_stops(self, tokens: Sequence[int], start: int, end: int) -> int:
        """Return the first position from `start` without a stop token, which some masks leave out."""
        return (
            next((i for i in range(start, end) if tokens[i] not in self._chat.stop_token_ids), end) if start else start
        )

    def _contents(self, text: str, role: str) -> list[_Content]:
        """Return the contents of a text that begins within a content of `role`; the last one may continue."""
        contents: list[_Content] = []
        cursor = 0
        while (pattern := self._patterns.get(role)) is not None and (match := pattern.search(text, cursor)) is not None:
            closing = shared_length(match[0], self._closing.get(role, ""))
            if role != _START:
                contents.append(_Content(role, cursor, match.start(), match.start() + closing))
            role, cursor = self._following[role][match[0]], match.end()
        end = len(text)
        if (closing := self._closing.get(role, "")) and text[cursor:].endswith(closing):
            end -= len(closing)
        return [*contents, _Content(role, cursor, end, len(text))]

    def _tokens_until(self, ids: Sequence[int], length: int) -> int:
        """Return the number of leading tokens whose text has at least this length."""
        return bisect_left(range(len(ids)), length, key=lambda n: len(self._chat.text(ids[:n])))


def with_turns(
    rollout: ScoredRollout, messages: Sequence[Message], turns: Sequence[Turn], context_turns: Sequence[ContextTurn]
) -> Trace:
    """Return a rollout's arrays as a trace with these turns."""
    return Trace(
        messages=tuple(messages),
        tokens_T=tuple(rollout.tokens_T),
        masks_T=tuple(rollout.masks_T),
        logprobs_T=tuple(rollout.logprobs_T),
        turns=tuple(turns),
        context_turns=tuple(sorted(context_turns, key=lambda turn: turn.message_index)),
        attachments=rollout.attachments,
    )


def _is_interrupted(content: _Content, text: str) -> bool:
    """Return whether text that belongs to no content follows a sampled turn."""
    return content.role == _SAMPLED and bool(text[: content.end].strip())


def _message(content: _Content, text: str) -> Message:
    return {"role": content.role, "content": text[content.start : content.end]}


@lru_cache(maxsize=4)
def reader_for(renderer: Any, tokenizer: Any) -> TranscriptReader:
    """Return the reader of a renderer's sequences, from a cache."""
    return TranscriptReader(ChatFormat(renderer, tokenizer, ()))
