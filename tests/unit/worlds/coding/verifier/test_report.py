"""What the host makes of the reports of the tests' process, whatever it says and however it ends."""

import asyncio
import marshal
import time
from typing import Any, Self

import pytest

from agentic_opd.core.errors import SandboxError
from agentic_opd.core.types import Task, Verification, VerifyOutcome
from agentic_opd.sandboxes.protocol import CommandResult
from agentic_opd.worlds.coding.verifier.harness.counter import sign
from agentic_opd.worlds.coding.verifier.harness.pipe import encode
from agentic_opd.worlds.coding.verifier.verify import CheckReport, Failure, last_report, verify

TESTS = "from solution import f\nassert f(1) == 2\nassert f(2) == 4\n"


def line(secret: bytes, report: Any) -> bytes:
    body = report if type(report) is bytes else encode(report)
    return (sign(secret, body) + body).hex().encode()


def fields(**other: Any) -> tuple[Any, ...]:
    """What counter.py writes."""
    said = {"done": True, "passed": [], "failed": [], "lost": 0, "late": 0, "failures": [], "error": None}
    assert other.keys() <= said.keys()
    return (*{**said, **other}.values(),)


def test_only_signed_reports_count_and_that_of_the_end_wins() -> None:
    output = b"\n".join(
        [
            b"Hidden tests: 4 of 4 passed.",
            line(b"k", fields(passed=[1, 2], failed=[3], failures=[(3, "no", "it is not true", 0)], error="why")),
            line(b"k", fields(done=False, passed=[3])),
            line(b"other", fields(passed=[1])),
            line(b"k", fields(passed=[6]))[:-2],
            b"00",
        ]
    )
    assert last_report(b"k", output, 12) == CheckReport(
        True, frozenset({1, 2}), frozenset({3}), failures=(Failure(3, "no", "it is not true", 0),), error="why"
    )
    assert last_report(b"q", output, 12) is None


@pytest.mark.parametrize(
    "odd",
    [
        b"no message",
        7,
        (),
        {1: 2},
        fields()[:-1],
        fields(passed=[2]),
        fields(failed=[-1]),
        fields(passed=["0"]),
        fields(passed=[True]),
        fields(passed=2),
        fields(passed=None),
        fields(failures=None),
        fields(failures=[(2, "a check that the tests do not have", "", 0)]),
        fields(failures=[(-1, "no", "", 0)]),
        fields(failures=[(0, "no", "", -1)]),
        fields(failures=[(0, "no", "", 2**31)]),
        fields(lost=16**10_000),
        fields(late=-1),
        fields(error="x" * 2**16),
        fields(failures=[(0,)]),
        fields(failures=[(0, b"no")]),
        fields(done=1),
        fields(error=b"no"),
    ],
)
def test_a_signed_report_that_cannot_be_one_is_left_out(odd: Any) -> None:
    output = b"\n".join([line(b"k", fields(passed=[0, 1])), line(b"k", odd)])
    assert last_report(b"k", output, 2) == CheckReport(True, frozenset({0, 1}))


class Ended:
    """A sandbox in which the tests' process ends at once, in this way."""

    def __init__(self, result: CommandResult) -> None:
        self._result = result

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def check(self) -> None: ...

    async def run(self, command: str, timeout_s: float, stdin: bytes | None = None) -> CommandResult:
        return self._result


def verdict_of(result: CommandResult) -> Verification:
    return asyncio.run(verify(Task("t", "p", TESTS), lambda: Ended(result), {"solution.py": b""}, 10.0))


@pytest.mark.parametrize(
    ("result", "outcome", "why"),
    [
        (CommandResult(0, b""), "crashed", "The tests' process ended without a report (exit code 0)."),
        (CommandResult(137, b""), "crashed", "The tests' process ended without a report (exit code 137)."),
        (CommandResult(137, b"", timed_out=True), "timeout", "The tests did not end within 210 s."),
        (CommandResult(152, b""), "timeout", "The tests did not end within 10 s of processor time."),
        (CommandResult(137, b"", stopped=True), "crashed", "The solution stopped the tests' process."),
        (CommandResult(137, b"", idle=True), "timeout", "The tests did nothing for 25 s."),
        (CommandResult(1, b"", disk_exceeded=True), "crashed", "The solution's files take more space than is allowed."),
        (CommandResult(1, b"", memory_exceeded=True), "crashed", "The solution took more memory than is allowed."),
        (
            CommandResult(137, b"", memory_exceeded=True, timed_out=True),
            "crashed",
            "The solution took more memory than is allowed.",
        ),
    ],
)
def test_an_end_without_a_report_is_counted(result: CommandResult, outcome: str, why: str) -> None:
    verdict = verdict_of(result)
    assert (verdict.outcome, verdict.passed, verdict.total) == (VerifyOutcome(outcome), 0, 2)
    assert verdict.report == f"Hidden tests: 0 of 2 passed.\n{why}"


def test_a_verifier_that_does_not_start_is_the_sandboxes_fault() -> None:
    with pytest.raises(SandboxError, match="the verifier did not start: exit code 1, 'no python'"):
        verdict_of(CommandResult(1, b"no python"))


def signed(key: bytes, **other: Any) -> Verification:
    """The verdict on a report that a solution in the tests' process has written."""

    class Signing(Ended):
        async def run(self, command: str, timeout_s: float, stdin: bytes | None = None) -> CommandResult:
            assert stdin is not None
            secret = marshal.loads(stdin[stdin.index(b"\n") + 1 :])["secret"]
            return CommandResult(0, line(secret, fields(**other)))

    return asyncio.run(
        verify(Task("t", "p", TESTS), lambda: Signing(CommandResult(0, b"")), {"solution.py": key}, 10.0)
    )


@pytest.mark.parametrize(
    "manner", ["it gives 4711", "value 4711", "raises E4711 E4711", "type 4711 int", "raises", "", "late\n4711"]
)
def test_a_report_chooses_among_the_words_that_the_judge_reads(manner: str) -> None:
    judged = signed(b"x = 1", failed=[0], failures=[(0, "4711\x1b[2J\n4711", manner, 1)] * 9)
    lines = judged.judge_report.split("\n")
    assert len(lines) == 4
    assert not any("4711" in text for text in lines)
    assert "\x1b" not in judged.report
    assert len(judged.report.split("\n")) == 4


def test_a_large_output_is_searched_in_linear_time() -> None:
    outputs = [b"\n" * 2**22, b"0\n" * 2**21, (b"0" * 99 + b"\n") * 2**15, b"0" * 2**22, b"g".join([b"0" * 64] * 2**16)]
    start = time.process_time()
    assert [last_report(b"k", output, 2) for output in outputs] == [None] * len(outputs)
    assert time.process_time() - start < 5.0
