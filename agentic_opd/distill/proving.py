"""TurnContext + Hint -> HintProof: does the policy end better with the hint? (I/O by a given function)

The distiller knows no world. The environment gives it a `ProveHint`, which replays the episode (`hint.proof: replay`).
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agentic_opd.core.errors import RendererError
from agentic_opd.core.types import Episode, ProofVerdict, TeacherRequest, TurnOutcome
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.evidence import TurnContext
from agentic_opd.distill.hints import Hint
from agentic_opd.distill.insertion import hint_place, insert_hint
from agentic_opd.distill.scoring import NotScored
from agentic_opd.distill.servers import DistillServers
from agentic_opd.wire.group import ProofRecord


@dataclass(frozen=True, slots=True)
class HintProof:
    """The record of a hint's continuations, their number, and the time from the first to the last one."""

    record: ProofRecord
    rollouts: int
    seconds: float
    unhinted: tuple[Episode, ...] = ()
    """Continuations of a first turn without the hint: rollouts of the task like any other (`hint.proof.join`)."""


ProveHint = Callable[[TurnContext, TeacherRequest, Callable[[int], bool]], Awaitable[HintProof]]
"""Plays continuations of a turn with the hint of the request and without it. The function in its arguments is asked for
each number of further continuations whether the episode's budget allows them.

Raises ServerError or SandboxError if nothing can be played.
"""


@dataclass(slots=True)
class Budget:
    """Number of continuations that are left for the hints of an episode."""

    left: int

    def spend(self, count: int) -> bool:
        """Take `count` continuations from the budget; return False, and take none, if it has fewer."""
        if count > self.left:
            return False
        self.left -= count
        return True


async def prove_hint(
    context: TurnContext,
    hint: Hint,
    servers: DistillServers,
    config: DistillConfig,
    prove: ProveHint,
    budget: Budget,
) -> tuple[HintProof | None, NotScored | None]:
    """Return the proof of a hint (None if it can't be inserted), and why it is not scored (None if it is proven)."""
    if not hint.read.text:
        return None, NotScored(TurnOutcome.UNPROVEN, "its source withholds the hint from the teacher")
    position = hint_place(context.trace, context.turn, config.hint.placement)
    try:
        ids = servers.hint_encoder.encode(hint.text, as_message=position.as_message)
    except RendererError as error:
        return None, NotScored(TurnOutcome.UNPROVEN, str(error))
    request = insert_hint(context.trace, context.turn, position.insert_at, ids)
    proof = await prove(context, request, budget.spend)
    record = proof.record
    if record.verdict is ProofVerdict.PROVEN:
        return proof, None
    if record.verdict is ProofVerdict.REFUTED:
        return proof, NotScored(TurnOutcome.REFUTED, "the policy passes less often with the hint", request)
    passed, played = record.with_hint or (0, 0)
    why = f"passed {passed} of {played} with the hint, {record.without_hint[0]} of {record.without_hint[1]} without"
    if not proof.rollouts:
        why = "the episode's budget of continuations (hint.proof.rollouts) is spent"
    return proof, NotScored(TurnOutcome.UNPROVEN, record.not_replayed or why, request)
