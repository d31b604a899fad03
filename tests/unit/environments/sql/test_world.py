"""The SQL world as an episode meets it: its tools, its verdict, its tasks from files."""

import asyncio
import json
import logging
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import ConfigError, WorldError
from agentic_opd.core.types import Task, ToolCall, ToolResult, Verification
from agentic_opd.env.config import AgenticOPDEnvConfig
from agentic_opd.worlds.choose import make_world
from agentic_opd.worlds.config import EvalConfig
from agentic_opd.worlds.custom import HookedWorld

pytestmark = pytest.mark.slow

GOLD = "SELECT name FROM shops WHERE price > 2"


def played(
    made: HookedWorld, task: Task, calls: Sequence[tuple[str, dict[str, Any]]]
) -> tuple[list[ToolResult], Verification]:
    async def play() -> tuple[list[ToolResult], Verification]:
        async with made.session(task) as session:
            results = [await session.run_tool(ToolCall("1", name, given, "")) for name, given in calls]
            return results, await made.verify(task, await session.collect())

    return asyncio.run(play())


@pytest.fixture
def shops(tmp_path: Path) -> Path:
    """A Spider-like folder: questions.json, and a database with one more of its schema beside it."""
    folder = tmp_path / "databases" / "shop"
    folder.mkdir(parents=True)
    for name, prices in (("shop", (1, 2, 3, 4)), ("shop_2", (5, 1, 7, 2))):
        with closing(sqlite3.connect(folder / f"{name}.sqlite")) as connection:
            connection.execute("CREATE TABLE shops (name TEXT, price REAL)")
            connection.executemany("INSERT INTO shops VALUES (?, ?)", zip("abcd", prices, strict=True))
            connection.commit()
    write(tmp_path, [{"db_id": "shop", "question": "Which shops cost more than 2?", "query": GOLD}])
    return tmp_path


def write(folder: Path, entries: Any) -> None:
    (folder / "questions.json").write_text(json.dumps(entries))


def of_files(folder: Path, *, eval_fraction: float = 0.0, **settings: Any) -> HookedWorld:
    files = {"file": str(folder / "questions.json"), "databases": str(folder / "databases")}
    config = AgenticOPDEnvConfig(world={"type": "sql", **files, **settings}, eval=EvalConfig(fraction=eval_fraction))  # type: ignore[arg-type]
    made = make_world(config)
    assert isinstance(made, HookedWorld)
    return made


def test_the_last_answer_counts_and_its_errors_are_the_policys(shops: Path) -> None:
    made = of_files(shops)
    (task,), _ = asyncio.run(made.train_and_eval_tasks())
    right = {"sql": task.reference_solution}
    results, verification = played(made, task, [("answer", right), ("answer", {"sql": "SELECT some FROM nowhere"})])
    assert (results[1].content, results[1].is_error) == ("Error: no such table: nowhere.", True)
    assert verification.correctness == 0
    assert "no such table" in verification.judge_report
    assert played(made, task, [("schema", {})])[1].report == "No answer was given."
    assert played(made, task, [("answer", right), ("query", {"sql": "SELECT 1"})])[1].correctness == 1


def test_questions_of_a_file_are_judged_by_the_databases_beside_it(shops: Path) -> None:
    made = of_files(shops)
    (task,), held_out = asyncio.run(made.train_and_eval_tasks())
    assert (task.prompt, held_out) == ("Which shops cost more than 2?", [])
    by_accident = "SELECT name FROM shops WHERE name IN ('c', 'd')"
    shown, verification = played(made, task, [("answer", {"sql": by_accident})])
    assert shown[0].content == "name\nc\nd"
    assert verification.correctness == 0
    assert (
        verification.report == "The answer is right on 0 of 1 hidden databases.\ndatabase 1: other values in the rows"
    )
    assert played(made, task, [("answer", {"sql": f"{GOLD} ORDER BY price"})])[1].correctness == 1


def test_without_databases_beside_it_parts_of_the_shown_one_judge(shops: Path) -> None:
    (shops / "databases/shop/shop_2.sqlite").unlink()
    made = of_files(shops)
    (task,), _ = asyncio.run(made.train_and_eval_tasks())
    wrong = "SELECT name FROM shops WHERE name IN ('c', 'd')"
    assert "of 4 hidden databases" in played(made, task, [("answer", {"sql": GOLD})])[1].report
    assert played(made, task, [("answer", {"sql": GOLD})])[1].correctness == 1
    assert played(made, task, [("answer", {"sql": wrong.replace("'d'", "'x'")})])[1].correctness == 0


def test_bird_writes_sql_and_evidence(shops: Path) -> None:
    write(shops, [{"db_id": "shop", "question": "Which?", "evidence": "dear means price > 2", "SQL": GOLD}] * 4)
    training, held_out = asyncio.run(of_files(shops, eval_fraction=0.5).train_and_eval_tasks())
    assert training[0].prompt == "Which?\ndear means price > 2"
    assert len(training) + len(held_out) == 4


def test_parts_hold_views_blobs_and_what_is_no_utf_8(shops: Path) -> None:
    (shops / "databases/shop/shop_2.sqlite").unlink()
    with closing(sqlite3.connect(shops / "databases/shop/shop.sqlite")) as connection:
        connection.execute("CREATE TABLE a_first (data BLOB, name TEXT)")
        connection.executemany("INSERT INTO a_first VALUES (?, CAST(? AS TEXT))", [(b"\xff\x00", b"caf\xe9")] * 9)
        connection.execute("CREATE VIEW a_view AS SELECT hex(data) AS d, name FROM a_first")
        connection.commit()
    write(shops, [{"db_id": "shop", "question": "Which?", "query": "SELECT d, name FROM a_view"}])
    made = of_files(shops)
    (task,), _ = asyncio.run(made.train_and_eval_tasks())
    assert played(made, task, [("answer", {"sql": "SELECT hex(data), name FROM a_first"})])[1].correctness == 1


def test_a_right_query_that_fails_on_a_hidden_database_is_the_worlds_fault(shops: Path) -> None:
    with closing(sqlite3.connect(shops / "databases/shop/shop_2.sqlite")) as connection:
        connection.execute("ALTER TABLE shops RENAME TO others")
    made = of_files(shops)
    (task,), _ = asyncio.run(made.train_and_eval_tasks())
    with pytest.raises(WorldError, match=r"the right query .* fails on a hidden database: no such table"):
        played(made, task, [("answer", {"sql": "SELECT 1"})])
    with pytest.raises(WorldError, match="fails on a hidden database"):
        played(made, task, [("answer", {"sql": GOLD})])


def test_a_file_of_macos_beside_a_database_is_no_hidden_database(shops: Path) -> None:
    (shops / "databases/shop/._shop.sqlite").write_bytes(b"\0\x05\x16\7Mac OS X")
    made = of_files(shops)
    (task,), _ = asyncio.run(made.train_and_eval_tasks())
    verification = played(made, task, [("answer", {"sql": GOLD})])[1]
    assert verification.report.startswith("The answer is right on 1 of 1 hidden databases.")


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"db_id": "shop", "question": "Which?"}, "entry 0 has no text as query or SQL"),
        ({"db_id": "shop", "question": " ", "query": GOLD}, "entry 0 has no text as question"),
        ({"db_id": "bank", "question": "Which?", "query": GOLD}, r"there is no .*bank\.sqlite"),
        ({"db_id": "../shop", "question": "Which?", "query": GOLD}, "not the name of a folder"),
        ({"db_id": "shop", "question": "Which?", "query": "SELECT x"}, "its own query fails on .*: no such column: x"),
        ({"db_id": "shop", "question": "Which?", "query": GOLD, "SQL": "SELECT 1"}, "two queries, query and SQL"),
        (
            {"table_id": "1", "question": "Which?", "sql": {"sel": 5}},
            r"as db_id \(its fields are table_id, question, sql",
        ),
        ([], "entry 0 has no text as db_id"),
    ],
)
def test_what_is_wrong_with_an_entry_is_said(shops: Path, entry: Any, why: str) -> None:
    good = {"db_id": "shop", "question": "Which?", "query": GOLD}
    write(shops, [entry, good])
    with pytest.raises(ConfigError, match=why):
        asyncio.run(of_files(shops).train_and_eval_tasks())
    (task,), _ = asyncio.run(of_files(shops, skip_broken=True).train_and_eval_tasks())
    assert task.task_id == "questions/00001"


def test_what_is_no_list_is_refused_and_files_belong_together(shops: Path) -> None:
    for content, why in (({"data": []}, r"expected a list of questions: `jq \.data`"), ([], "holds no question")):
        write(shops, content)
        with pytest.raises(ConfigError, match=why):
            asyncio.run(of_files(shops).train_and_eval_tasks())
    (shops / "questions.json").unlink()
    with pytest.raises(ConfigError, match="can't be read as JSON"):
        asyncio.run(of_files(shops).train_and_eval_tasks())
    with pytest.raises(ValueError, match=r"world\.databases\n  Field required"):
        AgenticOPDEnvConfig(world={"type": "sql", "file": "questions.json"})  # type: ignore[arg-type]


def test_questions_may_stand_one_a_line(shops: Path) -> None:
    entry = json.dumps({"db_id": "shop", "question": "Which?", "sql": GOLD})
    (shops / "questions.json").write_text(f"{entry}\r\n{entry}\r\n")
    tasks, _ = asyncio.run(of_files(shops).train_and_eval_tasks())
    assert [task.task_id for task in tasks] == ["questions/00000", "questions/00001"]


@pytest.mark.parametrize("suffix", [".sqlite", ".db", ".sqlite3"])
def test_databases_may_stand_in_the_folder_itself_and_are_not_each_others_hidden_ones(shops: Path, suffix: str) -> None:
    for path in (shops / "databases/shop").iterdir():
        path.rename(shops / "databases" / f"{path.stem}{suffix}")
    (shops / "databases/shop").rmdir()
    (task,), _ = asyncio.run(of_files(shops).train_and_eval_tasks())
    assert task.hidden_tests == "4 databases", "the visible one and three copies"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("shop.sql", "", r"but shop\.sql: make it, as `sqlite3 shop\.sqlite < shop\.sql` does"),
        ("shops.csv", "", r"`sqlite3 shop\.sqlite '\.import --csv shops\.csv shops'`"),
        ("data.sqlite", "", r"but data\.sqlite: rename its database"),
        ("shop.sqlite", "version https://git-lfs.github.com/spec/v1\n", "`git lfs pull` fetches the file"),
    ],
)
def test_what_stands_in_a_databases_place_is_named(shops: Path, name: str, text: str, why: str) -> None:
    for path in (shops / "databases/shop").iterdir():
        path.unlink()
    (shops / "databases/shop" / name).write_text(text)
    with pytest.raises(ConfigError, match=why):
        asyncio.run(of_files(shops).train_and_eval_tasks())


def test_a_file_with_a_byte_order_mark_is_read(shops: Path) -> None:
    text = json.dumps([{"db_id": "shop", "question": "Which shops cost more than 2?", "query": GOLD}])
    (shops / "questions.json").write_text(text, encoding="utf-8-sig")
    (task,), _ = asyncio.run(of_files(shops).train_and_eval_tasks())
    assert task.task_id == "questions/00000"


@pytest.mark.parametrize("has_more", [True, False])
def test_a_query_that_cuts_a_tie_is_named_or_left_out(
    shops: Path, has_more: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    if not has_more:
        (shops / "databases/shop/shop_2.sqlite").unlink()
    cut = {"db_id": "shop", "question": "Any two?", "query": "SELECT name FROM shops LIMIT 2"}
    write(shops, [cut, {"db_id": "shop", "question": "Which?", "query": GOLD}])
    assert len(asyncio.run(of_files(shops).train_and_eval_tasks())[0]) == 2
    assert "1 of 2 entries have a query that keeps some of several equal rows" in caplog.text
    assert "entry 0: SELECT name FROM shops LIMIT 2" in caplog.text
    (task,), _ = asyncio.run(of_files(shops, skip_broken=True).train_and_eval_tasks())
    assert task.task_id == "questions/00001"


def test_rows_that_the_question_does_not_order_may_come_in_any_order(shops: Path) -> None:
    for name in ("shop", "shop_2"):
        with closing(sqlite3.connect(shops / f"databases/shop/{name}.sqlite")) as connection:
            connection.execute("INSERT INTO shops SELECT name || '2', price FROM shops")
            connection.commit()
    write(shops, [{"db_id": "shop", "question": "By price?", "query": "SELECT name FROM shops ORDER BY price"}])
    made = of_files(shops)
    (task,), _ = asyncio.run(made.train_and_eval_tasks())
    for order, is_right in (("price, name DESC", True), ("price, name", True), ("price DESC", False), ("name", False)):
        verification = played(made, task, [("answer", {"sql": f"SELECT name FROM shops ORDER BY {order}"})])[1]
        assert verification.all_passed is is_right, order
