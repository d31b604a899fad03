"""The accepted hints of other turns, from which controls are drawn. Pure."""

from collections import OrderedDict
from collections.abc import Iterable
from random import Random
from typing import NamedTuple


class AcceptedHint(NamedTuple):
    """An accepted hint and the name of its turn's task or conversation."""

    task_id: str
    text: str

    @property
    def words(self) -> str:
        """The text in lower case with single spaces; hints are equal if this is equal."""
        return " ".join(self.text.lower().split())


class HintPool:
    """The latest accepted hints by task; a draw picks a task uniformly, then one of its hints uniformly."""

    KEPT_HINTS = 64
    """Number of distinct hints kept per task, the latest ones."""
    KEPT_TASKS = 512
    """Number of tasks whose hints are kept, those with the latest hints."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = Random(seed)
        self._by_task: OrderedDict[str, OrderedDict[str, AcceptedHint]] = OrderedDict()

    def add(self, hint: AcceptedHint) -> None:
        """Add a hint; a hint of the same text becomes the latest."""
        hints = self._by_task.setdefault(hint.task_id, OrderedDict())
        self._by_task.move_to_end(hint.task_id)
        hints[hint.words] = hint
        hints.move_to_end(hint.words)
        if len(hints) > self.KEPT_HINTS:
            hints.popitem(last=False)
        if len(self._by_task) > self.KEPT_TASKS:
            self._by_task.popitem(last=False)

    def of_other_task(self, *excluded: AcceptedHint) -> AcceptedHint | None:
        """Draw a hint that shares neither task nor text with any `excluded` hint; None if there is no such hint."""
        tasks = {hint.task_id for hint in excluded}
        return self._drawn(self._fitting(task, excluded) for task in self._by_task if task not in tasks)

    def of_same_task(self, task_id: str, *excluded: AcceptedHint) -> AcceptedHint | None:
        """Draw a hint of the task that shares its text with no `excluded` hint; None if there is no such hint."""
        return self._drawn([self._fitting(task_id, excluded)])

    def _fitting(self, task_id: str, excluded: tuple[AcceptedHint, ...]) -> list[AcceptedHint]:
        texts = {hint.words for hint in excluded}
        return [hint for words, hint in self._by_task.get(task_id, {}).items() if words not in texts]

    def _drawn(self, hints_by_task: Iterable[list[AcceptedHint]]) -> AcceptedHint | None:
        fitting = [hints for hints in hints_by_task if hints]
        return self._rng.choice(self._rng.choice(fitting)) if fitting else None
