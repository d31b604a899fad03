"""Hint sources that need no judge: the turn's evidence, the reference solution, a sibling rollout that passed. Pure.

A source returns hints for a turn (`Told`), or the reason why it has no hint (`Lack`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentic_opd.core.names import HintSource
from agentic_opd.core.text import cut_middle
from agentic_opd.core.types import Episode, HindsightPair
from agentic_opd.distill.turns import changing_calls, makers

FEEDBACK = "If you answer as you are about to, this is what comes of it:"
REFERENCE = "This is a right solution of the task:"
SIBLING = "Another attempt at this task, which passed in the end, did this, in this order:"


@dataclass(frozen=True, slots=True)
class Lack:
    """The reason why a source has no hint for a turn."""

    why: str


@dataclass(frozen=True, slots=True)
class Known:
    """Inputs of the sources."""

    episode: Episode
    pair: HindsightPair
    siblings: Sequence[Episode] = ()
    """The other rollouts of the group."""
    max_chars: int = 4000
    """Maximum length of a sibling's text, in characters."""


@dataclass(frozen=True, slots=True)
class Told:
    """One or more hints of a source for a turn; the first one that leaks no hidden test is used."""

    what: str
    """Sentence at the beginning of each hint."""
    texts: tuple[str, ...]


def feedback(known: Known) -> Told | Lack:
    """Return the turn's evidence verbatim (SDPO)."""
    return Told(FEEDBACK, ("\n\n".join(one.text for one in known.pair.evidence),))


def reference(known: Known) -> Told | Lack:
    """Return the task's reference solution (OPSD)."""
    solution = (known.episode.task.reference_solution or "").strip()
    return Told(REFERENCE, (solution,)) if solution else Lack("the task has no solution of its own")


def sibling(known: Known) -> Told | Lack:
    """Return how sibling rollouts that passed made the judged result; only for turns that made the failed result.

    A text holds all calls of a sibling that changed the judged result, because it is unknown which of them mattered.
    The shortest text comes first.
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
