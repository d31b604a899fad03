"""The judge: chat messages -> sampled answers of an OpenAI-compatible endpoint (I/O)."""

import asyncio
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast

import openai
from pydantic import SecretStr

from agentic_opd.core.concurrency import wait_for_slot
from agentic_opd.core.errors import (
    ServerMismatchError,
    ServerRequestError,
    ServerTooSlowError,
    ServerUnreachableError,
)
from agentic_opd.core.http import NoAnswerError, RetryWindow, key_advice, may_pass
from agentic_opd.core.text import well_formed
from agentic_opd.core.types import Message
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.pace import Pace, StalledError

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

_MAY_PASS = ("rate_limit", "too_many", "exhausted", "overload", "unavailable", "timeout", "server_error", "internal")
"""Substrings of error codes of transient failures."""
_TOO_LONG = re.compile(r"context|too (?:large|long)|exceed|greater than|reduce", re.IGNORECASE)
"""Matches a refusal because of the request's length, as opposed to an unsupported parameter."""


class _Form(NamedTuple):
    """Optional parameters of a request; some endpoints refuse them."""

    limit: Literal["max_tokens", "max_completion_tokens"] | None = "max_tokens"
    has_temperature: bool = True

    def plainer(self, refusal: str) -> "_Form | None":
        """Return the form without the parameter named in `refusal`; None if it names no parameter of the form."""
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
"""Forms to try, in order, if an endpoint refuses a request without naming a parameter."""


class JudgeReply(NamedTuple):
    """The answers to one question, and the endpoint's seconds for all of them, without waiting for a free slot."""

    texts: tuple[str, ...]
    latency_s: float


class OpenAIJudge:
    """Votes from `/chat/completions` of `base_url`, all in one request (`n`) if possible.

    If the endpoint returns fewer choices than requested, or refuses `n` above 1, single requests are sent concurrently
    for the missing votes. If it refuses `max_tokens` or `temperature`, `max_completion_tokens` is sent instead, or the
    parameter is omitted; the accepted form is remembered. The key is never part of an error or a log line.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: SecretStr | None,
        config: DistillConfig,
        retry_s: float = 60.0,
    ) -> None:
        self.base_url, self.model = base_url, model
        self._key = api_key.get_secret_value() if api_key else ""
        self._setting = "env.judge_base_url" if config.judge_base_url else "openai.base_url"
        self._model_setting = "env.judge_model_name" if config.judge_base_url else "openai.model_name"
        self._key_setting = "env.judge_api_key" if config.judge_base_url else "openai.api_key"
        # Without a key the client would read one from the environment and send it to base_url.
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key=self._key or "EMPTY", timeout=None, max_retries=0)
        self._temperature, self._max_tokens = config.judge_temperature, config.judge_max_tokens
        self._extra_body = config.judge_extra_body or None
        self._retry_s, self._window = retry_s, RetryWindow(f"the judge {base_url}")
        at_once, setting = config.max_concurrent_judgements, "env.max_concurrent_judgements"
        self._pace = Pace(f"the judge {base_url}", at_once, config.judge_timeout_s, setting)
        self._takes_n, self._form, self._has_answered = True, _Form(), False

    async def ask(self, messages: Sequence[Message], num_votes: int) -> JudgeReply:
        """Return exactly `num_votes` independently sampled answers; "" replaces one that the endpoint did not return.

        Raises:
            ServerRequestError: the endpoint refused the request (4xx).
            ServerUnreachableError: no usable answer within the retry window.
            ServerTooSlowError: the endpoint runs but answers nothing in time.
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
        # An endpoint may return no choice at all, even for a single vote.
        texts += [""] * (num_votes - len(texts))
        return JudgeReply(tuple(texts[:num_votes]), latency)

    async def check(self) -> None:
        """List the endpoint's models, to find a wrong address, key or model before the first episode.

        A model that is not listed is asked one question, because endpoints take names that they do not list.

        Raises:
            ServerRequestError: the endpoint refuses the key.
            ServerUnreachableError: no usable answer within the retry window.
            ServerMismatchError: the endpoint does not have the model.
        """
        client = self._client.with_options(timeout=self._pace.patience_s)
        names: list[str] = []
        try:
            listed = await self._retried(client.models.list)
            names = [str(model.id) for model in listed.data or () if getattr(model, "id", None)]
            if names and self.model not in names:
                await self._request([{"role": "user", "content": "Hello"}], 1)
        except ServerRequestError as error:
            if error.status in (401, 403):
                raise
            if names and error.status == 404:
                raise ServerMismatchError(
                    f"the judge at {self.base_url} serves {', '.join(map(repr, names[:8]))}, and {self._model_setting} "
                    f"is {self.model!r}: name what is served."
                ) from error

    async def close(self) -> None:
        await self._client.close()

    async def _first(self, messages: Sequence[Message], num_votes: int) -> "_Answer":
        if num_votes > 1 and self._takes_n:
            try:
                return await self._request(messages, num_votes)
            except ServerRequestError as error:
                if error.status not in (400, 422):
                    raise
            # The refusal is because of n, or a single request is refused too.
            before = self._form
            answer = await self._request(messages, 1)
            self._takes_n = self._form != before
            return answer
        return await self._request(messages, 1)

    async def _request(self, messages: Sequence[Message], n: int) -> "_Answer":
        """Send a request in a form that the endpoint accepts, and remember the form."""
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
        """Yield the forms to try after a refusal, the most likely first."""
        yield self._form  # A concurrent request may have changed it.
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
            await wait_for_slot()  # Building a request blocks the event loop for milliseconds.
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
                f"judge {self.model!r} at {self.base_url} gave no usable answer for {self._retry_s:g} s: {error} "
                f"Does it run at this address ({self._setting})?"
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
        """Return the error for a failed request, by status, with the key masked."""
        reason = reason.replace(self._key, "***") if self._key else reason
        if may_pass(status):
            return NoAnswerError(reason[:300])
        advice = key_advice(status, reason, bool(self._key), self._key_setting)
        refused = f"judge {self.model!r} at {self.base_url} refused the request: {reason[:1000]}{advice}"
        return ServerRequestError(refused, status, reason)


class _Answer(NamedTuple):
    texts: list[str]
    seconds: float


def _error_in(answer: object) -> Any:
    """Return the error in an answer's body, or None: `error` at the top or in each choice, or vLLM's older form."""
    choices = getattr(answer, "choices", None)
    if isinstance(choices, list) and choices:
        errors = [getattr(choice, "error", None) for choice in cast(list[Any], choices)]
        return errors[0] if all(errors) else None
    if getattr(answer, "object", None) == "error":
        return {name: getattr(answer, name, None) for name in ("message", "code")}
    return getattr(answer, "error", None) or None


def _status_of(error: object) -> int:
    """Return the HTTP status for an error in a body, from its code, status or type; 400 if none of them is known."""
    fields = cast(Mapping[str, Any], error) if isinstance(error, Mapping) else {}
    for code in (fields.get("code"), fields.get("status"), fields.get("type")):
        text = str(code).lower()
        if re.fullmatch("[45][0-9][0-9]", text):
            return int(text)
        if any(part in text for part in _MAY_PASS):
            return 503
    return 400


def _texts(answer: Any, base_url: str) -> list[str]:
    """Return the choices' texts, after checking the answer's form, which the client does not check."""
    choices = getattr(answer, "choices", None)
    if not isinstance(choices, list):
        raise ServerMismatchError(f"{base_url} answered a judge request with something else than a chat completion")
    contents = (getattr(getattr(choice, "message", None), "content", None) for choice in choices)
    return [well_formed(content) if isinstance(content, str) else "" for content in contents]
