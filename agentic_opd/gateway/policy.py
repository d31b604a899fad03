"""Client of one vLLM server of the policy: prompt token ids in, a stream of sampled tokens out (I/O).

It always streams from the plugin's `POST /generate`, whether or not the client streams. This route takes every sampling
parameter, and returns ids, logprobs and the weight version.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from agentic_opd.core.errors import ServerError, ServerMismatchError, ServerRequestError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.server_info import ServerInfo
from agentic_opd.core.text import read_json
from agentic_opd.gateway.errors import RefusedError

ROUTE = "/generate"
_STREAMING_ROUTE, _INTERVAL_ROUTE = 2, 4
"""Minimum versions of the plugin's `generate_route` for streaming, and for streaming several tokens per event."""


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

    def then(self, later: "Delta") -> "Delta":
        """Return this delta merged with the choice's next one."""
        return replace(later, tokens=self.tokens + later.tokens)


_Row = Annotated[list[dict[int, float]], Field(min_length=1, max_length=1)]
"""`[{id: logprob}]`, the sampled token first."""


class _Event(BaseModel):
    index: int
    token_ids: list[int]
    logprobs: list[_Row]
    finish_reason: str | None
    stop_reason: int | str | None
    weight_version: int | None = None

    def delta(self, top_logprobs: int) -> Delta:
        """Convert the event; raises ValueError if the logprobs do not match the ids."""
        tokens = tuple(
            SampledToken(token, own, tuple(sorted(row.items(), key=lambda entry: -entry[1])[:top_logprobs]))
            for token, (row,) in zip(self.token_ids, self.logprobs, strict=True)
            for own in [_own(token, row)]
        )
        stop = self.stop_reason if isinstance(self.stop_reason, str) else None
        return Delta(self.index, tokens, self.finish_reason, stop, self.weight_version)


@dataclass(frozen=True, slots=True)
class SamplingServer:
    """One of the policy's vLLM servers, with its reported properties."""

    client: JsonClient
    info: ServerInfo

    @property
    def url(self) -> str:
        """Base URL, without `/v1`."""
        return self.client.base_url

    def check(self) -> None:
        """Raise ServerMismatchError unless the server can stream what it samples."""
        if not self.info.has_plugin or self.info.generate_route < _STREAMING_ROUTE:
            plugin = f"plugin {self.info.plugin_version}" if self.info.has_plugin else "no agentic_opd plugin"
            raise ServerMismatchError(
                f"{self.url} has {plugin}, and what is sampled streams through it: install this version of agentic_opd "
                "in vLLM's environment, and start the server with scripts/serve_vllm MODEL."
            )

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        n: int,
        max_tokens: int,
        top_logprobs: int,
        params: Mapping[str, Any],
        interval: int = 1,
    ) -> AsyncGenerator[Delta]:
        """Sample `n` completions of a prompt; yields deltas as they arrive. Closing the generator stops the sampling.

        Args:
            prompt_ids: Token ids of the whole prompt.
            n: Number of completions.
            max_tokens: Maximum number of tokens of each completion.
            top_logprobs: Number of most likely tokens to return at each position.
            params: Further sampling parameters, by vLLM's names.
            interval: Tokens of a choice per event, after its first token; older plugins send one token per event.

        Raises:
            RefusedError: vLLM rejects the prompt or a parameter, which `param` names.
            ServerError: the server refuses the request for another reason.
            ServerMismatchError: the events are not sampled ids with their logprobs.
            ServerUnreachableError: the server gave no usable answer, or its stream broke off.
        """
        body = {
            "prompt": {"prompt_token_ids": list(prompt_ids)},
            **params,
            **{"n": n, "max_tokens": max_tokens, "logprobs": top_logprobs, "stream": True},
        }
        if interval > 1 and self.info.generate_route >= _INTERVAL_ROUTE:
            body["stream_interval"] = interval
        try:
            async with aclosing(self.client.events(ROUTE, body)) as events:
                async for some in events:
                    for delta in self._deltas(some, top_logprobs):
                        yield delta
        except ServerRequestError as error:
            raise _as_refusal(error) from error

    def _deltas(self, events: Sequence[bytes], top_logprobs: int) -> Sequence[Delta]:
        """Return one merged delta per choice for events that arrived together."""
        by_choice = dict[int, Delta]()
        for event in events:
            delta = self._delta(event, top_logprobs)
            before = by_choice.get(delta.index)
            by_choice[delta.index] = before.then(delta) if before else delta
        return tuple(by_choice.values())

    def _delta(self, event: bytes, top_logprobs: int) -> Delta:
        """Parse an event. Errors do not quote it, because it holds conversation text."""
        where = f"{self.url}{ROUTE}"
        try:
            return _Event.model_validate_json(event).delta(top_logprobs)
        except ValidationError as error:
            if event.startswith(b'{"error"'):
                raise ServerMismatchError(f"{where} failed while it sampled; the vLLM server's log says more") from None
            fields = ", ".join(".".join(map(str, one["loc"])) or "event" for one in error.errors()[:3])
            raise ServerMismatchError(f"{where} does not stream sampled tokens as the plugin does: {fields}") from None
        except ValueError as error:
            raise ServerMismatchError(f"{where} does not say what it sampled: {error}") from error


def _own(token: int, row: Mapping[int, float]) -> float:
    first, logprob = next(iter(row.items()))
    if first != token:
        raise ValueError(f"token {token} with the logprob of {first}")
    return min(logprob, 0.0)


def _as_refusal(error: ServerRequestError) -> Exception:
    """Map 400 (invalid) and 413 (too long) to a RefusedError for the client, other statuses to a ServerError."""
    if error.status not in (400, 413):
        return ServerError(str(error))
    try:
        refused = read_json(error.answer)["error"]
        return RefusedError(error.status, f"vLLM refuses it: {refused['message']}", refused.get("field"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return RefusedError(error.status, "vLLM refuses the request's sampling parameters")
