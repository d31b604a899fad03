"""A module that hidden tests get for `import pytest`: the parts of pytest that tests of one function or class use."""

from __future__ import annotations

from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

FIXTURE = "_opd_fixture"
PARAMETERS = "_opd_parameters"


class Failed(BaseException):
    """`pytest.fail`, and a `raises` without an error."""


class Skipped(BaseException):
    """`pytest.skip`. No test that skips is counted as passed."""


class _Raises:
    """`raises` as a context manager, and what it gives."""

    def __init__(self, expected: Any, match: str | None) -> None:
        self._expected = expected
        self._match = match
        self.value: Any = None

    @property
    def type(self) -> Any:
        return type(self.value)

    def match(self, pattern: str) -> bool:
        import re

        if re.search(pattern, str(self.value)) is None:
            raise AssertionError(f"expected an error that matches {pattern!r}, got {str(self.value)!r}")
        return True

    def __enter__(self) -> _Raises:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        if error is None:
            raise Failed(f"did not raise {self._expected!r}")
        self.value = error
        if not isinstance(error, self._expected):
            return False
        return self._match is None or self.match(self._match)


def raises(expected: Any, *call: Any, match: str | None = None, **kwargs: Any) -> _Raises:
    """As pytest's: a context, or a function and its arguments."""
    context = _Raises(expected, match)
    if call:
        with context:
            call[0](*call[1:], **kwargs)
    return context


class approx:
    """Numbers, and lists, tuples and mappings of them, that are nearly equal."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> None:
        self._expected = expected
        self._nan_ok = nan_ok
        # As pytest: with an absolute tolerance alone there is no relative one.
        self._rel = (1e-6 if abs is None else 0.0) if rel is None else rel
        self._abs = 1e-12 if abs is None else abs

    def __eq__(self, got: object) -> bool:
        return self._near(got, self._expected)

    def __repr__(self) -> str:
        return f"approx({self._expected!r})"

    def _near(self, got: Any, expected: Any) -> bool:
        if isinstance(expected, dict):
            return isinstance(got, dict) and got.keys() == expected.keys() and self._all(got, expected, expected)
        if isinstance(expected, (list, tuple)):
            same = isinstance(got, (list, tuple)) and len(got) == len(expected)
            return same and self._all(got, expected, range(len(expected)))
        if got == expected:
            return True
        if not (isinstance(got, (int, float, complex)) and isinstance(expected, (int, float, complex))):
            return False
        if got != got or expected != expected:
            return self._nan_ok and got != got and expected != expected
        if abs(got) == float("inf") or abs(expected) == float("inf"):
            return False
        return abs(got - expected) <= max(self._rel * abs(expected), self._abs)

    def _all(self, got: Any, expected: Any, keys: Iterable[Any]) -> bool:
        return all(self._near(got[key], expected[key]) for key in keys)


class _Mark:
    """`mark`: `parametrize` does what pytest's does, any other mark nothing."""

    def parametrize(self, names: Any, rows: Iterable[Any], **_: Any) -> Callable[[Any], Any]:
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
        sets = [dict(zip(names, _values(row, len(names)), strict=True)) for row in rows]

        def mark(test: Any) -> Any:
            setattr(test, PARAMETERS, [*getattr(test, PARAMETERS, []), sets])
            return test

        return mark

    def __getattr__(self, name: str) -> Any:
        return _no_mark


def _no_mark(*args: Any, **kwargs: Any) -> Any:
    return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else _no_mark


class _Param(tuple):  # type: ignore[type-arg]
    """`pytest.param`: the values of one case."""


def _values(row: Any, count: int) -> Any:
    if isinstance(row, _Param):
        return row
    return row if count > 1 else (row,)


def param(*values: Any, **_: Any) -> _Param:
    """One case of `parametrize`."""
    return _Param(values)


def fixture(function: Any = None, *, autouse: bool = False, name: str | None = None, **_: Any) -> Any:
    """Mark a function as a fixture; each test gets one of its own, whatever its scope."""

    def mark(function: Any) -> Any:
        setattr(function, FIXTURE, {"autouse": autouse, "name": name})
        return function

    return mark if function is None else mark(function)


def fail(reason: str = "", **_: Any) -> None:
    """End the test as failed."""
    raise Failed(reason)


def skip(reason: str = "", **_: Any) -> None:
    """End the test, which counts as failed."""
    raise Skipped(reason)


def importorskip(name: str, *_: Any, **__: Any) -> Any:
    """The module."""
    return __import__(name)


def make_pytest() -> ModuleType:
    """The module for `sys.modules`."""
    pytest = ModuleType("pytest")
    vars(pytest).update(
        raises=raises,
        approx=approx,
        mark=_Mark(),
        param=param,
        fixture=fixture,
        fail=fail,
        skip=skip,
        xfail=fail,
        importorskip=importorskip,
    )
    return pytest
