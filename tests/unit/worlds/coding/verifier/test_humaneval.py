"""A sample of HumanEval through the verifier; all of it: tests/integration/test_check_tasks.py."""

import asyncio

import pytest

from agentic_opd.core.types import Task
from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox
from agentic_opd.worlds.coding.config import CodingSettings
from agentic_opd.worlds.coding.tasks.load import load_tasks
from agentic_opd.worlds.coding.verifier.verify import verify
from tests.support.places import HUMANEVAL, NO_HUMANEVAL

pytestmark = [pytest.mark.sandbox, pytest.mark.skipif(not HUMANEVAL.exists(), reason=NO_HUMANEVAL)]


def correctness(tasks: list[Task], source: str | None = None) -> list[float]:
    """The share of checks that pass with each task's reference solution, or with `source` in its place."""

    async def one(task: Task, at_once: asyncio.Semaphore) -> float:
        text = source or task.reference_solution
        assert text is not None
        async with at_once:
            return (await verify(task, BubblewrapSandbox, {"solution.py": text.encode()}, 60.0)).correctness

    async def main() -> list[float]:
        at_once = asyncio.Semaphore(2)
        return await asyncio.gather(*[one(task, at_once) for task in tasks])

    return asyncio.run(main())


def test_tasks_of_every_kind_pass_with_their_reference() -> None:
    """32: a helper and a random loop; 38, 50: the tests call a helper of the prompt; 153: named like a class."""
    tasks = load_tasks(CodingSettings(dataset_name=str(HUMANEVAL), dataset_format="humaneval"))
    assert len(tasks) == 164
    chosen = [tasks[number] for number in (0, 32, 38, 50, 153)]
    assert correctness(chosen) == [1.0] * 5


def test_the_field_map_of_a_generic_dataset_works_too() -> None:
    fields = {"test_code": "test", "reference_solution": "canonical_solution"}
    (task,) = load_tasks(CodingSettings(dataset_name=str(HUMANEVAL), dataset_fields=fields, limit=1))
    assert correctness([task], "def has_close_elements(numbers, threshold): pass") == [0.0]
