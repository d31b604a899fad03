"""The judge: chat messages -> sampled answers of an OpenAI-compatible endpoint (I/O)."""

import asyncio
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import parse_qsl, urlsplit
from urllib.request import getproxies

import aiohttp
from pydantic import SecretStr

from agentic_opd import __version__
from agentic_opd.core.errors import (
    EndpointRefusedError,
    RateLimitError,
    ServerError,
    ServerMismatchError,
    ServerRequestError,
    ServerTooSlowError,
    ServerUnreachableError,
)
from agentic_opd.core.http import NoAnswerError, RetryWindow, key_advice, may_pass
from agentic_opd.core.rate_limits import pause_asked
from agentic_opd.core.text import request_body, well_formed
from agentic_opd.core.types import JudgeTokens, Message
from agentic_opd.distill.completions import (
    advice_on,
    choice_texts,
    error_in,
    error_of,
    read_completion,
    status_of,
    tokens_of,
)
from agentic_opd.distill.config import JudgeConfig
from agentic_opd.distill.pace import Pace, StalledError

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

_TOO_LONG = re.compile(r"context|too (?:large|long)|exceed|greater than|reduce", re.IGNORECASE)
"""Matches a refusal because of the request's length, as opposed to an unsupported parameter."""
_NEEDS_STREAM = re.compile(
    r"\b(?:only|must|requires?d?|needs?|enable|supports?|set)\b.{0,80}\bstream|"
    r"\bstream.{0,80}\b(?:only|requires?d?|must|true)\b|non-?stream",
    re.IGNORECASE | re.DOTALL,
)
"""Matches a refusal of a request that does not ask for a stream."""
_STREAM_USAGE = re.compile("stream_options|include_usage")
"""Matches a refusal of a stream that ends with its count of tokens."""
_VERSION_CHARS = 11
"""Values up to this length in an address' query are versions, such as 2024-10-21, and no secrets."""
_REFUSED_S = 60.0
"""Seconds after a refusal of every request in which no other request is sent."""
_CONNECT_S = 10.0
_IDLE_S = 4.0
"""Seconds after which an idle connection is closed: before the server does (5 s in vLLM)."""


class _Form(NamedTuple):
    """Optional parameters of a request; some endpoints refuse them."""

    limit: Literal["max_tokens", "max_completion_tokens"] | None = "max_tokens"
    has_temperature: bool = True
    is_stream: bool = False
    counts_stream: bool = True
    """Whether a stream is asked for its count of tokens."""

    def plainer(self, refusal: str) -> "_Form | None":
        """Return the form without the parameter named in `refusal`; None if it names no parameter of the form."""
        if not self.is_stream and _NEEDS_STREAM.search(refusal):
            return self._replace(is_stream=True)
        if self.is_stream and self.counts_stream and _STREAM_USAGE.search(refusal):
            return self._replace(counts_stream=False)
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
    """The answers to one question."""

    texts: tuple[str, ...]
    latency_s: float
    """Seconds of the endpoint for all answers, without waiting for a free slot."""
    tokens: JudgeTokens | None = None
    """Tokens of all requests; None if the endpoint does not count those of each."""


class OpenAIJudge:
    """Votes from `/chat/completions` of `base_url`, all in one request (`n`) if possible.

    If the endpoint returns fewer choices than requested, or refuses `n` above 1, single requests are sent concurrently
    for the missing votes. If it refuses `max_tokens` or `temperature`, `max_completion_tokens` is sent instead, or the
    parameter is omitted; if it only answers with a stream, it is asked for one. The accepted form is remembered.

    Its rate limit holds all questions for the pause that it asks for; see `Pace`. If it would refuse every request, for
    example because of the key, questions fail at once, and one is asked every `_REFUSED_S` seconds.

    `base_url` may end in `/chat/completions`, and its query is part of each request; with `api-version` in it (Azure),
    the key is sent as `api-key`. The key and the query are never part of an error or a log line.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: SecretStr | None,
        config: JudgeConfig,
        retry_s: float = 60.0,
    ) -> None:
        address = urlsplit(base_url)
        path = address.path.rstrip("/").removesuffix("/chat/completions").rstrip("/")
        self.base_url, self.model = address._replace(path=path, query="", fragment="").geturl(), model
        query = dict(parse_qsl(address.query, keep_blank_values=True))
        self._query = f"?{address.query}" if address.query else ""
        self._key = api_key.get_secret_value() if api_key else ""
        self._secrets = [
            *filter(None, [self._key]),
            *(value for value in query.values() if len(value) > _VERSION_CHARS),
            *(part for part in re.split("[&=]", address.query) if len(part) > _VERSION_CHARS and part not in query),
        ]
        is_azure = bool(self._key) and "api-version" in query
        # A server without a key may want one all the same.
        key_header = {"api-key": self._key} if is_azure else {"Authorization": f"Bearer {self._key or 'EMPTY'}"}
        self._headers = {"Accept": "application/json", "User-Agent": f"agentic_opd/{__version__}", **key_header}
        self._setting = "env.judge.base_url" if config.base_url else "openai.base_url"
        self._model_setting = "env.judge.model_name" if config.base_url else "openai.model_name"
        self._key_setting = "env.judge.api_key" if config.base_url else "openai.api_key"
        self._session: aiohttp.ClientSession | None = None
        self._temperature, self._max_tokens = config.temperature, config.max_tokens
        self._extra_body = config.extra_body
        self._retry_s, self._window = retry_s, RetryWindow(f"the judge {self.base_url}")
        at_once, setting = config.max_concurrent, "env.judge.max_concurrent"
        self._pace = Pace(f"the judge {self.base_url}", at_once, config.timeout_s, setting)
        self._refusal: EndpointRefusedError | None = None
        self._next_question_at = float("-inf")
        self._takes_n, self._form, self._has_answered = True, _Form(), False
        self.context: int | None = None
        """Tokens of the model's context; None before `check`, and if the endpoint does not list it."""

    async def ask(self, messages: Sequence[Message], num_votes: int) -> JudgeReply:
        """Return exactly `num_votes` independently sampled answers; "" replaces one that the endpoint did not return.

        Raises:
            ServerRequestError: the endpoint refused the request (4xx).
            EndpointRefusedError: it would refuse every request: its key, account or model is at fault.
            RateLimitError: its rate limit did not end.
            ServerUnreachableError: no usable answer within the retry window.
            ServerTooSlowError: the endpoint runs but answers nothing in time.
            ServerMismatchError: the answer is not a chat completion.
        """
        first = await self._first(messages, num_votes)
        missing = num_votes - len(first.texts)
        results = await asyncio.gather(*(self._request(messages, 1) for _ in range(missing)), return_exceptions=True)
        rest = list[_Answer]()
        for result in results:
            if isinstance(result, BaseException):
                raise result
            rest.append(result)
        texts = [*first.texts, *(text for answer in rest for text in answer.texts)]
        latency = first.seconds + max((answer.seconds for answer in rest), default=0.0)
        # An endpoint may return no choice at all, even for a single vote.
        texts += [""] * (num_votes - len(texts))
        tokens = JudgeTokens.total([first.tokens, *(answer.tokens for answer in rest)])
        return JudgeReply(tuple(texts[:num_votes]), latency, tokens)

    async def check(self) -> None:
        """List the endpoint's models, to find a wrong address, key or model before the first episode.

        A model that is not listed is asked one question, because endpoints take names that they do not list.

        Raises:
            ServerRequestError: the endpoint refuses the key.
            ServerUnreachableError: no usable answer within the retry window.
            ServerMismatchError: the endpoint does not have the model.
        """
        names: list[str] = []
        try:
            listed = await self._paced(lambda: self._retried("GET", "/models", timeout_s=self._pace.patience_s))
            names = _names_of(listed.get("data"))
            self.context = _context_of(self.model, listed.get("data"))
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
        await self._pace.close()
        if self._session is not None:
            await self._session.close()

    async def _first(self, messages: Sequence[Message], num_votes: int) -> "_Answer":
        if num_votes > 1 and self._takes_n:
            try:
                return await self._request(messages, num_votes)
            except ServerRequestError as error:
                if error.status not in (400, 422) or isinstance(error, EndpointRefusedError):
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
                if error.status not in (400, 422) or isinstance(error, EndpointRefusedError):
                    raise
                tried[form] = error
                form = next(
                    (candidate for candidate in self._other_forms(form, error, n) if candidate not in tried), None
                )
            else:
                self._remember(form)
                return answer
        raise next(iter(tried.values()))

    def _other_forms(self, form: _Form, refusal: ServerRequestError, n: int) -> Iterator[_Form]:
        """Yield the forms to try after a refusal, the most likely first."""
        yield self._form  # A concurrent request may have changed it.
        if not form.is_stream and _NEEDS_STREAM.search(refusal.answer):
            yield form._replace(is_stream=True)
        if form.is_stream and not self._has_answered:
            yield form._replace(counts_stream=False)
        if _TOO_LONG.search(refusal.answer):
            return
        if (plainer := form.plainer(refusal.answer)) is not None:
            yield plainer
        if n == 1 and not self._has_answered:
            stream = {"is_stream": form.is_stream, "counts_stream": form.counts_stream}
            yield from (plain._replace(**stream) for plain in _PLAINER_FORMS)

    def _remember(self, form: _Form) -> None:
        if form.is_stream and not self._form.is_stream:
            logger.info("the judge %s only answers with a stream: later requests ask for one", self.base_url)
        if (form.limit, form.has_temperature) != (self._form.limit, self._form.has_temperature):
            limit = f"{form.limit} for the limit of tokens" if form.limit else "no limit of tokens"
            temperature = "" if form.has_temperature else ", and no temperature: its votes are sampled at its own"
            logger.warning("the judge %s refuses parameters: it is sent %s%s", self.base_url, limit, temperature)
        self._form, self._has_answered = form, True

    async def _sent(self, messages: Sequence[Message], n: int, form: _Form) -> "_Answer":
        params: dict[str, Any] = {"model": self.model, "messages": messages}
        params |= {form.limit: self._max_tokens} if form.limit else {}
        params |= {"n": n} if n > 1 else {}
        params |= {"temperature": self._temperature} if form.has_temperature else {}
        params |= {"stream_options": {"include_usage": True}} if form.is_stream and form.counts_stream else {}
        params |= self._extra_body | ({"stream": True} if form.is_stream else {})
        body = request_body(params)

        async def ask() -> _Answer:
            self._check_refusal()
            start = time.monotonic()
            answer = await self._retried("POST", "/chat/completions", body)
            texts = choice_texts(answer)
            if texts is None:
                raise ServerMismatchError(
                    f"{self.base_url} answered a judge request with something other than a chat completion"
                )
            return _Answer(texts, time.monotonic() - start, tokens_of(answer))

        try:
            answer = await self._paced(ask)
        except EndpointRefusedError as error:
            self._note_refusal(error)
            raise
        self._refusal = None
        return answer

    def _note_refusal(self, refusal: EndpointRefusedError) -> None:
        """Let further questions fail at once for a while, and log the first refusal."""
        if self._refusal is None:
            self._next_question_at = time.monotonic() + _REFUSED_S
            logger.error("%s. One question is sent every %.0f s until it answers", refusal, _REFUSED_S)
        self._refusal = refusal

    def _check_refusal(self) -> None:
        """Raise the refusal of every request again, unless it is time for another question."""
        refusal = self._refusal
        if refusal is None:
            return
        if time.monotonic() < self._next_question_at:
            raise EndpointRefusedError(str(refusal), refusal.status, refusal.answer)
        self._next_question_at = time.monotonic() + _REFUSED_S

    async def _paced(self, request: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        try:
            return await self._pace.ask(request)
        except StalledError as error:
            raise ServerTooSlowError(
                f"judge {self.model!r} at {self.base_url} answered nothing for {self._pace.patience_s:g} s, asked for "
                f"one turn at a time: raise env.judge.timeout_s, lower env.judge.max_tokens "
                f"({self._max_tokens}) or env.prm_votes, or name a faster judge in env.judge.base_url"
            ) from error

    async def _retried(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float | None = None
    ) -> Mapping[str, Any]:
        try:
            return await self._window.ask(lambda: self._once(method, path, body, timeout_s), self._retry_s)
        except NoAnswerError as error:
            raise ServerUnreachableError(
                f"judge {self.model!r} at {self.base_url} gave no usable answer for {self._retry_s:g} s: {error} "
                f"Does it run at this address ({self._setting})?"
            ) from error

    async def _once(self, method: str, path: str, body: bytes | None, timeout_s: float | None) -> Mapping[str, Any]:
        """Return the JSON object of an answer, or one made of the pieces of a stream."""
        headers = self._headers if body is None else {"Content-Type": "application/json", **self._headers}
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        url = f"{self.base_url}{path}{self._query}"
        try:
            async with self._open().request(method, url, data=body, headers=headers, timeout=timeout) as response:
                text = await response.text(errors="replace")
                answer = read_completion(text) if response.status < 400 else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError) as error:
            raise NoAnswerError(self._masked(str(error) or type(error).__name__)[:300]) from error
        if answer is None:
            words = f"HTTP {response.status}: {' '.join(text.split())}"
            raise self._failure(text, error_of(text), response.status, response.headers, words)
        refusal = error_in(answer)
        if refusal is not None:
            words = f"HTTP 200 with an error: {refusal!r}"
            raise self._failure(words, refusal, status_of(refusal), response.headers, words)
        return answer

    def _open(self) -> aiohttp.ClientSession:
        """Return the session, whose connections all requests share; `Pace` limits their number."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=_reads_environment())
        return self._session

    def _failure(
        self, text: str, error: Any, status: int, headers: Mapping[str, str], words: str
    ) -> NoAnswerError | ServerError:
        """Return the error for a refused request, with the key masked.

        Args:
            text: The response.
            error: The error in it, if that could be read.
            status: HTTP status, or the one that the error names.
            headers: Of the response.
            words: What the message says.
        """
        words = self._masked(well_formed(words))
        pause_s = pause_asked(headers, text, is_limit=status == 429)
        advice = advice_on(error, text, status, is_passing=pause_s is not None)
        refused = f"judge {self.model!r} at {self.base_url} refused the request: {words[:1000]}"
        about_key = key_advice(status, text, bool(self._key), self._key_setting)
        if advice is not None:
            return EndpointRefusedError(f"{refused}.{about_key} {advice}", status, self._masked(text))
        if status == 429 or (may_pass(status) and pause_s is not None):
            return RateLimitError(
                f"judge {self.model!r} at {self.base_url} is over its rate limit ({words[:300]}): lower "
                "env.judge.max_concurrent or env.prm_votes, or name another judge in env.judge.base_url",
                pause_s,
            )
        if may_pass(status):
            return NoAnswerError(words[:300])
        return ServerRequestError(f"{refused}{about_key}", status, self._masked(text))

    def _masked(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def refuses_length(error: ServerError) -> bool:
    """Return whether an endpoint refused a request because of its length."""
    if not isinstance(error, ServerRequestError) or isinstance(error, EndpointRefusedError):
        return False
    return error.status == 413 or (error.status in (400, 422) and _TOO_LONG.search(error.answer) is not None)


def _reads_environment() -> bool:
    """Return whether there is a proxy or a netrc file; aiohttp looks for both in two threads before each request."""
    netrc = os.environ.get("NETRC") or Path(os.environ.get("HOME", "/")) / ".netrc"
    return bool(getproxies()) or Path(netrc).is_file()


def _context_of(model: str, models: object) -> int | None:
    """Return the context of a model in an endpoint's list, as vLLM and OpenRouter name it; None if it has none.

    vLLM lists an adapter without a context, and names its model as `parent`.
    """
    entries = [entry for entry in models if isinstance(entry, dict)] if isinstance(models, list) else []
    listed = next((entry for entry in entries if entry.get("id") == model), {})
    parent = next((entry for entry in entries if entry.get("id") == listed.get("parent")), {}) if listed else {}
    lengths = (entry.get(name) for entry in (listed, parent) for name in ("max_model_len", "context_length"))
    return next((length for length in lengths if type(length) is int and length > 0), None)


def _names_of(models: object) -> list[str]:
    """Return the names in an endpoint's list of models; empty if it has another form."""
    entries = [entry for entry in models if isinstance(entry, dict)] if isinstance(models, list) else []
    return [str(entry["id"]) for entry in entries if entry.get("id")]


class _Answer(NamedTuple):
    texts: list[str]
    seconds: float
    tokens: JudgeTokens | None
