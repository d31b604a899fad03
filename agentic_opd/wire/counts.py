"""Counts of rollouts, turns, hints and tokens in groups, shared by runs, metrics and reports. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields

from agentic_opd.core.precision import root_mean_square
from agentic_opd.core.types import IGNORED, JudgeTokens, TurnOutcome
from agentic_opd.wire.group import JudgedTrajectory, ScoredGroup, ScoredRollout, TurnRecord


@dataclass(slots=True)
class TurnCounts:
    turns: int = 0
    hints: int = 0
    outcomes: Counter[TurnOutcome] = field(default_factory=Counter[TurnOutcome])

    @property
    def scored(self) -> int:
        return self.outcomes[TurnOutcome.SCORED]

    def add(self, records: Iterable[TurnRecord]) -> None:
        for record in records:
            self.turns += 1
            self.hints += record.hint is not None
            self.outcomes[record.outcome] += 1

    def merge(self, counts: "TurnCounts") -> None:
        self.turns += counts.turns
        self.hints += counts.hints
        self.outcomes.update(counts.outcomes)


@dataclass(slots=True)
class JudgeCounts:
    """Questions to the judge, and the tokens of those whose endpoint counts them."""

    questions: int = 0
    uncounted: int = 0
    """Questions of which the tokens are not known."""
    read_tokens: int = 0
    sampled_tokens: int = 0

    @classmethod
    def of(cls, records: Iterable[TurnRecord], trajectory: JudgedTrajectory | None) -> "JudgeCounts":
        """Count the questions about the turns of these records, and about their rollout as a whole."""
        tokens = [record.judge_tokens for record in records if record.question is not None]
        tokens += [window.judge_tokens for window in trajectory.windows] if trajectory else []
        counted = JudgeTokens.total(answer for answer in tokens if answer is not None) or JudgeTokens(0, 0)
        return cls(len(tokens), tokens.count(None), counted.read, counted.sampled)

    def merge(self, counts: "JudgeCounts") -> None:
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(counts, count.name))


@dataclass(slots=True)
class RolloutCounts:
    """Sums over rollouts; `score` is the sum of scores."""

    rollouts: int = 0
    verified: int = 0
    """Rollouts with counts of passed checks."""
    passed: int = 0
    score: float = 0.0
    assistant_turns: int = 0
    tokens: int = 0
    sampled_tokens: int = 0
    scored_tokens: int = 0
    records: TurnCounts = field(default_factory=TurnCounts)

    def add(self, rollout: ScoredRollout, *, is_first: bool = True) -> None:
        """Count one sequence; only the first branch of a rollout (`is_first`) counts as a rollout."""
        if is_first:
            self.rollouts += 1
            self.verified += rollout.checks is not None
            self.passed += rollout.checks is not None and rollout.checks.all_passed
            self.score += rollout.score
        self.assistant_turns += rollout.num_turns or 0
        self.tokens += len(rollout.tokens_T)
        self.sampled_tokens += len(rollout.masks_T) - rollout.masks_T.count(IGNORED)
        self.records.add(rollout.turns or ())
        self.scored_tokens += len(rollout.row_positions)

    def merge(self, counts: "RolloutCounts") -> None:
        for count in fields(self):
            if count.name != "records":
                setattr(self, count.name, getattr(self, count.name) + getattr(counts, count.name))
        self.records.merge(counts.records)


class RunCounts:
    """Counts of a run's groups, per task and in total; `distilled` is True once a group was distilled."""

    def __init__(self) -> None:
        self.by_task: dict[str, RolloutCounts] = {}
        self.total = RolloutCounts()
        self.no_verdicts = Counter[str]()
        """Rollouts that their groups leave out because their tests gave no verdict, by cause."""
        self.noise_floor: float | None = None
        self._noise_rms: list[float] = []
        self.distilled = False

    def add(self, group: ScoredGroup) -> None:
        of_task = self.by_task.setdefault(group.task_id or "", RolloutCounts())
        for rollout, is_first in zip(group.rollouts, group.is_first_of_rollout, strict=True):
            counts = RolloutCounts()
            counts.add(rollout, is_first=is_first)
            of_task.merge(counts)
            self.total.merge(counts)
        self.no_verdicts.update(group.no_verdicts or {})
        if group.distillation is not None:
            self.distilled = True
            floors = (self.noise_floor, group.distillation.noise_floor)
            self.noise_floor = max((floor for floor in floors if floor is not None), default=None)
            if group.distillation.noise_rms is not None:
                self._noise_rms.append(group.distillation.noise_rms)

    @property
    def noise_rms(self) -> float | None:
        """Root mean square of the gaps without a hint (nats), with equal weight per group; None if never measured."""
        return root_mean_square(self._noise_rms) if self._noise_rms else None


def rollout_rows(
    group: ScoredGroup, decode: Callable[[Sequence[int]], str], limit: int
) -> list[tuple[str, float, str, str]]:
    """Return (task, score, hints, text) of at most `limit` rollouts of a group, those with the most hints first.

    `hints` has one line per turn with a hint: `turn 2 (scored): ...`.
    """
    rows: list[tuple[int, tuple[str, float, str, str]]] = []
    for rollout in group.rollouts:
        turns = enumerate(rollout.turns or (), start=1)
        hints = [f"turn {i} ({turn.outcome.value}): {turn.hint}" for i, turn in turns if turn.hint is not None]
        rows.append((len(hints), (group.task_id or "", rollout.score, "\n".join(hints), decode(rollout.tokens_T))))
    rows.sort(key=lambda row: -row[0])
    return [row for _, row in rows[:limit]]
