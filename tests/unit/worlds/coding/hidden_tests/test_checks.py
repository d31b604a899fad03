import ast
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from agentic_opd.worlds.coding.hidden_tests.checks import instrument, shown_checks
from agentic_opd.worlds.coding.hidden_tests.complete import undefined_names, wanted_names


class Seen:
    """A plain record of what each check said, in place of the counter of the tests' process."""

    def __init__(self) -> None:
        self.results: list[tuple[int, bool]] = []
        self._is_reached = False

    @contextmanager
    def check(self, number: int) -> Iterator[None]:
        self._is_reached = False
        try:
            yield
        except BaseException:  # noqa: BLE001 - as the counter does
            self.results.append((number, False))
        else:
            self.results += [(number, True)] * self._is_reached

    def true(self, value: object, label: str = "") -> None:
        self._is_reached = True
        assert value

    def equal(self, left: object, right: object, call_is_left: bool, label: str = "") -> None:
        self.true(left == right)


def run_instrumented(tests: str, **names: object) -> list[tuple[int, bool]]:
    seen = Seen()
    calls = {"_opd_check": seen.check, "_opd_equal": seen.equal, "_opd_true": seen.true}
    exec(instrument(tests).source, {**names, **calls, "_opd_alternative": lambda: None})
    return seen.results


def test_asserts_become_checks_wherever_they_stand() -> None:
    tests = """
def check(f):
    for i in range(2):
        assert f(i) == i, f'message {i}'
    if f(0):
        assert f(5) == 5
assert f(1) and not f(0)
with open('/dev/null'):
    assert (y := f(3)) == 3
    assert y != 3
check(f)
"""
    assert run_instrumented(tests, f=lambda x: x) == [(2, True), (3, True), (4, False), (0, True), (0, True)]
    assert instrument(tests).labels == ("f(i)", "f(5)", "f(1) and (not f(0))", "(y := f(3))", "y != 3")


def test_an_exception_fails_its_check_and_the_rest_runs() -> None:
    def f(x: int) -> int:
        if x == 2:
            raise SystemExit(0)
        return 1 // x

    assert run_instrumented("assert f(0) == 0\nassert f(2) == 2\nassert f(1) == 1", f=f) == [
        (0, False),
        (1, False),
        (2, True),
    ]


def test_sides_are_evaluated_in_order_and_once() -> None:
    calls: list[int] = []

    def f(x: int) -> int:
        calls.append(x)
        return x

    run_instrumented("assert f(1) == f(2)\nassert 3 == f(3)", f=f)
    assert calls == [1, 2, 3]
    assert instrument("assert 3 == f(3)\nassert 1 == x").labels == ("f(3)", "1")


def test_constant_asserts_are_no_checks() -> None:
    checks = instrument("assert True, 'fine'\nassert f()\ntry:\n    f()\n    assert False\nexcept ValueError: pass")
    assert checks.labels == ("f()",)
    assert "assert False" in checks.source


def test_a_file_of_tests_keeps_its_asserts_and_says_what_came() -> None:
    checks = instrument(
        "from solution import f\nassert f(0) == 1\ndef test_a():\n"
        "    assert f(1) == 2\n    assert f(2)\n    assert f(3), 'm'"
    )
    assert checks.labels == ("f(0)", "test_a")
    assert "_opd_equal(f(1), 2, True, 'f(1)')" in checks.source
    assert "_opd_true(f(2), 'f(2)')" in checks.source
    assert "_opd_reached()\n    assert f(3), 'm'" in checks.source
    assert checks.source.endswith("_opd_tests((1, 1, 'test_a', None, False))")


def test_long_labels_are_cut() -> None:
    (label,) = instrument(f"assert f({'x' * 500!r}) == 1").labels
    assert len(label) == 200


@pytest.mark.parametrize(
    ("tests", "in_process"),
    [
        ("from solution import solve, LIMIT, Strongest_Extension", False),
        ("from solution import TreeNode", True),
        ("from solution import P", True),
        ("from solution import *\nassert f() == 1", False),
        ("from solution import *\nassert f(Pair(1)) == 1", True),
        ("from solution import *\nfrom typing import List\nx: List = f(1)\nassert x == 1", False),
        ("from solution import *\nxs = [2, 1]\nf(xs)\nassert xs == [1, 2]", True),
        ("import solution\nassert solution.solve() == 1", False),
        ("import solution\nassert solution.Stack().pop() == 1", True),
        ("import solution\nclass Node: pass", True),
        ("import io, contextlib, solution\nwith contextlib.redirect_stdout(io.StringIO()): f()", True),
        ("from fractions import Fraction", False),
        ("import numpy as np\nfrom solution import f\nassert np.allclose(f(1), 2)", False),
        ("import numpy as np\nfrom solution import f\nassert f(np.array([1])) == 2", True),
        ("import math, random", False),
        ("from solution import Solution\nassert Solution().f() == 1", False),
        ("import solution, unittest\nclass A(unittest.TestCase):\n    def test_a(self): pass", False),
        ("import solution\nclass TestA:\n    def test_a(self): pass", False),
        ("import solution\ndef test_a(capsys): pass", True),
        ("import numpy as np", False),
        ("assert run_program('1') == '2'", False),
        ("from solution import f\nroot = f(1)\nroot.left = f(2)", True),
        ("from solution import f\nassert f(1).x == 2", True),
        ("from solution import f\nassert f(1).upper() == 'A'", False),
        ("from solution import f\nassert next(f(1)) == 2", True),
        ("from solution import f\nassert f.__name__ == 'f'", True),
        ("from solution import f\nassert f(open('x')) == 2", True),
        ("import solution\nassert solution.f('solution.py')", True),
        ("exec(compile(text('solution' + '.py'), '', 'exec'))\nassert f(1) == 2", True),
        ("import runpy\nassert runpy.run_path(FILE)['f'](1) == 2", True),
        ("import os, sys\nsys.path.insert(0, os.getcwd())\nfrom solution import f\nassert f(1) == 2", False),
    ],
)
def test_the_tests_alone_decide_whether_one_process_is_needed(tests: str, in_process: bool) -> None:
    assert instrument(tests).in_process is in_process


def test_undefined_names() -> None:
    tests = """
import os.path as path, sys
from math import sqrt as root
def check(candidate, *rest, key=None):
    total = sum(x for x in rest)
    try:
        assert candidate(total) == helper(key, path, sys, root)
    except ValueError as error:
        print(error)
[other for other in LIST]
check(solve)
"""
    assert undefined_names(tests) == ["LIST", "helper", "solve"]
    with pytest.raises(SyntaxError):
        undefined_names("def")


@pytest.mark.parametrize(
    ("tests", "entry_point", "names", "modules"),
    [
        ("assert f(1) == sys.maxsize", "f", ["f"], ["sys"]),
        ("assert abs(f(1)) == LIMIT", "f", ["LIMIT", "f"], []),
        ("assert sum(1, 2) == 3", "sum", ["sum"], []),
        ("assert bisect([1], 2) == 1", "bisect", ["bisect"], []),
        ("from math import *\nassert f(4) == sqrt(16)", "f", ["f"], []),
        ("def near(a, b): return a == b\nfrom solution import *\nassert near(f(1), g)", None, ["f", "g"], []),
        ("assert f(1) == Json(run_program(''))", "f", ["f"], []),
    ],
)
def test_names_that_nothing_else_gives_are_the_solutions(
    tests: str, entry_point: str | None, names: list[str], modules: list[str]
) -> None:
    assert wanted_names(ast.parse(tests), entry_point) == (names, modules)


def test_import_star_is_spelled_out() -> None:
    star = "from solution import *\nassert abs(f(1)) == len(g)"
    assert instrument(star).source.startswith("from solution import f, g\n")
    with pytest.raises(ValueError, match="import everything from 'helpers'"):
        instrument(f"from helpers import *\n{star}")


def test_what_is_no_assert_stays_as_it_is() -> None:
    source = "x = 1\n\n\ndef f():\n    return x"
    assert ast.dump(ast.parse(instrument(source).source)) == ast.dump(ast.parse(source))


@pytest.mark.slow
def test_examples_of_many_functions_are_found_in_time() -> None:
    public = "".join(f"def f{number}(x): pass\n>>> f{number}({number})\n" for number in range(2000))
    labels = tuple(f"candidate({number})" for number in range(1000, 3000))
    start = time.process_time()
    assert shown_checks(labels, public) == frozenset(range(1000))
    assert time.process_time() - start < 10, "it takes half a second"


@pytest.mark.parametrize(
    ("label", "public", "is_shown"),
    [
        ("f(1, 'a')", 'Example: f(1, "a") is 2.', True),
        ("f(1)", "g.f(1)", True),
        ("f(1)", "of(1)", False),
        ("candidate([1])", "def f(x): ...\n>>> f([1])", True),
        ("candidate([1])", "def f(x): ...\n>>> g([1])", False),
    ],
)
def test_an_example_of_the_task_is_shown(label: str, public: str, is_shown: bool) -> None:
    assert shown_checks((label,), public) == frozenset({0} if is_shown else ())
