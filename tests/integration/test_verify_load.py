"""Many verifications at once: none times out, none sees another's files, values or processes."""

import asyncio

import pytest

from agentic_opd.core.types import Task, Verification, VerifyOutcome
from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox
from agentic_opd.worlds.coding.verifier.verify import verify

pytestmark = pytest.mark.sandbox

AT_ONCE = 16
SOURCE = """
import glob, os
def mine(number):
    with open(f"/tmp/mine{number}", "w") as file: file.write(str(number))
    return sorted(os.listdir("/tmp"))
def processes(): return len(glob.glob("/proc/[0-9]*"))
def f(x): return x
"""
TESTS = """
from solution import f, mine, processes
assert mine({n}) == ['mine{n}']
assert processes() <= 4
assert f({n}) == {n}
assert f({n}) == 7
for i in range(200):
    assert f(i) == i
"""


def test_many_at_once_neither_time_out_nor_interfere() -> None:
    async def main() -> list[Verification]:
        files = {"solution.py": SOURCE.encode()}
        tasks = [Task(str(n), "p", TESTS.format(n=n)) for n in range(AT_ONCE)]
        return await asyncio.gather(*[verify(task, BubblewrapSandbox, files, 30.0) for task in tasks])

    verdicts = asyncio.run(main())
    assert [verdict.outcome for verdict in verdicts] == [VerifyOutcome.RAN] * AT_ONCE
    assert [verdict.passed for verdict in verdicts] == [5 if n == 7 else 4 for n in range(AT_ONCE)]
