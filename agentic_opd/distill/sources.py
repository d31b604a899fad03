"""Where a hint comes from when no judge writes it: what came after, the task's solution, a rollout that passed. Pure.

A source has a hint for a turn, or says why it has none. Each begins with a sentence that says what it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentic_opd.core.text import cut_middle
from agentic_opd.core.types import Episode, HindsightPair
from agentic_opd.distill.turns import changing_calls, is_makers
from agentic_opd.settings.fields import HintSource

FEEDBACK = "If you answer as you are about to, this is what comes of it:"
REFERENCE = "This is a right solution of the task:"
SIBLING = "Another attempt at this task, which passed, did this:"


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


def feedback(known: Known) -> str | Lack:
    """What came after the turn, word for word (SDPO)."""
    return _told(FEEDBACK, "\n\n".join(one.text for one in known.pair.evidence))


def reference(known: Known) -> str | Lack:
    """The task's own solution (OPSD)."""
    solution = (known.episode.task.reference_solution or "").strip()
    return _told(REFERENCE, solution) if solution else Lack("the task has no solution of its own")


def sibling(known: Known) -> str | Lack:
    """How a rollout of the group that passed made what is judged, for the turn that made it wrong in this one.

    Of several the shortest is told, by its calls that changed what is judged.
    """
    if _passed(known.episode):
        return Lack("this rollout passed itself")
    if not is_makers(known.episode, known.pair):
        return Lack("the turn did not make what failed")
    passed = ("\n\n".join(changing_calls(one)) for one in known.siblings if _passed(one))
    told = sorted((text for text in passed if text), key=len)
    if not told:
        return Lack("no other rollout of the group passed")
    return _told(SIBLING, cut_middle(told[0], known.max_chars))


def _told(what: str, text: str) -> str:
    return f"{what}\n{text}"


def _passed(episode: Episode) -> bool:
    return episode.verification is not None and episode.verification.correctness == 1


SOURCES: dict[HintSource, Callable[[Known], str | Lack]] = {
    "feedback": feedback,
    "reference": reference,
    "sibling": sibling,
}
