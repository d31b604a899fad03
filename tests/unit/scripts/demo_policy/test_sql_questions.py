"""Generated questions: repeatable, sound, with a part that training never has."""

import asyncio
import sqlite3
from itertools import islice

import pytest
from demo_policy.sql.faults import habit, mistake_of, quoted, taught
from demo_policy.sql.questions import HELD_OUT, Question, questions, sql
from demo_policy.sql.world import GeneratedSql

from agentic_opd.core.types import Task, ToolCall, ToolResult, Verification
from agentic_opd.worlds.config import WorldConfig
from agentic_opd.worlds.custom import HookedWorld
from agentic_opd_environments.sql.engine import QueryError, difference, run_query

pytestmark = pytest.mark.slow

COUNT = 100


@pytest.fixture(scope="module")
def training() -> list[Question]:
    return [*islice(questions(7, held_out=False), COUNT)]


@pytest.fixture(scope="module")
def held_out() -> list[Question]:
    return [*islice(questions(7, held_out=True), COUNT)]


def test_the_same_seed_gives_the_same_questions(training: list[Question]) -> None:
    assert [*islice(questions(7, held_out=False), 20)] == training[:20]
    assert [*islice(questions(8, held_out=False), 20)] != training[:20]
    assert len({one.text for one in training}) > 0.95 * COUNT


def test_nothing_held_out_is_in_training(training: list[Question], held_out: list[Question]) -> None:
    nouns = {table.noun for one in training for table in one.query.schema.tables}
    parts = frozenset[str]().union(*(one.query.parts for one in training))
    assert not any(one.query.is_held_out for one in training)
    assert frozenset[str]().union(*HELD_OUT) <= parts, "each part of what is held out was seen"
    new_schema = [one for one in held_out if not nouns & {table.noun for table in one.query.schema.tables}]
    new_combination = [one for one in held_out if one.query.is_held_out]
    assert len(new_schema) > COUNT / 2
    assert len(new_combination) > COUNT / 2
    assert all(one.query.is_held_out or one in new_schema for one in held_out)


def test_each_answer_is_right_on_all_databases_which_differ(training: list[Question], held_out: list[Question]) -> None:
    for one in (*training, *held_out):
        results = [run_query(image, sql(one.query)) for image in (one.visible, *one.hidden)]
        assert all(result.rows for result in results)
        assert len({result.rows for result in results}) > 2


def test_a_query_that_is_right_by_accident_fails(training: list[Question]) -> None:
    shown = hidden = tries = 0
    for one in training:
        for wrong in taught(one.query):
            tries += 1
            shown += _agrees(one, wrong.sql, one.visible)
            hidden += all(_agrees(one, wrong.sql, image) for image in one.hidden)
    assert shown > 0.03 * tries, "some are right on the shown database"
    assert hidden < 0.01 * tries


def test_a_plain_count_fails_of_any_other_table_and_by_ids(training: list[Question]) -> None:
    """Counts of `table`, wherever a question asks for rows of it: of each other table, the largest id, and the like."""
    tried = 0
    for one in training:
        table, hidden = one.query.table.name, one.hidden
        right = [run_query(image, f"SELECT COUNT(*) FROM {table}").rows for image in hidden]
        tables = [other.name for other in one.query.schema.tables]
        wrong = [f"SELECT COUNT(*) FROM {other}" for other in tables if other != table]
        wrong += [f"SELECT MAX(id) FROM {other}" for other in tables]
        wrong += [f"SELECT MAX(id) - MIN(id) + 1 FROM {table}", f"SELECT COUNT(*) + 1 FROM {table}"]
        wrong += [f"SELECT MAX({child.link}) FROM {child.name}" for child in one.query.schema.children]
        for written in wrong:
            tried += 1
            answers = [run_query(image, written).rows for image in hidden]
            assert all(answer != count for answer, count in zip(answers, right, strict=True)), (table, written)
    assert tried > 5 * COUNT


def _agrees(one: Question, written: str, image: bytes) -> bool:
    try:
        got = run_query(image, written)
    except QueryError:
        return False
    return difference(got, run_query(image, sql(one.query)), is_ordered=one.query.limit is not None) is None


def test_a_question_says_what_its_query_needs(training: list[Question]) -> None:
    for one in training:
        for value in (str(filter.value) for filter in one.query.filters if filter.value is not None):
            assert value in one.text
        assert one.query.table.noun in one.text
        assert one.query.of is None or one.query.of.name in one.text
        assert one.query.limit in (None, 1) or str(one.query.limit) in one.text


def test_taught_mistakes_are_told_apart_and_their_hints_quote_the_right_clause(training: list[Question]) -> None:
    for one in training:
        right = sql(one.query)
        assert mistake_of(one.query, right) is None
        for wrong in taught(one.query):
            assert wrong.sql != right
            assert mistake_of(one.query, f"{wrong.sql} ;") == wrong
            assert all(quoted(hint) in right and len(hint) > 10 for hint in wrong.hints)


def test_habits_are_taught_mistakes_of_some_queries(training: list[Question], held_out: list[Question]) -> None:
    for part in (training, held_out):
        habits = [(one, usual) for one in part if (usual := habit(one.query)) is not None]
        assert 0.2 * COUNT < len(habits) < 0.5 * COUNT
        assert all(usual in taught(one.query) for one, usual in habits)
    kinds = {usual.kind for one in training if (usual := habit(one.query))}
    assert len(kinds) > 3


def test_images_are_databases(training: list[Question]) -> None:
    connection = sqlite3.connect(":memory:")
    connection.deserialize(training[0].visible)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


class Few(GeneratedSql):
    num_tasks, num_eval_tasks = 12, 6


async def played(
    made: HookedWorld, task: Task, calls: list[tuple[str, dict[str, str]]]
) -> tuple[list[ToolResult], Verification]:
    async with made.session(task) as session:
        results = [await session.run_tool(ToolCall("1", name, {**given}, "")) for name, given in calls]
        return results, await made.verify(task, await session.collect())


def test_an_episode_of_the_generator() -> None:
    made = HookedWorld(Few(), WorldConfig())
    training, held_out = asyncio.run(made.train_and_eval_tasks())
    assert (len(training), len(held_out)) == (12, 6)
    assert not {task.task_id for task in training} & {task.task_id for task in held_out}
    for task in (*training, *held_out):
        assert task.reference_solution is not None
        calls = [("schema", {}), ("query", {"sql": "SELECT 1 AS one"}), ("answer", {"sql": task.reference_solution})]
        results, verification = asyncio.run(played(made, task, calls))
        assert results[0].content.startswith("CREATE TABLE")
        assert results[1].content == "one\n1"
        assert [result.is_change for result in results] == [False, False, True]
        assert verification.correctness == 1
        assert "right on 3 of 3" in verification.judge_report
