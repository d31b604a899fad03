"""Several training processes: the others wait for the first as long as it works, and for none that hangs."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentic_opd.serving.process_group import free_port
from tests.support.interpreters import Interpreters, interpreters

pytestmark = pytest.mark.slow

TWO_PROCESSES = """
import os, signal
second = os.fork()
os.environ["RANK"] = str(int(second == 0))
if second == 0:
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # It ends with the first one, also if it is stopped.
"""
STOPPED = """
import os, signal, sys
from datetime import timedelta
from torch.distributed import distributed_c10d
from agentic_opd.core.errors import TrainingError
from agentic_opd.training.distributed import join_processes
world = join_processes("cpu")
world.share(None)
if not world.is_first:
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
distributed_c10d._set_pg_timeout(timedelta(seconds=2))
try:
    collective = world.sum if sys.argv[2] == "sum" else world.share
    for _ in range(3):  # A small message may still reach the buffers of a stopped process.
        print(collective({"a": 1.0}))
except TrainingError as error:
    print("refused:", error, flush=True)
os._exit(0)
"""
WAITING = """
import asyncio, os, sys
from agentic_opd.training import distributed
distributed._BEAT_S = 0.01
world = distributed.join_processes("cpu")
beats, share = 0, distributed.DistContext.share
def counted(self, value):
    global beats
    beats += 1
    return share(self, value)
distributed.DistContext.share = counted
async def value():
    try:
        while beats < 3 or sys.argv[1] == "cancelled":
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        return "stopped"
    return "batch"
async def run():
    running = asyncio.create_task(world.share_when(value() if world.is_first else None))
    while sys.argv[1] == "cancelled" and world.is_first and beats < 3:
        await asyncio.sleep(0.01)
    if sys.argv[1] == "cancelled" and world.is_first:
        running.cancel()
    return await running
print(asyncio.run(run()), beats >= 3, flush=True)
if world.is_first:
    os.waitpid(second, 0)
os._exit(0)
"""


@pytest.fixture(scope="module")
def python() -> Iterator[Interpreters]:
    with interpreters("torch", "agentic_opd.training.distributed") as warm:
        yield warm


def printed_by_two(python: Interpreters, script: str, *arguments: str) -> str:
    """Run two processes of one group, as torchrun would start them, until the first ends; return what they print."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1")), "WORLD_SIZE": "2"}
    return python.run(["-c", TWO_PROCESSES + script, *arguments], Path.cwd(), {**os.environ, **group}).stdout


@pytest.mark.parametrize("collective", ["share", "sum"])
@pytest.mark.parametrize("ends_with", ["SIGSTOP", "SIGKILL"])
def test_a_process_that_is_stopped_or_killed_ends_the_others_wait(
    python: Interpreters, ends_with: str, collective: str
) -> None:
    printed = printed_by_two(python, STOPPED, ends_with, collective)
    assert "refused: another training process did not take part within" in printed
    assert "start again with --resume" in printed


@pytest.mark.parametrize(("how", "value"), [("done", "batch"), ("cancelled", "stopped")])
def test_the_others_wait_for_the_first_as_long_as_it_waits(python: Interpreters, how: str, value: str) -> None:
    """By broadcasts that it is waiting: the time limit is that of one of them."""
    assert printed_by_two(python, WAITING, how).splitlines() == [f"{value} True"] * 2
