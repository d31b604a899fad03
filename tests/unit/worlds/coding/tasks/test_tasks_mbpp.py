import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import DatasetError
from agentic_opd.core.types import Task
from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox
from agentic_opd.sandboxes.workdir import put_files
from agentic_opd.worlds.coding.config import CodingSettings
from agentic_opd.worlds.coding.tasks.load import load_tasks

ROW: dict[str, Any] = {
    "task_id": 11,
    "text": "Write a function to double a number.",
    "code": "def double(x):\r\n    return 2 * x",
    "test_setup_code": "",
    "test_list": ["assert double(1) == 2", "assert double(-3) == -6"],
    "challenge_test_list": ["assert double(0) == 0"],
}
TREE = {
    **ROW,
    "text": "Write a function to find the height of a tree.",
    "code": "class Node:\r\n  def __init__(self, left=None):\r\n    self.left = left\r\n"
    "def height(node):\r\n  return 0 if node is None else 1 + height(node.left)",
    "test_setup_code": "root = Node()\r\nroot.left = Node()",
    "test_list": ["assert (height(root)) == 2", "assert (height(root.left)) == 1"],
    "challenge_test_list": [],
}


def load(tmp_path: Path, *rows: Any, **settings: Any) -> list[Task]:
    path = tmp_path / "mbpp.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_tasks(CodingSettings(dataset_name=str(path), dataset_format="mbpp", **settings))


def test_one_example_is_public_and_the_others_count(tmp_path: Path) -> None:
    (task,) = load(tmp_path, ROW)
    assert task.prompt == (
        "Write a function to double a number.\n\nWrite the function `double` in solution.py.\n\n"
        "An example (test_solution.py runs it):\n\n```python\nassert double(1) == 2\n```"
    )
    assert task.hidden_tests == ("from solution import double\n\nassert double(-3) == -6\nassert double(0) == 0\n")
    assert (task.task_id, task.entry_point) == ("11", "double")
    assert task.reference_solution == "def double(x):\n    return 2 * x\n"
    assert "-3" not in task.files["test_solution.py"]


def test_the_only_test_is_not_shown(tmp_path: Path) -> None:
    row = {**ROW, "test_list": ["assert double(1) == 2"], "challenge_test_list": []}
    (task,) = load(tmp_path, row)
    assert task.prompt.endswith("\n\nWrite the function `double` of 1 argument in solution.py.")
    assert task.files == {}
    assert "assert double(1) == 2" in task.hidden_tests


def test_setup_code_runs_after_the_import_and_is_shown(tmp_path: Path) -> None:
    (task,) = load(tmp_path, TREE)
    assert "Write the function `height`, and `Node`, which the tests use, in solution.py." in task.prompt
    assert "```python\nroot = Node()\nroot.left = Node()\nassert (height(root)) == 2\n```" in task.prompt
    assert task.hidden_tests.startswith("from solution import Node, height\n\nroot = Node()\nroot.left = Node()\n")


def test_the_sanitized_form(tmp_path: Path) -> None:
    row = {
        "task_id": 2,
        "prompt": "Write a function.",
        "code": "def f(x): return x / 3",
        "test_imports": ["import math"],
        "test_list": ["assert f(3) == 1", "assert math.isclose(f(1), 0.333, rel_tol=0.01)"],
    }
    (task,) = load(tmp_path, row)
    assert task.entry_point == "f"
    assert task.hidden_tests.startswith("from solution import f\n\nimport math\nassert math.isclose(f(1)")


@pytest.mark.parametrize(
    ("test", "code", "entry_point"),
    [
        ("assert sum(10, 15) == 6", "def sum(a, b): ...", "sum"),
        ("assert sum(10, 15) == 6", "", "sum"),
        ("assert set(f(1)) == set([1])", "", "f"),
        ("assert sorted(first(g(1))) == [1]", "def g(x): ...", "g"),
        ("assert not f(1)", "not Python", "f"),
        ("assert x == 1", "x = 1", None),
    ],
)
def test_the_function_that_is_asked_for(tmp_path: Path, test: str, code: str, entry_point: str | None) -> None:
    (task,) = load(tmp_path, {**ROW, "code": code, "test_list": [test], "challenge_test_list": []})
    assert task.entry_point == entry_point
    assert f"import {entry_point or 'x'}\n" in task.hidden_tests.replace("first, ", "")


def test_every_field_can_be_mapped(tmp_path: Path) -> None:
    renamed = {f"my_{name}": value for name, value in {**TREE, "test_imports": ["import math"]}.items()}
    fields = {
        "task_id": "my_task_id",
        "prompt": "my_text",
        "reference_solution": "my_code",
        "test_list": "my_test_list",
        "test_setup_code": "my_test_setup_code",
        "challenge_test_list": "my_challenge_test_list",
        "test_imports": "my_test_imports",
    }
    (given,) = load(tmp_path, {**TREE, "test_imports": ["import math"]})
    assert load(tmp_path, renamed, dataset_fields=fields) == [given]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "T", "tests": []}, r"line 1: no field 'test_list' for test_list; there is text, tests"),
        ({**ROW, "test_list": [], "challenge_test_list": []}, r"line 1: field 'test_list' is empty"),
        ({**ROW, "test_list": [1]}, r"field 'test_list' \(test_list\) must be a list of texts, got '\[1\]'"),
        ({**ROW, "test_list": "assert f(1)"}, r"field 'test_list' \(test_list\) is not valid JSON"),
        ({**ROW, "test_list": ["assert f("]}, r"line 1: the tests are not valid Python"),
        ({**ROW, "test_setup_code": "x ="}, r"line 1: the tests are not valid Python"),
        ({**ROW, "test_list": ["double(1)"], "challenge_test_list": []}, r"line 1: the hidden tests have no `assert`"),
        ({**ROW, "text": ""}, r"field 'text' \(prompt\) must be a text, got an empty text"),
    ],
)
def test_broken_rows(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        load(tmp_path, row)


@pytest.mark.sandbox
def test_the_public_example_runs_in_the_sandbox(tmp_path: Path) -> None:
    """The lines that the agent reads for a right, a wrong and a broken solution."""
    double, tree, check = load(
        tmp_path, ROW, {**TREE, "task_id": 12}, {**ROW, "task_id": 13, "test_list": ["assert not double(0)"]}
    )

    async def output(task: Task, solution: str) -> tuple[int | None, str]:
        async with BubblewrapSandbox() as sandbox:
            await put_files(sandbox, {**task.files, "solution.py": solution})
            result = await sandbox.run("python test_solution.py", 20.0)
            return result.exit_code, result.text

    async def main() -> list[tuple[int | None, str]]:
        return [
            await output(double, double.reference_solution or ""),
            await output(double, "def double(x): return x"),
            await output(double, "def double(x): return x / 0"),
            await output(tree, tree.reference_solution or ""),
            await output(check, "def double(x): return 1"),
        ]

    right, wrong, broken, with_class, not_equal = asyncio.run(main())
    assert right == (0, "ok   double(1)\n1 of 1 examples passed\n")
    assert wrong == (1, "FAIL double(1): expected 2, got 1\n0 of 1 examples passed\n")
    assert broken == (1, "FAIL double(1): ZeroDivisionError: division by zero\n0 of 1 examples passed\n")
    assert with_class == (0, "ok   height(root)\n1 of 1 examples passed\n")
    assert not_equal == (1, "FAIL bool(not double(0)): expected True, got False\n0 of 1 examples passed\n")
