"""What the demo policy may write for a task: correct solutions, and faults with the hints that mend them.

In: `variants.yaml`. Out: `TaskVariants` for each built-in task.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from agentic_opd.core.errors import DatasetError

_FILE = Path(__file__).with_name("variants.yaml")


@dataclass(frozen=True, slots=True)
class Fault:
    """A wrong solution: `mended` with the text `good` replaced by `bad`, which occurs once in `solution`."""

    name: str
    mended: str
    good: str
    bad: str
    hints: tuple[str, ...]
    hidden: bool
    """The public examples pass; only hidden tests fail."""

    def __post_init__(self) -> None:
        if self.mended.count(self.good) != 1 or self.solution.count(self.bad) != 1:
            raise DatasetError(f"fault {self.name!r}: good and bad must each occur exactly once in their solution")

    @property
    def solution(self) -> str:
        """The wrong solution's source."""
        return self.mended.replace(self.good, self.bad)

    @property
    def bad_line(self) -> str:
        """The first line of `bad` that `good` does not have, without its indentation; if it has all, the first."""
        good, bad = ([line.strip() for line in text.strip().split("\n")] for text in (self.good, self.bad))
        return next((line for line in bad if line not in good), bad[0])


@dataclass(frozen=True, slots=True)
class TaskVariants:
    """All that may be written for one task; `entry_point` is its function's name."""

    entry_point: str
    correct: tuple[str, ...]
    faults: tuple[Fault, ...]

    @property
    def visible(self) -> tuple[Fault, ...]:
        """The faults that the public examples show."""
        return tuple(fault for fault in self.faults if not fault.hidden)

    @property
    def hidden(self) -> tuple[Fault, ...]:
        """The faults that only hidden tests show."""
        return tuple(fault for fault in self.faults if fault.hidden)


@lru_cache(maxsize=1)
def load_variants() -> dict[str, TaskVariants]:
    """The variants of every built-in task by entry point."""
    rows: dict[str, dict[str, Any]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return {name: _variants(name, row) for name, row in rows.items()}


def _variants(entry_point: str, row: dict[str, Any]) -> TaskVariants:
    correct: list[str] = row["correct"]
    faults = [
        Fault(
            name=name,
            mended=correct[fault["of"]],
            good=fault["good"],
            bad=fault["bad"],
            hints=tuple(fault["hints"]),
            hidden=fault.get("hidden", False),
        )
        for name, fault in row["faults"].items()
    ]
    return TaskVariants(entry_point, tuple(correct), tuple(faults))
