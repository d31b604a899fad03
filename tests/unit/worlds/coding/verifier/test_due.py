"""Which checks are due where tests have alternatives: the task's own solution says so, and no other can lower it."""

import asyncio

import pytest

from agentic_opd.core.types import Task
from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox
from agentic_opd.worlds.coding.verifier.verify import verify

pytestmark = pytest.mark.sandbox


def counts(tests: str, solution: str, own: str | None = None, prompt: str = "p") -> tuple[int, int]:
    task = Task("t", prompt, f"from solution import f\n{tests}", reference_solution=own)
    verdict = asyncio.run(verify(task, BubblewrapSandbox, {"solution.py": solution.encode()}, 10.0))
    assert not verdict.in_process
    return verdict.passed, verdict.total


BRANCHES = """
for x in (1, 2, 3):
    got = f(x)
    if isinstance(got, float):
        assert abs(got - x / 2) < 1e-6
    else:
        assert got == x // 2
"""
EXCEPT = """
assert f(2) == 0.5
try:
    f(0)
    assert False, "must raise"
except ValueError as error:
    assert "zero" in str(error)
except Exception as error:
    assert isinstance(error, ValueError)
"""
HALF, INVERSE = "def f(x): return x / 2", "def f(x):\n    if x == 0: raise ValueError('zero')\n    return 1 / x"
HELPER = """
def assertion(got, want):
    exact = got == want
    if not exact and isinstance(want, float):
        assert abs(got - want) < 1e-6
    else:
        assert exact
for x in (1, 2): assertion(f(x), x / 2)
"""


@pytest.mark.parametrize("own", [None, "own"])
@pytest.mark.parametrize(
    ("tests", "solution", "expected"),
    [
        (BRANCHES, HALF, (1, 1)),
        (BRANCHES, "def f(x): return x // 2", (1, 1)),
        (BRANCHES, "def f(x): return x", (0, 1)),
        (BRANCHES, "def f(x): return x / 2 if x < 3 else 7", (0, 1)),
        (EXCEPT, INVERSE, (2, 2)),
        (EXCEPT, "def f(x): return 0.5", (1, 2)),
        (EXCEPT, "def f(x): return 1 / x", (1, 2)),
        (EXCEPT, "import os\ndef f(x): return 1 / x if x else os._exit(0)", (1, 2)),
        (HELPER, HALF, (1, 1)),
        (HELPER, "def f(x): return x / 2 + 1e-9", (1, 1)),
        (HELPER, "def f(x): return x", (0, 1)),
    ],
)
def test_alternatives_are_one_check(tests: str, solution: str, expected: tuple[int, int], own: str | None) -> None:
    reference = None if own is None else INVERSE if tests == EXCEPT else HALF
    assert counts(tests, solution, reference) == expected


UNREACHED = """
import sys
if sys.platform == "no such platform":
    assert f(1) == 7
assert f(1) == 1
def unused(): assert f(2) == 7
if f(3) == 4:
    assert f(4) == 4
"""


def test_what_the_own_solution_does_not_reach_is_not_due() -> None:
    own = "def f(x): return x"
    assert counts(UNREACHED, own, own) == (1, 1)
    assert counts(UNREACHED, own) == (1, 1)
    assert counts(UNREACHED, "def f(x): return {1: 1, 3: 4}.get(x)", own) == (1, 2)


LOOP = """
for x in f('all'):
    if x > 0:
        assert x == 1
assert f('one') == 1
"""


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        ("def f(x): return [1, 1] if x == 'all' else 1", (2, 2)),
        ("def f(x): return [] if x == 'all' else 1", (1, 2)),
        ("def f(x): return [-1] if x == 'all' else 1", (1, 2)),
        ("def f(x): return []", (0, 2)),
        ("import sys\ndef f(x): sys.exit(0)", (0, 2)),
        ("import os\ndef f(x): os._exit(0)", (0, 2)),
    ],
)
def test_no_solution_lowers_what_is_due(solution: str, expected: tuple[int, int]) -> None:
    assert counts(LOOP, solution, "def f(x): return [1] if x == 'all' else 1") == expected


def test_a_false_assert_that_the_tests_swallow_has_failed() -> None:
    tests = "try:\n    assert f(1) == 1\nexcept AssertionError as error:\n    print(error)\n"
    assert counts(tests, "def f(x): return 2") == (0, 1)
    assert counts(tests, "def f(x): return 1") == (1, 1)
    other = "try:\n    assert f(1) == 1\nexcept AssertionError:\n    assert f(1) == 2\n"
    assert counts(other, "def f(x): return 2") == (1, 1)
    assert counts(other, "def f(x): return 3") == (0, 1)


def test_a_test_of_a_file_that_reaches_none_of_its_asserts_is_not_passed() -> None:
    tests = "def test_a():\n    for got, want in zip(f(3), [0, 1, 2]):\n        assert got == want\n"
    assert counts(tests, "def f(x): return [*range(x)]") == (1, 1)
    assert counts(tests, "def f(x): return []") == (0, 1)


SHOWN = 'assert f([1, 2], sep="; ") == "1; 2"\nassert f([]) == ""\n'
DOCSTRING = """
def f(xs):
    '''
    >>> f( [1,2], sep='; ')
    '1; 2'
    '''
"""
BY_NAME = "def check(candidate):\n    " + SHOWN.replace("f(", "candidate(").replace("\nassert", "\n    assert")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Write f.", (1, 2)),
        (DOCSTRING, (0, 1)),
        (DOCSTRING + "    >>> f([])", (1, 2)),
        (DOCSTRING.replace("1,2", "1,2,3"), (1, 2)),
        ("elf([1, 2], sep='; ')", (1, 2)),
    ],
)
def test_shown_examples_count_only_where_there_are_no_others(prompt: str, expected: tuple[int, int]) -> None:
    solution = "def f(xs, sep=''): return '1; 2'"
    assert counts(SHOWN, solution, prompt=prompt) == expected
    assert counts(f"{BY_NAME}check(f)\n", solution, prompt=prompt) == expected


def test_a_shown_example_that_fails_does_not_count_either() -> None:
    assert counts(SHOWN, "def f(xs, sep=''): return ''", prompt=DOCSTRING) == (1, 1)
