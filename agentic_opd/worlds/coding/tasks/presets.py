"""What the formats of datasets are: which field of a row holds what, and how a row becomes a task. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentic_opd.core.types import Task
from agentic_opd.worlds.coding.config import DatasetFormat
from agentic_opd.worlds.coding.tasks.io_tasks import IO_FIELDS, TEST_NAMES, io_task
from agentic_opd.worlds.coding.tasks.mbpp import MBPP_FIELDS, mbpp_task
from agentic_opd.worlds.coding.tasks.row_values import FieldMap, RowValues
from agentic_opd.worlds.coding.verifier.hidden_tests import complete_tests, helpers_of


@dataclass(frozen=True, slots=True)
class Preset:
    """A dataset's format."""

    fields: FieldMap
    make_task: Callable[[str, RowValues], Task]
    """Task id and row -> task; raises DatasetError where the row lacks something."""


def _generic_task(task_id: str, values: RowValues) -> Task:
    if not values.has("test_code") and any(values.has(name) for name in TEST_NAMES):
        return io_task(task_id, values)
    prompt, entry_point = values.need("prompt"), values.text("entry_point")
    if "solution.py" not in prompt:
        what = f"the function `{entry_point}`" if entry_point else "your code"
        prompt = f"{prompt.rstrip()}\n\nWrite {what} in solution.py."
    return Task(
        task_id=task_id,
        prompt=prompt,
        hidden_tests=_complete(values, values.need("test_code"), entry_point),
        entry_point=entry_point,
        reference_solution=values.text("reference_solution"),
    )


def _humaneval_task(task_id: str, values: RowValues) -> Task:
    code, entry_point = values.need("prompt"), values.need("entry_point")
    solution = values.text("reference_solution")
    return Task(
        task_id=task_id,
        prompt=f"Complete this code in solution.py, so that it holds the whole function `{entry_point}`.\n\n"
        f"```python\n{code.strip()}\n```",
        hidden_tests=_complete(values, helpers_of(code, entry_point) + values.need("test_code"), entry_point),
        entry_point=entry_point,
        reference_solution=None if solution is None else code + solution,
    )


def _complete(values: RowValues, test_code: str, entry_point: str | None) -> str:
    """`complete_tests`, with the row's place in its error."""
    try:
        return complete_tests(test_code, entry_point)
    except ValueError as error:
        raise values.error(f"the hidden tests {error}") from error


PRESETS: Mapping[DatasetFormat, Preset] = {
    "generic": Preset(
        FieldMap(
            {
                **IO_FIELDS.candidates,
                "task_id": ("task_id", "id"),
                "prompt": ("prompt", "task"),
                "test_code": ("test_code",),
                "entry_point": ("entry_point", "fn_name"),
                "reference_solution": ("reference_solution", "solution", "solutions"),
            }
        ),
        _generic_task,
    ),
    "humaneval": Preset(
        FieldMap(
            {
                "task_id": ("task_id",),
                "prompt": ("prompt",),
                "test_code": ("test",),
                "entry_point": ("entry_point",),
                "reference_solution": ("canonical_solution",),
            }
        ),
        _humaneval_task,
    ),
    "mbpp": Preset(MBPP_FIELDS, mbpp_task),
    "apps": Preset(IO_FIELDS, io_task),
}
"""`dataset_format` -> what it means."""
