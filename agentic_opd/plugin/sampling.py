"""Responses of the sampling routes -> sampled tokens: `/generate`, whole or streamed, and `/v1/completions`. Pure.

`/generate` returns a row for each token, `[{id: logprob}]`, with the sampled token first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

import msgspec
from pydantic import BaseModel, Field

from agentic_opd.core.types import Completion


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token and, in `top`, the requested number of likely tokens, each with its logprob (nats)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens of one choice sampled since its last delta."""

    index: int
    tokens: tuple[SampledToken, ...]
    finish_reason: str | None = None
    """`stop` or `length` in the last delta of a choice, None before."""
    stop_string: str | None = None
    """The `stop` string that ended the choice, if any."""
    weight_version: int | None = None
    """Version of the oldest weights that sampled the choice, in its last delta; None before."""


_FirstRow = Annotated[
    list[Annotated[dict[int, float], msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1, max_length=1)
]
_Row = Annotated[list[Annotated[dict[int, float], Field(min_length=1)]], Field(min_length=1, max_length=1)]


class WholeAnswer(msgspec.Struct):
    """Response of `/generate` without `stream`; each list has one entry per choice."""

    token_ids: list[list[int]]
    logprobs: list[list[_FirstRow]]
    finish_reasons: list[str]
    weight_version: int | None = None

    @classmethod
    def of(cls, answer: object) -> Self:
        """Raise ValueError if the JSON of a response has another form."""
        return msgspec.convert(answer, cls, str_keys=True)

    def completions(self) -> list[Completion]:
        """Raise ValueError or AlignmentError if the lists do not match."""
        choices = zip(self.token_ids, self.logprobs, self.finish_reasons, strict=True)
        return [
            Completion(tuple(ids), tuple(_logprobs(ids, rows)), reason, self.weight_version)
            for ids, rows, reason in choices
        ]


class StreamEvent(BaseModel):
    """An event of `/generate` with `stream`."""

    index: int
    token_ids: list[int]
    logprobs: list[_Row]
    finish_reason: str | None
    stop_reason: int | str | None
    weight_version: int | None = None

    def delta(self, top_logprobs: int) -> Delta:
        """Raise ValueError if the logprobs do not match the ids."""
        rows = zip(self.token_ids, _logprobs(self.token_ids, self.logprobs), self.logprobs, strict=True)
        tokens = tuple(
            SampledToken(token, logprob, tuple(sorted(row.items(), key=lambda entry: -entry[1])[:top_logprobs]))
            for token, logprob, (row,) in rows
        )
        stop = self.stop_reason if isinstance(self.stop_reason, str) else None
        return Delta(self.index, tokens, self.finish_reason, stop, self.weight_version)


def _logprobs(token_ids: Sequence[int], rows: Sequence[Sequence[dict[int, float]]]) -> list[float]:
    """Return the sampled tokens' logprobs, at most 0; raise ValueError if a row is another token's."""
    logprobs: list[float] = []
    for token, (row,) in zip(token_ids, rows, strict=True):
        first, logprob = next(iter(row.items()))
        if first != token:
            raise ValueError(f"the logprob of token {token} is that of token {first}")
        logprobs.append(min(logprob, 0.0))
    return logprobs


def merged(deltas: Sequence[Delta]) -> list[Delta]:
    """Merge deltas that arrived together into one per choice."""
    by_choice: dict[int, Delta] = {}
    for delta in deltas:
        before = by_choice.get(delta.index)
        by_choice[delta.index] = delta if before is None else replace(delta, tokens=before.tokens + delta.tokens)
    return list(by_choice.values())


class _ChoiceLogprobs(BaseModel):
    token_logprobs: list[float]


class _CompletionChoice(BaseModel):
    token_ids: list[int]
    logprobs: _ChoiceLogprobs
    finish_reason: str


class CompletionsAnswer(BaseModel):
    """Response of vLLM's `/v1/completions`, which does not report the weight version."""

    choices: list[_CompletionChoice]

    @classmethod
    def of(cls, answer: object) -> Self:
        """Raise ValueError if the JSON of a response has another form."""
        return cls.model_validate(answer)

    def completions(self) -> list[Completion]:
        """Raise AlignmentError if a choice has another number of logprobs than of ids."""
        return [Completion(tuple(c.token_ids), tuple(c.logprobs.token_logprobs), c.finish_reason) for c in self.choices]
