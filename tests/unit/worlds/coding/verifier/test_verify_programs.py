"""solution.py as a program, and functions that are called with JSON, by the real verifier."""

import math

import pytest

from agentic_opd.core.types import VerifyOutcome
from agentic_opd.worlds.coding.hidden_tests.complete import call_tests, io_tests
from tests.support.sandboxes import verify_source

SUM = io_tests(["1 2\n", "3 4", "5 6\n", "ä\n"], ["3\n", "7  \n\n", "12", "ä"])


def test_the_source_of_program_tests() -> None:
    assert io_tests(["1 2\n"], ["3 \n4\n\n"]) == "assert run_program('1 2\\n') == Printed('3 \\n4')\n"


def test_the_source_of_call_tests() -> None:
    tests = call_tests("Solution().f", [[1, "a"], [[None, {"k": 1.5}]]], [True, [math.inf]])
    assert tests.splitlines() == [
        "from solution import Solution",
        "",
        "assert Solution().f(1, 'a') == Json(True)",
        "assert Solution().f([None, {'k': 1.5}]) == Json([float('inf')])",
    ]
    with pytest.raises(ValueError, match="cannot call 'f\\(x\\) or g'"):
        call_tests("f(x) or g", [[]], [1])


@pytest.mark.sandbox
def test_programs_are_run_once_for_each_input() -> None:
    source = """
line = input()
if line == 'ä':
    print(line, flush=True)
    exit()
if __name__ == '__main__':
    print(sum(map(int, line.split())), ' \\n')
"""
    verdict = verify_source(SUM, source)
    assert (verdict.outcome, verdict.passed, verdict.total) == (VerifyOutcome.RAN, 3, 4), verdict.report
    assert verdict.report.splitlines()[1] == "FAIL run_program('5 6\\n'): expected '12', got '11  \\n\\n'"
    assert not verdict.in_process


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("print(int(input().split()[2]))", "ProgramError: exit code 1: IndexError: list index out of range"),
        ("import os\nos.kill(os.getpid(), 9)", "ProgramError: exit code 137"),
        ("import os\nos.write(1, b'\\xff')", "ProgramError: what it prints is not UTF-8"),
        ("while True: print('3' * 10**6)", "ProgramError: it prints more than 16 MiB"),
        ("print(3); import os; os.close(1)\nwhile True: pass", "no end after "),
        ("def f(:", "ProgramError: exit code 1: SyntaxError: "),
        ("import sys\nprint(3); sys.exit(1)", "ProgramError: exit code 1"),
    ],
    ids=["raises", "is killed", "no text", "too much", "closes and hangs", "is broken", "exits"],
)
def test_programs_that_fail(source: str, why: str) -> None:
    verdict = verify_source(io_tests(["1 2\n"], ["3"]), source, timeout_s=1.0 if "no end" in why else 10.0)
    assert (verdict.passed, verdict.total) == (0, 1)
    assert verdict.report.splitlines()[-1].startswith(f"FAIL run_program('1 2\\n'): {why}")


@pytest.mark.sandbox
def test_a_program_is_over_when_its_own_process_is() -> None:
    source = "import os\nif os.fork() == 0:\n    while True: pass\nprint(3)"
    assert verify_source(io_tests(["1 2\n"], ["3"]), source).correctness == 1.0


@pytest.mark.sandbox
def test_an_endless_program_costs_only_its_input() -> None:
    source = "n = int(input().split()[0])\nwhile n == 3: pass\nprint(n)"
    verdict = verify_source(io_tests(["1 2\n", "3 4", "5 6\n"], ["1", "3", "5"]), source, timeout_s=2.0)
    assert (verdict.outcome, verdict.passed, verdict.total) == (VerifyOutcome.TIMEOUT, 2, 3), verdict.report


@pytest.mark.sandbox
def test_functions_and_methods_are_called_apart_from_the_tests() -> None:
    tests = call_tests("f", [[1, 2], [[3]], [{"a": [1]}]], [[1, 2], [[3]], {"a": [2]}])
    verdict = verify_source(tests, "def f(*args): return args[0] if type(args[0]) is dict else args")
    assert (verdict.outcome, verdict.passed, verdict.total) == (VerifyOutcome.RAN, 2, 3), verdict.report
    assert verdict.report.splitlines()[1] == "FAIL f({'a': [1]}): expected {'a': [2]}, got {'a': [1]}"
    methods = call_tests("Solution().f", [[1], [2]], [2, 5])
    verdict = verify_source(methods, "class Solution:\n    def f(self, x): return 2 * x")
    assert (verdict.outcome, verdict.passed, verdict.total) == (VerifyOutcome.RAN, 1, 2), verdict.report
    assert not verdict.in_process
