"""The SQL world: answer a question with a query, which is judged on hidden databases.

schema() -> query(sql)* -> answer(sql)+         the last answer is run on each hidden database of the same schema
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentic_opd.core.errors import WorldError
from agentic_opd.core.types import Task
from agentic_opd.worlds.custom import Checks, CustomWorld, ToolError, tool
from agentic_opd_environments.sql.engine import (
    QueryError,
    Result,
    Source,
    difference,
    result_text,
    run_query,
    schema_text,
)
from agentic_opd_environments.sql.files import read_questions
from agentic_opd_environments.sql.order import Expected, expected, is_ordered

_MOST_KEPT_ROWS = 500_000
"""Rows of expected results that are kept for later verifications, of all questions together."""


@dataclass(frozen=True, slots=True)
class Case:
    visible: Source
    """The database that the policy sees."""
    hidden: tuple[Source, ...]
    sql: str
    """The right query."""


@dataclass(slots=True)
class Desk:
    """State of one episode: the visible database and the last answer."""

    database: Source
    answer: str | None = None


class SqlWorld(CustomWorld):
    """Questions over SQLite databases; see `docs/sql.md`."""

    system_prompt = (
        "Answer the question with one SQLite query. Look at the schema, then give your query with answer. "
        "It is judged on other databases of the same schema."
    )

    def __init__(self, file: Path, databases: Path, skip_broken: bool = False) -> None:
        """Store the settings; nothing is read yet.

        Args:
            file: JSON file of questions in the format of Spider or BIRD.
            databases: Folder with `DB_ID/DB_ID.sqlite`. Further .sqlite files beside a database are its hidden
                databases; without such files, they are copies of it with other values and rows.
            skip_broken: Leave out wrong entries of the file, and those whose own query cuts a tie, with a warning,
                instead of failing.
        """
        self._file, self._databases, self._skip_broken = file, databases, skip_broken
        self._cases: dict[str, Case] = {}
        self._expected: dict[tuple[str, int], Expected] = {}
        """Results of the right queries, by task and number of the hidden database."""
        self._kept_rows = 0

    def tasks(self) -> list[Task]:
        """Return the questions of the file."""
        return [
            self.make_task(
                f"{self._file.stem}/{question.number:05}",
                question.text,
                Case(question.visible, question.hidden, question.sql),
                question.examples,
            )
            for question in read_questions(self._file, self._databases, skip_broken=self._skip_broken)
        ]

    def start(self, task: Task) -> Desk:
        """Return the visible database, without an answer."""
        return Desk(self._case(task).visible)

    @tool
    def schema(self, desk: Desk) -> str:
        """Show the tables and their columns."""
        return schema_text(desk.database)

    @tool
    def query(self, desk: Desk, sql: str) -> str:  # noqa: D417 - the policy reads this and passes no desk
        """Run a SELECT query and see its first rows.

        Args:
            sql: The query.
        """
        return result_text(_run(desk, sql))

    @tool
    def answer(self, desk: Desk, sql: str) -> str:  # noqa: D417 - likewise
        """Give the query that answers the question, and see its first rows. The last one counts.

        Args:
            sql: The query.
        """
        desk.answer = sql
        return result_text(_run(desk, sql))

    def judged(self, state: Desk) -> str | None:
        """Return the last answer."""
        return state.answer

    def verify(self, task: Task, state: Desk) -> Checks:
        """Compare the answer's rows with those of the right query on each hidden database.

        The one check passes if they agree on all of them.
        """
        case = self._case(task)
        if state.answer is None:
            return Checks(0, 1, "No answer was given.", "No answer was given.")
        wrong = [self._difference(task, number, state.answer) for number in range(len(case.hidden))]
        lines = [f"database {number}: {text or 'right'}" for number, text in enumerate(wrong, 1)]
        report = f"The answer is right on {wrong.count(None)} of {len(wrong)} hidden databases.\n" + "\n".join(lines)
        return Checks(not any(wrong), 1, report, report)

    # ------------------------------------------------------------------------------------------------------- questions

    def _case(self, task: Task) -> Case:
        if task.task_id not in self._cases:
            raise WorldError(f"world sql: there is no task {task.task_id!r}")
        return self._cases[task.task_id]

    def _difference(self, task: Task, number: int, answer: str) -> str | None:
        """Describe how an answer differs from the right one on a hidden database; None if it does not."""
        case = self._case(task)
        right = self._right(task.task_id, case, number)
        try:
            rows = run_query(case.hidden[number], answer)
        except QueryError as error:
            return f"the query fails: {error}"
        return difference(rows, right.result, is_ordered=is_ordered(case.sql), tie_ends=right.tie_ends)

    def _right(self, task_id: str, case: Case, number: int) -> Expected:
        """Return the result of the right query on a hidden database."""
        right = self._expected.get((task_id, number))
        if right is None:
            try:
                right = expected(case.hidden[number], case.sql)
            except QueryError as error:
                fault = f"world sql: the right query {case.sql!r} fails on a hidden database: {error}"
                raise WorldError(fault) from None
            if self._kept_rows + len(right.result.rows) <= _MOST_KEPT_ROWS:
                self._kept_rows += len(right.result.rows)
                self._expected[task_id, number] = right
        return right

    def make_task(self, task_id: str, text: str, case: Case, examples: Sequence[Any] = ()) -> Task:
        """Return a task that this world can judge."""
        self._cases[task_id] = case
        for number in range(len(case.hidden)):
            self._expected.pop((task_id, number), None)
        hidden = f"{len(case.hidden)} databases"
        return Task(task_id, text, hidden_tests=hidden, reference_solution=case.sql, examples=examples)


def _run(desk: Desk, written: str) -> Result:
    try:
        return run_query(desk.database, written)
    except QueryError as error:
        raise ToolError(f"{error}.") from None
