"""What the report knows of one rollout: frozen dataclasses, made by read.py from a checked group.

Shape suffixes as in types.py, and `_S` for the sampled positions of a sequence, in order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentic_opd.core.types import check_lengths


class Vote(NamedTuple):
    """One answer of the judge: its decision (None: it could not be read), its hint, and its words."""

    decision: int | None
    hint: str | None
    text: str


@dataclass(frozen=True, slots=True)
class TurnView:
    """One assistant turn `[start, end)` of the sequence and what became of it.

    `outcome` is None where the file has no record of the turn: the run was not distilled, or another program wrote it.
    """

    start: int
    end: int
    outcome: str | None = None
    next_state_role: str | None = None
    votes: tuple[Vote, ...] = ()
    hint: str | None = None
    hint_token_ids: tuple[int, ...] = ()
    insert_at: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TeacherTop:
    """The teacher's entries at the sampled positions, cut to those that are shown.

    `counts_S` says how many entries each sampled position has: 0 where it is not scored. `ids` and `logprobs` (nats)
    hold the entries of all positions one after the other; the first of a position is the sampled token's.
    """

    counts_S: NDArray[np.uint8]
    ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]

    def __post_init__(self) -> None:
        check_lengths("teacher's top", counts=int(self.counts_S.sum()), ids=len(self.ids), logprobs=len(self.logprobs))


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sequence of a group; `line` (from 1) and `index` (from 0) say where it stands in the file."""

    line: int
    index: int
    task_id: str
    score: float
    tokens_T: NDArray[np.int64]
    sampled_S: NDArray[np.int64]
    """The sampled positions."""
    student_S: NDArray[np.float64]
    """The policy's logprob (nats) of each sampled token."""
    teacher: TeacherTop
    turns: tuple[TurnView, ...]
    messages: tuple[Mapping[str, Any], ...]
    passed: int | None = None
    total: int | None = None
    reward: Mapping[str, float] | None = None
    stop_reason: str | None = None
    tool_errors: int | None = None
    noise_floor: float | None = None
    """The engine's noise (nats), measured once a group."""

    def __post_init__(self) -> None:
        check_lengths(
            "rollout", sampled=len(self.sampled_S), student=len(self.student_S), teacher=len(self.teacher.counts_S)
        )

    @property
    def is_scored_S(self) -> NDArray[np.bool_]:
        """Which sampled tokens have a teacher's row."""
        return self.teacher.counts_S > 0

    @property
    def gaps(self) -> NDArray[np.float64]:
        """Teacher minus student (nats) at the scored tokens, in order."""
        counts = self.teacher.counts_S[self.is_scored_S].astype(np.int64)
        first = np.cumsum(counts) - counts
        gaps: NDArray[np.float64] = self.teacher.logprobs[first] - self.student_S[self.is_scored_S]
        return gaps

    @property
    def is_passed(self) -> bool | None:
        """Whether all hidden tests passed; None where the file does not say."""
        return None if self.passed is None else self.passed == self.total


@dataclass(frozen=True, slots=True)
class Run:
    """A file of scored groups as the report reads it.

    `settings` is what stands in the `.run.json` beside it, empty where there is none; `left_out` says which lines are
    not in the report and why.
    """

    name: str
    settings: Mapping[str, Any]
    rollouts: tuple[Rollout, ...]
    left_out: tuple[str, ...] = ()
