"""Runs the tests of a pytest or unittest file, one after the other, each counted as a check or, by its cases, several.

`import pytest` gives them pytest_stand_in.py: the real one takes longer to import than most tests to run, and need not
be there. unittest is the real one.
"""

from __future__ import annotations

import sys

from agentic_opd.worlds.coding.verifier.harness.counter import Counter, shown
from agentic_opd.worlds.coding.verifier.harness.pytest_stand_in import PARAMETERS, Fixtures, make_pytest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class TestCases:
    """The tests of one file, whose global names are `names`."""

    __test__ = False  # Not a class of tests, whatever pytest thinks of its name.

    def __init__(self, counter: Counter, names: dict[str, Any]) -> None:
        self._counter = counter
        self._names = names
        self._is_set_up = False
        sys.modules["pytest"] = make_pytest()

    def functions(self) -> dict[str, Any]:
        """What instrumented test files call."""
        return {"_opd_test": self.run, "_opd_require": require}

    def run(self, first: int, count: int, name: str, method: str | None) -> None:
        """Run the test `name`, or `method` of the class `name`; its cases are the checks from `first` on.

        If it turns out to have more cases than `count`, the last check stands for the rest.
        """
        owner = self._names[name]
        cases = self._cases(owner, method)
        for number in range(first, first + max(count, len(cases))):
            self._counter.begin()
            check = min(number, first + count - 1)
            try:
                self._set_up_module()
                cases[number - first]()
            except BaseException as error:  # noqa: BLE001 - a test may raise anything, and so may the solution
                self._counter.failed(check, error)
            else:
                self._counter.end(check, None)

    def _set_up_module(self) -> None:
        if not self._is_set_up:
            self._is_set_up = True
            for name in ("setUpModule", "setup_module"):
                if name in self._names:
                    _call_with_module(self._names[name])

    def _cases(self, owner: Any, method: str | None) -> list[Callable[[], None]]:
        if method is None:
            return self._parametrized(owner, None)
        if hasattr(owner, "assertEqual"):
            return [lambda: _run_unittest(owner(method))]
        return self._parametrized(getattr(owner, method), owner)

    def _parametrized(self, function: Any, owner: type | None) -> list[Callable[[], None]]:
        """One call for each set of parameters."""
        sets: list[dict[str, Any]] = [{}]
        for holder in (function, owner):
            for more in getattr(holder, PARAMETERS, ()):
                sets = [{**outer, **inner} for outer in sets for inner in more]
        return [lambda values=values: self._call(function, owner, values) for values in sets]

    def _call(self, function: Any, owner: type | None, values: dict[str, Any]) -> None:
        instance = None if owner is None else owner()
        fixtures = Fixtures(self._names, instance, values)
        bound = function if instance is None else getattr(instance, function.__name__)
        try:
            for name in ("setup_class", "setup_method"):
                if hasattr(instance, name):
                    _call_with_module(getattr(instance, name))
            fixtures.set_up()
            _finish(bound(**fixtures.arguments_of(bound)))
        finally:
            fixtures.tear_down()
            if hasattr(instance, "teardown_method"):
                _call_with_module(instance.teardown_method)  # type: ignore[union-attr]


def require(left: object, right: object, call_is_left: bool, label: str) -> None:
    """What `assert left == right` becomes in a test: an error that says what came."""
    if not left == right:  # noqa: SIM201 - an object may answer the two differently, and the tests ask for this one
        got, expected = (left, right) if call_is_left else (right, left)
        raise AssertionError(f"{label}: expected {shown(expected)}, got {shown(got)}")


def _call_with_module(function: Any) -> None:
    """Call a set-up function, which may take one argument that says what for."""
    code = function.__code__
    wanted = code.co_argcount - hasattr(function, "__self__") - len(function.__defaults__ or ())
    function(*[None] * wanted)


def _finish(result: Any) -> None:
    if hasattr(result, "__await__"):
        import asyncio

        asyncio.run(result)


def _run_unittest(case: Any) -> None:
    """Run one method of a TestCase with its set-up; raise what it raised."""
    import unittest

    class Result(unittest.TestResult):
        first: BaseException | None = None

        def addError(self, test: Any, err: Any) -> None:
            self.first = self.first or err[1]

        addFailure = addError

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
            if err is not None:
                self.addError(subtest, err)

        def addSkip(self, test: Any, reason: str) -> None:
            self.first = self.first or AssertionError(f"it was skipped: {reason}")

        def addUnexpectedSuccess(self, test: Any) -> None:
            self.first = self.first or AssertionError("it was expected to fail")

    result = Result()
    unittest.TestSuite([case]).run(result)
    if result.first is not None:
        raise result.first
    if result.testsRun != 1:
        raise AssertionError(f"{result.testsRun} tests ran, expected 1")
