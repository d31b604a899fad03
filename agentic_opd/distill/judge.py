"""The judge: one chat in, several answers out, from any OpenAI-compatible endpoint (I/O)."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import openai
from pydantic import SecretStr

from agentic_opd.core.concurrency import own_turn
from agentic_opd.core.errors import (
    ServerMismatchError,
    ServerRequestError,
    ServerTooSlowError,
    ServerUnreachableError,
)
from agentic_opd.core.http import NoAnswerError, RetryWindow, may_pass
from agentic_opd.core.types import Message
from agentic_opd.distill.pace import Pace, StalledError

AnswerT = TypeVar("AnswerT")


class JudgeReply(NamedTuple):
    """The answers to one question, and how long the endpoint took for all of them (waiting for a free slot not
    counted).
    """

    texts: tuple[str, ...]
    latency_s: float


class Judge(Protocol):
    """What the pipeline needs of a judge; `OpenAIJudge` is one."""

    async def ask(self, messages: Sequence[Message], num_votes: int) -> JudgeReply:
        """Return `num_votes` answers to `messages`, each sampled by itself."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


class OpenAIJudge:
    """Votes from `/chat/completions` of `base_url`, all asked for at once (`n`).

    If the endpoint returns fewer choices than asked for, or refuses more than one, the rest is asked for one by one,
    concurrently.

    Args:
        base_url: The endpoint, ending in /v1.
        model: The judge's model.
        api_key: Its key; never part of an error or a log line.
        temperature: Sampling temperature of the votes.
        max_tokens: Tokens one vote may take.
        timeout_s: Seconds without an answer to any request after which those under way are given up; see `Pace`.
        retry_s: Seconds to go on asking an endpoint that refuses connections, resets them, times out or answers 5xx
            or 429; see `RetryWindow`.
        max_concurrent: Requests under way at the same time, at first.
        extra_body: Further fields of every request.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: SecretStr | None = None,
        *,
        temperature: float = 0.7,
        max_tokens: int = 512,
        timeout_s: float = 120.0,
        retry_s: float = 60.0,
        max_concurrent: int = 64,
        extra_body: dict[str, Any] | None = None,
    ) -> None:
        self.base_url, self.model = base_url, model
        self._key = api_key.get_secret_value() if api_key else ""
        # Without a key the client would look for one in the environment and send it wherever base_url points.
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key=self._key or "EMPTY", timeout=None, max_retries=0)
        self._params: dict[str, Any] = {
            "model": model,
            "temperature": temperature,
            "max_tokens": max_tokens,
            "extra_body": extra_body or None,
        }
        self._retry_s, self._window = retry_s, RetryWindow(f"the judge {base_url}")
        self._pace = Pace(f"the judge {base_url}", max_concurrent, timeout_s, "env.max_concurrent_judgements")
        self._takes_n = True

    async def ask(self, messages: Sequence[Message], num_votes: int) -> JudgeReply:
        """Return exactly `num_votes` answers; "" stands for one that the endpoint did not give.

        Raises:
            ServerRequestError: the endpoint refused the request (4xx).
            ServerUnreachableError: nothing usable within the retry window.
            ServerTooSlowError: the endpoint runs, and answers nothing.
            ServerMismatchError: the answer is not a chat completion.
        """
        first = await self._first(messages, num_votes)
        missing = num_votes - len(first.texts)
        rest = await asyncio.gather(*(self._request(messages, 1) for _ in range(missing)), return_exceptions=True)
        texts, latency = list(first.texts), first.seconds
        for answer in rest:
            if isinstance(answer, BaseException):
                raise answer
            texts += answer.texts
            latency = max(latency, first.seconds + answer.seconds)
        # An endpoint that gives no choice to a request for one has no more votes to give.
        texts += [""] * (num_votes - len(texts))
        return JudgeReply(tuple(texts[:num_votes]), latency)

    async def check(self) -> None:
        """Ask which models there are, to find a wrong address or key before the first episode.

        Raises:
            ServerRequestError: the key is refused (401, 403).
            ServerUnreachableError: nothing usable within the retry window.
        """
        try:
            await self._retried(self._client.with_options(timeout=self._pace.patience_s).models.list)
        except ServerRequestError as error:
            if error.status in (401, 403):
                raise

    async def close(self) -> None:
        """Close pooled connections."""
        await self._client.close()

    async def _first(self, messages: Sequence[Message], num_votes: int) -> "_Answer":
        if num_votes > 1 and self._takes_n:
            try:
                return await self._request(messages, num_votes)
            except ServerRequestError as error:
                if error.status not in (400, 422):
                    raise
            # Refused: for its n, or for something that a request for one choice will be refused for too.
            answer = await self._request(messages, 1)
            self._takes_n = False
            return answer
        return await self._request(messages, 1)

    async def _request(self, messages: Sequence[Message], n: int) -> "_Answer":
        many: dict[str, Any] = {"n": n} if n > 1 else {}

        async def ask() -> _Answer:
            await own_turn()  # The client takes milliseconds for a request, and many are made at once.
            start = time.monotonic()
            answer = await self._retried(
                lambda: self._client.chat.completions.create(messages=list(messages), **many, **self._params)  # type: ignore[call-overload]
            )
            return _Answer(_texts(answer, self.base_url), time.monotonic() - start)

        try:
            return await self._pace.ask(ask)
        except StalledError as error:
            raise ServerTooSlowError(
                f"judge {self.model!r} at {self.base_url} answered nothing for {self._pace.patience_s:g} s, asked for "
                f"one turn at a time: raise env.judge_timeout_s, lower env.judge_max_tokens "
                f"({self._params['max_tokens']}) or env.prm_votes, or name a quicker judge in env.judge_base_url"
            ) from error

    async def _retried(self, call: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        try:
            return await self._window.ask(lambda: self._once(call), self._retry_s)
        except NoAnswerError as error:
            raise ServerUnreachableError(
                f"judge {self.model!r} at {self.base_url} gave no usable answer for {self._retry_s:g} s: {error}"
            ) from error

    async def _once(self, call: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        try:
            return await call()
        except (openai.OpenAIError, json.JSONDecodeError) as error:
            reason = str(error) or type(error).__name__
            reason = reason.replace(self._key, "***") if self._key else reason
            if isinstance(error, openai.APIStatusError) and not may_pass(error.status_code):
                refused = f"judge {self.model!r} at {self.base_url} refused the request: {reason[:1000]}"
                raise ServerRequestError(refused, error.status_code) from error
            raise NoAnswerError(reason[:300]) from error


class _Answer(NamedTuple):
    texts: list[str]
    seconds: float


def _texts(answer: Any, base_url: str) -> list[str]:
    """The choices' texts; the client does not check what it was sent, so this does."""
    choices = getattr(answer, "choices", None)
    if not isinstance(choices, list):
        raise ServerMismatchError(f"{base_url} answered a judge request with something else than a chat completion")
    contents = (getattr(getattr(choice, "message", None), "content", None) for choice in choices)
    return [content if isinstance(content, str) else "" for content in contents]
