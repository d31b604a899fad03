"""A world whose own work costs next to nothing, for scripts/bench/scale: what is measured is the environment."""

from collections.abc import Iterator, Sequence

from agentic_opd.worlds.custom import Checks, CustomWorld, Message, Task, tool

_RESULT = "The list has the names of the parts, their numbers and their sums, and each line is one of them. "


class ScaleWorld(CustomWorld):
    """The agent looks things up, and every answer is right half of the time, by its length."""

    def __init__(self, tasks: int = 64, result_chars: int = 600) -> None:
        self._count = tasks
        self._result = (_RESULT * (result_chars // len(_RESULT) + 1))[:result_chars]

    def tasks(self) -> Iterator[Task]:
        """Return tasks that differ in their numbers."""
        for number in range(self._count):
            prompt = f"Task {number}: find the names and the sum of list {number}. " + _RESULT * 6
            yield Task(task_id=f"scale/{number}", prompt=prompt, hidden_tests=f"sum {number * 7919}")

    @tool
    def look_up(self, state: None, subject: str) -> str:
        """Look something up.

        Args:
            state: None.
            subject: The list to look up.
        """
        return f"{len(subject)} entries. {self._result}"

    def verify(self, task: Task, state: None, messages: Sequence[Message]) -> tuple[Checks, str]:
        """Return a verdict that depends on the conversation's length."""
        written = sum(len(message["content"] or "") for message in messages)
        passed = written % 2
        return Checks(passed=passed, total=1), f"The sum is {'right' if passed else 'not that of the list'}."
