"""Output of `check_tasks`: a bar or plain lines for a person, and one JSON line per task (I/O)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentic_opd.core.console import LiveBar, PrintableConsole
from agentic_opd.core.errors import OutputError
from agentic_opd.core.text import printable_line, text_lines
from agentic_opd.core.types import Verification, VerifyOutcome
from agentic_opd.wire.files import JsonLines

_NOT_PASSED = frozenset({VerifyOutcome.NO_SOLUTION, VerifyOutcome.CRASHED, VerifyOutcome.TIMEOUT})
_SHOWN_LINES = 4


@dataclass(frozen=True, slots=True)
class CheckedTask:
    """A task's verdict, and the duration of its verification in seconds."""

    task_id: str
    verification: Verification
    seconds: float

    @property
    def is_passed(self) -> bool:
        """Whether the tests ran to their end and all passed."""
        verdict = self.verification
        return verdict.outcome not in _NOT_PASSED and verdict.passed == verdict.total

    @property
    def outcome(self) -> str:
        """Outcome of the tests: `ran`, or `ran, in_process` if they shared a process with the solution."""
        verdict = self.verification
        return verdict.outcome.value + (", in_process" if verdict.in_process else "")

    def to_row(self) -> dict[str, Any]:
        """Return the JSON line's object."""
        verdict = self.verification
        return {
            "id": self.task_id,
            "correctness": verdict.correctness,
            "passed": verdict.passed,
            "total": verdict.total,
            "outcome": self.outcome,
            "seconds": round(self.seconds, 3),
        }

    def to_text(self) -> str:
        """Return the result as text; a failure with the first lines of its report."""
        verdict = self.verification
        counts = f"{verdict.passed} of {verdict.total} passed ({self.seconds:.1f} s)"
        text = f"{printable_line(self.task_id)}: {counts}, {self.outcome}"
        if self.is_passed:
            return text
        report = "".join(f"\n    {line[:300]}" for line in text_lines(verdict.report)[1 : 1 + _SHOWN_LINES])
        return f"FAIL {text}{report}"


class ResultLines:
    """Writes one JSON line per task, in the order of the tasks, to a file or to standard output.

    A line is written once the lines of all earlier tasks are; `close` writes the remaining ones.
    """

    def __init__(self, path: Path | None) -> None:
        """Open `path`, replacing an existing file.

        Raises:
            OutputError: the file cannot be written.
        """
        self._next = 0
        self._waiting: dict[int, CheckedTask] = {}
        self._lines = JsonLines(path, hint="Choose another --out.")

    def add(self, number: int, checked: CheckedTask) -> None:
        """Add the result of the task at index `number`.

        Raises:
            OutputError: the line cannot be written to the disk or to standard output.
        """
        self._waiting[number] = checked
        while self._next in self._waiting:
            self._write(self._next)
            self._next += 1

    def close(self) -> None:
        """Write the remaining lines in order, and close the file."""
        for number in sorted(self._waiting):
            self._write(number)
        self._lines.close()

    def _write(self, number: int) -> None:
        try:
            self._lines.write(self._waiting.pop(number).to_row())
        except OutputError:
            self._waiting.clear()
            raise


class CheckProgress(LiveBar):
    """A live bar in a terminal, with failures above it; elsewhere a line per task."""

    def __init__(self, total: int) -> None:
        super().__init__("tasks", total, console=PrintableConsole(stderr=True, highlight=False))
        self._total = total
        self.passed = 0
        self.failed = 0

    @property
    def counts(self) -> str:
        """Text with the numbers of passed and failed tasks so far."""
        return f"{self.passed} passed, {self.failed} failed"

    def done(self, checked: CheckedTask) -> None:
        """Count a checked task and show it."""
        self.passed += checked.is_passed
        self.failed += not checked.is_passed
        if not self.is_live:
            self.say(f"{self.passed + self.failed}/{self._total} {checked.to_text()}")
            return
        if not checked.is_passed:
            self.say(checked.to_text())
        self.show(self.passed + self.failed, self.counts)
