import asyncio
import time

from agentic_opd.runs.loop_lag import LoopLag


def test_a_loop_that_is_kept_busy_is_late() -> None:
    async def busy() -> tuple[float, ...]:
        lag = LoopLag()
        lag.start()
        await asyncio.sleep(0.03)
        time.sleep(0.2)  # noqa: ASYNC251
        await asyncio.sleep(0.03)
        lag.stop()
        return tuple(lag.latest())

    found = asyncio.run(busy())
    assert 0.15 < max(found) < 2
    assert min(found) >= 0


def test_nothing_was_seen_before_the_start() -> None:
    lag = LoopLag()
    lag.stop()
    assert not lag.latest()
