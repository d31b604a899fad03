"""OpenAI's completions: `POST /v1/completions`, of a text or of token ids. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from agentic_opd.gateway.choice import Finished
from agentic_opd.gateway.client import Client
from agentic_opd.gateway.errors import ClientError
from agentic_opd.gateway.protocols.base import DONE, CommonBody, Event, Reply, WireProtocol, new_id, sse
from agentic_opd.gateway.protocols.chat import StreamOptions, usage
from agentic_opd.gateway.request import Asked, check_choices, make_asked, read_body
from agentic_opd.gateway.sampler import Begun
from agentic_opd.plugin.sampling import SampledToken

_DEFAULT_TOKENS = 16
"""Length of an answer without `max_tokens`, as OpenAI defines it."""
_TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class _CompletionBody(CommonBody):
    prompt: str | list[_TokenId] | list[str] | list[list[_TokenId]]
    n: Annotated[int, Field(ge=1)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    add_special_tokens: Literal[True] | None = None
    return_token_ids: bool | None = None


@dataclass(slots=True)
class _CompletionReply(Reply):
    def whole(self) -> dict[str, Any]:
        choices = [
            self._choice(index, one.message["content"], self.tokens[index], one.finish_reason, 0)
            for index, one in sorted(self.finished.items())
        ]
        return {**self._head(), "choices": choices, "usage": usage(self)}

    def events(self, event: Event) -> Iterator[str]:
        if isinstance(event, Begun):
            return
        piece = event.rest if isinstance(event, Finished) else event
        reason = event.finish_reason if isinstance(event, Finished) else None
        if piece.content or piece.tokens or reason:
            earlier = len(self.tokens[piece.index]) - len(piece.tokens)
            yield sse(
                {**self._head(), "choices": [self._choice(piece.index, piece.content, piece.tokens, reason, earlier)]}
            )

    def closing(self) -> str:
        return (sse({**self._head(), "choices": [], "usage": usage(self)}) if self.asked.include_usage else "") + DONE

    def failed(self, error: ClientError) -> str:
        return sse(TextCompletions().error(error)) + DONE

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.asked.answer_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def _choice(
        self, index: int, text: str, tokens: Sequence[SampledToken], finish_reason: str | None, num_earlier: int
    ) -> dict[str, Any]:
        """Return a choice, or its part after `num_earlier` tokens."""
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
        if self.asked.top_logprobs is not None:
            earlier = self.decode([token.token_id for token in self.tokens[index][:num_earlier]])
            choice["logprobs"] = self._columns(tokens, len(earlier))
        if self.asked.echo["return_token_ids"]:
            choice["token_ids"] = [token.token_id for token in tokens]
            choice["prompt_token_ids"] = None if num_earlier else list(self.prompt_ids)
        return choice

    def _columns(self, tokens: Sequence[SampledToken], offset: int) -> dict[str, Any]:
        texts = [self.decode([token.token_id]) for token in tokens]
        offsets = list[int]()
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        most = self.asked.top_logprobs or 0
        top = [{self.decode([one]): logprob for one, logprob in token.top[:most]} for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": top if most else None,
            "text_offset": offsets,
        }


class TextCompletions(WireProtocol):
    path = "/v1/completions"
    reply = _CompletionReply

    def read(self, body: object, client: Client, *, counts: bool = False) -> Asked:
        read = read_body(_CompletionBody, body)
        prompt = read.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise ClientError(400, f"prompt: {len(prompt)} prompts, send one request for each", "prompt")
            prompt = prompt[0]
        if not prompt:
            raise ClientError(400, "prompt: it is empty", "prompt")
        if read.best_of is not None and read.best_of != (read.n or 1):
            raise ClientError(400, "best_of: only the value of n is possible", "best_of")
        if read.stream_options is not None and not read.stream:
            raise ClientError(400, "stream_options needs stream: true", "stream_options")
        read.log_without_effect("completions")
        return make_asked(
            client,
            read,
            (),
            (),
            at="prompt",
            prompt=prompt if isinstance(prompt, str) else tuple(cast(list[int], prompt)),
            n=check_choices(read.n, client),
            max_tokens=read.max_tokens or _DEFAULT_TOKENS,
            top_logprobs=read.logprobs,
            stream=bool(read.stream),
            include_usage=bool(read.stream_options and read.stream_options.include_usage),
            answer_id=new_id("cmpl-"),
            echo={"return_token_ids": bool(read.return_token_ids)},
        )
