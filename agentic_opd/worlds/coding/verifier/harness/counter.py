"""Counts the checks of the hidden tests and reports the count, signed, so that only this process can have written it.

A check is a number below the number of checks, which the tests alone decide. It passes if it is reached and is true
each time (an `assert` in a loop); so no solution can add checks that it passes.
"""

from __future__ import annotations

import os

from agentic_opd.worlds.coding.verifier.harness.clock import TookTooLong
from agentic_opd.worlds.coding.verifier.harness.pipe import NoAnswer, encode, solution_line

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


class Counter:
    """What came of each check so far; verify.py reads its reports, and says what they hold."""

    def __init__(self, out_fd: int, secret: bytes, clock: Clock) -> None:
        self._out_fd = out_fd
        self._secret = secret
        self._clock = clock
        self._is_true: dict[int, bool] = {}
        self._running: list[int] = []
        self._lost = self._late = 0
        self._failures: list[tuple[int, str, str, int]] = []
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
            kinds = ["None" if one is None else f"a value of type {type(one).__name__}" for one in (got, expected)]
            manner = "it gives another value than expected"
            if type(got) is not type(expected):
                manner = "it gives {} where {} is expected".format(*kinds)
            self.end(number, f"expected {shown(expected)}, got {shown(got)}", manner)

    def check_true(self, number: int, value: object) -> None:
        """Check number `number` is that `value` is true."""
        self.end(number, None if value else "is not true", "it is not true")

    def failed(self, number: int, error: BaseException) -> None:
        """Check number `number` raised."""
        self.note(error)
        self.end(number, error_text(error), _manner(error), solution_line(error))

    def note(self, error: BaseException) -> None:
        """Remember an error that is the end of the solution's process."""
        if isinstance(error, TookTooLong):
            self._late += 1
        elif isinstance(error, NoAnswer):
            self._lost += 1

    def end(self, number: int, failure: str | None, manner: str = "", line: int = 0) -> None:
        """The check that began last has passed (`failure` is None), or failed.

        `failure` says what was expected and what came, `manner` the same without any value of the tests, and `line`
        where in solution.py it raised: 0 if it did not, or elsewhere.
        """
        losses = self._running.pop() if self._running else self._losses()
        if failure is None and losses != self._losses():
            failure = manner = "the solution's process ended"
            self._lost += 1
        if not self._running:
            self._clock.start_share()
        if failure is None:
            self._is_true.setdefault(number, True)
        elif self._is_true.get(number) is not False:
            self._is_true[number] = False
            if len(self._failures) < MAX_FAILURES:
                self._failures.append((number, shorten(failure), manner, line))

    def _losses(self) -> int:
        return 0 if self.side is None else self.side.losses

    def report(self, *, done: bool = False, error: str | None = None) -> None:
        """Write what came of the checks, signed, as one line; `error` is why the tests ended early, if they did."""
        counts = (sum(self._is_true.values()), self._lost, self._late)
        body = encode((done, *counts, self._failures, error))
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


def _manner(error: BaseException) -> str:
    """What an error is, without its text, which may hold values of the tests."""
    if isinstance(error, TookTooLong):
        return "it does not end in time"
    if isinstance(error, NoAnswer):
        return "the solution's process ended"
    if isinstance(error, AssertionError):
        return "an assertion of the test failed"
    return f"it raises {shorten(type(error).__name__)}"


def shown(value: object) -> str:
    """Its repr."""
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - a number with too many digits, or an object of the solution
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
