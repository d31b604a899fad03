"""What the host makes of the reports of the tests' process, whatever it says and however it ends."""

import asyncio
from typing import Any, Self

import pytest

from agentic_opd.core.types import Task, VerifyOutcome
from agentic_opd.sandboxes.protocol import CommandResult
from agentic_opd.worlds.coding.verifier.harness.counter import sign
from agentic_opd.worlds.coding.verifier.harness.pipe import Ref, encode
from agentic_opd.worlds.coding.verifier.verify import Report, last_report, verify

TESTS = "from solution import f\nassert f(1) == 2\nassert f(2) == 4\n"


def line(secret: bytes, report: Any) -> bytes:
    body = report if type(report) is bytes else encode(report, lambda value: value)
    return (sign(secret, body) + body).hex().encode()


def fields(number: int = 1, **other: Any) -> tuple[Any, ...]:
    """What counter.py writes."""
    said = {"passed": 0, "settled": 0, "lost": 0, "late": 0, "failures": [], "done": False, "error": None}
    assert other.keys() <= said.keys()
    return (number, *{**said, **other}.values())


def test_only_signed_reports_count_and_the_last_one_wins() -> None:
    output = b"\n".join(
        [
            b"Hidden tests: 4 of 4 passed.",
            line(b"k", fields(2, passed=5, settled=1, failures=[(3, "no")], error="why")),
            line(b"k", fields(1, passed=3)),
            line(b"other", fields(9, passed=12)),
            line(b"k", fields(3, passed=6))[:-2],
            b"00",
        ]
    )
    assert last_report(b"k", output, 12) == Report(2, 5, 1, failures=((3, "no"),), error="why")
    assert last_report(b"q", output, 12) == Report()


@pytest.mark.parametrize(
    "odd",
    [
        b"no message",
        7,
        (),
        Ref("object", 1),
        fields()[:-1],
        fields(passed=3),
        fields(settled=1),
        fields(passed="2"),
        fields(passed=None),
        fields(failures=None),
        fields(failures=[(2, "a check that the tests do not have")]),
        fields(failures=[(-1, "no")]),
        fields(failures=[(0,)]),
        fields(failures=[(0, b"no")]),
        fields(done=1),
        fields(error=b"no"),
    ],
)
def test_a_signed_report_that_cannot_be_one_is_left_out(odd: Any) -> None:
    good = fields(passed=2, settled=1)
    output = b"\n".join([line(b"k", good), line(b"k", (2, *odd[1:]) if type(odd) is tuple else odd)])
    assert last_report(b"k", output, 2) == Report(1, 2, 1)


class Ended:
    """A sandbox in which the tests' process ends at once, with this exit code and output."""

    def __init__(self, exit_code: int, output: bytes = b"") -> None:
        self._result = CommandResult(exit_code, output)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def check(self) -> None: ...

    async def run(self, command: str, timeout_s: float, stdin: bytes | None = None) -> CommandResult:
        return self._result


@pytest.mark.parametrize("exit_code", [0, 137])
def test_an_end_before_the_first_report_is_a_crash(exit_code: int) -> None:
    verdict = asyncio.run(verify(Task("t", "p", TESTS), lambda: Ended(exit_code), {"solution.py": b""}, 10.0))
    assert (verdict.outcome, verdict.passed, verdict.total) == (VerifyOutcome.CRASHED, 0, 2)
    assert verdict.report.splitlines()[1] == (
        f"The tests' process ended before its first report (exit code {exit_code})."
    )
