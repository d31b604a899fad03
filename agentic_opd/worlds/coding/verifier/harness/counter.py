"""Count the checks of the hidden tests and report the results, signed to prove that this process wrote them.

The tests alone determine the numbers of the checks. A check passes if it is reached and is true every time. So a
solution cannot add checks that it passes.
"""

from __future__ import annotations

import builtins
import os
import sys

from agentic_opd.worlds.coding.verifier.harness.clock import Clock, TookTooLong
from agentic_opd.worlds.coding.verifier.harness.pipe import SHOWN_DIGITS, NoAnswer, encode, solution_line
from agentic_opd.worlds.coding.verifier.harness.programs import ProgramError

try:
    from _blake2 import blake2b
except ImportError:
    from hashlib import blake2b

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from agentic_opd.worlds.coding.verifier.harness.test_side import SolutionProcess

_MAX_FAILURES = 3
_MAX_TEXT = 200


class CheckFailed(AssertionError):
    """A condition of a check is false; `manner` is how, see `_manner`."""

    manner = "assertion"


class CountedCheck:
    """Context of one check of the tests; any exception in it fails only this check."""

    def __init__(self, counter: Counter, number: int, *, is_reached: bool = False) -> None:
        self._counter, self.number = counter, number
        self.is_reached = is_reached  # A condition was reached: the check passes if it ends without an error.
        self.false: CheckFailed | None = None  # Error of a false condition, even if the tests caught it.
        self.losses = 0

    def __enter__(self) -> None:
        self._counter.begin(self)

    def __exit__(self, kind: object, error: BaseException | None, traceback: Any) -> bool:
        self._counter.end(self, error)
        return True


class Counter:
    """Results of the checks; verify.py reads the reports."""

    def __init__(self, out_fd: int, secret: bytes, clock: Clock) -> None:
        self._out_fd, self._secret, self.clock = out_fd, secret, clock
        self._is_true: dict[int, bool] = {}
        self._open: list[CountedCheck] = []
        self._lost = self._late = 0
        self._failures: list[tuple[int, str, str, int]] = []
        self.process: SolutionProcess | None = None  # The solution's process, if it is a separate one.

    def check(self, number: int) -> CountedCheck:
        """Return a check that passes if it reaches conditions and all of them hold."""
        return CountedCheck(self, number)

    def equal(self, left: object, right: object, call_is_left: bool, label: str = "") -> None:
        """Raise CheckFailed unless `left == right`; the side that is not the call is the expected value."""
        self.reached()
        if left == right:
            return
        actual, expected = (left, right) if call_is_left else (right, left)
        text = f"expected {_described(expected, repr)}, got {_described(actual, repr)}"
        expected = getattr(expected, "expected", expected)
        is_same_type = type(actual) is type(expected)
        self._fail(text, "value" if is_same_type else f"type {type(actual).__name__} {type(expected).__name__}", label)

    def true(self, value: object, label: str = "") -> None:
        """Raise CheckFailed unless `value` is true."""
        self.reached()
        if not value:
            self._fail("is not true", "untrue", label)

    def reached(self) -> None:
        """Record that the innermost open check has reached a condition."""
        if self._open:
            self._open[-1].is_reached = True

    def alternative(self) -> None:
        """Forget the open check's false condition: a handler of the tests checks other conditions in its place."""
        if self._open:
            self._open[-1].false = None

    def _fail(self, text: str, manner: str, label: str) -> None:
        error = CheckFailed(f"{label}: {text}" if label else text)
        error.manner = CheckFailed.manner if label else manner
        if self._open:
            self._open[-1].false = error
        raise error

    def begin(self, check: CountedCheck) -> None:
        """Begin a check; a nested check uses the time of the outer one."""
        if not self._open:
            self.clock.start_share()
        self._open.append(check)
        check.losses = self.process.losses if self.process else 0

    def end(self, check: CountedCheck, error: BaseException | None) -> None:
        """End a check, with the error that ended it, if any."""
        if len(self._open) == 1:
            self.clock.start_share()
        self._open.pop()
        error = error or check.false
        if error is None and self.process and self.process.losses != check.losses:
            error = NoAnswer("the solution's process ended")
        if error is None:
            if check.is_reached:
                self._is_true.setdefault(check.number, True)
            return
        self.note(error)
        if self._is_true.get(check.number) is not False:
            self._is_true[check.number] = False
            if len(self._failures) < _MAX_FAILURES:
                self._failures.append((check.number, error_text(error), _manner(error), solution_line(error)))

    def note(self, error: BaseException) -> None:
        """Count an error if it ended the solution's process."""
        self._late += isinstance(error, TookTooLong)
        self._lost += isinstance(error, NoAnswer) and not isinstance(error, TookTooLong)

    def report(self, *, is_final: bool = False, error: str | None = None) -> None:
        """Write the results as one signed line; `error` is the reason why the tests ended early, if they did."""
        numbers = [[number for number, is_true in self._is_true.items() if is_true is kind] for kind in (True, False)]
        body = encode((is_final, *numbers, self._lost, self._late, self._failures, error))
        os.write(self._out_fd, b"\n" + (sign(self._secret, body) + body).hex().encode() + b"\n")


def sign(secret: bytes, body: bytes) -> bytes:
    """Return the keyed hash of a report."""
    return blake2b(body, key=secret, digest_size=16).digest()


def _shorten(text: str) -> str:
    text = " ".join(text.splitlines())
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."


def error_text(error: BaseException) -> str:
    """Return an error as one short line; the name is left out for errors of this package."""
    text, name = _described(error, str), type(error).__name__
    return _shorten(text if isinstance(error, (NoAnswer, CheckFailed)) else f"{name}: {text}" if text else name)


def _manner(error: BaseException) -> str:
    """Return how a check failed, as words that verify.py puts into a sentence: a kind, then names of types.

    Neither the error's text is among them, which may hold values of the tests, nor a name that is not an identifier.
    """
    if isinstance(error, NoAnswer):
        return "late" if isinstance(error, TookTooLong) else "lost"
    if isinstance(error, ProgramError):
        return "program"
    if isinstance(error, AssertionError) or type(error).__module__ == "_pytest.outcomes":
        return error.manner if type(error) is CheckFailed else CheckFailed.manner
    base = next(cls.__name__ for cls in type(error).__mro__ if getattr(builtins, cls.__name__, None) is cls)
    name = str(type(error).__name__)
    return f"raises {name if name.isidentifier() and len(name) <= _MAX_TEXT else base} {base}"


def _described(value: Any, describe: Callable[[Any], str]) -> str:
    """Return `describe(value)`, or the value's type if that fails, as it does for an integer of very many digits."""
    digits = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(SHOWN_DIGITS)
    try:
        return describe(value)
    except Exception as error:  # noqa: BLE001 - the solution's __repr__ or __str__ may be broken
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
    finally:
        sys.set_int_max_str_digits(digits)
