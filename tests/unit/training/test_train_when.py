"""When a step may begin, by a clock that the test sets."""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime, time, timedelta, timezone
from typing import Any

import pytest
from aiohttp import web

from agentic_opd.atropos.trainer import TrainerClient
from agentic_opd.core.errors import ServerMismatchError
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.sources import registration
from agentic_opd.training.train_when import TrainWhen, is_within
from tests.unit.distill.fakes import Script, served

ZONE = timezone(timedelta(hours=2))


class Clock:
    """A clock that a wait moves on; `events` are called once their time has come."""

    def __init__(self, start: str = "12:00") -> None:
        self.now = datetime.fromisoformat(f"2026-01-01T{start}").replace(tzinfo=ZONE)
        self.start, self.events = self.now, list[tuple[float, Callable[[], None]]]()

    def read(self) -> datetime:
        return self.now

    @property
    def waited_s(self) -> float:
        return (self.now - self.start).total_seconds()

    async def sleep(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)
        for event in [event for event in self.events if event[0] <= self.waited_s]:
            self.events.remove(event)
            event[1]()


class Requests:
    """vLLM's counters at /metrics."""

    def __init__(self) -> None:
        self.running = self.waiting = 0
        self.finished = {"stop": 3, "length": 4}
        self.status = 200
        self.looks = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.looks += 1
        counts = [f'vllm:num_requests_running{{engine="0"}} {float(self.running)}']
        counts += [f"vllm:num_requests_waiting {float(self.waiting)}"]
        counts += ['vllm:num_requests_waiting_by_reason{reason="capacity"} 9.0', "# HELP vllm:num_requests_running x"]
        counts += [f'vllm:request_success_total{{finished_reason="{k}"}} {n:.1e}' for k, n in self.finished.items()]
        return web.Response(text="\n".join(counts) + "\n", status=self.status)

    def answer_one(self) -> None:
        self.finished["stop"] += 1


def config(train_when: str, **changes: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"model": "", "train_when": train_when, **changes})


def window(train_when: str, clock: Clock, **changes: Any) -> TrainWhen:
    return TrainWhen(config(train_when, **changes), now=clock.read, sleep=clock.sleep)


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        ("22:00-06:00", ["22:00", "23:59", "00:00", "05:59"], ["06:00", "12:00", "21:59"]),
        ("09:30-17:00", ["09:30", "16:59"], ["17:00", "23:00", "09:29"]),
        ("00:00-06:00", ["00:00"], ["06:00", "23:59"]),
        ("22:00-00:00", ["22:00", "23:59"], ["00:00", "21:59"]),
    ],
)
def test_hours_begin_with_their_first_minute_and_end_before_their_last(
    hours: str, inside: list[str], outside: list[str]
) -> None:
    begin, end = map(time.fromisoformat, hours.split("-"))
    assert all(is_within(time.fromisoformat(text), begin, end) for text in inside)
    assert not any(is_within(time.fromisoformat(text), begin, end) for text in outside)


@pytest.mark.parametrize("text", ["", "22:00", "22:00-22:00", "25:00-06:00", "22-6", "never", "1:00-2:00-3:00", "Idle"])
def test_what_is_no_time_to_train_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected (always, idle or )?hours"):
        config(text)


def test_idle_needs_servers_to_watch() -> None:
    with pytest.raises(ValueError, match="train_when idle watches the requests to vllm_urls: name them"):
        config("idle", groups=["groups.jsonl"])


def test_always_never_waits_and_asks_nobody() -> None:
    clock = Clock()
    asyncio.run(window("always", clock, vllm_urls=["http://127.0.0.1:9"]).until_open())
    assert clock.waited_s == 0


def test_a_wait_for_hours_over_midnight_ends_with_their_first_minute(caplog: pytest.LogCaptureFixture) -> None:
    """In local time; the log has the reason once."""
    clock = Clock("21:58")
    with caplog.at_level(logging.INFO, logger="agentic_opd"):
        asyncio.run(window("22:00-06:00", clock).until_open())
    assert clock.waited_s == 120
    assert [record.message for record in caplog.records] == [
        "training waits (train_when 22:00-06:00): steps begin from 22:00 to 06:00 local time",
        "training continues",
    ]


@pytest.mark.slow
def test_the_api_keeps_its_batches_until_the_hours_begin() -> None:
    """A trainer that asked while they were open, and got no batch, asks no more once they are over."""
    clock = Clock("05:59")
    hours = window("22:00-06:00", clock)
    batch = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0], "inference_logprobs": [[1.0, -0.5]]}
    asked: list[datetime] = []

    def answer(body: Any) -> dict[str, Any]:
        asked.append(clock.now)
        clock.now += timedelta(minutes=10)
        return {"batch": None if len(asked) == 1 else [batch]}

    async def run() -> int:
        script = {"/batch": Script(answer), "/status": Script({"current_step": 0, "queue_size": 0})}
        async with served(script) as url:
            client = TrainerClient(url, registration(config("always")), hours.until_open)
            groups = await client.batch(0)
            await client.close()
            return len(groups)

    assert asyncio.run(run()) == 1
    assert [f"{moment:%d %H:%M}" for moment in asked] == ["01 05:59", "01 22:00"]


def watch(clock: Clock, requests: Requests, use: Callable[[TrainWhen], Any], idle_s: float = 60) -> Any:
    """What `use` returns of a window that watches a server."""

    async def run() -> Any:
        async with served({"/metrics": requests.answer}) as url:
            watched = window("idle", clock, vllm_urls=[url], idle_s=idle_s)
            try:
                return await use(watched)
            finally:
                await watched.close()

    return asyncio.run(run())


def test_a_server_is_idle_after_the_time_without_a_request(caplog: pytest.LogCaptureFixture) -> None:
    clock, requests = Clock(), Requests()
    requests.running = 1
    clock.events = [(100.0, lambda: setattr(requests, "running", 0)), (120.0, requests.answer_one)]
    with caplog.at_level(logging.INFO, logger="agentic_opd"):
        watch(clock, requests, lambda watched: watched.until_open())
    assert clock.waited_s == 120 + 60
    assert [record.message for record in caplog.records] == [
        "training waits (train_when idle): until the servers have had no request for 60 s",
        "training continues",
    ]


def test_a_request_that_waits_keeps_a_server_busy() -> None:
    clock, requests = Clock(), Requests()
    requests.waiting = 1
    clock.events = [(500.0, lambda: setattr(requests, "waiting", 0))]
    watch(clock, requests, lambda watched: watched.until_open())
    assert clock.waited_s >= 500 + 58


def test_an_idle_server_is_asked_seldom() -> None:
    """A trainer that waits for a batch asks the window five times a second."""
    clock, requests = Clock(), Requests()

    async def use(watched: TrainWhen) -> int:
        await watched.until_open()
        before = requests.looks
        for _ in range(50):
            await watched.until_open()
            clock.now += timedelta(seconds=0.2)
        return requests.looks - before

    assert watch(clock, requests, use) <= 5


def test_the_trainers_own_requests_are_no_activity_and_those_of_others_before_them_are() -> None:
    clock, requests = Clock(), Requests()

    async def use(watched: TrainWhen) -> list[float]:
        waits: list[float] = []
        for others in (0, 1):
            await watched.until_open()
            clock.start = clock.now = clock.now + timedelta(minutes=10)
            for _ in range(others):
                requests.answer_one()
            async with watched.own_requests():
                requests.answer_one()
            await watched.until_open()
            waits.append(clock.waited_s)
        return waits

    assert watch(clock, requests, use) == [0, 60]


def test_a_server_that_is_away_is_waited_for_and_may_have_had_requests(caplog: pytest.LogCaptureFixture) -> None:
    clock, requests = Clock(), Requests()
    requests.status = 503
    clock.events = [(30.0, lambda: setattr(requests, "status", 200))]
    with caplog.at_level(logging.INFO, logger="agentic_opd"):
        watch(clock, requests, lambda watched: watched.until_open())
    assert clock.waited_s == 30 + 60
    assert "does not answer, so it may have requests" in caplog.records[0].message
    assert len(caplog.records) == 3


@pytest.mark.parametrize("text", ["", "vllm:num_requests_running 0.0\n", "vllm:num_requests_running x\n"])
def test_a_server_that_counts_no_requests_is_an_error(text: str) -> None:
    async def run() -> None:
        async with served({"/metrics": answer}) as url:
            watched = window("idle", Clock(), vllm_urls=[url])
            try:
                await watched.until_open()
            finally:
                await watched.close()

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=text)

    with pytest.raises(ServerMismatchError, match=r"without --disable-log-stats|is no number: could not convert"):
        asyncio.run(run())
