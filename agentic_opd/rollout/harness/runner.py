"""The tests' process: runs the instrumented hidden tests, counts the checks, and signs what it reports.

Its input (stdin, read to the end before anything of the solution runs) is `pack_job`'s bytes; its output are lines
that `read_reports` reads. The solution's process can reach the same output pipe, so each report carries a keyed hash
that only the host and this process can make, and this process's memory is closed to others (PR_SET_DUMPABLE).
"""

from __future__ import annotations

import os
import sys

from agentic_opd.rollout.harness.test_side import SolutionModule, start
from agentic_opd.rollout.harness.wire import Ref, decode, encode

try:
    from _blake2 import blake2b
except ImportError:
    from hashlib import blake2b

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_FAILURES = 3
_MAX_TEXT = 200
_MAX_REPORTS = 1000
_PR_SET_DUMPABLE = 4


class Counter:
    """Counts checks, and reports the count each time it changes."""

    def __init__(self, out_fd: int, secret: bytes) -> None:
        self._out_fd = out_fd
        self._secret = secret
        self._reports = 0
        # failures: pairs of a check's number and what happened; error: why the tests ended early, if they did.
        self._state: dict[str, Any] = {"passed": 0, "executed": 0, "failures": [], "done": False, "error": None}

    def check_equal(self, number: int, left: object, right: object, call_is_left: bool) -> None:
        """Check number `number` is `left == right`; the one that is not the call is what was expected."""
        if left == right:
            self._count(number, None)
        else:
            got, expected = (left, right) if call_is_left else (right, left)
            self._count(number, f"expected {expected!r}, got {got!r}")

    def check_true(self, number: int, value: object) -> None:
        """Check number `number` is that `value` is true."""
        self._count(number, None if value else "is not true")

    def failed(self, number: int, error: BaseException) -> None:
        """Check number `number` raised."""
        self._count(number, error_text(error))

    def _count(self, number: int, failure: str | None) -> None:
        failures = self._state["failures"]
        self._state["executed"] += 1
        self._state["passed"] += failure is None
        if failure is not None and len(failures) < MAX_FAILURES and all(number != seen for seen, _ in failures):
            failures.append((number, shorten(failure)))
        # A loop may hold a million checks; from some number on only every hundredth is worth a line.
        if self._state["executed"] < _MAX_REPORTS or self._state["executed"] % 100 == 0:
            self.report()

    def report(self, **changes: object) -> None:
        """Write the state, signed, as one line."""
        self._state.update(changes)
        self._reports += 1
        body = encode((self._reports, self._state), _nothing_foreign)
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
    """`IndexError: list index out of range`."""
    text = str(error)
    return shorten(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _nothing_foreign(value: object) -> object:
    raise TypeError(f"a {type(value).__name__} is not plain data")


def pack_job(job: dict[str, Any]) -> bytes:
    """The input of this process."""
    return encode(job, _nothing_foreign)


def read_reports(secret: bytes, output: bytes) -> dict[str, Any] | None:
    """The last state that was reported with the right signature, None where there is none."""
    last: tuple[int, dict[str, Any] | None] = (0, None)
    for line in output.split(b"\n"):
        try:
            raw = bytes.fromhex(line.decode("ascii"))
        except ValueError:
            continue
        if len(raw) > 16 and raw[:16] == sign(secret, raw[16:]):
            report = decode(raw[16:], _no_refs)
            last = max(last, report, key=lambda item: item[0])
    return last[1]


def _no_refs(ref: Ref) -> object:
    raise ValueError(f"a report holds no reference, got {ref.kind}")


def main() -> None:
    """Run one job."""
    job = decode(sys.stdin.buffer.read(), _no_refs)
    out_fd = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    counter = Counter(out_fd, job.pop("secret"))
    _close_memory()
    counter.report()
    for path, content in job["files"].items():
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)  # noqa: PTH103, PTH120 - pathlib takes 5 ms to import
        with open(path, "wb") as file:  # noqa: PTH123
            file.write(content)
    counter.report(error=_run(counter, job), done=True)
    os._exit(0)


def _run(counter: Counter, job: dict[str, Any]) -> str | None:
    """Run the tests. Returns what made them end early, None where nothing did."""
    side = None if job["in_process"] else start(job["solution_program"])
    try:
        if side is None:
            sys.path.insert(0, os.getcwd())  # noqa: PTH109
            __import__("solution")
        else:
            sys.modules["solution"] = SolutionModule(side.request, side.request("import"))
    except BaseException as error:  # noqa: BLE001 - whatever the solution does when it is imported
        return f"solution.py could not be imported: {error_text(error)}"
    names = {
        "__name__": "__main__",
        "_opd_equal": counter.check_equal,
        "_opd_true": counter.check_true,
        "_opd_failed": counter.failed,
    }
    try:
        exec(compile(job["tests"], "hidden_tests.py", "exec"), names)
    except BaseException as error:  # noqa: BLE001 - the tests may raise anything outside of their checks
        return f"The tests ended early: {error_text(error)}"
    return None if side is None or side.gone is None else f"The tests ended early: {side.gone}"


def _close_memory() -> None:
    """Keep every other process of this user from this one's memory, descriptors and registers."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE) failed")
