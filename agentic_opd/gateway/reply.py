"""Sampled choices in OpenAI's format: a completion, or the chunks of a stream. Pure."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentic_opd.gateway.choice import Finished, Piece
from agentic_opd.gateway.sampler import Begun
from agentic_opd.plugin.sampling import SampledToken


def _new_id() -> str:
    return f"chatcmpl-{uuid.uuid4().hex}"


def _now() -> int:
    return int(time.time())


@dataclass(slots=True)
class Reply:
    """The state of one answer while it is sampled."""

    model: str
    decode: Callable[[Sequence[int]], str]
    """Function from token ids to text, for the tokens in logprobs."""
    top_logprobs: int | None
    """Number of likely tokens per position; None: the client requested no logprobs."""
    reply_id: str = field(default_factory=_new_id)
    created: int = field(default_factory=_now)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    session_id: str = ""
    _roles_sent: set[int] = field(default_factory=set[int])
    _finished: dict[int, Finished] = field(default_factory=dict[int, Finished])
    _tokens: dict[int, list[SampledToken]] = field(default_factory=dict[int, list[SampledToken]])

    def take(self, event: Begun | Piece | Finished) -> None:
        """Add an event of the answer."""
        if isinstance(event, Begun):
            self.prompt_tokens, self.session_id = event.prompt_tokens, event.session_id
            return
        piece = event.rest if isinstance(event, Finished) else event
        self._tokens.setdefault(piece.index, []).extend(piece.tokens)
        if isinstance(event, Finished):
            self._finished[event.index] = event
            self.completion_tokens += len(event.completion.token_ids)

    def completion(self) -> dict[str, Any]:
        """Return the whole answer as a `chat.completion`."""
        choices = [
            {
                "index": index,
                "message": {**_message(one), "refusal": None},
                "logprobs": self._logprobs(self._tokens[index]),
                "finish_reason": one.finish_reason,
            }
            for index, one in sorted(self._finished.items())
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": self.usage()}

    def chunks(self, event: Begun | Piece | Finished) -> Iterator[dict[str, Any]]:
        """Yield the stream's chunks for an event; the event must also be given to `take`."""
        if isinstance(event, Begun):
            return
        piece = event.rest if isinstance(event, Finished) else event
        if piece.index not in self._roles_sent:
            self._roles_sent.add(piece.index)
            yield self._chunk(piece.index, {"role": "assistant", "content": ""})
        delta = {"content": piece.content, "reasoning_content": piece.reasoning}
        delta = {name: text for name, text in delta.items() if text}
        if delta or (piece.tokens and self.top_logprobs is not None):
            yield self._chunk(piece.index, delta, logprobs=self._logprobs(piece.tokens))
        if isinstance(event, Finished):
            calls = event.message.get("tool_calls") or ()
            if calls:
                yield self._chunk(event.index, {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
            yield self._chunk(event.index, {}, finish_reason=event.finish_reason)

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream with `include_usage`."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Return the numbers of prompt and completion tokens."""
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.reply_id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, Any] | None:
        if self.top_logprobs is None:
            return None
        return {
            "content": [
                {
                    **self._entry(token.token_id, token.logprob),
                    "top_logprobs": [self._entry(*one) for one in token.top[: self.top_logprobs]],
                }
                for token in tokens
            ]
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.decode([token_id])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _message(finished: Finished) -> dict[str, Any]:
    """Return the message; as in OpenAI's format, a tool call without text has a null content."""
    message = dict(finished.message)
    if not message["content"] and message.get("tool_calls"):
        message["content"] = None
    return message
