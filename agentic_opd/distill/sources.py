"""Where a hint comes from when no judge writes it: what came after, the task's solution, a rollout that passed. Pure.

A source has a hint for a turn, or says why it has none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentic_opd.core.text import cut_middle
from agentic_opd.core.types import Episode, HindsightPair
from agentic_opd.distill.turns import changing_calls, makers
from agentic_opd.settings.fields import HintSource

FEEDBACK = "If you answer as you are about to, this is what comes of it:"
REFERENCE = "This is a right solution of the task:"
SIBLING = "Another attempt at this task, which passed in the end, did this, in this order:"


@dataclass(frozen=True, slots=True)
class Lack:
    """Why a source has no hint for a turn."""

    why: str


@dataclass(frozen=True, slots=True)
class Known:
    """What the sources may draw on."""

    episode: Episode
    pair: HindsightPair
    siblings: Sequence[Episode] = ()
    """The other rollouts of the group."""
    max_chars: int = 4000
    """Of what is told of a sibling."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a source has for a turn: one hint, or several of which the first that tells no secret is taken."""

    what: str
    """The sentence that each begins with."""
    texts: tuple[str, ...]


def feedback(known: Known) -> Told | Lack:
    """What came after the turn, word for word (SDPO)."""
    return Told(FEEDBACK, ("\n\n".join(one.text for one in known.pair.evidence),))


def reference(known: Known) -> Told | Lack:
    """The task's own solution (OPSD)."""
    solution = (known.episode.task.reference_solution or "").strip()
    return Told(REFERENCE, (solution,)) if solution else Lack("the task has no solution of its own")


def sibling(known: Known) -> Told | Lack:
    """How a rollout of the group that passed made what is judged, for each turn that made it wrong in this one.

    Of several the shortest is told, by all its calls that changed what is judged: nobody says which of them counted.
    """
    if _passed(known.episode):
        return Lack("this rollout passed itself")
    if known.pair.turn_index not in makers(known.episode):
        return Lack("the turn did not make what failed")
    passed = ("\n\n".join(changing_calls(one)) for one in known.siblings if _passed(one))
    told = sorted((text for text in passed if text), key=len)
    if not told:
        return Lack("no other rollout of the group passed")
    return Told(SIBLING, tuple(cut_middle(text, known.max_chars) for text in told))


def _passed(episode: Episode) -> bool:
    return episode.verification is not None and episode.verification.correctness == 1


SOURCES: dict[HintSource, Callable[[Known], Told | Lack]] = {
    "feedback": feedback,
    "reference": reference,
    "sibling": sibling,
}
