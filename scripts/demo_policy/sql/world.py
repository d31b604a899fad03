"""The SQL world with generated questions, for the demo policy and the learning experiments."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from agentic_opd.core.types import Task
from agentic_opd_environments.sql.world import Case, SqlWorld
from demo_policy.sql.questions import Question, questions, sql


class GeneratedSql(SqlWorld):
    """The tasks are generated from `seed`; `num_tasks` to train on, `num_eval_tasks` to evaluate on."""

    num_tasks, num_eval_tasks, seed = 1000, 200, 0

    def __init__(self) -> None:
        """Generate nothing yet."""
        super().__init__(Path(), Path())

    def tasks(self) -> list[Task]:
        """Return the questions to train on."""
        return [*self._generated("training", self.num_tasks)]

    def eval_tasks(self) -> list[Task]:
        """Return the questions to evaluate on; the schema or the combination of each never occurs in training."""
        return [*self._generated("held-out", self.num_eval_tasks)]

    def _generated(self, part: str, count: int) -> Iterator[Task]:
        for number, question in enumerate(islice(questions(self.seed, held_out=part == "held-out"), count)):
            yield self.task_of(f"sql/{part}/{self.seed}/{number:05}", question)

    def task_of(self, task_id: str, question: Question) -> Task:
        """Return a generated question as a task that this world can judge."""
        return self.make_task(task_id, question.text, Case(question.visible, question.hidden, sql(question.query)))
