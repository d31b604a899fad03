"""Work on the event loop in turn."""

import asyncio
import time

import pytest

from agentic_opd.core.concurrency import in_turn


def test_the_loop_looks_at_everything_between_two_turns() -> None:
    """Forty pieces of 5 ms begin at once: what is due meanwhile is seen to after one or two of them, not after all."""
    done = list[int]()

    async def work(number: int) -> None:
        async with in_turn():
            time.sleep(0.005)  # noqa: ASYNC251
            done.append(number)

    async def look() -> list[int]:
        seen = list[int]()
        while len(done) < 40:
            seen.append(len(done))
            await asyncio.sleep(0)
        return seen

    async def run() -> list[int]:
        looking = asyncio.create_task(look())
        await asyncio.gather(*(work(number) for number in range(40)))
        return await looking

    seen = asyncio.run(run())
    assert done == list(range(40))
    assert {*seen} == {*range(40)}


def test_a_turn_that_fails_or_is_cancelled_lets_the_next_one_begin() -> None:
    async def fail() -> None:
        async with in_turn():
            raise ValueError("no")

    async def run() -> str:
        with pytest.raises(ValueError, match="no"):
            await fail()
        async with in_turn():
            waiting = asyncio.create_task(fail())
            await asyncio.sleep(0)
            waiting.cancel()
        async with asyncio.timeout(5), in_turn():
            return "done"

    assert asyncio.run(run()) == "done"
    assert asyncio.run(run()) == "done", "each loop has turns of its own"
