"""Work on the event loop in turn."""

import asyncio
import gc
import time

import anyio
import pytest

from agentic_opd.core.concurrency import fair_slot, rare_collections, to_its_end


def test_the_loop_looks_at_everything_between_two_turns() -> None:
    """Forty pieces of 5 ms begin at once: what is due meanwhile is seen to after one or two of them, not after all."""
    done = list[int]()

    async def work(number: int) -> None:
        async with fair_slot():
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
        async with fair_slot():
            raise ValueError("no")

    async def run() -> str:
        with pytest.raises(ValueError, match="no"):
            await fail()
        async with fair_slot():
            waiting = asyncio.create_task(fail())
            await asyncio.sleep(0)
            waiting.cancel()
        async with asyncio.timeout(60), fair_slot():
            return "done"

    assert asyncio.run(run()) == "done"
    assert asyncio.run(run()) == "done", "each loop has turns of its own"


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("times", [1, 3])
def test_work_is_done_to_its_end_however_often_it_is_cancelled(times: int, fails: bool) -> None:
    done = list[str]()

    async def work(goes_on: asyncio.Event) -> None:
        await goes_on.wait()
        done.append("written")
        await asyncio.sleep(0)
        done.append("added")
        if fails:
            raise ValueError("the disk refused")

    async def run() -> None:
        goes_on = asyncio.Event()
        task = asyncio.create_task(to_its_end(work(goes_on)))
        for _ in range(times):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert done == ["written", "added"]


def test_work_is_done_to_its_end_in_a_scope_that_cancels_until_it_is_left() -> None:
    """As starlette ends a stream whose client has left."""
    done = list[str]()

    async def work() -> None:
        await asyncio.shield(asyncio.sleep(0.01))
        done.append("written")

    async def run() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(to_its_end, work())
            await asyncio.sleep(0)
            group.cancel_scope.cancel()
        done.append("left")

    asyncio.run(run())
    assert done == ["written", "left"]


def test_work_that_is_not_cancelled_gives_its_result_or_its_error() -> None:
    async def work(result: int | Exception) -> int:
        if isinstance(result, Exception):
            raise result
        return result

    assert asyncio.run(to_its_end(work(1))) == 1
    with pytest.raises(ValueError, match="no"):
        asyncio.run(to_its_end(work(ValueError("no"))))


def test_collections_are_rare_in_the_block_alone() -> None:
    before = gc.get_threshold()
    with rare_collections():
        assert gc.get_threshold()[0] == 50_000
        assert gc.get_freeze_count() > 1000
    assert gc.get_threshold() == before
