import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
from pyarrow import Table, parquet

from agentic_opd.core.errors import DatasetError
from agentic_opd.core.types import Task
from agentic_opd.env.config import AgentEnvConfig
from agentic_opd.worlds.coding.config import CodingSettings
from agentic_opd.worlds.coding.hidden_tests.checks import checks_of
from agentic_opd.worlds.coding.tasks.load import load_tasks, load_train_and_eval
from agentic_opd.worlds.config import EvalConfig, WorldConfig

ROW = {"task_id": "a", "prompt": "Add.", "test_code": "assert add(1, 2) == 3", "entry_point": "add"}
HUMANEVAL_ROW = {
    "task_id": "H/0",
    "prompt": 'def double(x):\n    return 2 * x\n\n\ndef f(x: int) -> int:\n    """ Doc. >>> f(1) """\n',
    "entry_point": "f",
    "canonical_solution": "    return double(x)\n",
    "test": "def check(candidate):\n    assert candidate(1) == double(1)\n",
}


def load(path: Path | str, **settings: Any) -> list[Task]:
    return load_tasks(CodingSettings(dataset_name=str(path), **settings))


def write(path: Path, *rows: Any) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def test_the_built_in_tasks_are_there_without_a_dataset() -> None:
    assert len(load_tasks(CodingSettings())) == 8
    assert [task.entry_point for task in load_tasks(CodingSettings(limit=2))] == ["fizzbuzz", "is_palindrome"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tasks.jsonl", "tasks.jsonl.gz", "tasks.parquet"])
def test_generic_rows_of_every_kind_of_file(tmp_path: Path, name: str) -> None:
    second = {**ROW, "task_id": "b", "prompt": "Write `add` in solution.py.", "entry_point": None}
    path = tmp_path / name
    if name.endswith("parquet"):
        parquet.write_table(Table.from_pylist([ROW, second]), path)
    else:
        write(path, ROW, second)
    first, last = load(path)
    assert first == Task(
        "a",
        "Add.\n\nWrite the function `add` in solution.py.",
        "from solution import add\n\nassert add(1, 2) == 3\n",
        entry_point="add",
    )
    assert (last.task_id, last.prompt, last.entry_point) == ("b", "Write `add` in solution.py.", None)


VERL = {
    "data_source": "x",
    "prompt": [{"role": "system", "content": "Think first."}, {"role": "user", "content": "Echo a line."}],
    "reward_model": {"style": "rule", "ground_truth": json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["1", "2"]})},
    "extra_info": {"index": 7, "split": "train"},
}


@pytest.mark.parametrize("name", ["tasks.jsonl", "tasks.parquet", "array.jsonl", "texts.jsonl"])
@pytest.mark.parametrize("dataset_format", ["generic", "apps"])
def test_a_field_may_be_inside_another_and_a_prompt_messages(tmp_path: Path, name: str, dataset_format: Any) -> None:
    """As in verl's datasets; an inner object may be JSON text, and the rows one array."""
    path = tmp_path / name
    if name.endswith("parquet"):
        parquet.write_table(Table.from_pylist([VERL]), path)
    elif name.startswith("array"):
        path.write_text(json.dumps([VERL], indent=1))
    else:
        write(path, {field: json.dumps(value) for field, value in VERL.items()} if name == "texts.jsonl" else VERL)
    fields = {"task_id": "extra_info.index", "input_output": "reward_model.ground_truth", "prompt": "prompt"}
    (task,) = load(path, dataset_format=dataset_format, dataset_fields=fields)
    assert task.task_id == "7"
    assert task.prompt.startswith("Think first.\n\nEcho a line.\n\nWrite a program in solution.py")
    assert task.hidden_tests is not None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"input_output": "reward_model.truth"},
            "no field 'reward_model.truth' for input_output; there is data_source",
        ),
        ({"input_output": "reward_model.style.x"}, "no field 'reward_model.style.x' for input_output"),
        ({"test_code": "data_source", "prompt": "reward_model"}, "must be a text, got dict"),
    ],
)
def test_an_inner_field_that_is_not_there_is_named(tmp_path: Path, fields: dict[str, str], said: str) -> None:
    with pytest.raises(DatasetError, match=said):
        load(write(tmp_path / "a.jsonl", VERL), dataset_fields=fields)


def test_a_field_whose_name_has_a_dot_is_that_field(tmp_path: Path) -> None:
    row = {**ROW, "a": {"b": "inner"}, "a.b": "outer"}
    assert load(write(tmp_path / "a.jsonl", row), dataset_fields={"task_id": "a.b"})[0].task_id == "outer"


def test_prompts_of_several_turns_are_refused(tmp_path: Path) -> None:
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    with pytest.raises(
        DatasetError, match=r"field 'prompt' \(prompt\) must be a text, or the messages of a system and a"
    ):
        load(write(tmp_path / "a.jsonl", {**ROW, "prompt": turns}))


def test_a_rows_number_is_no_id_of_another_row(tmp_path: Path) -> None:
    """Whatever the order; a missing id may be null, or NaN as pandas writes it."""
    rows = [{**ROW, "task_id": task_id} for task_id in ("1", None, float("nan"), "row-4", None, "4", "2")]
    ids = [task.task_id for task in load(write(tmp_path / "a.jsonl", *rows))]
    assert ids == ["1", "row-1", "row-2", "row-4", "row-row-4", "4", "2"]
    bare = [{**ROW, "task_id": None}] * 2
    assert [task.task_id for task in load(write(tmp_path / "b.jsonl", *bare))] == ["0", "1"]
    with pytest.raises(DatasetError, match=r"a\.jsonl, line 3: the id '1' is already that of a\.jsonl, line 1"):
        load(write(tmp_path / "a.jsonl", rows[0], rows[1], rows[0]))


def test_a_row_of_any_format_may_name_its_kind(tmp_path: Path) -> None:
    plain = write(tmp_path / "tasks.jsonl", ROW, {**ROW, "task_id": "b", "kind": "math"})
    assert [task.kind for task in load(plain)] == [None, "math"]
    other = write(tmp_path / "humaneval.jsonl", {**HUMANEVAL_ROW, "topic": "strings"})
    assert load(other, dataset_format="humaneval", dataset_fields={"kind": "topic"})[0].kind == "strings"


SHARED = {**ROW, "task_id": "s", "test_code": "from solution import Node\nassert add(Node(1), 2) == 3"}


def train_and_eval(path: Path, **settings: Any) -> tuple[list[str], list[str]]:
    held_out = write(path.with_name("eval.jsonl"), {**SHARED, "task_id": "e", "prompt": "Another."})
    coding = CodingSettings(dataset_name=str(path), **settings)
    train, evaluation = load_train_and_eval(coding, WorldConfig(eval=EvalConfig(dataset_name=str(held_out))))
    return [task.task_id for task in train], [task.task_id for task in evaluation]


def test_tasks_whose_tests_share_a_process_are_evaluated_and_not_trained_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", ROW, SHARED, {**SHARED, "task_id": "t"})
    assert train_and_eval(path) == (["a"], ["e"])
    (record,) = caplog.records
    assert (
        "2 of 3 tasks to train on must share a process with the solution, where it is easier to cheat ('s', 't')"
        in (record.message)
    )
    assert [task.task_id for task in load(path)] == ["a", "s", "t"]


def test_tasks_whose_tests_share_a_process_are_kept_or_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROW, SHARED)
    assert train_and_eval(path, in_process="keep") == (["a", "s"], ["e"])
    with pytest.raises(DatasetError, match="1 of 2 tasks to train on must share a process"):
        train_and_eval(path, in_process="refuse")
    with pytest.raises(DatasetError, match="1 of 1 tasks"):
        train_and_eval(write(tmp_path / "b.jsonl", SHARED))


def test_tests_whose_names_cannot_be_told_are_refused(tmp_path: Path) -> None:
    row = {**ROW, "test_code": "from helpers import *\nassert add(1, TWO) == 3"}
    with pytest.raises(DatasetError, match=r"line 1: the hidden tests import everything from 'helpers'"):
        load(write(tmp_path / "a.jsonl", row))


def test_ids_are_optional_and_may_be_numbers(tmp_path: Path) -> None:
    row = {"task": "Add.", "test_code": "assert add(1, 2) == 3"}
    tasks = load(write(tmp_path / "a.jsonl", row, {**row, "task_id": 17}))
    assert [task.task_id for task in tasks] == ["0", "17"]
    assert tasks[0].prompt == "Add.\n\nWrite your code in solution.py."


def test_fields_can_be_mapped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "Q", "checks": "assert f(1) == 1", "prompt": "no", "answer": "A"})
    (task,) = load(path, dataset_fields={"prompt": "question", "test_code": "checks", "reference_solution": "answer"})
    assert task.prompt.startswith("Q\n")
    assert task.reference_solution == "A"


def test_a_field_s_usual_name_can_be_mapped_too(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "Q", "checks": "assert f(1) == 1", "task": "no"})
    (task,) = load(path, dataset_fields={"task": "question", "test_code": "checks"})
    assert task.prompt.startswith("Q\n")


def test_null_fields_give_way_to_others(tmp_path: Path) -> None:
    (task,) = load(write(tmp_path / "a.jsonl", {**ROW, "prompt": None, "task": "T", "entry_point": None}))
    assert task.prompt.startswith("T\n")
    assert task.entry_point is None


def test_broken_rows_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl", {"a": 1}, ROW, {**ROW, "prompt": "again"})
    assert [task.task_id for task in load(path, skip_broken=True)] == ["a"]
    assert "2 rows are left out:\n  a.jsonl, line 1: no field" in caplog.text
    assert "a.jsonl, line 3: the id 'a' is already that of a.jsonl, line 2" in caplog.text


def test_the_limit_stops_the_reading(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROW, "{broken")
    assert len(load(path, limit=1)) == 1


def test_humaneval_rows(tmp_path: Path) -> None:
    (task,) = load(write(tmp_path / "a.jsonl", HUMANEVAL_ROW), dataset_format="humaneval")
    assert task.prompt.startswith(
        "Complete this code in solution.py, so that it holds the whole function `f`.\n\n```python\n"
    )
    assert task.reference_solution == HUMANEVAL_ROW["prompt"] + "    return double(x)\n"
    assert task.hidden_tests == (
        "from solution import f\n\n"
        "def double(x):\n    return 2 * x\n\n"
        "def check(candidate):\n    assert candidate(1) == double(1)\n\n"
        "check(f)\n"
    )


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([], {}, r"a\.jsonl' is empty: it has no rows"),
        (["{broken"], {}, r"a\.jsonl, line 1: not valid JSON: Expecting property name"),
        ([ROW, "", "[1]"], {}, r"a\.jsonl, line 3: expected a JSON object, got list"),
        ([ROW, ROW], {}, r"a\.jsonl, line 2: the id 'a' is already that of a\.jsonl, line 1"),
        (
            [{"promt": "x", "test_code": "y"}],
            {},
            r"line 1: no field 'prompt' or 'task' for prompt; there is promt, test_code \(did you mean 'promt'\?\)",
        ),
        ([ROW], {"dataset_fields": {"entry_point": "entry"}}, r"no field 'entry' for entry_point; there is task_id, "),
        ([ROW], {"dataset_fields": {"promt": "x"}}, r"unknown name 'promt': there is .*did you mean 'prompt'"),
        ([ROW], {"dataset_fields": {"task": "a", "prompt": "b"}}, r"'prompt' is named twice: it means prompt"),
        ([ROW], {"dataset_fields": {"test_list": "a"}}, r"unknown name 'test_list': there is "),
        ([{**ROW, "prompt": " "}], {}, r"field 'prompt' \(prompt\) must be a text, got an empty text"),
        ([{**ROW, "prompt": None}], {}, r"field 'prompt' \(prompt\) must be a text, got NoneType"),
        ([{**ROW, "test_code": ["x"]}], {}, r"field 'test_code' \(test_code\) must be a text, got list"),
        (
            [ROW, {"a": 1}, {"b": 1}],
            {},
            r"line 2: no field .*\(1 more rows fail\.\) Set env.world.skip_broken to leave",
        ),
        ([{"a": 1}], {"skip_broken": True}, r"is empty: no row of it can become a task"),
        ([{**ROW, "test_code": "assert f("}], {}, r"line 1: the hidden tests are not valid Python"),
        ([{**ROW, "test_code": "print(1)"}], {}, r"line 1: the hidden tests have no `assert`"),
        ([ROW], {"dataset_format": "humaneval"}, r"no field 'test' for test_code"),
    ],
)
def test_broken_datasets(tmp_path: Path, rows: list[Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        load(write(tmp_path / "a.jsonl", *rows), **settings)


# ------------------------------------------------------------------------------------------- training and evaluation


def rows(count: int, prefix: str = "") -> list[dict[str, str]]:
    return [{**ROW, "task_id": f"{prefix}{number}", "prompt": f"{prefix}{number}"} for number in range(count)]


def split(path: Path | None, limit: int | None = None, **settings: Any) -> tuple[list[str], list[str]]:
    coding = CodingSettings(dataset_name=None if path is None else str(path), limit=limit)
    train, evaluation = load_train_and_eval(coding, WorldConfig(**settings))
    return [task.task_id for task in train], [task.task_id for task in evaluation]


@pytest.mark.slow
def test_a_part_of_a_dataset_is_held_out_whatever_the_order_and_the_limit(tmp_path: Path) -> None:
    there = rows(300)
    train, evaluation = split(write(tmp_path / "a.jsonl", *there))
    assert sorted(train + evaluation, key=int) == [row["task_id"] for row in there]
    assert 15 <= len(evaluation) <= 45
    turned = split(write(tmp_path / "b.jsonl", *reversed(there)))
    assert (sorted(turned[0]), sorted(turned[1])) == (sorted(train), sorted(evaluation))
    few = split(tmp_path / "a.jsonl", limit=100)
    assert few == ([one for one in train if int(one) < 100], [one for one in evaluation if int(one) < 100])
    assert split(tmp_path / "a.jsonl", eval={"seed": 1})[1] != evaluation


def test_all_or_nothing_can_be_held_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl", *rows(3))
    assert split(path, eval={"fraction": 0}) == (["0", "1", "2"], [])
    assert split(path, eval={"fraction": 1}) == ([], ["0", "1", "2"])
    assert caplog.text == ""


def test_small_datasets_never_lose_a_side_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl", *rows(2))
    assert split(path, eval={"fraction": 0.001}) == (["0", "1"], [])
    assert "with env.eval.fraction 0.001 none of its 2 tasks is held out" in caplog.text
    with pytest.raises(DatasetError, match=r"all of its 1 tasks are held out .* Set env.eval.fraction to 0"):
        split(path, eval={"fraction": 0.9}, limit=1)


def test_the_built_in_tasks_are_for_both() -> None:
    train, evaluation = split(None)
    assert train == evaluation
    assert len(train) == 8


def test_a_dataset_of_its_own_to_evaluate_on(tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", *rows(3))
    other = write(tmp_path / "b.jsonl", *({**row, "prompt": f"other {row['prompt']}"} for row in rows(2)))
    assert split(train, eval={"dataset_name": str(other)}) == (["0", "1", "2"], ["0", "1"])
    mbpp = write(tmp_path / "c.jsonl", {"task_id": 7, "body": "T", "code": "", "test_list": ["assert f(1)"]})
    settings = {"dataset_name": str(mbpp), "dataset_format": "mbpp", "dataset_fields": {"text": "body"}}
    assert split(train, eval=settings) == (["0", "1", "2"], ["7"])
    assert split(None, eval={"dataset_name": str(other)})[1] == ["0", "1"]


def test_another_split_to_evaluate_on(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", *rows(3, "a"))
    write(tmp_path / "test.jsonl", *rows(2, "b"))
    assert split(tmp_path, eval={"dataset_split": "test"}) == (["a0", "a1", "a2"], ["b0", "b1"])


def test_the_two_datasets_must_not_share_tasks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *rows(7))
    other = write(tmp_path / "b.jsonl", *({**row, "task_id": f"x{row['task_id']}"} for row in rows(7)))
    with pytest.raises(DatasetError, match=r"7 tasks .* also in the one to train on \('x0', .*'x4', \.\.\.\)"):
        split(path, eval={"dataset_name": str(other)})


def test_a_split_of_no_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match=r"neither eval\.dataset_name nor world\.dataset_name"):
        AgentEnvConfig(eval=EvalConfig(dataset_split="test"))


@pytest.mark.parametrize("settings", [{"eval": {"dataset_name": "tasks.jsonl"}}, {"eval": {"dataset_split": "test"}}])
def test_a_dataset_to_evaluate_on_is_for_the_coding_world(settings: Any) -> None:
    world = {"type": "sql", "file": "questions.json", "databases": "databases"}
    with pytest.raises(ValueError, match="settings of the world coding, and the world is sql"):
        AgentEnvConfig(world=world, **settings)  # type: ignore[arg-type]


LONG, LONGEST = "7" * 5000, "7" * 3_000_000
DEEP = "[" * 900 + "]" * 900


def raw_row(**fields: str) -> str:
    """A row whose values are JSON text, which `json.dumps` would not write."""
    texts = {"prompt": '"Write f."', "test_code": '"assert f(1) == 1"', **fields}
    return "{" + ", ".join(f'"{name}": {text}' for name, text in texts.items()) + "}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task_id": LONG}, "field 'task_id' .* has 5000 characters, at most 1000"),
        ({"task_id": f'"{"x" * 5000}"'}, "field 'task_id' .* has 5000 characters, at most 1000"),
        ({"task_id": LONGEST}, "an integer has more than 50000 digits"),
        ({"task_id": "1e400"}, "field 'task_id' .* must be a text, got float"),
        ({"test_code": f'"assert f(1) == {LONGEST}"'}, "an integer has more than 50000 digits"),
        ({"test_code": f'"assert f(1) == {"-" * 50_000}1"'}, "not valid Python: they are nested too deeply"),
        ({"examples": f'[{{"role": "user", "content": {LONG}}}]'}, "line 1: it cannot become a task"),
        (
            {"examples": f'[{{"role": "assistant", "tool_calls": [{{"name": "f", "arguments": {{"a": {LONG}}}}}]}}]'},
            "line 1: it cannot become a task",
        ),
        ({"test_code": "null", "public_test_cases": f"[{LONG}]"}, "must be a list of objects .* got 'int'"),
        ({"solution": f"[{LONG}]", "test_code": "null", "inputs": '["1"]', "outputs": '["1"]'}, "got 'list'"),
        ({"test_code": "null", "input_output": f'{{"fn_name": {LONG}, "inputs": [[1]], "outputs": [1]}}'}, "line 1: "),
        (
            {"test_code": "null", "input_output": f'{{"fn_name": "f", "inputs": [[{DEEP}]], "outputs": [1]}}'},
            "values are nested too deeply",
        ),
    ],
)
def test_values_of_any_length_and_depth_are_refused_by_row(
    tmp_path: Path, fields: dict[str, str], message: str
) -> None:
    path = write(tmp_path / "tasks.jsonl", raw_row(**fields))
    start = time.process_time()
    with pytest.raises(DatasetError, match=message):
        load(path)
    assert time.process_time() - start < 2.0  # Reading 3,000,000 digits takes 38 s.


def test_integers_of_many_digits_are_kept(tmp_path: Path) -> None:
    values = f'{{"fn_name": "f", "inputs": [[{LONG}], [{{"{LONG}": 1}}]], "outputs": [{LONG}, 0x]}}'
    of_calls = raw_row(test_code="null", task_id="-5", input_output=values.replace("0x", LONG))
    program = raw_row(test_code="null", task_id='"io"', input_output=f'{{"inputs": ["1"], "outputs": ["{LONGEST}"]}}')
    in_hexadecimal = raw_row(task_id='"h"', test_code=f'"assert f(1) == 0x{"f" * 60_000}"')
    start = time.process_time()
    tasks = load(write(tmp_path / "tasks.jsonl", of_calls, program, in_hexadecimal))
    assert [task.task_id for task in tasks] == ["-5", "io", "h"]
    assert LONG in (tasks[0].hidden_tests or "")
    assert "0x" + "f" * 60_000 in checks_of(tasks[2]).source
    assert time.process_time() - start < 2.0
