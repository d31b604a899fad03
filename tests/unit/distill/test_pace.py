"""A slow judge is sent fewer requests at a time, and waited for as long as it answers; a silent one is given up."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import count

import pytest
from aiohttp import web

from agentic_opd.core.errors import ServerTooSlowError
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.judge import OpenAIJudge
from agentic_opd.distill.pace import Pace, StalledError

from .fakes import served


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


@pytest.mark.slow
def test_requests_are_waited_for_as_long_as_answers_come() -> None:
    """The last of 16 waits twice as long as the patience is."""

    async def test() -> None:
        server, pace = SlowServer(most=16, seconds=0.15), Pace("it", 16, 1.2, "limit")
        answers = await asyncio.gather(*(pace.ask(server) for _ in range(16)))
        assert answers == ["answer"] * 16
        assert (server.widest, pace.limit) == (16, 16)

    run(test)


@pytest.mark.slow
def test_a_server_that_is_too_slow_for_many_is_sent_fewer(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        server, pace = SlowServer(most=2), Pace("the judge", 16, 0.5, "env.max_concurrent_judgements")
        assert await asyncio.gather(*(pace.ask(server) for _ in range(40))) == ["answer"] * 40
        assert pace.limit == 1
        assert server.widest == 16

    with caplog.at_level(logging.WARNING):
        run(test)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("the judge answered none of 16 requests within 0.5 s; it is sent 4 at a time")
    assert "1 at a time from now on (env.max_concurrent_judgements)" in second


def test_a_silent_server_is_given_up_and_asked_again_later() -> None:
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

    run(test)


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
            judge = OpenAIJudge(f"{url}/v1", "m", None, DistillConfig(judge_timeout_s=0.2, max_concurrent_judgements=1))
            try:
                with pytest.raises(ServerTooSlowError, match=r"env\.judge_timeout_s.*env\.judge_max_tokens \(512\)"):
                    await judge.ask([{"role": "user", "content": "?"}], 3)
            finally:
                held.set()
                await judge.close()

    run(test)
