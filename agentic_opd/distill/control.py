"""Accepted hints of other turns: what is read in a turn's place of its own hint, or beside it as a control. Pure.

A control hint stands where the turn's hint stands and says nothing about the turn: what it explains of a gap, any hint
would have explained.
"""

from collections import OrderedDict
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from agentic_opd.distill.config import DistillConfig
from agentic_opd.wire.group import ControlKind

KEPT_HINTS = 64
"""Different hints that are remembered of each task: the latest."""

KEPT_TASKS = 512
"""Tasks whose hints are remembered: those that had one last."""


class AcceptedHint(NamedTuple):
    """A hint, and the task of the turn that it was accepted for."""

    task_id: str
    text: str

    @property
    def words(self) -> str:
        """Its text as far as two hints that differ in it are two."""
        return " ".join(self.text.lower().split())


class HintPool:
    """Accepted hints by task, the latest ones; drawn from at random, each task as likely, then each of its hints."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = Random(seed)
        self._by_task: OrderedDict[str, OrderedDict[str, AcceptedHint]] = OrderedDict()

    def add(self, hint: AcceptedHint) -> None:
        """Remember a hint; one that is known already becomes the latest."""
        hints = self._by_task.setdefault(hint.task_id, OrderedDict())
        self._by_task.move_to_end(hint.task_id)
        hints[hint.words] = hint
        hints.move_to_end(hint.words)
        if len(hints) > KEPT_HINTS:
            hints.popitem(last=False)
        if len(self._by_task) > KEPT_TASKS:
            self._by_task.popitem(last=False)

    def of_other_task(self, *known: AcceptedHint) -> AcceptedHint | None:
        """A hint that has neither the task nor the text of a `known` one; None if there is no such hint."""
        tasks = {hint.task_id for hint in known}
        fitting = [self._fitting(task, known) for task in self._by_task if task not in tasks]
        return self._drawn([hints for hints in fitting if hints])

    def of_same_task(self, task_id: str, *known: AcceptedHint) -> AcceptedHint | None:
        """A hint of the task that has the text of no `known` one; None if there is no such hint."""
        fitting = self._fitting(task_id, known)
        return self._drawn([fitting] if fitting else [])

    def _fitting(self, task_id: str, known: tuple[AcceptedHint, ...]) -> list[AcceptedHint]:
        texts = {hint.words for hint in known}
        return [hint for words, hint in self._by_task.get(task_id, {}).items() if words not in texts]

    def _drawn(self, fitting: list[list[AcceptedHint]]) -> AcceptedHint | None:
        return self._rng.choice(self._rng.choice(fitting)) if fitting else None


class ControlHint(NamedTuple):
    """A hint that serves as a control."""

    kind: ControlKind
    text: str


def control_hints(
    config: DistillConfig, pool: HintPool, own: AcceptedHint, read: AcceptedHint
) -> Iterator[ControlHint]:
    """Yield what may serve as the control of a turn, the best first: none with `control: none`.

    Args:
        config: The distillation settings.
        pool: Hints accepted so far.
        own: The hint that was accepted for the turn.
        read: What the teacher reads: that, or one in its place. No control has the text of one of these.
    """
    found = None
    if config.control == "other":
        found = pool.of_other_task(own, read)
    elif config.control == "same_task":
        found = pool.of_same_task(own.task_id, own, read)
    if found is not None:
        yield ControlHint("other" if config.control == "other" else "same_task", found.text)
    neutral = AcceptedHint("", config.control_neutral_hint)
    if config.control != "none" and neutral.words not in (own.words, read.words):
        yield ControlHint("neutral", neutral.text)
