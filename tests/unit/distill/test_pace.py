"""A slow judge is sent fewer requests at a time, and waited for as long as it answers; a silent one is given up."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from agentic_opd.core.errors import RateLimitError, ServerTooSlowError
from agentic_opd.distill import pace as pace_module
from agentic_opd.distill.config import JudgeConfig
from agentic_opd.distill.judge import OpenAIJudge
from agentic_opd.distill.pace import Pace, StalledError
from tests.support.virtual_time import run_in_virtual_time

from .fakes import served

InVirtualTime = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]


class SlowServer:
    """Answers one request after the other, each after `seconds`; holds all while more than `most` are under way."""

    def __init__(self, most: int, seconds: float = 0.0) -> None:
        self.most, self.seconds, self.under_way, self.widest = most, seconds, 0, 0
        self.one_by_one = asyncio.Lock()

    async def __call__(self) -> str:
        self.under_way += 1
        self.widest = max(self.widest, self.under_way)
        try:
            if self.under_way > self.most:
                await asyncio.Event().wait()
            async with self.one_by_one:
                await asyncio.sleep(self.seconds)
            return "answer"
        finally:
            self.under_way -= 1


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


@pytest.fixture
def in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> InVirtualTime:
    """Runs a test whose seconds, those of `Pace` included, pass at once."""
    monkeypatch.setattr(pace_module, "time", SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time()))
    return lambda test: run_in_virtual_time(test())


def test_requests_are_waited_for_as_long_as_answers_come(in_virtual_time: InVirtualTime) -> None:
    """The last of 16 waits twice as long as the patience is."""

    async def test() -> None:
        server, pace = SlowServer(most=16, seconds=0.15), Pace("it", 16, 1.2, "limit")
        answers = await asyncio.gather(*(pace.ask(server) for _ in range(16)))
        assert answers == ["answer"] * 16
        assert (server.widest, pace.limit) == (16, 16)

    in_virtual_time(test)


def test_a_server_that_is_too_slow_for_many_is_sent_fewer(
    in_virtual_time: InVirtualTime, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        server, pace = SlowServer(most=2), Pace("the judge", 16, 0.5, "env.judge.max_concurrent")
        assert await asyncio.gather(*(pace.ask(server) for _ in range(40))) == ["answer"] * 40
        assert pace.limit == 1
        assert server.widest == 16

    with caplog.at_level(logging.WARNING):
        in_virtual_time(test)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("the judge answered none of 16 requests within 0.5 s; it is sent 4 at a time")
    assert "1 at a time from now on (env.judge.max_concurrent)" in second


def test_a_silent_server_is_given_up_and_asked_again_later(in_virtual_time: InVirtualTime) -> None:
    async def test() -> None:
        asked = count()

        async def silent() -> str:
            next(asked)
            await asyncio.sleep(3600)
            return ""

        pace = Pace("it", 8, 0.1, "limit")
        results = await asyncio.gather(*(pace.ask(silent) for _ in range(8)), return_exceptions=True)
        assert [type(result) for result in results] == [StalledError] * 8
        tried = next(asked)
        assert tried == 8 + 2 + 1, "and the others fail with the one that was asked alone"
        with pytest.raises(StalledError):
            await pace.ask(silent)
        assert next(asked) == tried + 1, "nothing is asked meanwhile"
        await asyncio.sleep(0.15)
        assert await pace.ask(SlowServer(most=1)) == "answer"

    in_virtual_time(test)


def test_an_error_is_an_answer() -> None:
    async def test() -> None:
        async def refuse() -> str:
            raise KeyError("no")

        with pytest.raises(KeyError):
            await Pace("it", 2, 5.0, "limit").ask(refuse)

    run(test)


def test_a_judge_that_answers_nothing_is_an_error_that_names_its_settings() -> None:
    async def test() -> None:
        held = asyncio.Event()

        async def hold(_: web.Request) -> web.StreamResponse:
            await held.wait()
            return web.Response()

        async with served({"/v1/chat/completions": hold}) as url:
            judge = OpenAIJudge(f"{url}/v1", "m", None, JudgeConfig(timeout_s=0.2, max_concurrent=1))
            try:
                with pytest.raises(ServerTooSlowError, match=r"env\.judge\.timeout_s.*env\.judge\.max_tokens \(512\)"):
                    await judge.ask([{"role": "user", "content": "?"}], 3)
            finally:
                held.set()
                await judge.close()

    run(test)


class Clock:
    """The time of `Pace`: it passes only in pauses, at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.pauses = 1000.0, list[float]()
        monkeypatch.setattr(pace_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(pace_module, "_sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await others_run(20)  # What goes on meanwhile is refused or answered first.
        self.now += seconds


async def others_run(turns: int = 100) -> None:
    """Let the tasks that can run do so."""
    for _ in range(turns):
        await asyncio.sleep(0)


class LimitedServer:
    """Refuses each request before `ends_at`, and each one while `most` are under way; names a pause, or none."""

    def __init__(self, clock: Clock, ends_at: float, pause_s: float | None = None, most: int = 1000) -> None:
        self.clock, self.ends_at, self.pause_s, self.most = clock, ends_at, pause_s, most
        self.under_way = self.requests = self.widest = 0

    async def __call__(self) -> str:
        self.requests += 1
        self.under_way += 1
        self.widest = max(self.widest, self.under_way)
        try:
            is_over = self.clock.now < self.ends_at or self.under_way > self.most
            await asyncio.sleep(0)
            if is_over:
                raise RateLimitError("slow down", self.pause_s)
            await asyncio.sleep(0)
            return "answer"
        finally:
            self.under_way -= 1


def test_all_requests_wait_for_one_pause_and_none_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit of 70 s, longer than every window of retries."""

    async def test() -> None:
        clock = Clock(monkeypatch)
        server, pace = LimitedServer(clock, ends_at=1070, pause_s=70), Pace("S", 16, 120, "limit")
        assert await asyncio.gather(*(pace.ask(server) for _ in range(40))) == ["answer"] * 40
        assert (clock.pauses, server.requests) == ([70], 16 + 40), "each of the first 16 was refused once"
        assert 8 <= pace.limit < 16
        assert await asyncio.gather(*(pace.ask(server) for _ in range(150))) == ["answer"] * 150
        assert pace.limit == 16
        await pace.close()

    with caplog.at_level(logging.INFO):
        run(test)
    first, last = caplog.messages
    assert first.startswith("S is over its rate limit: it is sent no request for 70 s, and then 8 at a time")
    assert last == "S is sent 16 requests at a time again (limit)"


def test_after_a_pause_a_single_request_is_sent_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit lasts for three pauses of the server's: the second and third cost one request each."""

    async def test() -> None:
        clock = Clock(monkeypatch)
        server, pace = LimitedServer(clock, ends_at=1200, pause_s=70), Pace("S", 16, 120, "limit")
        assert await asyncio.gather(*(pace.ask(server) for _ in range(16))) == ["answer"] * 16
        assert (clock.pauses, server.requests) == ([70] * 3, 16 + 1 + 1 + 16)
        await pace.close()

    run(test)


def test_a_limit_without_a_pause_is_asked_about_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        clock = Clock(monkeypatch)
        server, pace = LimitedServer(clock, ends_at=1200), Pace("S", 4, 120, "limit")
        assert await pace.ask(server) == "answer"
        assert clock.pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
        assert await pace.ask(server) == "answer"
        server.ends_at, clock.pauses[:] = clock.now + 1, []
        assert await pace.ask(server) == "answer"
        assert clock.pauses == [1], "an answer begins anew"
        await pace.close()

    run(test)


def test_the_concurrency_comes_down_to_what_the_server_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        clock = Clock(monkeypatch)
        server, pace = LimitedServer(clock, ends_at=0, pause_s=1, most=5), Pace("S", 64, 120, "limit")
        assert await asyncio.gather(*(pace.ask(server) for _ in range(300))) == ["answer"] * 300
        assert pace.limit <= 6
        server.widest = 0
        assert await asyncio.gather(*(pace.ask(server) for _ in range(100))) == ["answer"] * 100
        assert server.widest <= 6
        await pace.close()

    run(test)


def test_an_absurd_pause_is_cut_with_a_warning_and_a_limit_without_an_end_fails_all_questions(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        clock = Clock(monkeypatch)
        server, pace = LimitedServer(clock, ends_at=10**9, pause_s=86_400), Pace("S", 16, 120, "limit")
        results = await asyncio.gather(*(pace.ask(server) for _ in range(100)), return_exceptions=True)
        assert [type(result) for result in results] == [RateLimitError] * 100
        assert clock.now - 1000 <= 1800
        assert server.requests == 16 + 2, "the first ones, and one after each pause"
        with pytest.raises(RateLimitError, match="slow down"):
            await pace.ask(server)
        assert server.requests == 18, "nothing is sent in a pause"
        await others_run()
        assert clock.now - 1000 == 1800
        server.ends_at = 0
        assert await pace.ask(server) == "answer"
        await pace.close()

    run(test)
    assert "S asks for a pause of 86400 s, which may be a mistake: it is asked again after 600 s" in caplog.text


def test_a_pause_that_ends_with_the_run_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        pace = Pace("S", 4, 120, "limit")
        question = asyncio.ensure_future(pace.ask(LimitedServer(Clock(monkeypatch), ends_at=10**9, pause_s=60)))
        monkeypatch.setattr(pace_module, "_sleep", asyncio.sleep)
        await others_run()
        assert pace._pause is not None
        await pace.close()
        with pytest.raises(RateLimitError, match="closed"):
            await question
        assert len(asyncio.all_tasks()) == 2, "this test and its time limit"

    run(test)


def test_a_cancelled_question_lets_another_try_after_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        clock, held = Clock(monkeypatch), asyncio.Event()
        pace = Pace("S", 4, 120, "limit")
        server = LimitedServer(clock, ends_at=1050, pause_s=50)

        async def held_after_the_pause() -> str:
            if clock.now > 1040:
                held.set()
                await asyncio.Event().wait()
            return await server()

        first = asyncio.ensure_future(pace.ask(held_after_the_pause))
        await held.wait()
        second = asyncio.ensure_future(pace.ask(server))
        await others_run()
        assert not second.done(), "a single request after a pause"
        first.cancel()
        assert await second == "answer"
        await pace.close()

    run(test)
