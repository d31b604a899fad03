"""One choice of an answer in the making: sampled tokens in, the text that can be shown already out. Pure.

A message is known for certain only when its last token is: what looks like text may become a tool call. So text is held
back while it could still turn into something else, and what was shown is never taken back: if the finished message
does not go on from it, the client's message is what it was shown, and `rewrote` says so.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agentic_opd.core.errors import RendererError
from agentic_opd.core.types import Message
from agentic_opd.gateway.policy import Delta, SampledToken
from agentic_opd.rollout.chat import Chat, ParsedTurn
from agentic_opd.rollout.conversation import Completion

_MAY_BE_TAG = re.compile(r"<(?![\s=0-9])")
"""Not the sign of a comparison. At the end of a text it may be anything."""
_LONGEST_TAG = 32
"""Characters from a `<` on that may be the beginning of a tag."""
_CALL_STARTS = ("{", "[", "`")
"""With one of these a text may begin that is a tool call."""
_PARSED_AGAIN = 32
"""A message of n tokens is parsed again when n / 32 more are there: often enough to be seen, and linear in all."""
_HELD, _HELD_PARSED_AGAIN = 16, 4
"""Likewise when so many tokens were held back, as in a tool call, which comes whole."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What can be shown of a choice since the last piece, and the tokens that were sampled since then."""

    index: int
    content: str
    reasoning: str
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """A whole choice."""

    index: int
    completion: Completion
    message: Message
    """As the client is given it."""
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    rest: Piece
    """What was not shown yet; the tool calls stand in the message only."""
    rewrote: bool = False
    """The message does not go on from what was shown; it was kept as it was shown."""


class Choice:
    """Collects what is sampled of one choice."""

    def __init__(self, index: int, chat: Chat, prompt_ids: list[int], message_index: int, keeps_stop: bool) -> None:
        """Begin.

        Args:
            index: The choice's place in the answer.
            chat: Parses what is sampled.
            prompt_ids: What it is sampled from.
            message_index: The place that its message will have in the conversation.
            keeps_stop: A stop string that ends it stays in the text.
        """
        self.index = index
        self._chat, self._prompt_ids, self._message_index = chat, prompt_ids, message_index
        self._keeps_stop = keeps_stop
        self._tokens: list[SampledToken] = []
        self._untold = 0
        """From which token on the client was not told the logprobs."""
        self._versions: list[int] = []
        self._content, self._reasoning = "", ""
        """What was shown."""
        self._parse_at, self._shown_at = 1, 0
        self._is_plain = False
        """It has begun as text, and without the space before it: what follows is text too, as long as nothing in it may
        be a tag or a call."""

    def take(self, delta: Delta, stop: Sequence[str] = ()) -> Piece | None:
        """Add what was sampled; what can be shown now, None if there is nothing new.

        Args:
            delta: What was sampled.
            stop: The strings that end the text, whose beginnings are held back.
        """
        self._tokens += delta.tokens
        if delta.weight_version is not None:
            self._versions.append(delta.weight_version)
        if delta.finish_reason is not None or len(self._tokens) < self._parse_at:
            return None
        known, shown = len(self._tokens), len(self._content) + len(self._reasoning)
        piece = self._shown_now(stop)
        if len(self._content) + len(self._reasoning) > shown:
            self._shown_at = known
        is_held = known - self._shown_at > _HELD
        self._parse_at = known + 1 + known // (_HELD_PARSED_AGAIN if is_held else _PARSED_AGAIN)
        return piece

    def _shown_now(self, stop: Sequence[str]) -> Piece | None:
        text = self._plain_text() if self._is_plain else None
        if text is not None:
            return self._piece(held_back(text, stop, has_tools=bool(self._chat.tools)), self._reasoning)
        parsed = self._parsed()
        if parsed is None:
            return None
        text, reasoning = parsed.message["content"], parsed.message.get("reasoning_content")
        self._is_plain = bool(text) and text.rstrip() == (self._plain_text() or "").rstrip()
        content = held_back(text, stop, has_tools=bool(self._chat.tools))
        return self._piece(content, _certain((reasoning or "").lstrip()))

    def finish(self, delta: Delta) -> Finished:
        """The whole choice; `delta`, the last one, was taken.

        Raises:
            AlignmentError: no token was sampled.
        """
        assert delta.finish_reason is not None
        completion = Completion(
            tuple(token.token_id for token in self._tokens),
            tuple(token.logprob for token in self._tokens),
            delta.finish_reason,
            min(self._versions, default=None),
        )
        parsed = self._parsed()
        if parsed is None or any(call.error or not self._chat.tools for call in parsed.tool_calls):
            parsed = self._as_text(completion, parsed)
        message = dict(parsed.message)
        if delta.stop_string and not self._keeps_stop:
            message["content"] = message["content"].partition(delta.stop_string)[0]
        if "reasoning_content" in message:
            message["reasoning_content"] = message["reasoning_content"].strip()
        rewrote = False
        for name, shown in (("content", self._content), ("reasoning_content", self._reasoning)):
            if not (message.get(name) or "").startswith(shown):
                message[name], rewrote = shown, True
        rest = self._piece(message["content"], message.get("reasoning_content") or "")
        reason = "tool_calls" if parsed.tool_calls and delta.finish_reason == "stop" else delta.finish_reason
        return Finished(self.index, completion, message, reason, rest or Piece(self.index, "", "", ()), rewrote)

    def _as_text(self, completion: Completion, parsed: ParsedTurn | None) -> ParsedTurn:
        """A turn with a call that is broken, for the agent to complain about, or that nobody asked for."""
        reasoning = None if parsed is None else parsed.message.get("reasoning_content")
        if self._chat.tools and not reasoning:
            return self._chat.unparsed(completion.token_ids)
        ids = [token for token in completion.token_ids if token not in self._chat.stop_token_ids]
        text = self._chat.text(ids)
        if not reasoning:
            return ParsedTurn({"role": "assistant", "content": text}, ())
        content = text.partition("</think>")[2].lstrip()
        return ParsedTurn({"role": "assistant", "content": content, "reasoning_content": reasoning}, ())

    @property
    def tokens(self) -> Sequence[SampledToken]:
        """All that was sampled so far."""
        return self._tokens

    def _parsed(self) -> ParsedTurn | None:
        try:
            ids = [token.token_id for token in self._tokens]
            return self._chat.parse(self._prompt_ids, ids, self._message_index)
        except RendererError:
            return None

    def _plain_text(self) -> str | None:
        """What was sampled so far, as text; None if something in it may be more than text."""
        text = self._chat.text([token.token_id for token in self._tokens])
        tag = _MAY_BE_TAG.search(text)
        is_tag = tag is not None and tag.end() < len(text)
        is_call = self._chat.tools and any(start in text for start in _CALL_STARTS)
        return None if is_tag or is_call else text.lstrip()

    def _piece(self, content: str, reasoning: str) -> Piece | None:
        """What of these texts was not shown yet; None if nothing was, and no token is untold."""
        new_content = content[len(self._content) :] if content.startswith(self._content) else ""
        new_reasoning = reasoning[len(self._reasoning) :] if reasoning.startswith(self._reasoning) else ""
        self._content, self._reasoning = self._content + new_content, self._reasoning + new_reasoning
        tokens = tuple(self._tokens[self._untold :])
        if not (new_content or new_reasoning or tokens):
            return None
        self._untold = len(self._tokens)
        return Piece(self.index, new_content, new_reasoning, tokens)


def held_back(content: str, stop: Sequence[str], *, has_tools: bool) -> str:
    """The beginning of an unfinished text that will stay as it is, whatever follows.

    Args:
        content: The text so far.
        stop: Strings that would end it, and not be part of it.
        has_tools: A tool may be called; some families do that in text.
    """
    certain = _certain(content)
    for string in stop:
        certain = certain.partition(string)[0]
    longest = max(map(len, stop), default=1) - 1
    certain = certain[: max(0, len(certain) - longest)].rstrip()
    if has_tools and certain.lstrip().startswith(("<", *_CALL_STARTS)):
        return ""
    tag = certain.rfind("<", max(0, len(certain) - _LONGEST_TAG))
    return certain if tag < 0 or not _MAY_BE_TAG.match(certain, tag) else certain[:tag].rstrip()


def _certain(text: str) -> str:
    """Without a character that is not whole yet, and space that the end of the message may strip."""
    return text.rstrip("\ufffd").rstrip()
