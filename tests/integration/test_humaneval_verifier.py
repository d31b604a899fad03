"""All of HumanEval through the verifier: every reference passes, and nothing does with `pass` in its place."""

from dataclasses import replace

from agentic_opd.worlds.coding.config import CodingConfig
from agentic_opd.worlds.coding.tasks.load import load_tasks
from tests.unit.worlds.coding.verifier.test_humaneval import DATA, correctness, pytestmark  # noqa: F401 - the mark applies here too


def test_all_references_pass_and_no_pass_does() -> None:
    tasks = load_tasks(CodingConfig(dataset_name=str(DATA), dataset_format="humaneval"))
    assert correctness(tasks) == [1.0] * 164
    empty = [replace(task, reference_solution=f"def {task.entry_point}(*args): pass") for task in tasks]
    assert max(correctness(empty)) < 1.0
