"""The judge: one chat in, several answers out, from any OpenAI-compatible endpoint (I/O)."""

import asyncio
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, cast

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
from agentic_opd.core.text import well_formed
from agentic_opd.core.types import Message
from agentic_opd.distill.pace import Pace, StalledError

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

_MAY_PASS = ("rate_limit", "too_many", "exhausted", "overload", "unavailable", "timeout", "server_error", "internal")
"""Parts of error codes in words that say that the same request may be answered later."""
_TOO_LONG = re.compile(r"context|too (?:large|long)|exceed|greater than|reduce", re.IGNORECASE)
"""What says that a request is refused for its length, and not for a parameter that the endpoint does not know."""


class _Form(NamedTuple):
    """The parameters that a request is sent with; some endpoints refuse one or the other."""

    limit: Literal["max_tokens", "max_completion_tokens"] | None = "max_tokens"
    has_temperature: bool = True

    def plainer(self, refusal: str) -> "_Form | None":
        """The form without the parameter that a refusal names; None: it names none."""
        if self.has_temperature and re.search(r"\btemperature\b", refusal):
            return self._replace(has_temperature=False)
        if self.limit is not None and re.search(rf"\b{self.limit}\b", refusal):
            return self._replace(limit="max_completion_tokens" if self.limit == "max_tokens" else None)
        return None


_PLAINER_FORMS = (
    _Form("max_completion_tokens"),
    _Form("max_tokens", has_temperature=False),
    _Form("max_completion_tokens", has_temperature=False),
    _Form(None, has_temperature=False),
)
"""What an endpoint is asked with that refuses requests without a reason, in this order."""


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
    concurrently. If it refuses `max_tokens` or `temperature`, it is asked with `max_completion_tokens`, or without;
    what it takes is found out by its first answer, and remembered.

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
        self._temperature, self._max_tokens, self._extra_body = temperature, max_tokens, extra_body or None
        self._retry_s, self._window = retry_s, RetryWindow(f"the judge {base_url}")
        self._pace = Pace(f"the judge {base_url}", max_concurrent, timeout_s, "env.max_concurrent_judgements")
        self._takes_n, self._form, self._has_answered = True, _Form(), False

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
            before = self._form
            answer = await self._request(messages, 1)
            self._takes_n = self._form != before
            return answer
        return await self._request(messages, 1)

    async def _request(self, messages: Sequence[Message], n: int) -> "_Answer":
        """Ask in the form that the endpoint takes; a form is remembered if it is answered."""
        tried: dict[_Form, ServerRequestError] = {}
        form: _Form | None = self._form
        while form is not None:
            try:
                answer = await self._sent(messages, n, form)
            except ServerRequestError as error:
                if error.status not in (400, 422):
                    raise
                tried[form] = error
                form = next((other for other in self._other_forms(form, error, n) if other not in tried), None)
            else:
                self._remember(form)
                return answer
        raise next(iter(tried.values()))

    def _other_forms(self, form: _Form, refusal: ServerRequestError, n: int) -> Iterator[_Form]:
        """What to ask with after a refusal, the likeliest first."""
        yield self._form  # Another request may have found it out meanwhile.
        if _TOO_LONG.search(refusal.answer):
            return
        if (plainer := form.plainer(refusal.answer)) is not None:
            yield plainer
        if n == 1 and not self._has_answered:
            yield from _PLAINER_FORMS

    def _remember(self, form: _Form) -> None:
        if form != self._form:
            limit = f"{form.limit} for the limit of tokens" if form.limit else "no limit of tokens"
            temperature = "" if form.has_temperature else ", and no temperature: its votes are sampled at its own"
            logger.warning("the judge %s refuses parameters: it is sent %s%s", self.base_url, limit, temperature)
        self._form, self._has_answered = form, True

    async def _sent(self, messages: Sequence[Message], n: int, form: _Form) -> "_Answer":
        create: Any = self._client.chat.completions.create
        params: dict[str, Any] = {"n": n} if n > 1 else {}
        params |= {form.limit: self._max_tokens} if form.limit else {}
        params |= {"temperature": self._temperature} if form.has_temperature else {}

        async def ask() -> _Answer:
            await own_turn()  # The client takes milliseconds for a request, and many are made at once.
            start = time.monotonic()
            answer = await self._retried(
                lambda: create(model=self.model, messages=list(messages), extra_body=self._extra_body, **params)
            )
            return _Answer(_texts(answer, self.base_url), time.monotonic() - start)

        try:
            return await self._pace.ask(ask)
        except StalledError as error:
            raise ServerTooSlowError(
                f"judge {self.model!r} at {self.base_url} answered nothing for {self._pace.patience_s:g} s, asked for "
                f"one turn at a time: raise env.judge_timeout_s, lower env.judge_max_tokens "
                f"({self._max_tokens}) or env.prm_votes, or name a quicker judge in env.judge_base_url"
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
            answer = await call()
        except (openai.OpenAIError, json.JSONDecodeError) as error:
            status = error.status_code if isinstance(error, openai.APIStatusError) else 500
            raise self._failure(well_formed(str(error)) or type(error).__name__, status) from error
        if (found := _error_in(answer)) is not None:
            raise self._failure(f"HTTP 200 with an error: {found!r}", _status_of(found))
        return answer

    def _failure(self, reason: str, status: int) -> NoAnswerError | ServerRequestError:
        """The error that a request came to, by its status; without the key."""
        reason = reason.replace(self._key, "***") if self._key else reason
        if may_pass(status):
            return NoAnswerError(reason[:300])
        refused = f"judge {self.model!r} at {self.base_url} refused the request: {reason[:1000]}"
        return ServerRequestError(refused, status, reason)


class _Answer(NamedTuple):
    texts: list[str]
    seconds: float


def _error_in(answer: object) -> Any:
    """What an answer holds in place of choices: `{"error": ...}`, in it or in each choice, or vLLM's form of before."""
    choices = getattr(answer, "choices", None)
    if isinstance(choices, list) and choices:
        errors = [getattr(choice, "error", None) for choice in cast(list[Any], choices)]
        return errors[0] if all(errors) else None
    if getattr(answer, "object", None) == "error":
        return {name: getattr(answer, name, None) for name in ("message", "code")}
    return getattr(answer, "error", None) or None


def _status_of(error: object) -> int:
    """The HTTP status that an error in a body stands for, by its code; 400 where it says none."""
    fields = cast(Mapping[str, Any], error) if isinstance(error, Mapping) else {}
    for code in (fields.get("code"), fields.get("status"), fields.get("type")):
        text = str(code).lower()
        if re.fullmatch("[45][0-9][0-9]", text):
            return int(text)
        if any(part in text for part in _MAY_PASS):
            return 503
    return 400


def _texts(answer: Any, base_url: str) -> list[str]:
    """The choices' texts; the client does not check what it was sent, so this does."""
    choices = getattr(answer, "choices", None)
    if not isinstance(choices, list):
        raise ServerMismatchError(f"{base_url} answered a judge request with something else than a chat completion")
    contents = (getattr(getattr(choice, "message", None), "content", None) for choice in choices)
    return [well_formed(content) if isinstance(content, str) else "" for content in contents]
