"""Counts the checks of the hidden tests and reports the count, signed, so that only this process can have written it.

A check is a number below the number of checks, which the tests alone decide. It passes if it is reached and is true
each time (an `assert` in a loop); so no solution can add checks that it passes.
"""

from __future__ import annotations

import os
import time

from agentic_opd.worlds.coding.verifier.harness.clock import TookTooLong
from agentic_opd.worlds.coding.verifier.harness.pipe import NoAnswer, encode

try:
    from _blake2 import blake2b
except ImportError:
    from hashlib import blake2b

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentic_opd.worlds.coding.verifier.harness.clock import Clock
    from agentic_opd.worlds.coding.verifier.harness.test_side import TestSide

MAX_FAILURES = 3
_MAX_TEXT = 200
_MAX_PROMPT_REPORTS = 500
_REPORT_EVERY_S = 0.1


class Counter:
    """What came of each check so far; verify.py reads its reports, and says what they hold."""

    def __init__(self, out_fd: int, secret: bytes, repeated: frozenset[int], clock: Clock) -> None:
        self._out_fd = out_fd
        self._secret = secret
        self._repeated = repeated
        self._clock = clock
        self._is_true: dict[int, bool] = {}
        self._running: list[int] = []
        self._reports = 0
        self._reported_at = 0.0
        self._passed = self._settled = self._lost = self._late = 0
        self._failures: list[tuple[int, str]] = []
        self.side: TestSide | None = None
        """The way to the solution's process, if it has one of its own."""

    def begin(self) -> None:
        """A check begins. The time of one that runs inside another (in a callback) is the outer one's."""
        if not self._running:
            self._clock.start_share()
        self._running.append(self._losses())

    def check_equal(self, number: int, left: object, right: object, call_is_left: bool) -> None:
        """Check number `number` is `left == right`; the one that is not the call is what was expected."""
        if left == right:
            self.end(number, None)
        else:
            got, expected = (left, right) if call_is_left else (right, left)
            self.end(number, f"expected {shown(expected)}, got {shown(got)}")

    def check_true(self, number: int, value: object) -> None:
        """Check number `number` is that `value` is true."""
        self.end(number, None if value else "is not true")

    def failed(self, number: int, error: BaseException) -> None:
        """Check number `number` raised."""
        self.note(error)
        self.end(number, error_text(error))

    def note(self, error: BaseException) -> None:
        """Remember an error that is the end of the solution's process."""
        if isinstance(error, TookTooLong):
            self._late += 1
        elif isinstance(error, NoAnswer):
            self._lost += 1

    def end(self, number: int, failure: str | None) -> None:
        """The check that began last has passed, or failed like this."""
        losses = self._running.pop() if self._running else self._losses()
        if failure is None and losses != self._losses():
            failure = "the solution's process ended"
            self._lost += 1
        was_true = self._is_true.get(number)
        self._is_true[number] = failure is None and was_true is not False
        if not self._running:
            self._clock.start_share()
        if self._is_true[number] is was_true:
            return
        change = self._is_true[number] - bool(was_true)
        self._passed += change
        self._settled += change if number not in self._repeated else 0
        if failure is not None and len(self._failures) < MAX_FAILURES:
            self._failures.append((number, shorten(failure)))
        self.report_soon()

    def _losses(self) -> int:
        return 0 if self.side is None else self.side.losses

    def report_soon(self) -> None:
        """Report, unless there are so many checks that not every one is worth a line."""
        if self._reports < _MAX_PROMPT_REPORTS or time.monotonic() > self._reported_at + _REPORT_EVERY_S:
            self.report()

    def report(self, *, done: bool = False, error: str | None = None) -> None:
        """Write what came of the checks, signed, as one line; `error` is why the tests ended early, if they did."""
        self._reports += 1
        self._reported_at = time.monotonic()
        counts = (self._passed, self._settled, self._lost, self._late)
        body = encode((self._reports, *counts, self._failures, done, error), nothing_foreign)
        line = sign(self._secret, body) + body
        os.write(self._out_fd, b"\n" + line.hex().encode() + b"\n")


def sign(secret: bytes, body: bytes) -> bytes:
    """The keyed hash of a report."""
    return blake2b(body, key=secret, digest_size=16).digest()


def shorten(text: str) -> str:
    """One line of at most _MAX_TEXT characters."""
    text = " ".join(text.splitlines())
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."


def error_text(error: BaseException) -> str:
    """`IndexError: list index out of range`; for an end of the solution's process, only how it ended."""
    text = str(error)
    if isinstance(error, NoAnswer):
        return shorten(text)
    return shorten(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def nothing_foreign(value: object) -> object:
    """For `encode`: nothing but plain data is expected."""
    raise TypeError(f"a {type(value).__name__} is not plain data")


def shown(value: object) -> str:
    """Its repr."""
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - a number with too many digits, or an object of the solution
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
