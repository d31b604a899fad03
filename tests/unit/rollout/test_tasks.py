import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import Table, parquet

from agentic_opd.config import RolloutConfig
from agentic_opd.errors import DatasetError
from agentic_opd.rollout.tasks import load_tasks
from agentic_opd.types import Task

ROW = {"task_id": "a", "prompt": "Add.", "test_code": "assert add(1, 2) == 3", "entry_point": "add"}
HUMANEVAL_ROW = {
    "task_id": "H/0",
    "prompt": 'def double(x):\n    return 2 * x\n\n\ndef f(x: int) -> int:\n    """ Doc. >>> f(1) """\n',
    "entry_point": "f",
    "canonical_solution": "    return double(x)\n",
    "test": "def check(candidate):\n    assert candidate(1) == double(1)\n",
}


def load(path: Path | str, **settings: Any) -> list[Task]:
    return load_tasks(RolloutConfig(dataset_name=str(path), **settings))


def write(path: Path, *rows: Any) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def test_the_built_in_tasks_are_there_without_a_dataset() -> None:
    assert len(load_tasks(RolloutConfig())) == 8
    assert [task.entry_point for task in load_tasks(RolloutConfig(dataset_limit=2))] == ["fizzbuzz", "is_palindrome"]


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


def test_the_limit_stops_the_reading(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROW, "{broken")
    assert len(load(path, dataset_limit=1)) == 1


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
        ([], {}, r"has no rows"),
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
        ([{**ROW, "prompt": " "}], {}, r"field 'prompt' \(prompt\) must be a text, got an empty text"),
        ([{**ROW, "prompt": None}], {}, r"field 'prompt' \(prompt\) must be a text, got NoneType"),
        ([{**ROW, "test_code": ["x"]}], {}, r"field 'test_code' \(test_code\) must be a text, got list"),
        ([{**ROW, "test_code": "assert f("}], {}, r"line 1: the hidden tests are not valid Python"),
        ([{**ROW, "test_code": "print(1)"}], {}, r"line 1: the hidden tests have no `assert`"),
        ([ROW], {"dataset_format": "humaneval"}, r"no field 'test' for test_code"),
    ],
)
def test_broken_datasets(tmp_path: Path, rows: list[Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        load(write(tmp_path / "a.jsonl", *rows), **settings)


def test_what_is_no_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 1000)[:20])
    (tmp_path / "not.jsonl.gz").write_text("{}\n")
    (tmp_path / "not.parquet").write_text("{}\n")
    (tmp_path / "tasks.csv").write_text("a,b\n")
    for name, message in {
        "nope.jsonl": "there is no such file",
        "cut.jsonl.gz": "cannot be read after line 0",
        "not.jsonl.gz": "cannot be read after line 0",
        "not.parquet": "cannot be read",
        "tasks.csv": r"expected a file that ends in \.jsonl",
        "../x/y z": "neither a file here nor a name on the hub",
    }.items():
        with pytest.raises(DatasetError, match=message):
            load(name)


def test_a_name_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DatasetError, match=r"dataset 'nobody/nothing', split 'train', cannot be loaded from the hub: "):
        load("nobody/nothing")
