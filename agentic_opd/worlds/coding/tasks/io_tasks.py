"""Convert a row of APPS, LiveCodeBench or the like to a task: a program with input and output, or a function. Pure.

The first test is public (LiveCodeBench: its public tests), unless it is the only test. `test_solution.py` runs the
public tests, and the prompt shows the first one if it is short. The other tests are hidden, and only these count.

Tests come in three forms: `input_output`, an object with `inputs`, `outputs` and optionally `fn_name`; the same three
as fields of the row; and `public_test_cases` with `private_test_cases`, lists of `{input, output, testtype}`. Each may
be JSON text.
"""

import base64
import io
import pickle
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn, cast

from agentic_opd.core.text import read_json, text_lines
from agentic_opd.core.types import Task
from agentic_opd.worlds.coding.hidden_tests.complete import call_tests, io_tests, undefined_names
from agentic_opd.worlds.coding.hidden_tests.digits import many_digits
from agentic_opd.worlds.coding.tasks.example_files import TEST_FILE, calls_file, program_file
from agentic_opd.worlds.coding.tasks.row_values import FieldMap, RowValues, shortened

TEST_NAMES = ("input_output", "inputs", "outputs", "public_tests", "private_tests")


@dataclass(frozen=True, slots=True)
class IoTests:
    """Tests of a program (`fn_name` is None, pairs of texts) or of a function (argument lists and values).

    The first `num_public` tests are public and do not count. `hidden` has the others that differ from all public tests.
    """

    fn_name: str | None
    inputs: list[Any]
    outputs: list[Any]
    num_public: int

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """Pairs of an input and its output."""
        return [*zip(self.inputs, self.outputs, strict=True)]

    @property
    def hidden(self) -> tuple[list[Any], list[Any]]:
        """Inputs and outputs of the tests that count; those of all tests if no other test is left."""
        pairs = self.pairs
        hidden = [pair for pair in pairs[self.num_public :] if pair not in pairs[: self.num_public]] or pairs
        return [text for text, _ in hidden], [output for _, output in hidden]


def read_tests(values: RowValues, *, unwrap: bool) -> IoTests:
    """Return the tests of a row.

    `unwrap`: if all outputs of a function are lists of one element, replace each by its element, as APPS' rows of plain
    functions need.

    Raises:
        DatasetError: The row has no tests, or they do not have one of the three forms.
    """
    if values.has("public_tests") or values.has("private_tests"):
        return _listed_cases(values)
    name, tests = "inputs", {"inputs": values.data("inputs"), "outputs": values.data("outputs")}
    if values.has("input_output"):
        name, tests = "input_output", values.data("input_output")
    elif not (values.has("inputs") and values.has("outputs")):
        raise values.missing("input_output", "inputs", "public_tests")
    if not isinstance(tests, dict):
        raise values.wrong(name, f"must be an object with inputs and outputs, got {type(tests).__name__}")
    fields = cast(dict[str, Any], tests)
    inputs, outputs = fields.get("inputs"), fields.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise values.wrong(name, f"must hold the lists inputs and outputs; there is {', '.join(fields) or 'nothing'}")
    inputs, outputs = cast(list[Any], inputs), cast(list[Any], outputs)
    if len(inputs) != len(outputs) or not inputs:
        raise values.wrong(
            name, f"must hold as many outputs as inputs, got {len(inputs)} inputs, {len(outputs)} outputs"
        )
    fn_name = values.text("entry_point") or fields.get("fn_name") or None
    num_public = 1 if len(inputs) > 1 else 0
    if fn_name is None:
        return IoTests(None, _texts(inputs, values, name), _texts(outputs, values, name), num_public)
    if not all(isinstance(arguments, list) for arguments in inputs):
        raise values.wrong(name, f"must hold a list of arguments for each call of {fn_name}")
    if unwrap and all(isinstance(output, list) and len(cast(list[Any], output)) == 1 for output in outputs):
        outputs = [output[0] for output in outputs]
    with many_digits():
        inputs = [[_int_keys(argument) for argument in arguments] for arguments in inputs]
        outputs = [_int_keys(output) for output in outputs]
    return IoTests(str(fn_name), inputs, outputs, num_public)


def _texts(entries: Sequence[Any], values: RowValues, name: str) -> list[str]:
    """Return a program's inputs or outputs as texts; a list of lines is joined."""
    texts = ["\n".join(entry) if _is_lines(entry) else entry for entry in entries]
    for text in texts:
        if not isinstance(text, str):
            raise values.wrong(
                name,
                f"must hold texts, or lists of lines, if there is no fn_name; got {type(text).__name__}",
            )
    return texts


def _is_lines(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(line, str) for line in cast(list[Any], value))


def _int_keys(value: Any) -> Any:
    """Convert the keys of a mapping to integers if all of them look like integers: JSON has only text keys."""
    if not isinstance(value, dict):
        return value
    mapping = cast(dict[str, Any], value)
    is_int = mapping and all(key.removeprefix("-").isdecimal() for key in mapping)
    return {int(key): entry for key, entry in mapping.items()} if is_int else mapping


# ------------------------------------------------------------------------------------------ public and private tests


def _listed_cases(values: RowValues) -> IoTests:
    public, private = _cases(values, "public_tests"), _cases(values, "private_tests")
    cases = [*public, *private]
    name = "public_tests" if public else "private_tests"
    kinds = {case.get("testtype", "stdin") for case in cases}
    if len(kinds) != 1 or not kinds <= {"stdin", "functional"}:
        raise values.wrong(name, f"must be of one testtype, stdin or functional, got {sorted(map(str, kinds))}")
    num_public = len(public) if private else min(1, len(cases) - 1)
    if kinds == {"stdin"}:
        return IoTests(None, [case["input"] for case in cases], [case["output"] for case in cases], num_public)
    metadata = values.data("metadata")
    fn_name = values.text("entry_point") or (metadata.get("func_name") if isinstance(metadata, dict) else None)
    if not isinstance(fn_name, str):
        raise values.error("the tests are functional, and neither entry_point nor metadata's func_name is there")
    try:
        with many_digits():
            inputs = [[read_json(line) for line in text_lines(case["input"]) if line.strip()] for case in cases]
            outputs = [read_json(case["output"]) for case in cases]
    except (ValueError, RecursionError) as error:
        raise values.wrong(name, f"is functional, and an input or output is not JSON: {error}") from error
    return IoTests(fn_name, inputs, outputs, num_public)


def _cases(values: RowValues, name: str) -> list[dict[str, str]]:
    """Return the cases of a field: a list, JSON text, or LiveCodeBench's packed text (pickle, zlib, base64)."""
    raw = values.raw(name)
    is_packed = isinstance(raw, str) and raw.strip()[:1] not in ("", "[", "{")
    content = _unpacked(raw, values, name) if is_packed else values.data(name)
    if content is None:
        return []
    cases = cast(list[Any], content) if isinstance(content, list) else [content]
    for case in cases:
        if not isinstance(case, dict) or not all(isinstance(case.get(key), str) for key in ("input", "output")):
            raise values.wrong(
                name, f"must be a list of objects with the texts input and output, got {shortened(case)!r}"
            )
    return cast(list[dict[str, str]], cases)


class _TextUnpickler(pickle.Unpickler):
    """Unpickler for built-in values only: a dataset must not run code here."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, and only plain text is accepted")


def _unpacked(packed: str, values: RowValues, name: str) -> Any:
    try:
        pickled = zlib.decompress(base64.b64decode(packed, validate=True))
        with many_digits():
            return read_json(_TextUnpickler(io.BytesIO(pickled)).load())
    except (zlib.error, pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise values.wrong(name, f"is neither JSON nor packed as LiveCodeBench packs its tests: {error}") from error


IO_FIELDS = FieldMap(
    {
        "task_id": ("task_id", "problem_id", "question_id", "id"),
        "prompt": ("question", "question_content", "prompt", "task", "problem", "description"),
        "input_output": ("input_output",),
        "inputs": ("inputs",),
        "outputs": ("outputs",),
        "public_tests": ("public_test_cases", "public_tests"),
        "private_tests": ("private_test_cases", "private_tests"),
        "metadata": ("metadata",),
        "entry_point": ("fn_name", "entry_point"),
        "starter_code": ("starter_code",),
        "reference_solution": ("solutions", "solution", "reference_solution"),
    }
)

_SHOWN_CHARS = 1000
"""Maximum length of an example in the prompt, in characters; `test_solution.py` runs longer ones too."""

_USUAL_MODULES = (
    "collections", "typing", "itertools", "functools", "heapq", "bisect", "math", "operator", "string", "random", "re",
    "sys", "copy", "datetime", "time", "fractions", "decimal", "statistics",
)  # fmt: skip


def io_task(task_id: str, values: RowValues) -> Task:
    """Convert a row with inputs and outputs to a task.

    Raises:
        DatasetError: A field is missing or broken, or there is no test.
    """
    question, starter, solution = values.need("prompt"), values.text("starter_code"), _solution(values)
    in_class = "class Solution" in (starter or solution or "")
    tests = read_tests(values, unwrap=not in_class)
    prompt = [question.strip()]
    if starter is not None:
        prompt.append(f"Start from this code:\n\n```python\n{_starter_with_imports(starter)}\n```")
    if tests.fn_name is None:
        hidden = io_tests(*tests.hidden)
        prompt.append("Write a program in solution.py that reads standard input and prints to standard output.")
        files = _program_examples(tests, prompt)
    else:
        call = f"Solution().{tests.fn_name}" if in_class else tests.fn_name
        try:
            hidden = call_tests(call, *tests.hidden)
        except ValueError as error:
            raise values.error(f"the tests {error}") from error
        of_class = " as a method of the class `Solution`" if in_class else ""
        prompt.append(f"Write the function `{tests.fn_name}`{of_class} in solution.py.")
        files = _call_examples(tests, call, prompt)
    return Task(
        task_id=task_id,
        prompt="\n\n".join(prompt),
        hidden_tests=hidden,
        entry_point=tests.fn_name,
        files=files,
        reference_solution=solution,
    )


def _program_examples(tests: IoTests, prompt: list[str]) -> dict[str, str]:
    """Return the test file of the public examples, if there are any, and append the first example to `prompt`."""
    examples = tests.pairs[: tests.num_public]
    if not examples:
        return {}
    text, expected = (part.strip("\n") for part in examples[0])
    _say(f"Input:\n```\n{text}\n```\nOutput:\n```\n{expected}\n```", prompt)
    return {TEST_FILE: program_file(examples)}


def _call_examples(tests: IoTests, call: str, prompt: list[str]) -> dict[str, str]:
    """Return the same as `_program_examples`, for the calls of a function."""
    with many_digits():
        checks = [
            f"assert {call}({', '.join(map(repr, arguments))}) == {output!r}"
            for arguments, output in tests.pairs[: tests.num_public]
        ]
    if not checks:
        return {}
    _say(f"```python\n{checks[0]}\n```", prompt)
    return {TEST_FILE: calls_file(f"from solution import {call.partition('(')[0]}\n", checks, as_json=True)}


def _say(example: str, prompt: list[str]) -> None:
    if len(example) <= _SHOWN_CHARS:
        prompt.append(f"An example ({TEST_FILE} runs it):\n\n{example}")
    else:
        prompt.append(f"{TEST_FILE} runs an example.")


# --------------------------------------------------------------------------------------------- starter and solution


def _solution(values: RowValues) -> str | None:
    """Return the row's first solution, with the imports that such datasets take for granted."""
    raw = values.raw("reference_solution")
    is_list = not isinstance(raw, str) or re.match(r'\s*(\[|"(?!""))', raw)  # Code may begin with a docstring.
    first = next(iter(values.texts("reference_solution")), None) if is_list else raw
    return None if first is None or not first.strip() else _with_imports(first)


def _starter_with_imports(starter: str) -> str:
    """Add imports to starter code, which needs a body to be parsed since it ends in an open function."""
    body = " pass"
    code = _with_imports(f"{starter.rstrip()}{body}")
    return code.removesuffix(body)


def _with_imports(code: str) -> str:
    """Return `code` with imports for names of usual modules, such as `List`, that it neither defines nor imports."""
    try:
        names = undefined_names(code)
    except (SyntaxError, RecursionError, MemoryError):
        return code
    lines = [line for name in names if (line := _import_of(name)) is not None]
    return "\n".join([*lines, "", code]) if lines else code


def _import_of(name: str) -> str | None:
    if name in _USUAL_MODULES:
        return f"import {name}"
    module = next((module for module in _USUAL_MODULES if hasattr(import_module(module), name)), None)
    return None if module is None else f"from {module} import {name}"
