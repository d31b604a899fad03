"""The eight built-in tasks of builtin.yaml, each with public examples, hidden tests and a reference solution."""

from functools import cache
from importlib import resources

import yaml

from agentic_opd.core.text import text_lines
from agentic_opd.core.types import Task
from agentic_opd.worlds.coding.tasks.example_files import TEST_FILE, builtin_file


def builtin_tasks(*, with_examples: bool = True) -> list[Task]:
    """Return the eight tasks in a fixed order; without examples the agent has no tests to run."""
    return [_task(**spec, with_examples=with_examples) for spec in _specs()]


@cache
def _specs() -> list[dict[str, str]]:
    return yaml.safe_load((resources.files(__package__ or "") / "builtin.yaml").read_text(encoding="utf-8"))


def _task(signature: str, statement: str, examples: str, hidden: str, reference: str, *, with_examples: bool) -> Task:
    """Return a task; `examples` and `hidden` are lines of `call == expected`, several to a line after `;` if hidden."""
    entry_point = signature.partition("(")[0]
    checks = "".join(f"assert {check.strip()}\n" for check in text_lines(hidden.strip().replace(";", "\n")))
    return Task(
        task_id=f"builtin/{entry_point}",
        prompt=f"Write `{signature}` in solution.py: {statement}"
        + (f"\n\nExamples ({TEST_FILE} runs them):\n{examples.strip()}" if with_examples else ""),
        hidden_tests=f"from solution import {entry_point}\n\n{checks}",
        entry_point=entry_point,
        files={TEST_FILE: builtin_file(entry_point, text_lines(examples.strip()))} if with_examples else {},
        reference_solution=reference,
    )
