"""Accepted hints of other turns, which replace a turn's hint or serve as its control. Pure.

A control hint takes the position of the turn's hint and does not concern the turn. It measures how much of a gap any
hint would explain.
"""

from collections import OrderedDict
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from agentic_opd.distill.config import DistillConfig
from agentic_opd.wire.group import ControlKind

KEPT_HINTS = 64
"""Number of distinct hints kept per task, the latest ones."""

KEPT_TASKS = 512
"""Number of tasks whose hints are kept, those with the latest hints."""


class AcceptedHint(NamedTuple):
    """An accepted hint and the task of its turn."""

    task_id: str
    text: str

    @property
    def words(self) -> str:
        """The text in lower case with single spaces; hints are equal if this is equal."""
        return " ".join(self.text.lower().split())


class HintPool:
    """The latest accepted hints by task; a draw picks a task uniformly, then one of its hints uniformly."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = Random(seed)
        self._by_task: OrderedDict[str, OrderedDict[str, AcceptedHint]] = OrderedDict()

    def add(self, hint: AcceptedHint) -> None:
        """Add a hint; a known hint becomes the latest."""
        hints = self._by_task.setdefault(hint.task_id, OrderedDict())
        self._by_task.move_to_end(hint.task_id)
        hints[hint.words] = hint
        hints.move_to_end(hint.words)
        if len(hints) > KEPT_HINTS:
            hints.popitem(last=False)
        if len(self._by_task) > KEPT_TASKS:
            self._by_task.popitem(last=False)

    def of_other_task(self, *known: AcceptedHint) -> AcceptedHint | None:
        """Draw a hint that shares neither task nor text with any `known` hint; None if there is no such hint."""
        tasks = {hint.task_id for hint in known}
        fitting = [self._fitting(task, known) for task in self._by_task if task not in tasks]
        return self._drawn([hints for hints in fitting if hints])

    def of_same_task(self, task_id: str, *known: AcceptedHint) -> AcceptedHint | None:
        """Draw a hint of the task that shares its text with no `known` hint; None if there is no such hint."""
        fitting = self._fitting(task_id, known)
        return self._drawn([fitting] if fitting else [])

    def _fitting(self, task_id: str, known: tuple[AcceptedHint, ...]) -> list[AcceptedHint]:
        texts = {hint.words for hint in known}
        return [hint for words, hint in self._by_task.get(task_id, {}).items() if words not in texts]

    def _drawn(self, fitting: list[list[AcceptedHint]]) -> AcceptedHint | None:
        return self._rng.choice(self._rng.choice(fitting)) if fitting else None


class ControlHint(NamedTuple):
    """A hint used as a control."""

    kind: ControlKind
    text: str


def control_hints(
    config: DistillConfig, pool: HintPool, own: AcceptedHint, read: AcceptedHint
) -> Iterator[ControlHint]:
    """Yield candidates for a turn's control, the preferred one first; nothing with `control: none`.

    Args:
        config: The distillation settings.
        pool: Hints accepted so far.
        own: The hint accepted for the turn.
        read: The hint that the teacher reads, `own` or its replacement. Controls differ in text from both.
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
