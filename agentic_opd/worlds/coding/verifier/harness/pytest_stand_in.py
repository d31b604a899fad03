"""The parts of pytest that tests of one function or class use: a module for `import pytest`, and fixtures.

Fixtures are those that the file defines, and `tmp_path`, `capsys` and `monkeypatch`.
"""

from __future__ import annotations

import os
import sys
from types import FunctionType, MethodType, ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

FIXTURE = "_opd_fixture"
PARAMETERS = "_opd_parameters"


class Failed(BaseException):
    """`pytest.fail`, and a `raises` without an error."""


class Skipped(BaseException):
    """`pytest.skip`. A test that skips is not counted as passed."""


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


BUILTIN = ("tmp_path", "capsys", "monkeypatch")


class Fixtures:
    """The fixtures of one run of one test: each made when first asked for, and torn down in the opposite order."""

    def __init__(self, names: dict[str, Any], instance: object, values: dict[str, Any]) -> None:
        self._values = dict(values)
        self._makers: dict[str, Any] = {}
        self._ends: list[Callable[[], object]] = []
        methods = {name: getattr(instance, name) for name in dir(instance)} if instance is not None else {}
        for name, item in {**names, **methods}.items():
            # Only functions are asked: something of the solution's would be asked in its process.
            fixture = getattr(item, FIXTURE, None) if type(item) in (FunctionType, MethodType) else None
            if fixture is not None:
                self._makers[fixture["name"] or name] = item

    def set_up(self) -> None:
        """Make those that every test uses."""
        for name, maker in self._makers.items():
            if getattr(maker, FIXTURE)["autouse"]:
                self._value(name)

    def arguments_of(self, function: Any) -> dict[str, Any]:
        """What to call `function` with.

        Raises:
            LookupError: It asks for a fixture that does not exist.
        """
        code = function.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        without_default = names[: code.co_argcount - len(function.__defaults__ or ())]
        wanted = {*without_default[hasattr(function, "__self__") :], *(set(names) & self._values.keys())}
        wanted |= set(names[code.co_argcount :]) - (function.__kwdefaults__ or {}).keys()
        return {name: self._value(name) for name in names if name in wanted}

    def tear_down(self) -> None:
        """Undo what was made."""
        while self._ends:
            self._ends.pop()()

    def _value(self, name: str) -> Any:
        if name not in self._values:
            self._values[name] = self._make(name)
        return self._values[name]

    def _make(self, name: str) -> Any:
        if name not in self._makers:
            if name not in BUILTIN:
                raise LookupError(f"there is no fixture {name!r}")
            return getattr(self, f"_{name}")()
        maker = self._makers[name]
        made = maker(**self.arguments_of(maker))
        if type(made).__name__ != "generator":
            return made
        self._ends.append(lambda: next(made, None))
        return next(made)

    def _tmp_path(self) -> Any:
        import pathlib
        import tempfile

        return pathlib.Path(tempfile.mkdtemp())

    def _capsys(self) -> Any:
        capture = _Capture()
        self._ends.append(capture.end)
        return capture

    def _monkeypatch(self) -> Any:
        patch = _MonkeyPatch()
        self._ends.append(patch.undo)
        return patch


class _Capture:
    """`capsys`: what is printed in this process."""

    def __init__(self) -> None:
        self._before = sys.stdout, sys.stderr
        self._start()

    def _start(self) -> None:
        import io

        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()

    def readouterr(self) -> Any:
        import collections

        texts: list[str] = [stream.getvalue() for stream in (sys.stdout, sys.stderr)]  # type: ignore[attr-defined]
        self._start()
        return collections.namedtuple("CaptureResult", "out err")(*texts)  # pyright: ignore[reportUntypedNamedTuple]

    def end(self) -> None:
        sys.stdout, sys.stderr = self._before


class _MonkeyPatch:
    """`monkeypatch`: changes that end with the test."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def setattr(self, target: Any, name: str, value: object) -> None:
        before = getattr(target, name)
        self._undo.append(lambda: setattr(target, name, before))
        setattr(target, name, value)

    def setitem(self, mapping: Any, key: object, value: object) -> None:
        before = dict(mapping)
        self._undo.append(lambda: (mapping.clear(), mapping.update(before)))
        mapping[key] = value

    def delitem(self, mapping: Any, key: object, raising: bool = True) -> None:
        before = dict(mapping)
        self._undo.append(lambda: (mapping.clear(), mapping.update(before)))
        if raising or key in mapping:
            del mapping[key]

    def setenv(self, name: str, value: str) -> None:
        self.setitem(os.environ, name, str(value))

    def delenv(self, name: str, raising: bool = True) -> None:
        self.delitem(os.environ, name, raising)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
