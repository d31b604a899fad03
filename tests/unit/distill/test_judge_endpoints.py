"""Habits of providers' endpoints: rate limits, refusals of every request, streams, parts, addresses with a query."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from aiohttp import web
from pydantic import SecretStr

from agentic_opd.core import http
from agentic_opd.core.errors import EndpointRefusedError, RateLimitError, ServerRequestError
from agentic_opd.core.types import JudgeTokens
from agentic_opd.distill import judge as judge_module
from agentic_opd.distill import pace
from agentic_opd.distill.config import JudgeConfig
from agentic_opd.distill.hints import parse_vote
from agentic_opd.distill.judge import OpenAIJudge

from .fakes import POSITIVE, served
from .test_judge import CHAT, KEY, obedient

T = TypeVar("T")


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_BACKOFF_S", (0.01, 0.02))
    monkeypatch.setattr(pace, "_BACKOFF_S", (0.01, 0.02))


class Endpoint:
    """Answers by a function of the request, which may be a response; keeps bodies, addresses and headers."""

    def __init__(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.requests: list[web.Request] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        self.bodies.append(await request.json() if request.can_read_body else {})
        answer = self.answer(self.bodies[-1])
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)


def asked(endpoint: Endpoint, use: Callable[[OpenAIJudge], Awaitable[T]], address: str = "/v1", **settings: Any) -> T:
    """Return what `use` makes of a judge at this address of the endpoint, which answers at every path."""

    async def run() -> T:
        async with served({"/{path:.*}": endpoint.handle}) as url:
            judge = OpenAIJudge(f"{url}{address}", "m", SecretStr(KEY), JudgeConfig(**settings), 0.05)
            try:
                return await use(judge)
            finally:
                await judge.close()

    return asyncio.run(asyncio.wait_for(run(), 60))


async def three(judge: OpenAIJudge) -> list[int | None]:
    return [parse_vote(text).decision for text in (await judge.ask(CHAT, 3)).texts]


async def many(judge: OpenAIJudge) -> list[Any]:
    return await asyncio.gather(*(judge.ask(CHAT, 3) for _ in range(16)), return_exceptions=True)


def refused(status: int, message: str = "no", headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status, headers=headers)


class SkippedPauses:
    """The time of pauses, which are over at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.pauses = 1000.0, list[float]()
        monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(pace, "_sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("status", "headers", "message", "seconds"),
    [
        (429, {"Retry-After": "70"}, "rate limit", 70),
        (429, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT", "Date": "Wed, 21 Oct 2026 07:26:50 GMT"}, "", 70),
        (429, {"retry-after-ms": "90000"}, "", 90),
        (429, {"x-ratelimit-reset-requests": "2m0s", "x-ratelimit-remaining-requests": "0"}, "", 120),
        (429, {}, "You exceeded your current quota, check your billing. Please retry in. retryDelay: 75s", 75),
        (503, {"Retry-After": "100"}, "overloaded", 100),
        (529, {"Retry-After": "61"}, "overloaded", 61),
    ],
)
def test_the_pause_that_an_endpoint_asks_for_is_kept_and_loses_no_vote(
    monkeypatch: pytest.MonkeyPatch, status: int, headers: dict[str, str], message: str, seconds: float
) -> None:
    """16 questions with 3 votes each, and a window of 0.05 s for outages."""
    clock = SkippedPauses(monkeypatch)
    ends_at = clock.now + seconds - 0.5
    endpoint = Endpoint(lambda body: refused(status, message, headers) if clock.now < ends_at else obedient(body))
    replies = asked(endpoint, many)
    assert [len(reply.texts) for reply in replies] == [3] * 16
    assert clock.pauses[0] == pytest.approx(seconds)
    assert len(endpoint.bodies) <= 16 + 16


def test_a_limit_in_an_answer_of_200_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SkippedPauses(monkeypatch)
    error = {"error": {"message": "slow down, try again in 70s", "code": 429}}
    endpoint = Endpoint(lambda body: error if clock.now < 1069 else obedient(body))
    assert asked(endpoint, three) == [1, 1, 1]
    assert clock.pauses == [70]


def test_a_limit_without_an_end_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    SkippedPauses(monkeypatch)
    endpoint = Endpoint(lambda body: refused(429, f"slow down {KEY}", {"Retry-After": "86400"}))
    results = asked(endpoint, many)
    assert {type(result) for result in results} == {RateLimitError}
    assert "lower env.judge.max_concurrent or env.prm_votes" in str(results[0])
    assert KEY not in str(results[0])
    assert len(endpoint.bodies) < 40


@pytest.mark.parametrize(
    ("response", "advice"),
    [
        (
            (429, "You exceeded your current quota", {"code": "insufficient_quota", "type": "insufficient_quota"}),
            "credit",
        ),
        ((429, "Your account is suspended", {"type": "exceeded_current_quota_error"}), "credit"),
        ((429, "Insufficient balance", {"code": "1113"}), "credit"),
        ((402, "Insufficient Balance", {}), "credit"),
        ((400, "Your credit balance is too low to access the API.", {"type": "invalid_request_error"}), "credit"),
        ((400, "Access denied", {"code": "Arrearage"}), "credit"),
        ((403, "billing not active", {"code": "billing_not_active"}), "credit"),
        ((401, "Incorrect API key provided", {"code": "invalid_api_key"}), "env.judge.api_key"),
        ((400, "API key not valid. Please pass a valid API key.", {"status": "INVALID_ARGUMENT"}), "env.judge.api_key"),
        ((403, "forbidden", {}), "env.judge.api_key"),
        ((404, "The model `m` does not exist", {"code": "model_not_found"}), "env.judge.model_name"),
        ((400, "The model m does not exist or you do not have access to it", {}), "env.judge.model_name"),
        ((404, "deployment", {"code": "DeploymentNotFound"}), "env.judge.model_name"),
        ((404, "no route", {}), "env.judge.base_url"),
    ],
)
def test_a_refusal_of_every_request_is_final(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, response: Any, advice: str
) -> None:
    """The first questions are on their way together; then one is sent each minute, until one is answered."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(judge_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    status, message, fields = response
    error = {"error": {"message": message, **fields}}
    endpoint = Endpoint(lambda body: web.json_response(error, status=status))

    async def ask(judge: OpenAIJudge) -> None:
        results = await many(judge)
        assert {type(result) for result in results} == {EndpointRefusedError}
        assert {result.status for result in results} == {status}
        assert all(advice in str(result) and message in str(result) for result in results)
        assert len(endpoint.bodies) <= 16
        sent = len(endpoint.bodies)
        await many(judge)
        assert len(endpoint.bodies) == sent
        clock.now += 61
        await many(judge)
        assert len(endpoint.bodies) == sent + 1
        endpoint.answer = obedient
        clock.now += 61
        assert await three(judge) == [1, 1, 1]
        assert [len(reply.texts) for reply in await many(judge)] == [3] * 16

    asked(endpoint, ask)
    assert caplog.text.count("One question is sent every 60 s") == 1


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (403, "Your input was flagged by moderation"),
        (400, "This model's maximum context length is 1024 tokens"),
        (400, "content filter"),
        (422, "messages: invalid"),
    ],
)
def test_a_refusal_of_one_question_is_not_final(status: int, message: str) -> None:
    endpoint = Endpoint(lambda body: refused(status, message))

    async def ask(judge: OpenAIJudge) -> list[int | None]:
        with pytest.raises(ServerRequestError) as caught:
            await judge.ask(CHAT, 1)
        assert not isinstance(caught.value, EndpointRefusedError)
        endpoint.answer = obedient
        return await three(judge)

    assert asked(endpoint, ask) == [1, 1, 1]


def test_a_missing_list_of_models_stops_no_question() -> None:
    endpoint = Endpoint(lambda body: obedient(body) if body else refused(404))

    async def ask(judge: OpenAIJudge) -> list[int | None]:
        await judge.check()
        return await three(judge)

    assert asked(endpoint, ask) == [1, 1, 1]


def streamed(body: dict[str, Any], *, pieces: int = 5, end: str = "data: [DONE]\n\n") -> web.Response:
    """Return a stream of a vote for each choice, its text in pieces and its choices in turn."""
    size = len(POSITIVE) // pieces + 1
    lines: list[str] = [": comment", f"data: {json.dumps({'choices': []})}"]
    for start in range(0, len(POSITIVE), size):
        for index in range(body.get("n", 1)):
            delta = {"content": POSITIVE[start : start + size], "reasoning_content": "hm"}
            lines.append(f"data: {json.dumps({'choices': [{'index': index, 'delta': delta}]})}")
    for index in range(body.get("n", 1)):
        lines.append(f"data: {json.dumps({'choices': [{'index': index, 'delta': {}, 'finish_reason': 'stop'}]})}")
    text = "\n\n".join(lines) + "\n\n" + end
    return web.Response(text=text, content_type="text/event-stream")


NEEDS_STREAM = [
    "This model supports stream mode only.",
    "This model only support stream mode, please enable the stream parameter to access the model.",
    "parameter.enable_thinking must be set to false for non-streaming calls",
    "Streaming is required for operations that may take longer than 10 minutes",
    "stream must be true",
    "only stream=true is supported; max tokens exceed the limit otherwise",
]


@pytest.mark.parametrize("message", NEEDS_STREAM)
@pytest.mark.parametrize("has_stream", [True, False], ids=["stream", "whole"])
def test_an_endpoint_that_only_streams_is_asked_for_a_stream_from_then_on(message: str, has_stream: bool) -> None:
    """It may answer with a whole completion all the same."""

    def answer(body: dict[str, Any]) -> Any:
        if not body.get("stream"):
            return refused(400, message)
        return streamed(body) if has_stream else obedient(body)

    endpoint = Endpoint(answer)

    async def ask_twice(judge: OpenAIJudge) -> list[int | None]:
        return await three(judge) + await three(judge)

    assert asked(endpoint, ask_twice) == [1] * 6
    assert [body.get("stream") for body in endpoint.bodies] == [None, True, True]
    assert [body.get("n") for body in endpoint.bodies] == [3] * 3


def counted(body: dict[str, Any]) -> web.Response:
    """A stream whose last piece counts the tokens, if it is asked for that."""
    usage = {"choices": [], "usage": {"prompt_tokens": 90, "completion_tokens": 21}}
    asks = (body.get("stream_options") or {}).get("include_usage")
    return streamed(body, end=f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n" if asks else "data: [DONE]\n\n")


STREAM_ONLY = "stream must be true"


@pytest.mark.parametrize(
    ("refusal", "expected", "streams"),
    [
        (None, JudgeTokens(90, 21), 2),
        ("Unrecognized request argument supplied: stream_options", None, 3),
        ("bad request", None, 3),
    ],
)
def test_a_stream_is_asked_for_its_tokens_where_the_endpoint_takes_that(
    refusal: str | None, expected: JudgeTokens | None, streams: int
) -> None:
    def answer(body: dict[str, Any]) -> Any:
        if not body.get("stream"):
            return refused(400, STREAM_ONLY)
        return refused(400, refusal) if refusal and "stream_options" in body else counted(body)

    endpoint = Endpoint(answer)

    async def ask_twice(judge: OpenAIJudge) -> list[JudgeTokens | None]:
        return [(await judge.ask(CHAT, 3)).tokens for _ in range(2)]

    assert asked(endpoint, ask_twice) == [expected] * 2
    assert [body.get("stream") for body in endpoint.bodies] == [None, *[True] * streams]
    assert [body["n"] for body in endpoint.bodies] == [3] * (1 + streams), "votes are still asked for together"


def test_tokens_that_are_counted_in_each_piece_are_those_of_the_last() -> None:
    def answer(body: dict[str, Any]) -> web.Response:
        pieces = [
            {
                "choices": [{"index": 0, "delta": {"content": POSITIVE}}],
                "usage": {"prompt_tokens": 9, "completion_tokens": 1},
            },
            {
                "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 9, "completion_tokens": 5},
            },
            {"choices": [], "usage": None},
        ]
        return web.Response(text="".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces))

    async def ask(judge: OpenAIJudge) -> JudgeTokens | None:
        return (await judge.ask(CHAT, 1)).tokens

    assert asked(Endpoint(answer), ask) == JudgeTokens(9, 5)


def test_a_stream_that_nobody_asked_for_is_read() -> None:
    assert asked(Endpoint(streamed), three) == [1, 1, 1]
    assert asked(Endpoint(lambda body: streamed(body, end="")), three) == [1, 1, 1]


def broken(body: dict[str, Any]) -> web.Response:
    text = streamed(body).text
    assert text is not None
    return web.Response(text=text[: len(text) // 2], content_type="text/event-stream")


def failed(body: dict[str, Any]) -> web.Response:
    error = json.dumps({"error": {"message": "engine is gone", "code": 500}})
    return web.Response(text=f"data: {error}\n\n", content_type="text/event-stream")


@pytest.mark.parametrize("first", [broken, failed])
def test_a_stream_that_breaks_off_or_holds_an_error_is_no_answer(first: Callable[[Any], web.Response]) -> None:
    answers = iter([first])
    endpoint = Endpoint(lambda body: next(answers, streamed)(body))
    assert asked(endpoint, three) == [1, 1, 1]
    assert len(endpoint.bodies) == 2


THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "Maybe \\boxed{-1}?"}]}


@pytest.mark.parametrize(
    "message",
    [
        {"content": [{"type": "text", "text": POSITIVE}]},
        {"content": [THOUGHT, {"type": "text", "text": POSITIVE}]},
        {"content": [{"type": "reasoning", "reasoning": "\\boxed{-1}"}, {"type": "output_text", "text": POSITIVE}]},
        {"content": [POSITIVE[:9], {"text": POSITIVE[9:]}]},
        {"content": [{"type": "text", "text": {"value": POSITIVE}}]},
        {"content": None, "reasoning_content": POSITIVE},
        {"content": "", "reasoning": POSITIVE},
        {"content": " \n", "reasoning_content": f"hm</think>{POSITIVE}"},
        {"content": [{"type": "thinking", "thinking": POSITIVE}]},
        {"content": POSITIVE, "reasoning_content": "\\boxed{-1}"},
    ],
)
def test_a_vote_is_read_wherever_the_message_holds_it(message: dict[str, Any]) -> None:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}
    endpoint = Endpoint(lambda body: {"choices": [choice] * body.get("n", 1)})
    assert asked(endpoint, three) == [1, 1, 1]


def test_reasoning_that_was_cut_off_is_no_vote() -> None:
    choice = {"index": 0, "finish_reason": "length", "message": {"content": None, "reasoning_content": POSITIVE}}
    assert asked(Endpoint(lambda body: {"choices": [choice] * 3}), three) == [None] * 3


@pytest.mark.parametrize(
    ("address", "sent_to"),
    [
        ("/v1", "/v1/chat/completions"),
        ("/v1/", "/v1/chat/completions"),
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1?a=1&b=x%20y", "/v1/chat/completions?a=1&b=x+y"),
        (
            "/openai/deployments/x?api-version=2024-10-21",
            "/openai/deployments/x/chat/completions?api-version=2024-10-21",
        ),
        (
            "/openai/deployments/x/chat/completions?api-version=1",
            "/openai/deployments/x/chat/completions?api-version=1",
        ),
        ("/v1/?key=very-secret-key", "/v1/chat/completions?key=very-secret-key"),
    ],
)
def test_the_query_of_an_address_reaches_each_request(address: str, sent_to: str) -> None:
    endpoint = Endpoint(lambda body: obedient(body) if body else {"object": "list", "data": []})

    async def ask(judge: OpenAIJudge) -> list[int | None]:
        await judge.check()
        assert "very-secret-key" not in judge.base_url
        return await three(judge)

    assert asked(endpoint, ask, address) == [1, 1, 1]
    models, question = endpoint.requests
    assert str(question.rel_url).replace("%20", "+") == sent_to
    assert str(models.rel_url).replace("%20", "+") == sent_to.replace("/chat/completions", "/models")


def test_a_secret_in_an_address_is_in_no_error_and_no_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="agentic_opd")
    endpoint = Endpoint(lambda body: refused(401, "no such key: very-secret-key"))
    results = asked(endpoint, many, "/v1?key=very-secret-key")
    assert not any("very-secret-key" in text for text in (*map(str, results), caplog.text))


def test_a_key_is_sent_as_azure_wants_it_if_the_address_has_an_api_version() -> None:
    endpoint = Endpoint(obedient)
    assert asked(endpoint, three, "/openai/deployments/x?api-version=1") == [1, 1, 1]
    assert endpoint.requests[0].headers["api-key"] == KEY
    assert "Authorization" not in endpoint.requests[0].headers
    assert asked(endpoint, three, "/openai/v1/") == [1, 1, 1]
    assert endpoint.requests[1].headers["Authorization"] == f"Bearer {KEY}"
    assert "api-key" not in endpoint.requests[1].headers
