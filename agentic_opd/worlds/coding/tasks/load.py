"""Load the tasks that the settings name, and split them into training and evaluation (I/O)."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from agentic_opd.core.errors import AlignmentError, DatasetError
from agentic_opd.core.types import Message, Task
from agentic_opd.worlds.coding.config import CodingSettings
from agentic_opd.worlds.coding.hidden_tests.checks import checks_of
from agentic_opd.worlds.coding.hidden_tests.complete import helpers_of
from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks
from agentic_opd.worlds.coding.tasks.io_tasks import IO_FIELDS, TEST_NAMES, io_task
from agentic_opd.worlds.coding.tasks.mbpp import MBPP_FIELDS, mbpp_task
from agentic_opd.worlds.coding.tasks.row_values import FieldMap, RowValues
from agentic_opd.worlds.coding.tasks.rows import Row, read_rows
from agentic_opd.worlds.coding.tools import TOOL_SPECS
from agentic_opd.worlds.config import DatasetFormat, WorldConfig
from agentic_opd.worlds.split import split_tasks

_MAX_LISTED = 5
_MAX_ID_CHARS = 1000
"""Ids are printed in logs, metrics, groups and reports."""

_log = logging.getLogger(__name__)


def load_train_and_eval(settings: CodingSettings, config: WorldConfig) -> tuple[list[Task], list[Task]]:
    """Return the tasks to train on and those to evaluate on; only the built-in tasks are in both.

    With a dataset to evaluate on (`env.eval.dataset_name` or `env.eval.dataset_split`), all tasks of the other one are
    for training. Otherwise `env.eval.fraction` of the dataset's tasks is held out. Without any dataset, both lists hold
    the built-in tasks.

    The evaluation list is empty at `env.eval.fraction` 0. It can be empty for a small dataset too, which is logged as a
    warning. The training list is empty at 1. `in_process` applies only to the training list.

    Raises:
        DatasetError: As `load_tasks`; the two datasets share tasks; all tasks of a small one are held out; or
            `in_process` refuses tasks, or leaves no task.
    """
    tasks = load_tasks(settings)
    if config.eval.dataset_name is not None or config.eval.dataset_split is not None:
        evaluation = load_tasks(_eval_settings(settings, config))
        _check_disjoint(tasks, evaluation)
        return _without_shared_process(tasks, settings), evaluation
    if settings.dataset_name is None:
        return tasks, tasks
    train, evaluation = split_tasks(tasks, config.eval.fraction, config.eval.seed)
    if not train and config.eval.fraction < 1:
        raise DatasetError(
            f"dataset {settings.dataset_name!r}: with env.eval.fraction {config.eval.fraction:g} and env.eval.seed "
            f"{config.eval.seed} all of its {len(tasks)} tasks are held out for evaluation. Set env.eval.fraction to 0 "
            "to train on all of them."
        )
    if not evaluation and config.eval.fraction > 0:
        _log.warning(
            "dataset %r: with env.eval.fraction %g none of its %d tasks is held out, so there is nothing to evaluate "
            "on. Set a larger env.eval.fraction, or env.eval.dataset_name.",
            settings.dataset_name,
            config.eval.fraction,
            len(tasks),
        )
    return _without_shared_process(train, settings), evaluation


def load_tasks(settings: CodingSettings) -> list[Task]:
    """Return the tasks of `dataset_name` in its order, at most `limit`; the built-in tasks if it is unset.

    The id of a row without one is its number, counted from 0; `row-N` if that is the id of another row.

    Raises:
        DatasetError: The dataset is missing, empty or broken, a row lacks a field, or two rows have the same id.
    """
    if settings.dataset_name is None:
        return builtin_tasks(with_examples=settings.builtin_examples)[: settings.limit]
    rows = islice(read_rows(settings.dataset_name, settings.dataset_split), settings.limit)
    tasks, broken = _make_tasks(rows, settings)
    if broken and not settings.skip_broken:
        more = f" ({len(broken) - 1} more rows fail.)" if len(broken) > 1 else ""
        remedy = " Set env.world.skip_broken to leave such rows out." if tasks else ""
        raise DatasetError(f"{str(broken[0]).rstrip('.')}.{more}{remedy}")
    if broken:
        listed = "\n".join(f"  {error}" for error in broken[:_MAX_LISTED])
        rest = f"\n  and {len(broken) - _MAX_LISTED} more" if len(broken) > _MAX_LISTED else ""
        _log.warning("dataset %r: %d rows are left out:\n%s%s", settings.dataset_name, len(broken), listed, rest)
    if not tasks:
        reason = "no row of it can become a task" if broken else "it has no rows"
        raise DatasetError(f"dataset {settings.dataset_name!r} is empty: {reason}")
    return tasks


def _without_shared_process(tasks: list[Task], settings: CodingSettings) -> list[Task]:
    """Apply `in_process` to the tasks whose tests share a process with the solution."""
    shared = [task.task_id for task in tasks if checks_of(task).in_process]
    if not shared:
        return tasks
    problem = (
        f"dataset {settings.dataset_name!r}: the hidden tests of {len(shared)} of {len(tasks)} tasks to train on must "
        f"share a process with the solution, where it is easier to cheat ({_listed(shared)})"
    )
    if settings.in_process == "refuse" or (settings.in_process == "skip" and len(shared) == len(tasks)):
        raise DatasetError(f"{problem}. Set env.world.in_process to keep, or to skip if there are others.")
    keeps = settings.in_process == "keep"
    _log.warning("%s; they are %s (env.world.in_process)", problem, "kept" if keeps else "left out")
    return tasks if keeps else [task for task in tasks if task.task_id not in {*shared}]


def _listed(task_ids: Sequence[str]) -> str:
    return ", ".join(map(repr, task_ids[:_MAX_LISTED])) + (", ..." if len(task_ids) > _MAX_LISTED else "")


def _make_tasks(rows: Iterable[Row], settings: CodingSettings) -> tuple[list[Task], list[DatasetError]]:
    """Convert rows to tasks; return the tasks, and the errors of the rows that cannot become tasks."""
    preset = PRESETS[settings.dataset_format]
    fields = FieldMap({**preset.fields.candidates, **BESIDE}).mapped_by(settings.dataset_fields)
    tasks: list[Task] = []
    locations: dict[str, str] = {}
    without_id: dict[int, int] = {}
    broken: list[DatasetError] = []
    for number, row in enumerate(rows):
        values = RowValues(row, fields)
        try:
            task_id = values.text("task_id")
            if task_id is not None and len(task_id) > _MAX_ID_CHARS:
                raise values.wrong("task_id", f"has {len(task_id)} characters, at most {_MAX_ID_CHARS} are allowed")
            if task_id is not None and task_id in locations:
                raise values.error(f"the id {task_id!r} is already that of {locations[task_id]}")
            task = preset.make_task(task_id or str(number), values)
            task = replace(task, kind=values.text("kind"), examples=_examples(task.task_id, values))
            checks_of(task)
        except DatasetError as error:
            broken.append(error)
            continue
        except (ValueError, RecursionError, MemoryError) as error:
            why = str(error) if isinstance(error, ValueError) else "values are nested too deeply"
            broken.append(values.error(f"it cannot become a task: {why}"))
            continue
        if task_id is None:
            without_id[len(tasks)] = number
        else:
            locations[task_id] = row.location
        tasks.append(task)
    for index, number in without_id.items():
        task_id = str(number)
        while task_id in locations:
            task_id = f"row-{task_id}"
        locations[task_id] = f"row {number}"
        tasks[index] = replace(tasks[index], task_id=task_id)
    return tasks, broken


def _examples(task_id: str, values: RowValues) -> Sequence[Message]:
    """Return the messages before the task's prompt; empty if the field holds anything other than messages."""
    messages = values.raw("examples")
    if isinstance(messages, str) and messages.lstrip().startswith("["):
        messages = values.data("examples")
    if not isinstance(messages, list) or not all(isinstance(row, dict) and "role" in row for row in messages):
        return ()
    try:
        return Task(task_id, "", None, examples=messages, tools=TOOL_SPECS).examples
    except AlignmentError as error:
        raise values.wrong("examples", str(error)) from error


def _eval_settings(settings: CodingSettings, config: WorldConfig) -> CodingSettings:
    """Return settings with which `load_tasks` loads the dataset to evaluate on."""
    is_same = config.eval.dataset_format == "same"
    changes = {
        "dataset_name": config.eval.dataset_name or settings.dataset_name,
        "dataset_split": config.eval.dataset_split or settings.dataset_split,
        "dataset_format": settings.dataset_format if is_same else config.eval.dataset_format,
        "dataset_fields": {**(settings.dataset_fields if is_same else {}), **config.eval.dataset_fields},
    }
    return settings.model_copy(update=changes)


def _check_disjoint(train: list[Task], evaluation: list[Task]) -> None:
    """Raise DatasetError if a task is in both lists, by content: two datasets may use the same ids."""
    trained = {(task.prompt, task.hidden_tests) for task in train}
    shared = [task.task_id for task in evaluation if (task.prompt, task.hidden_tests) in trained]
    if shared:
        raise DatasetError(
            f"{len(shared)} tasks of the dataset to evaluate on are also in the one to train on ({_listed(shared)}). "
            "Name another env.eval.dataset_name or env.eval.dataset_split; or unset both, and env.eval.fraction holds "
            "tasks out."
        )


# ------------------------------------------------------------------------------------------------ formats of datasets


@dataclass(frozen=True, slots=True)
class Preset:
    fields: FieldMap
    make_task: Callable[[str, RowValues], Task]
    """(task id, row) -> task; raises DatasetError if the row lacks a field."""


def _generic_task(task_id: str, values: RowValues) -> Task:
    if not values.has("test_code") and any(values.has(name) for name in TEST_NAMES):
        return io_task(task_id, values)
    prompt, entry_point = values.need("prompt"), values.text("entry_point")
    if "solution.py" not in prompt:
        solution = f"the function `{entry_point}`" if entry_point else "your code"
        prompt = f"{prompt.rstrip()}\n\nWrite {solution} in solution.py."
    return Task(
        task_id=task_id,
        prompt=prompt,
        hidden_tests=values.hidden_tests(values.need("test_code"), entry_point),
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
        hidden_tests=values.hidden_tests(helpers_of(code, entry_point) + values.need("test_code"), entry_point),
        entry_point=entry_point,
        reference_solution=None if solution is None else code + solution,
    )


BESIDE: Mapping[str, tuple[str, ...]] = {"kind": ("kind",), "examples": ("examples",)}
"""Optional fields of a row in any format."""

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
"""`dataset_format` -> its preset."""
