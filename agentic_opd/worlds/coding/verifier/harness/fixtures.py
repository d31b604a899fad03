"""Fixtures of pytest files: those that the file defines, and `tmp_path`, `capsys` and `monkeypatch`."""

from __future__ import annotations

import os
import sys
from types import FunctionType, MethodType

from agentic_opd.worlds.coding.verifier.harness.pytest_stand_in import FIXTURE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

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
            LookupError: It asks for a fixture that there is not.
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
