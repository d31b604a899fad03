"""Settings -> tasks: the built-in ones, or the rows of a dataset by a preset that says which field holds what."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice

from agentic_opd.config import RolloutConfig
from agentic_opd.errors import DatasetError
from agentic_opd.rollout.builtin_tasks import builtin_tasks
from agentic_opd.rollout.dataset_rows import Row, read_rows
from agentic_opd.rollout.hidden_tests import complete_tests, helpers_of
from agentic_opd.types import Task

_NAMES = ("task_id", "prompt", "test_code", "entry_point", "reference_solution")
"""Our names of what a row may hold; `dataset_fields` maps any of them to a field of the row."""


def load_tasks(config: RolloutConfig) -> list[Task]:
    """The tasks that the settings name, in the dataset's order.

    Raises:
        DatasetError: The dataset is missing, empty or broken, a row lacks a field, or two rows have one id.
    """
    if config.dataset_name is None:
        return builtin_tasks()[: config.dataset_limit]
    preset = _PRESETS[config.dataset_format]
    _check_mapping(config.dataset_fields)
    rows = read_rows(config.dataset_name, config.dataset_split)
    tasks: dict[str, Task] = {}
    places: dict[str, str] = {}
    for number, row in enumerate(islice(rows, config.dataset_limit)):
        values = _Values(row, preset, config.dataset_fields)
        task_id = values.get("task_id") or str(number)
        if task_id in tasks:
            raise DatasetError(f"{row.place}: the id {task_id!r} is already that of {places[task_id]}")
        tasks[task_id] = preset.make_task(task_id, values)
        places[task_id] = row.place
    if not tasks:
        raise DatasetError(f"dataset {config.dataset_name!r} has no rows")
    return [*tasks.values()]


def _check_mapping(mapping: Mapping[str, str]) -> None:
    for name in mapping:
        if name not in _NAMES:
            raise DatasetError(f"dataset_fields: unknown name {name!r}: {_there_is(_NAMES, name)}")


def _there_is(names: tuple[str, ...], wanted: str) -> str:
    """`there is a, b, c (did you mean b?)`."""
    close = get_close_matches(wanted, names, n=1)
    return f"there is {', '.join(names) or 'nothing'}" + (f" (did you mean {close[0]!r}?)" if close else "")


# -------------------------------------------------------------------------------------------------------------- presets


@dataclass(frozen=True, slots=True)
class _Preset:
    """Which field of a row holds what, and how a row becomes a task."""

    fields: Mapping[str, tuple[str, ...]]
    """Our name -> the fields that may hold it; the first that is there counts."""
    required: frozenset[str]
    """Names that every row must have."""
    make_task: "Callable[[str, _Values], Task]"
    """Task id and values -> task."""


@dataclass(frozen=True, slots=True)
class _Values:
    """A row by our names."""

    row: Row
    preset: _Preset
    mapping: Mapping[str, str]

    def get(self, name: str) -> str | None:
        """The value; None where the row has none and need not.

        Raises:
            DatasetError: It is needed and missing, or it is no text.
        """
        needed = name in self.mapping or name in self.preset.required
        candidates = (self.mapping[name],) if name in self.mapping else self.preset.fields[name]
        field = next((field for field in candidates if field in self.row.fields), None)
        if field is None:
            if not needed:
                return None
            there = _there_is((*self.row.fields,), candidates[0])
            wanted = " or ".join(map(repr, candidates))
            raise DatasetError(
                f"{self.row.place}: no field {wanted} for {name}; {there}. Name it in dataset_fields, "
                f"for example {{{name}: FIELD}}."
            )
        value = self.row.fields[field]
        if name == "task_id" and type(value) is int:
            value = str(value)
        if value is None and name not in self.preset.required:
            return None
        if not isinstance(value, str) or (needed and not value.strip()):
            got = "an empty text" if isinstance(value, str) else type(value).__name__
            raise DatasetError(f"{self.row.place}: field {field!r} ({name}) must be a text, got {got}")
        return value

    def need(self, name: str) -> str:
        """The value of a name that the preset requires."""
        value = self.get(name)
        assert value is not None, name
        return value

    def complete_tests(self, test_code: str, entry_point: str | None) -> str:
        """`complete_tests`, with the row's place in its error."""
        try:
            return complete_tests(test_code, entry_point)
        except ValueError as error:
            raise DatasetError(f"{self.row.place}: the hidden tests {error}") from error


def _generic_task(task_id: str, values: _Values) -> Task:
    prompt, entry_point = values.need("prompt"), values.get("entry_point")
    if "solution.py" not in prompt:
        what = f"the function `{entry_point}`" if entry_point else "your code"
        prompt = f"{prompt.rstrip()}\n\nWrite {what} in solution.py."
    return Task(
        task_id=task_id,
        prompt=prompt,
        hidden_tests=values.complete_tests(values.need("test_code"), entry_point),
        entry_point=entry_point,
        reference_solution=values.get("reference_solution"),
    )


def _humaneval_task(task_id: str, values: _Values) -> Task:
    code, entry_point, solution = values.need("prompt"), values.need("entry_point"), values.get("reference_solution")
    return Task(
        task_id=task_id,
        prompt=f"Complete this code in solution.py, so that it holds the whole function `{entry_point}`.\n\n"
        f"```python\n{code.strip()}\n```",
        hidden_tests=values.complete_tests(helpers_of(code, entry_point) + values.need("test_code"), entry_point),
        entry_point=entry_point,
        reference_solution=None if solution is None else code + solution,
    )


_PRESETS = {
    "generic": _Preset(
        fields={
            "task_id": ("task_id",),
            "prompt": ("prompt", "task"),
            "test_code": ("test_code",),
            "entry_point": ("entry_point",),
            "reference_solution": ("reference_solution",),
        },
        required=frozenset({"prompt", "test_code"}),
        make_task=_generic_task,
    ),
    "humaneval": _Preset(
        fields={
            "task_id": ("task_id",),
            "prompt": ("prompt",),
            "test_code": ("test",),
            "entry_point": ("entry_point",),
            "reference_solution": ("canonical_solution",),
        },
        required=frozenset({"task_id", "prompt", "test_code", "entry_point"}),
        make_task=_humaneval_task,
    ),
}
