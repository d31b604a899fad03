"""Several training processes: the others wait for the first as long as it works, and for none that hangs."""

import os
import subprocess
import sys

import pytest

from agentic_opd.serving.process_group import free_port

pytestmark = pytest.mark.slow

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
    print("refused:", error)
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
os._exit(0)
"""


def processes(script: str, *arguments: str) -> list[subprocess.Popen[str]]:
    """Two processes of one group, as torchrun would start them."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1")), "WORLD_SIZE": "2"}
    argv = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    return [
        subprocess.Popen(argv, env={**os.environ, **where, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]


@pytest.mark.parametrize("collective", ["share", "sum"])
@pytest.mark.parametrize("ends_with", ["SIGSTOP", "SIGKILL"])
def test_a_process_that_is_stopped_or_killed_ends_the_others_wait(ends_with: str, collective: str) -> None:
    first, second = processes(STOPPED, ends_with, collective)
    try:
        printed, _ = first.communicate(timeout=120)
        assert "refused: another training process did not take part within" in printed
        assert "start again with --resume" in printed
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


@pytest.mark.parametrize(("how", "value"), [("done", "batch"), ("cancelled", "stopped")])
def test_the_others_wait_for_the_first_as_long_as_it_waits(how: str, value: str) -> None:
    """By broadcasts that it is waiting: the time limit is that of one of them."""
    both = processes(WAITING, how)
    printed = [process.communicate(timeout=120)[0].split() for process in both]
    assert printed == [[value, "True"]] * 2
