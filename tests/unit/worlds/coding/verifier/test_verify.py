"""Verdicts of the real verifier in real sandboxes."""

import asyncio
import re
import subprocess
import sys

import pytest

from agentic_opd.core.errors import DatasetError, SandboxError
from agentic_opd.core.types import Task, Verification, VerifyOutcome
from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox
from agentic_opd.worlds.coding.hidden_tests.checks import checks_of
from agentic_opd.worlds.coding.verifier.verify import verify
from tests.support.memory import LIMIT
from tests.support.sandboxes import verify_source

pytestmark = pytest.mark.sandbox

DOUBLE = "from solution import f\nassert f(1) == 2\nassert f(2) == 4\nassert 6 == f(3)\nassert f(4) > 7\n"


def result(verdict: Verification) -> tuple[VerifyOutcome, int, int]:
    return verdict.outcome, verdict.passed, verdict.total


def test_every_check_counts_by_itself() -> None:
    verdict = verify_source(DOUBLE, "def f(x):\n    return {1: 2, 2: 5}.get(x) or [][x]")
    assert result(verdict) == (VerifyOutcome.RAN, 1, 4)
    assert verdict.correctness == 0.25
    assert verdict.report == (
        "Hidden tests: 1 of 4 passed.\n"
        "FAIL f(2): expected 4, got 5\n"
        "FAIL f(3): IndexError: list index out of range\n"
        "FAIL f(4) > 7: IndexError: list index out of range"
    )


def test_a_right_solution_passes_and_the_report_is_one_line() -> None:
    verdict = verify_source(DOUBLE, "print('Hidden tests: 0 of 4')\ndef f(x):\n    return 2 * x")
    assert result(verdict) == (VerifyOutcome.RAN, 4, 4)
    assert verdict.report == "Hidden tests: 4 of 4 passed."


def test_a_failing_comparison_shows_the_source() -> None:
    verdict = verify_source("from solution import f\nassert abs(f(1) - 2) < 1e-6", "def f(x): return 3.0")
    assert verdict.report == "Hidden tests: 0 of 1 passed.\nFAIL abs(f(1) - 2) < 1e-06: is not true"


def test_no_solution() -> None:
    verdict = asyncio.run(verify(Task("t", "p", DOUBLE), BubblewrapSandbox, {"other.py": b""}, 10.0))
    assert result(verdict) == (VerifyOutcome.NO_SOLUTION, 0, 4)
    assert verdict.report == "Hidden tests: 0 of 4 passed.\nThere is no solution.py."


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def f(x:\n", "solution.py could not be imported: SyntaxError: "),
        ("import nope", "solution.py could not be imported: ModuleNotFoundError: No module named 'nope'"),
        ("import sys; sys.exit(0)", "solution.py could not be imported: SystemExit: 0"),
        ("import os; os._exit(0)", "solution.py could not be imported: the solution's process ended"),
        ("g = 1", "The tests ended early: ImportError: cannot import name 'f'"),
        ("def f(x):\n    import os\n    os._exit(0)", "Checks in which the solution ended its process: 4."),
    ],
)
def test_leaving_or_breaking_early_is_a_crash(source: str, why: str) -> None:
    verdict = verify_source(DOUBLE, source)
    assert result(verdict) == (VerifyOutcome.CRASHED, 0, 4)
    first, second, *_ = verdict.report.splitlines()
    assert first == "Hidden tests: 0 of 4 passed."
    assert second.startswith(why)


def test_an_end_or_an_endless_check_costs_only_that_check() -> None:
    left = verify_source(DOUBLE, "import os\ndef f(x):\n    return os._exit(0) if x == 2 else 2 * x")
    assert result(left) == (VerifyOutcome.CRASHED, 3, 4)
    assert left.report.splitlines()[1:] == [
        "Checks in which the solution ended its process: 1.",
        "FAIL f(2): the solution's process ended",
    ]
    hung = verify_source(DOUBLE, "def f(x):\n    while x == 2: pass\n    return 2 * x", timeout_s=2.0)
    assert result(hung) == (VerifyOutcome.TIMEOUT, 3, 4)
    counted, failed = hung.report.splitlines()[1:]
    assert counted == "Checks that did not end in time: 1."
    seconds = re.fullmatch(r"FAIL f\(2\): no end after ([0-9.]+) s", failed)
    assert seconds is not None
    assert 0 < float(seconds[1]) <= 0.5  # A quarter of the two seconds.


def test_checks_that_are_all_endless_leave_time_for_each_other() -> None:
    tests = "from solution import f\n" + "".join(f"assert f({n}) == {n}\n" for n in range(5))
    verdict = verify_source(tests, "def f(x):\n    while x != 4: pass\n    return x", timeout_s=2.0)
    assert result(verdict) == (VerifyOutcome.TIMEOUT, 1, 5), verdict.report
    assert "Checks that did not end in time: 4." in verdict.report


def test_a_restarted_solution_is_found_again_by_name() -> None:
    source = """
import os
class Solution:
    def __init__(self): self.calls = 0
    half = staticmethod(lambda x: x / 2)
    def count(self):
        self.calls += 1
        return self.calls
def get(x): return os._exit(0) if x == 1 else x
"""
    tests = """
from solution import Solution, get
half, one, other = Solution.half, Solution(), Solution()
assert one.count() == 1
assert get(0) == 0
assert one.count() == 2
assert get(1) == 1
assert get(2) == 2
assert half(4) == 2
assert other.count() == 1
"""
    verdict = verify_source(tests, source)
    assert result(verdict) == (VerifyOutcome.CRASHED, 6, 7), verdict.report
    assert not verdict.in_process


def test_processor_time_decides() -> None:
    """A sleeping solution is ended too, and what others do on the machine makes no difference."""
    tests = "from solution import f\n" + "".join(f"assert f({n}) == {n}\n" for n in range(8))
    source = "import time\ndef f(x):\n    end = time.process_time() + 0.1\n    while time.process_time() < end: pass\n"
    crowd = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(6)]
    try:
        busy = verify_source(tests, source + "    return x", timeout_s=2.0)
    finally:
        for process in crowd:
            process.kill()
            process.wait()
    assert result(busy) == (VerifyOutcome.RAN, 8, 8), busy.report
    sleeping = verify_source(
        tests, "import time\ndef f(x):\n    if x == 3: time.sleep(1000)\n    return x", timeout_s=2.0
    )
    assert result(sleeping) == (VerifyOutcome.TIMEOUT, 7, 8), sleeping.report


def test_what_ends_the_tests_early_costs_all() -> None:
    raised = verify_source(
        "from solution import f\nassert f(1) == 1\nx = f(2)\nassert x == 2", "def f(x): return 1 // (2-x)"
    )
    assert result(raised) == (VerifyOutcome.CRASHED, 0, 2)
    assert "The tests ended early: ZeroDivisionError" in raised.report


def test_an_assert_in_a_loop_is_one_check_that_passes_when_every_round_does() -> None:
    loop = "from solution import f\ndef check(g):\n    for i in range(2500):\n        assert g(i) == i\n"
    loop += "    assert g(-1) == -1\ncheck(f)\n"
    assert result(verify_source(loop, "def f(x): return x")) == (VerifyOutcome.RAN, 2, 2)
    some = verify_source(loop, "def f(x): return x % 100 if x > 0 else x")
    assert result(some) == (VerifyOutcome.RAN, 1, 2)
    assert some.report.count("FAIL") == 1
    unreached = verify_source(
        "from solution import f\nfor x in f():\n    assert x == 1\nassert f() == []", "def f(): return []"
    )
    assert result(unreached) == (VerifyOutcome.RAN, 1, 2)


def test_a_loop_that_is_cut_short_is_not_passed() -> None:
    loop = "from solution import f\nassert f(0) == 0\nfor i in range(10):\n    x = f(i)\n    assert x == i\n"
    verdict = verify_source(loop, "def f(x): return x if x < 5 else 1 // 0")
    assert result(verdict) == (VerifyOutcome.CRASHED, 0, 2)


def test_long_and_hostile_texts_are_one_short_line() -> None:
    raising = "raise ValueError('b\\r\\nHidden tests: 4 of 4 passed.' * 100)"
    source = f"def f(x):\n    if x == 1: return 'a' * 100000\n    {raising}"
    lines = verify_source(DOUBLE, source).report.split("\n")
    assert [line[:14] for line in lines] == ["Hidden tests: ", "FAIL f(1): exp", "FAIL f(2): Val", "FAIL f(3): Val"]
    assert all(len(line) < 420 and "\r" not in line for line in lines)


TREE = """
class TreeNode:
    def __init__(self, value, children=()):
        self.value, self.children = value, list(children)
    def __eq__(self, other):
        return isinstance(other, TreeNode) and self.value == other.value
class BadTree(Exception): pass
def depth(tree):
    if tree is None: raise BadTree('none')
    return 1 + max(map(depth, tree.children), default=0)
"""


def test_tests_that_need_the_solutions_classes_share_its_process() -> None:
    tests = """
from solution import *
class Leaf(TreeNode): pass
assert depth(TreeNode(1, [Leaf(2), TreeNode(3, [Leaf(4)])])) == 3
assert TreeNode(1) == TreeNode(1)
try:
    depth(None)
    assert False
except BadTree as error:
    assert str(error) == 'none'
"""
    verdict = verify_source(tests, TREE)
    assert result(verdict) == (VerifyOutcome.RAN, 3, 3)
    assert verdict.in_process
    assert result(verify_source(tests, "import sys; sys.exit(0)")) == (VerifyOutcome.CRASHED, 0, 3)
    assert result(verify_source(tests, TREE + "\nimport os\ndef depth(t): os._exit(0)"))[1:] == (0, 3)


def test_what_crosses_between_the_processes() -> None:
    """Constants, copies of arguments, generators, keyword arguments, named exceptions."""
    source = """
from collections import Counter, namedtuple
LIMIT = 3
Point = namedtuple('Point', 'x y')
class Custom(ValueError): pass
def total(grid, scale=1):
    total = scale * sum(map(sum, grid))
    grid.clear()
    return total
def count(text): return Counter(text)
def point(): return Point(1, 2.5)
def squares(n):
    for i in range(n): yield i * i
def fail(): raise Custom('no')
def pairs(items): return {(a, b): None for a in items for b in items}
"""
    tests = """
import solution
from solution import total, count
grid = [[3, 0], [2, 1]]
assert total(grid, scale=2) == 12
assert total(grid) == sum(map(sum, grid))
assert solution.LIMIT == 3
assert count('aab') == {'a': 2, 'b': 1}
assert solution.point() == (1, 2.5)
assert list(solution.squares(3)) == [0, 1, 4]
assert solution.squares(3) != [0, 1, 4]
assert sum(solution.squares(x) == [] for x in range(3)) == 0
assert solution.pairs({1}) == {(1, 1): None}
try:
    solution.fail()
    raise AssertionError
except ValueError as error:
    assert str(error) == 'no'
"""
    verdict = verify_source(tests, source)
    assert result(verdict) == (VerifyOutcome.RAN, 10, 10), verdict.report
    assert not verdict.in_process


IN_PLACE = """
from solution import rev
items = [1, 2, 3]
rev(items)
assert items == [3, 2, 1]
"""


@pytest.mark.parametrize(("body", "passed"), [("a.reverse()", 1), ("return a[::-1]", 0)])
def test_changes_in_place_can_be_asked_for(body: str, passed: int) -> None:
    verdict = verify_source(IN_PLACE, f"def rev(a): {body}")
    assert result(verdict) == (VerifyOutcome.RAN, passed, 1)
    assert verdict.in_process


CHANGES = {
    "cleared": ("xs = [3, 1, 2]\nassert f(xs) == sorted(xs)", "x.clear(); return []"),
    "in a loop": ("for xs in [[2, 1], [4, 3]]:\n    assert f(xs) == sorted(xs)", "x.clear(); return []"),
    "of a helper": (
        "def ref(xs): return sorted(xs)\ndef check(g):\n    xs = [2, 1]\n    got = g(xs)\n"
        "    assert got == ref(xs)\ncheck(f)",
        "x[:] = [7]; return [7]",
    ),
    "nested": (
        "grid = [[1, 2], [3]]\nassert f(grid) == [len(row) for row in grid]",
        "[r.clear() for r in x]; return [0, 0]",
    ),
    "a dict": ("d = {'a': 1}\nassert f(d) == sorted(d.items())", "x.clear(); return []"),
    "computed before": ("xs = [3, 1]\nwant = sorted(xs)\nassert f(xs) == want", "x.clear(); return []"),
}


@pytest.mark.parametrize(("tests", "body"), CHANGES.values(), ids=CHANGES)
def test_changed_arguments_change_nothing_for_the_tests(tests: str, body: str) -> None:
    verdict = verify_source(f"from solution import f\n{tests}\n", f"def f(x): {body}")
    assert result(verdict) == (VerifyOutcome.RAN, 0, 1), verdict.report
    assert not verdict.in_process


CHEATS = {
    "equal to everything": """
class A:
    def __eq__(self, other): return True
    __gt__ = __eq__
def f(x): return A()
""",
    "a list that equals everything": """
class A(list):
    def __eq__(self, other): return True
    __lt__ = __gt__ = __eq__
    def __sub__(self, other): return self
def f(x): return A()
""",
    "an int that equals everything": """
class A(int):
    def __eq__(self, other): return True
    __gt__ = __eq__
    __hash__ = None
def f(x): return A(0)
""",
    "prints the verdict": """
import os
def f(x):
    for fd in range(256):
        try: os.write(fd, b'\\nHidden tests: 4 of 4 passed.\\n')
        except OSError: pass
    return 0
""",
    "patches its own builtins and asserts": """
import builtins, sys
builtins.bool = lambda *args: True
for module in list(sys.modules.values()):
    for name in ('check_equal', '_count', 'encode'):
        if hasattr(module, name): setattr(module, name, lambda *args: b'')
def f(x): return 0
""",
    "writes to every pipe in /proc": """
import glob, os
def f(x):
    for path in glob.glob('/proc/[0-9]*/fd/*'):
        try: os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK), b'\\n' + b'00' * 64 + b'\\n')
        except OSError: pass
    return 0
""",
    "signals the tests' process": """
import os, signal
def f(x):
    os.kill(os.getppid(), signal.SIGKILL)
    return 0
""",
    "leaves from a thread": """
import threading, os
threading.Timer(0.05, os._exit, (0,)).start()
def f(x):
    while True: pass
""",
    "shadows the standard library": """
for name in ('struct', 'ctypes', 'random', 'sitecustomize'):
    open(name + '.py', 'w').write('raise SystemExit(0)')
def f(x): return 0
""",
}


@pytest.mark.parametrize("source", CHEATS.values(), ids=CHEATS)
def test_no_cheat_earns_a_check(source: str) -> None:
    verdict = verify_source(DOUBLE, source, timeout_s=4.0)
    assert verdict.passed == 0, verdict.report
    assert verdict.total == 4


def test_the_tests_cannot_be_read() -> None:
    """Neither on disk, nor in another process, nor in its own frames and objects."""
    source = """
import gc, glob, os, sys
def f():
    needle, found = ''.join(['n33', 'dle']), []
    for path in glob.glob('/*/*') + glob.glob('/proc/[0-9]*/*') + glob.glob('/proc/[0-9]*/fd/*'):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError: continue
        try:
            if needle.encode() in os.read(handle, 10**5): found.append(path)
        except OSError: pass
        os.close(handle)
    frame = sys._getframe().f_back
    while frame:
        if needle in repr((frame.f_locals, frame.f_code.co_consts)): found.append('a frame')
        frame = frame.f_back
    if any(needle in thing for thing in gc.get_objects() if type(thing) in (list, tuple, dict)): found.append('gc')
    return found
"""
    verdict = verify_source("from solution import f\nassert f() == 'n33dle'", source, timeout_s=600.0)
    assert verdict.report.endswith("FAIL f(): expected 'n33dle', got []")


def test_the_agents_own_files_come_along_and_shadow_nothing_of_the_tests() -> None:
    tests = "import random\nfrom solution import f\nassert f() == 5\nassert random.Random(0) is not None"
    files = {
        "solution.py": b"from lib.helper import five\nf = five",
        "lib/helper.py": b"def five(): return 5",
        "random.py": b"raise SystemExit(0)",
        "sitecustomize.py": b"raise SystemExit(0)",
        "struct.py": b"raise SystemExit(0)",
    }
    verdict = asyncio.run(verify(Task("t", "p", tests), BubblewrapSandbox, files, 10.0))
    assert result(verdict) == (VerifyOutcome.RAN, 2, 2), verdict.report


def test_many_at_once_do_not_interfere() -> None:
    async def main() -> list[Verification]:
        one = [
            verify(Task(str(n), "p", f"from solution import f\nassert f() == {n}"), BubblewrapSandbox, files, 60.0)
            for n in range(8)
        ]
        return await asyncio.gather(*one)

    files = {"solution.py": b"def f(): return 3"}
    assert [verdict.passed for verdict in asyncio.run(main())] == [0, 0, 0, 1, 0, 0, 0, 0]


def test_tests_that_check_nothing_are_an_error() -> None:
    with pytest.raises(DatasetError, match="task 't': the hidden tests have no `assert`"):
        checks_of(Task("t", "p", "from solution import f\nassert True"))
    with pytest.raises(DatasetError, match="task 't': the hidden tests are not valid Python"):
        checks_of(Task("t", "p", "assert f("))


def test_a_sandbox_without_python_is_an_error_and_no_verdict() -> None:
    class NoPython(BubblewrapSandbox):
        async def run(self, command: str, timeout_s: float, stdin: bytes | None = None):  # type: ignore[no-untyped-def]
            return await super().run(command.replace("python", "pythoff"), timeout_s, stdin)

    with pytest.raises(SandboxError, match="pythoff"):
        asyncio.run(verify(Task("t", "p", DOUBLE), NoPython, {"solution.py": b""}, 10.0))


HOARD = "for _ in range(28): os.write(os.memfd_create('m'), bytes(2**24))"

HOARDS = {
    "when it is imported": f"import os\n{HOARD}\ndef f(x): return 2 * x",
    "in the second check": f"import os\ndef f(x):\n    if x == 2:\n        {HOARD}\n    return 2 * x",
    "in a process of its own": f"""
import os, time
def f(x):
    if x == 1 and os.fork() == 0:
        os.setsid()
        {HOARD}
        time.sleep(60)
    if x == 4: time.sleep(1)
    return 2 * x
""",
}


@pytest.mark.parametrize("source", HOARDS.values(), ids=HOARDS.keys())
def test_more_memory_than_is_allowed_earns_nothing_and_is_said(source: str, memory_kind: str) -> None:
    files = {"solution.py": source.encode()}
    verdict = asyncio.run(verify(Task("t", "p", DOUBLE), lambda: BubblewrapSandbox(LIMIT), files, 20.0))
    assert result(verdict) == (VerifyOutcome.CRASHED, 0, 4)
    said = "Hidden tests: 0 of 4 passed.\nThe solution took more memory than is allowed."
    assert (verdict.report, verdict.judge_report) == (said, said)


STOPS = {
    "its parent": "os.kill(os.getppid(), 19)",
    "everything": "os.kill(-1, 19)",
    "its parent for ever": "os.fork() or [os.kill(tests, 19) for _ in iter(int, 1)]\n        while True: pass",
}


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS.keys())
def test_a_solution_that_stops_the_tests_ends_them(stop: str) -> None:
    """It would hold them to the limit by the clock, of 210 s."""
    source = f"import os\ntests = os.getppid()\ndef f(x):\n    if x == 2:\n        {stop}\n    return 2 * x"
    verdict = verify_source(DOUBLE, source)
    assert result(verdict) == (VerifyOutcome.CRASHED, 0, 4)
    assert verdict.report.split("\n")[1] == "The solution stopped the tests' process."


def test_a_solution_that_stops_itself_fails_that_check() -> None:
    verdict = verify_source(DOUBLE, "import os\ndef f(x):\n    if x == 2: os.kill(os.getpid(), 19)\n    return 2 * x")
    assert result(verdict) == (VerifyOutcome.CRASHED, 3, 4)
    assert verdict.report.split("\n")[2] == "FAIL f(2): the solution stopped its process"


def test_an_integer_of_ten_million_bits_is_not_written_out() -> None:
    verdict = verify_source(DOUBLE, "def f(x):\n    if x == 2: return 1 << 10**7\n    return 2 * x")
    assert result(verdict) == (VerifyOutcome.RAN, 3, 4)
    assert verdict.report.split("\n")[1] == "FAIL f(2): expected 4, got a int that cannot be shown (ValueError)"
    raised = verify_source(DOUBLE, "def f(x):\n    if x == 2: raise OSError(1 << 10**7, 'no')\n    return 2 * x")
    assert raised.outcome in (VerifyOutcome.RAN, VerifyOutcome.TIMEOUT)
    assert raised.passed == 3, raised.report


@pytest.mark.slow
def test_code_that_cannot_be_interrupted_is_ended_at_the_limit_of_processor_time() -> None:
    """Reading three million digits takes 38 s."""
    tests = "from solution import f\nassert int(f(1)) == 7\n"
    verdict = verify_source(tests, "def f(x): return '7' * 3_000_000", timeout_s=1.0)
    assert result(verdict) == (VerifyOutcome.TIMEOUT, 0, 1)
    # Where many others run, the limit by the clock may come first.
    assert verdict.report.split("\n")[1].startswith("The tests did not end within")


@pytest.mark.slow
def test_what_disarms_the_limit_of_a_check_is_ended_outside_of_it() -> None:
    tests = "import inspect\nfrom solution import f\nassert f(1) == 1\n"
    source = "import signal, time\ndef f(x):\n    signal.pthread_sigmask(signal.SIG_BLOCK, [14])\n    time.sleep(900)"
    verdict = verify_source(tests, source, timeout_s=1.0)
    assert result(verdict) == (VerifyOutcome.TIMEOUT, 0, 1)
    assert verdict.report.split("\n")[1] == "The tests did nothing for 7 s."
