"""Hidden tests in the style of pytest and unittest, counted test by test by the real verifier."""

import pytest

from agentic_opd.core.types import VerifyOutcome
from tests.support.sandboxes import verify_source

pytestmark = pytest.mark.sandbox

PYTEST = """
import pytest
from solution import add, div

CASES = [(1, 1, 2), (2, 2, 5), (3, 3, 6)]

@pytest.fixture
def three():
    yield 3

@pytest.fixture(autouse=True)
def count(tmp_path):
    (tmp_path / "x").write_text("used")

def assert_adds(a, b, total):
    assert add(a, b) == total

@pytest.mark.parametrize("a, b, total", CASES)
def test_cases(a, b, total):
    assert_adds(a, b, total)

@pytest.mark.parametrize("b", [2, pytest.param(0, id="zero")])
@pytest.mark.parametrize("a", [4])
def test_div(a, b):
    assert div(a, b) == pytest.approx(2 + 1e-9)

def test_zero(three, tmp_path):
    assert list(tmp_path.iterdir())
    with pytest.raises(ZeroDivisionError, match="by zero") as info:
        div(three, 0)
    assert info.type is ZeroDivisionError

def test_raises_nothing():
    with pytest.raises(ValueError):
        add(1, 2)

class TestMore:
    def setup_method(self):
        self.one = 1

    @pytest.mark.parametrize("x", range(3))
    def test_one(self, x):
        assert add(self.one, x) == x + 1

    async def test_soon(self):
        assert add(self.one, 1) == 2

def test_skips():
    pytest.skip("not today")

@pytest.mark.skip(reason="never")
def test_never(): assert False

if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
"""


def test_a_pytest_file() -> None:
    verdict = verify_source(PYTEST, "def add(a, b): return a + b\ndef div(a, b): return a / b")
    assert (verdict.outcome, verdict.passed, verdict.total) == (VerifyOutcome.RAN, 6, 10), verdict.report
    assert not verdict.in_process
    *others, last = verdict.report.splitlines()[1:]
    assert others == [
        "FAIL test_cases[1]: add(a, b): expected 5, got 4",
        "FAIL test_div[1]: ZeroDivisionError: division by zero",
    ]
    assert last.startswith("FAIL test_raises_nothing: Failed: DID NOT RAISE ")


UNITTEST = """
import unittest
from solution import first, LIMIT

class TestFirst(unittest.TestCase):
    @classmethod
    def setUpClass(cls): cls.items = [1, 2]
    def setUp(self): self.empty = []
    def test_first(self): self.assertEqual(first(self.items), 1)
    def test_two(self): self.assertEqual(first(self.items), 2)
    def test_empty(self):
        with self.assertRaises(IndexError): first(self.empty)
    def test_subs(self):
        for item in (1, 2, 3):
            with self.subTest(item=item): self.assertEqual(first([item]), item)
    def test_skipped(self): self.skipTest("no")
    @unittest.expectedFailure
    def test_known(self): self.assertTrue(False)

assert LIMIT == 3

if __name__ == "__main__":
    unittest.main()
"""


def test_a_unittest_file_with_an_assert_beside_it() -> None:
    verdict = verify_source(UNITTEST, "LIMIT = 3\ndef first(items): return items[0]")
    assert (verdict.outcome, verdict.passed, verdict.total) == (VerifyOutcome.RAN, 4, 6), verdict.report
    assert not verdict.in_process
    assert "FAIL TestFirst.test_two: AssertionError: 1 != 2" in verdict.report
    assert "FAIL TestFirst.test_skipped: SkipTest: no" in verdict.report


def test_an_endless_test_costs_only_itself() -> None:
    tests = "from solution import f\n" + "".join(f"def test_{n}(): assert f({n}) == {n}\n" for n in range(4))
    verdict = verify_source(tests, "def f(x):\n    while x == 1: pass\n    return x", timeout_s=2.0)
    assert (verdict.outcome, verdict.passed, verdict.total) == (VerifyOutcome.TIMEOUT, 3, 4), verdict.report


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)", "os.kill(os.getppid(), 9)", "os.kill(0, 9)"])
def test_no_end_passes_a_test_that_expects_any_error(end: str) -> None:
    tests = "import pytest\nfrom solution import f\ndef test_a():\n    with pytest.raises(Exception): f()\n"
    tests += "def test_b():\n    try: f()\n    except: pass\n"
    verdict = verify_source(tests, f"import os, sys\ndef f(): {end}")
    expected = 1 if end == "sys.exit(0)" else 0  # an exception like any other in test_b
    assert (verdict.passed, verdict.total) == (expected, 2), verdict.report


def test_what_sees_the_solution_from_inside_shares_its_process() -> None:
    tests = """
import solution
def test_prints(capsys):
    solution.hello()
    assert capsys.readouterr().out == "hello\\n"
def test_patched(monkeypatch):
    monkeypatch.setattr(solution, "NAME", "you")
    assert solution.name() == "you"
def test_not_patched():
    assert solution.name() == "me"
"""
    source = "NAME = 'me'\ndef hello(): print('hello')\ndef name(): return NAME"
    verdict = verify_source(tests, source)
    assert (verdict.outcome, verdict.passed, verdict.total) == (VerifyOutcome.RAN, 3, 3), verdict.report
    assert verdict.in_process
    endless = verify_source(tests, source + "\ndef name():\n    while True: pass", timeout_s=2.0)
    assert (endless.outcome, endless.passed, endless.total) == (VerifyOutcome.TIMEOUT, 1, 3), endless.report


def test_the_start_of_pytest_is_not_charged() -> None:
    slow = "import time, _pytest.main as m\nstart = m.Session.from_config.__func__\n"
    slow += "def late(cls, config):\n    end = time.process_time() + 1.5\n    while time.process_time() < end: pass\n"
    slow += "    return start(cls, config)\nm.Session.from_config = classmethod(late)\n"
    tests = "import solution\ndef test_prints(capsys):\n    solution.hello()\n"
    tests += "    assert capsys.readouterr().out == 'hello\\n'\n"
    verdict = verify_source(tests, slow + "def hello(): print('hello')", timeout_s=1.0)
    assert (verdict.outcome, verdict.passed, verdict.total) == (VerifyOutcome.RAN, 1, 1), verdict.report
