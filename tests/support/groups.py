"""Small scored groups for unit tests."""

from typing import Literal

from agentic_opd.core.types import DistillArrays, TurnOutcome
from agentic_opd.wire.group import GroupDistillation, ScoredGroup, ScoredRollout, TurnRecord, VerdictCounts


def record(hint: str | None, span: tuple[int, int] = (1, 2), role: Literal["tool"] = "tool") -> TurnRecord:
    """A scored turn with this hint, or one that came to none."""
    return TurnRecord(span, TurnOutcome.SCORED if hint else TurnOutcome.VOTE_FAILED, role, hint=hint)


def rollout(
    *hints: str | None, passed: int = 2, score: float = 0.5, tokens: tuple[int, ...] | None = None
) -> ScoredRollout:
    """A prompt token and one sampled token a turn; each turn has its hint, or none."""
    ids = tokens or tuple(range(1, len(hints) + 2))
    spans = [(i, i + 1) for i in range(1, len(hints) + 1)]
    rows = [[], *([[ids[i], 90], [-1.0, -2.0]] if hint else [[], []] for i, hint in enumerate(hints, start=1))]
    return ScoredRollout(
        tokens_T=ids,
        masks_T=(-100, *ids[1:]),
        logprobs_T=(1.0, *(-0.5 for _ in ids[1:])),
        score=score,
        rows=DistillArrays([row and row[0] for row in rows], [row and row[1] for row in rows]),
        turns=tuple(record(hint, span) for hint, span in zip(hints, spans, strict=True)),
        num_turns=len(hints),
        checks=VerdictCounts("ran", passed, 2),
    )


def group(*rollouts: ScoredRollout, item_id: str = "t#0") -> ScoredGroup:
    """A group of these rollouts, or of one rollout with a turn without a hint."""
    about = GroupDistillation(distill_topk=2, hint_placement="end")
    task_id = item_id.partition("#")[0]
    return ScoredGroup(rollouts or (rollout(None),), item_id=item_id, task_id=task_id, distillation=about)
