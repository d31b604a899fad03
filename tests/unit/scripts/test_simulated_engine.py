"""The simulated engine of scripts/bench/scale: its answers are those of the plugin, after the time of its GPUs."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from aiohttp.test_utils import TestServer
from bench.simulated_engine import Node, Rates, SimulatedEngine

from agentic_opd.core.http import JsonClient
from agentic_opd.core.types import TeacherRequest
from agentic_opd.plugin.client import PluginClient

T = TypeVar("T")
FAST = Rates(gpus=1, output_rate=1e6, single_rate=1e6, prefill_rate=1e6)


def with_engine(use: Callable[[PluginClient, SimulatedEngine], Awaitable[T]]) -> T:
    async def main() -> T:
        engine = SimulatedEngine(FAST, tokens=60, result_tokens=10, turns=3, judge_tokens=5)
        async with TestServer(engine.app()) as server:
            client = await PluginClient.connected(JsonClient(str(server.make_url("")).rstrip("/"), retry_s=0))
            try:
                return await use(client, engine)
            finally:
                await client.close()

    return asyncio.run(main())


def test_a_call_in_every_turn_but_the_last_one() -> None:
    async def use(client: PluginClient, engine: SimulatedEngine) -> list[str]:
        prompt, said = "<|im_start|>system<|im_start|>user<|im_start|>assistant\n", list[str]()
        for _ in range(3):
            (one,) = await client.complete(await client.token_ids(prompt=prompt), {"max_tokens": 500})
            said.append(engine.text(one.token_ids))
            assert one.finish_reason == "stop"
            prompt += f"{said[-1]}<|im_start|>user<|im_start|>assistant\n"
        return said

    first, second, last = with_engine(use)
    assert "<tool_call>" in first
    assert "<tool_call>" in second
    assert "<tool_call>" not in last


def test_rows_are_valid_and_of_the_sampled_tokens() -> None:
    async def use(client: PluginClient, engine: SimulatedEngine) -> None:
        (one,) = await client.complete((1, 2, 3), {"max_tokens": 500})
        request = TeacherRequest((1, 2, 3, *one.token_ids), len(one.token_ids), 3, ())
        reply = await client.score(request, 20)
        assert reply.rows.actual_R.tolist() == pytest.approx(one.logprobs)
        assert reply.rows.top_ids_RK.shape == (len(one.token_ids), 20)

    with_engine(use)


def test_requests_share_what_the_gpus_sample() -> None:
    rates = Rates(gpus=2, output_rate=1000, single_rate=200)
    assert rates.rate(1) == 200
    assert rates.rate(10) == 200
    assert rates.rate(40) == 50


def test_further_requests_wait_for_a_seat() -> None:
    node = Node(Rates(gpus=1, output_rate=1000, single_rate=1000, seats=2, prefill_rate=1e9))

    async def main() -> float:
        start = time.monotonic()
        await asyncio.gather(*(node.samples(1, 25) for _ in range(4)))
        return time.monotonic() - start

    assert asyncio.run(main()) >= 0.1, "two at a time, each with half of the rate"
    assert node.tokens == 100
