"""Convert a row of MBPP to a task. Pure.

The first test of `test_list` is public: the prompt shows it, and `test_solution.py` runs it. If it is the only test, it
is hidden, and the prompt has only the function's name and number of arguments. The other tests of `test_list` and
`challenge_test_list` are hidden, and only these count.
"""

import ast
import builtins

from agentic_opd.core.syntax import parse_module
from agentic_opd.core.types import Task
from agentic_opd.worlds.coding.hidden_tests.complete import import_lines, wanted_names
from agentic_opd.worlds.coding.tasks.example_files import TEST_FILE, calls_file
from agentic_opd.worlds.coding.tasks.row_values import FieldMap, RowValues

MBPP_FIELDS = FieldMap(
    {
        "task_id": ("task_id", "id"),
        "prompt": ("text", "prompt"),
        "reference_solution": ("code",),
        "entry_point": ("entry_point",),
        "test_list": ("test_list",),
        "challenge_test_list": ("challenge_test_list",),
        "test_setup_code": ("test_setup_code",),
        "test_imports": ("test_imports",),
    }
)


def mbpp_task(task_id: str, values: RowValues) -> Task:
    """Convert a row of MBPP, in the full or the sanitized form, to a task.

    Raises:
        DatasetError: A field is missing or broken, or there is no test.
    """
    prompt, solution = values.need("prompt"), values.text("reference_solution")
    if not values.has("test_list") and not values.has("challenge_test_list"):
        raise values.missing("test_list")
    tests = [*values.texts("test_list"), *values.texts("challenge_test_list")]
    setup = _newlines("\n".join([*values.texts("test_imports"), values.text("test_setup_code") or ""])).strip()
    try:
        parse_module(setup)
        calls = [_calls(test) for test in tests]
        entry_point = values.text("entry_point") or _tested_function(calls[0], solution)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise values.error(f"the tests are not valid Python: {str(error) or 'they are nested too deeply'}") from error
    source = "\n".join([setup, *tests]).strip()
    further_tests = [test for test in tests[1:] if test.strip() != tests[0].strip()]
    hidden_tests = values.hidden_tests("\n".join([setup, *(further_tests or tests)]).strip(), entry_point)
    names, modules = wanted_names(parse_module(source), entry_point)
    if entry_point is not None and entry_point not in names:
        names = sorted([*names, entry_point])
    is_shown = bool(further_tests)
    solution_text = _solution_in_words(entry_point, names, None if is_shown else calls[0])
    task_text = f"{prompt.strip()}\n\nWrite {solution_text} in solution.py."
    files: dict[str, str] = {}
    if is_shown:
        lines = import_lines(names, modules)
        setup_and_import = f"{lines}\n{setup}" if lines else setup
        files = {TEST_FILE: calls_file(setup_and_import, tests[:1])}
        example = "\n".join([setup, tests[0].strip()]).strip()
        task_text += f"\n\nAn example ({TEST_FILE} runs it):\n\n```python\n{example}\n```"
    return Task(
        task_id=task_id,
        prompt=task_text,
        hidden_tests=hidden_tests,
        entry_point=entry_point,
        files=files,
        reference_solution=None if solution is None else _newlines(solution) + "\n",
    )


def _newlines(code: str) -> str:
    """Replace the DOS line endings of MBPP's code."""
    return code.replace("\r\n", "\n")


def _solution_in_words(entry_point: str | None, names: list[str], calls: list[ast.Call] | None) -> str:
    """Describe the requested code in words, with the number of arguments that `calls` show (None with an example)."""
    if entry_point is None:
        return "your code"
    count = next((len(call.args) + len(call.keywords) for call in calls or () if _name(call) == entry_point), None)
    arguments = "" if count is None else f" of {count} argument{'' if count == 1 else 's'}"
    further_names = ", ".join(f"`{name}`" for name in names if name != entry_point)
    further = f", and {further_names}, which the tests use," if further_names else ""
    return f"the function `{entry_point}`{arguments}{further}"


def _calls(test: str) -> list[ast.Call]:
    """Return the calls of plain names in `test`, outer calls first."""
    return [node for node in ast.walk(parse_module(test)) if isinstance(node, ast.Call) and _name(node)]


def _tested_function(calls: list[ast.Call], solution: str | None) -> str | None:
    """Return the tested function: the first that the solution defines, or else the first that is not built in."""
    names = [name for call in calls if (name := _name(call))]
    defined = _functions(solution or "")
    return next(
        (name for name in names if name in defined),
        next((name for name in names if not hasattr(builtins, name)), names[0] if names else None),
    )


def _name(call: ast.Call) -> str | None:
    return call.func.id if isinstance(call.func, ast.Name) else None


def _functions(code: str) -> set[str]:
    try:
        return {node.name for node in parse_module(code).body if isinstance(node, ast.FunctionDef)}
    except (SyntaxError, RecursionError, MemoryError):
        return set()
