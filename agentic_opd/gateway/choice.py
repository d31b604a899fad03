"""Incremental output of one choice: sampled tokens in, text that is safe to stream out. Pure.

The message is certain only after its last token: apparent text may become a tool call. Text is therefore held back
while later tokens could still change it, and streamed text is never retracted. If the finished message does not start
with the streamed text, the client's message keeps the streamed text and `rewrote` is set.
"""

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from agentic_opd.core.errors import RendererError
from agentic_opd.core.types import Message
from agentic_opd.plugin.sampling import Delta, SampledToken
from agentic_opd.rollout.chat_format import ChatFormat, ParsedTurn
from agentic_opd.rollout.conversation import Completion

_MAY_BE_TAG = re.compile(r"<(?![\s=0-9])")
"""A `<` that is not a comparison sign. At the end of a text it matches too, because any character may follow."""
_LONGEST_TAG = 32
"""Maximum length (characters) of the start of a tag, from its `<` on."""
_CALL_STARTS = ("{", "[", "`")
"""Characters with which a tool call written as text may begin."""
_PARSE_INTERVAL = 32
"""A message of n tokens is parsed again after n / 32 more: frequent enough for a reader, and linear work in total."""
_HOLD_AFTER, _HOLD_INTERVAL = 16, 4
"""After more than 16 tokens without new text, parsing waits for n / 4 more. A tool call is sent only as a whole."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of a choice that is safe to stream, and the tokens sampled since the last piece."""

    index: int
    content: str
    reasoning: str
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    index: int
    completion: Completion
    message: Message
    """The message as the client receives it."""
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    rest: Piece
    """The text that was not streamed yet; tool calls are only in `message`."""
    stop_string: str | None = None
    """The `stop` string that ended the choice, if any."""
    reasoning_tokens: int = 0
    """Number of leading tokens that are reasoning."""
    rewrote: bool = False
    """Whether the parsed message did not start with the streamed text, so that `message` keeps the streamed text."""


class Choice:
    """The state of one choice while it is sampled."""

    def __init__(
        self, index: int, chat: ChatFormat, prompt_ids: list[int], message_index: int, keeps_stop: bool
    ) -> None:
        self.index = index
        self._chat, self._prompt_ids, self._message_index = chat, prompt_ids, message_index
        self._keeps_stop = keeps_stop
        self._tokens: list[SampledToken] = []
        self._first_unsent = 0
        """Index of the first token that no piece contains yet."""
        self._versions: list[int] = []
        self._content, self._reasoning = "", ""
        """The text streamed so far."""
        self._parse_at, self._shown_at = 1, 0
        self._is_plain = False
        """Whether the parsed content equals the decoded tokens without leading space.

        Later tokens then need no parsing, until one of them may belong to a tag or a call.
        """

    def take(self, delta: Delta, stop: Sequence[str] = ()) -> Piece | None:
        """Add sampled tokens, and return the text that is safe to stream now; None if nothing is new."""
        self._tokens += delta.tokens
        if delta.weight_version is not None:
            self._versions.append(delta.weight_version)
        if delta.finish_reason is not None or len(self._tokens) < self._parse_at:
            return None
        num_tokens, num_characters = len(self._tokens), len(self._content) + len(self._reasoning)
        piece = self._shown_now(stop)
        if len(self._content) + len(self._reasoning) > num_characters:
            self._shown_at = num_tokens
        is_held = num_tokens - self._shown_at > _HOLD_AFTER
        self._parse_at = num_tokens + 1 + num_tokens // (_HOLD_INTERVAL if is_held else _PARSE_INTERVAL)
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
        """Return the finished choice; `take` must have added `delta`, the last one.

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
        if calls := message.get("tool_calls"):
            # Clients send these ids back. They distinguish conversations with equal messages.
            message["tool_calls"] = [{**call, "id": f"call_{uuid.uuid4().hex[:24]}"} for call in calls]
        if not parsed.tool_calls:
            message["content"] += self._space_behind(message["content"], completion.token_ids)
        if delta.stop_string and not self._keeps_stop:
            message["content"] = message["content"].partition(delta.stop_string)[0]
        if "reasoning_content" in message:
            message["reasoning_content"] = message["reasoning_content"].strip()
        rewrote = False
        for name, streamed in (("content", self._content), ("reasoning_content", self._reasoning)):
            if not (message.get(name) or "").startswith(streamed):
                message[name], rewrote = streamed, True
        rest = self._piece(message["content"], message.get("reasoning_content") or "")
        reason = "tool_calls" if parsed.tool_calls and delta.finish_reason == "stop" else delta.finish_reason
        return Finished(
            self.index,
            completion,
            message,
            reason,
            rest or Piece(self.index, "", "", ()),
            delta.stop_string,
            self._chat.reasoning_tokens(completion.token_ids, message),
            rewrote,
        )

    def _space_behind(self, content: str, token_ids: Sequence[int]) -> str:
        """Return the space that was sampled after the content, at the end of the answer; parsers strip it."""
        text = self._chat.text([token for token in token_ids if token not in self._chat.stop_token_ids])
        answer = text.rpartition("</think>")[2]
        if not content or content not in answer:
            return ""
        behind = answer.partition(content)[2]
        return behind[: len(behind) - len(behind.lstrip())]

    def _as_text(self, completion: Completion, parsed: ParsedTurn | None) -> ParsedTurn:
        """Return the completion as text, if parsing failed, a tool call is malformed or the request has no tools.

        The agent can then report the malformed call.
        """
        reasoning = None if parsed is None else parsed.message.get("reasoning_content")
        if self._chat.tools and not reasoning:
            return self._chat.unparsed(completion.token_ids)
        ids = [token for token in completion.token_ids if token not in self._chat.stop_token_ids]
        text = self._chat.text(ids)
        if not reasoning:
            return ParsedTurn({"role": "assistant", "content": text}, ())
        content = text.partition("</think>")[2].lstrip()
        return ParsedTurn({"role": "assistant", "content": content, "reasoning_content": reasoning}, ())

    def _parsed(self) -> ParsedTurn | None:
        try:
            ids = [token.token_id for token in self._tokens]
            return self._chat.parse(self._prompt_ids, ids, self._message_index)
        except RendererError:
            return None

    def _plain_text(self) -> str | None:
        """Return the decoded tokens so far; None if they may contain a tag or a tool call."""
        text = self._chat.text([token.token_id for token in self._tokens])
        tag = _MAY_BE_TAG.search(text)
        is_tag = tag is not None and tag.end() < len(text)
        is_call = self._chat.tools and any(start in text for start in _CALL_STARTS)
        return None if is_tag or is_call else text.lstrip()

    def _piece(self, content: str, reasoning: str) -> Piece | None:
        """Return the new part of these texts and the new tokens; None if there are neither."""
        new_content = content[len(self._content) :] if content.startswith(self._content) else ""
        new_reasoning = reasoning[len(self._reasoning) :] if reasoning.startswith(self._reasoning) else ""
        self._content, self._reasoning = self._content + new_content, self._reasoning + new_reasoning
        tokens = tuple(self._tokens[self._first_unsent :])
        if not (new_content or new_reasoning or tokens):
            return None
        self._first_unsent = len(self._tokens)
        return Piece(self.index, new_content, new_reasoning, tokens)


def held_back(content: str, stop: Sequence[str], *, has_tools: bool) -> str:
    """Return the beginning of an unfinished text that no later token can change."""
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
    """Strip an incomplete character and trailing whitespace, which the end of the message may remove."""
    return text.rstrip("\ufffd").rstrip()
