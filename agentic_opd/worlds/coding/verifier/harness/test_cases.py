"""Run the tests of a pytest or unittest file, each counted as one check or, by its cases, as several.

pytest is sent only for files that use it, since importing it takes longer than running most tests.
"""

from __future__ import annotations

import os
import sys

from agentic_opd.worlds.coding.verifier.harness.counter import CountedCheck, Counter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    # First check, number of checks, function or class, method, whether it passes without reaching a condition.
    Test = tuple[int, int, str, str | None, bool]

_PYTEST_OPTIONS = (
    *("-s", "--no-header", "--assert=plain", "--tb=native", "--noconftest", "--rootdir=/", "-c/dev/null"),
    *("-pno:cacheprovider", "-pno:faulthandler", "-pno:junitxml", "-pno:pastebin"),
)


def load_pytest(packed: bytes) -> None:
    """Import pytest from a zip file of its modules."""
    file = os.memfd_create("pytest")
    os.write(file, packed)
    sys.path.insert(0, f"/proc/self/fd/{file}")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    __import__("pytest")


def run_tests(counter: Counter, names: dict[str, Any], *tests: Test) -> None:
    """Run the tests without pytest; `names` is the namespace of their file."""
    for number, _, name, method, is_reached in tests:
        with CountedCheck(counter, number, is_reached=is_reached):
            if hasattr(names[name], "assertEqual"):
                import unittest

                unittest.TestSuite([names[name](method)]).debug()
            else:
                _finish(names[name]() if method is None else getattr(names[name](), method)())


def _finish(result: Any) -> None:
    if hasattr(type(result), "__await__"):
        import asyncio

        asyncio.run(result)


def run_by_pytest(counter: Counter, names: dict[str, Any], *tests: Test) -> None:
    """Run the tests with pytest; cases beyond the counted number belong to the last check of their test.

    The time that pytest takes to start is not charged: on a slow machine it is more than many tests need.
    """
    import pytest

    plugin = _Plugin(counter, names, tests)
    pytest.hookimpl(wrapper=True)(_Plugin.pytest_runtest_makereport)
    counter.clock.pause()
    code = pytest.main([*_PYTEST_OPTIONS], [plugin])
    if plugin.raised is not None:
        raise plugin.raised
    if code not in (0, 5):
        raise RuntimeError(f"pytest could not run the tests: exit code {int(code)}")


class _Plugin:
    """A pytest plugin; its methods are pytest's hooks."""

    def __init__(self, counter: Counter, names: dict[str, Any], tests: tuple[Test, ...]) -> None:
        self._counter = counter
        self._names = names
        self._checks = {(name, method): (first, first + count - 1, bare) for first, count, name, method, bare in tests}
        self.raised: BaseException | None = None

    def pytest_collection(self) -> bool:
        return True  # The tests are in memory, not in a file.

    def pytest_runtestloop(self, session: Any) -> bool:
        from _pytest.runner import runtestprotocol

        try:
            items = [*self._items(session)]
            self._counter.clock.resume()
            for (check, item), (_, following) in zip(items, [*items[1:], (None, None)], strict=True):
                with check:
                    runtestprotocol(item, log=False, nextitem=following)
                    raised, self.raised = self.raised, None
                    if raised is not None:
                        raise raised
        except BaseException as error:  # noqa: BLE001 - pytest would print it
            self.raised = error
        return True

    def _items(self, session: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the counted tests, each as (check, pytest item)."""
        import pathlib

        import pytest

        module = type(sys)("hidden_tests")
        vars(module).update(self._names)

        class HiddenTests(pytest.Module):
            def _getobj(self) -> Any:
                return module

        todo: list[Any] = [HiddenTests.from_parent(session, path=pathlib.Path("/hidden_tests.py"))]
        while todo:
            node = todo.pop(0)
            if not hasattr(node, "runtest"):
                todo[:0] = node.collect()
                continue
            test = (node.cls.__name__, node.originalname) if node.cls else (node.originalname, None)
            if test in self._checks:
                number, last, is_reached = self._checks[test]
                self._checks[test] = min(number + 1, last), last, is_reached
                yield CountedCheck(self._counter, number, is_reached=is_reached), node

    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = yield
        if call.excinfo is not None:
            self.raised = self.raised or call.excinfo.value
        return report

    def pytest_pyfunc_call(self, pyfuncitem: Any) -> bool:
        _finish(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
        return True
