"""One client's requests: what is asked again, for how long, and what an outage means for the others."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from agentic_opd.core import http
from agentic_opd.core.errors import ServerRequestError, ServerUnreachableError
from agentic_opd.core.http import JsonClient, NoAnswerError, RetryWindow, key_advice
from tests.unit.distill.fakes import Script, served


class Clock:
    """Time passes only while the client waits, and in `attempt`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(http, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(http, "random", SimpleNamespace(uniform=lambda low, high: 1.0))
        monkeypatch.setattr(http, "asyncio", SimpleNamespace(sleep=self.sleep))

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def outcome(window: RetryWindow, answers: list[Any], clock: Clock, retry_s: float = 10.0) -> Any:
    """What a request comes to whose attempts end as told, each after a second."""

    async def attempt() -> Any:
        clock.now += 1.0
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    try:
        return asyncio.run(window.ask(attempt, retry_s))
    except (NoAnswerError, ServerRequestError) as error:
        return error


def no(count: int) -> list[Any]:
    return [NoAnswerError("HTTP 500")] * count


def test_pauses_double_and_the_window_starts_with_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, answers = Clock(monkeypatch), [*no(9), "late"]
    assert isinstance(outcome(RetryWindow("S"), answers, clock), NoAnswerError)
    # Failures at 1, 2.1, 3.3, 4.7, 6.5 and 9.1 s; the next attempt would start at 12.3 s, 11.3 s after the first.
    assert (len(answers), clock.now) == (4, pytest.approx(1009.1))


def test_an_outage_ends_with_an_answer_and_a_refusal_is_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, window = Clock(monkeypatch), RetryWindow("S")
    outcome(window, no(9), clock)
    clock.now += 5.0
    again = no(9)
    assert isinstance(outcome(window, again, clock), NoAnswerError)
    assert len(again) == 8, "the outage is known: one attempt"
    assert outcome(window, [ServerRequestError("refused", 400)], clock).status == 400
    line = "S does not answer (HTTP 500); retrying for 10 s"
    assert caplog.messages == [line], "once for the outage, not for each attempt"
    assert outcome(window, [*no(3), "back"], clock) == "back"
    assert caplog.messages == [line, line], "the next outage is another"
    assert outcome(window, [*no(2), "back"], clock) == "back"
    assert len(caplog.messages) == 2, "over before it is worth a line"


def test_a_request_that_always_fails_ends_though_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, window = Clock(monkeypatch), RetryWindow("S")

    async def others_are_answered() -> Any:
        clock.now += 1.0
        window._down_since = None  # As another request's answer leaves it.
        raise NoAnswerError("HTTP 500")

    with pytest.raises(NoAnswerError):
        asyncio.run(window.ask(others_are_answered, 10.0))
    assert clock.now < 1012


def asked(route: str, answer: Any, use: Callable[[JsonClient], Any]) -> Any:
    """What `use` makes of a server that gives this one answer."""

    async def run() -> Any:
        async with served({route: answer if callable(answer) else Script(answer)}) as url:
            client = JsonClient(url, "key", retry_s=0.0)
            try:
                return await use(client)
            finally:
                await client.close()

    return asyncio.run(run())


async def not_text(request: web.Request) -> web.Response:
    return web.Response(body=b"\xff\xfe{}", content_type="application/json", charset="utf-8")


@pytest.mark.parametrize("answer", [500, 503, 408, 429, "hang up", "<html>", not_text])
def test_what_may_pass_is_an_unreachable_server_in_the_end(answer: Any) -> None:
    with pytest.raises(ServerUnreachableError, match=r"/x gave no usable answer for 0 s: .+ Is the server up"):
        asked("/x", answer, lambda client: client.get("/x"))


@pytest.mark.parametrize(
    ("status", "answer", "has_key", "advice"),
    [
        (401, "", False, " No API key was sent: set mine.key."),
        (401, "a key is needed", True, " An API key was sent, and this server does not accept it: check mine.key."),
        (403, "", False, " No API key was sent: set mine.key."),
        (403, "this account may not use the model", True, ""),
        (403, '{"error": {"field": "path", "message": "outside of the weights root"}}', False, ""),
        (400, "", False, ""),
    ],
)
def test_a_wrong_key_is_told_from_a_missing_one(status: int, answer: str, has_key: bool, advice: str) -> None:
    assert key_advice(status, answer, has_key, "mine.key") == advice

    async def refusing(request: web.Request) -> web.Response:
        return web.Response(status=status, text=answer)

    async def use(client: JsonClient) -> None:
        client.key_setting, client.api_key = "mine.key", "key" if has_key else None
        await client.get("/x")

    with pytest.raises(ServerRequestError, match=f"HTTP {status}") as caught:
        asked("/x", refusing, use)
    assert str(caught.value).endswith(f"HTTP {status}: {answer}{advice}")


def test_a_web_page_in_a_refusal_is_only_named() -> None:
    async def page(request: web.Request) -> web.Response:
        text = "<!DOCTYPE HTML>\n<html>\n<body><h1>Error response</h1></body></html>"
        return web.Response(status=404, text=text, content_type="text/html")

    with pytest.raises(ServerRequestError, match=r"refused the request: HTTP 404: a web page$") as caught:
        asked("/x", page, lambda client: client.get("/x"))
    assert "<h1>" in caught.value.answer

    async def lines(request: web.Request) -> web.Response:
        return web.Response(status=400, text="several\n  lines")

    with pytest.raises(ServerRequestError, match=r"HTTP 400: several lines$"):
        asked("/x", lines, lambda client: client.get("/x"))


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_holds_its_status(status: int) -> None:
    with pytest.raises(ServerRequestError, match=f"HTTP {status}") as caught:
        asked("/x", status, lambda client: client.get("/x"))
    assert caught.value.status == status


def limited(pause_s: float) -> NoAnswerError:
    return NoAnswerError("HTTP 429", pause_s)


def test_a_pause_that_the_server_asks_for_is_kept_and_is_no_outage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 70 s, with a window of 10 s."""
    clock, window = Clock(monkeypatch), RetryWindow("S")
    assert outcome(window, [limited(70), limited(5), "late"], clock) == "late"
    assert clock.now >= 1000 + 70 + 5
    assert [
        message for message in caplog.messages if "asks for a pause of 70 s (HTTP 429)" in message
    ] == caplog.messages
    assert outcome(window, [*no(3), "back"], clock) == "back"


def test_a_pause_holds_the_other_requests_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, window = Clock(monkeypatch), RetryWindow("S")
    assert isinstance(outcome(window, [limited(70), *no(20)], clock), NoAnswerError)
    window._resumes_at = clock.now + 50  # As another request's refusal leaves it.
    begin = clock.now
    assert outcome(window, ["answer"], clock) == "answer"
    assert clock.now == begin + 50 + 1


@pytest.mark.parametrize(("pause_s", "most"), [(86_400.0, 4), (0.001, 300)])
def test_a_limit_without_an_end_ends_after_twenty_minutes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pause_s: float, most: int
) -> None:
    clock, answers = Clock(monkeypatch), [limited(pause_s)] * 1000
    assert isinstance(outcome(RetryWindow("S"), answers, clock), NoAnswerError)
    assert 1200 < clock.now - 1000 < 1900
    assert 1000 - len(answers) <= most
    assert ("a pause of 86400 s may be a mistake; it ends after 600 s" in caplog.text) == (pause_s > 600)


def test_a_pause_is_read_from_the_answer_and_the_query_of_the_address_reaches_each_request() -> None:
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(str(request.rel_url))
        if len(seen) == 1:
            return web.json_response({}, status=503, headers={"Retry-After": "0.01"})
        return web.json_response({"is": "fine"})

    async def run() -> Any:
        async with served({"/x": answer}) as url, JsonClient(f"{url}/v1/?key=secret", retry_s=1) as client:
            assert client.base_url == url
            return await client.get("/x"), await client.post("/x?a=1", {})

    assert asyncio.run(run()) == ({"is": "fine"}, {"is": "fine"})
    assert seen == ["/x?key=secret", "/x?key=secret", "/x?a=1&key=secret"]
