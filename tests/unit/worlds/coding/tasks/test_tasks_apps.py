import asyncio
import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import DatasetError
from agentic_opd.core.types import Task
from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox
from agentic_opd.sandboxes.workdir import put_files
from agentic_opd.worlds.coding.config import CodingSettings
from agentic_opd.worlds.coding.hidden_tests.checks import checks_of
from agentic_opd.worlds.coding.hidden_tests.complete import call_tests, io_tests
from agentic_opd.worlds.coding.tasks.load import load_tasks

PROGRAM: dict[str, Any] = {
    "problem_id": 3,
    "question": "Add the numbers.",
    "solutions": json.dumps(["print(sum(map(int, input().split())))", "other"]),
    "input_output": json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}),
    "starter_code": "",
}
FUNCTION: dict[str, Any] = {
    "problem_id": 4,
    "question": "Double it.",
    "solutions": ["def double(x): return 2 * x"],
    "input_output": {"fn_name": "double", "inputs": [[1], [-3]], "outputs": [2, -6]},
}
STARTER = "class Solution:\n    def double(self, x: List[int]) -> int:\n        "


def load(tmp_path: Path, *rows: Any, **settings: Any) -> list[Task]:
    path = tmp_path / "apps.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_tasks(CodingSettings(dataset_name=str(path), **{"dataset_format": "apps", **settings}))


def packed(text: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(text))).decode()


def test_a_program(tmp_path: Path) -> None:
    (task,) = load(tmp_path, PROGRAM)
    assert task.prompt == (
        "Add the numbers.\n\nWrite a program in solution.py that reads standard input and prints to standard output."
        "\n\nAn example (test_solution.py runs it):\n\nInput:\n```\n1 2\n```\nOutput:\n```\n3\n```"
    )
    assert (task.task_id, task.entry_point) == ("3", None)
    assert task.hidden_tests == io_tests(["3 4\n"], ["7\n"])
    assert task.reference_solution == "print(sum(map(int, input().split())))"
    assert "3 4" not in task.files["test_solution.py"]
    named = {**json.loads(PROGRAM["input_output"]), "fn_name": ""}
    assert load(tmp_path, {**PROGRAM, "input_output": named}) == [task]
    code = '"""Adds."""\nprint(3)'
    assert load(tmp_path, {**PROGRAM, "solutions": code})[0].reference_solution == code


def test_a_function(tmp_path: Path) -> None:
    (task,) = load(tmp_path, FUNCTION)
    assert task.prompt == (
        "Double it.\n\nWrite the function `double` in solution.py.\n\n"
        "An example (test_solution.py runs it):\n\n```python\nassert double(1) == 2\n```"
    )
    assert task.entry_point == "double"
    assert task.hidden_tests == call_tests("double", [[-3]], [-6])


def test_a_class_to_fill_in(tmp_path: Path) -> None:
    """The starter code and the reference solution get the imports that such datasets take for granted."""
    solution = "class Solution:\n    def double(self, x: List[int]): return 2 * sqrt(x) + collections.x + unknown"
    (task,) = load(tmp_path, {**FUNCTION, "starter_code": STARTER, "solutions": [solution]})
    assert (
        "Start from this code:\n\n```python\nfrom typing import List\n\n"
        "class Solution:\n    def double(self, x: List[int]) -> int:\n```\n\n"
        "Write the function `double` as a method of the class `Solution` in solution.py."
    ) in task.prompt
    assert "assert Solution().double(1) == 2" in task.prompt
    assert task.reference_solution == (
        f"from typing import List\nimport collections\nfrom math import sqrt\n\n{solution}"
    )


def test_inputs_and_outputs_of_the_row_itself(tmp_path: Path) -> None:
    row = {"id": 1, "task": "Add.", "inputs": ["1 2", ["3 4", ""]], "outputs": [["3"], "7"]}
    for preset in ("apps", "generic"):
        (task,) = load(tmp_path, row, dataset_format=preset)
        assert task.hidden_tests == io_tests(["3 4\n"], ["7"])
    (task,) = load(tmp_path, {**row, "inputs": "[[1], [2]]", "outputs": "[1, 2]", "fn_name": "f"})
    assert task.hidden_tests == call_tests("f", [[2]], [2])


def test_outputs_in_lists_of_one(tmp_path: Path) -> None:
    """Rows of plain functions wrap every output in a list; rows of classes do not."""

    def hidden(outputs: list[Any], **more: str) -> str:
        tests = {"fn_name": "f", "inputs": [[1], [2]], "outputs": outputs}
        (task,) = load(tmp_path, {**FUNCTION, "solutions": "", "input_output": tests, **more})
        return task.hidden_tests

    assert hidden([[1], [2]]) == call_tests("f", [[2]], [2])
    assert hidden([[1], [2, 3]]) == call_tests("f", [[2]], [[2, 3]])
    assert hidden([[1], [2]], starter_code=STARTER) == call_tests("Solution().f", [[2]], [[2]])


def test_keys_that_json_made_texts(tmp_path: Path) -> None:
    tests = {"fn_name": "f", "inputs": [[1], [{"1": 2}], [{"a": 1, "2": 2}]], "outputs": [1, {"-3": 4}, {}]}
    (task,) = load(tmp_path, {**FUNCTION, "input_output": tests})
    assert task.hidden_tests == call_tests("f", [[{1: 2}], [{"a": 1, "2": 2}]], [{-3: 4}, {}])


def test_the_only_test_is_not_shown_and_a_long_one_only_in_the_file(tmp_path: Path) -> None:
    one = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
    (task,) = load(tmp_path, {**PROGRAM, "input_output": one})
    assert task.prompt.endswith("prints to standard output.")
    assert task.files == {}
    long = {"inputs": ["1 " * 1000, "1"], "outputs": ["1000", "1"]}
    (task,) = load(tmp_path, {**PROGRAM, "input_output": long})
    assert task.prompt.endswith("\n\ntest_solution.py runs an example.")
    assert "1 " * 1000 in task.files["test_solution.py"]


# -------------------------------------------------------------------------------------------------------- LiveCodeBench


def case(given: str, expected: str, kind: str = "stdin") -> dict[str, str]:
    return {"input": given, "output": expected, "testtype": kind}


def listed(public: Any, private: Any, **more: Any) -> dict[str, Any]:
    return {
        "question_id": "abc_a",
        "question_content": "Q",
        "public_test_cases": public,
        "private_test_cases": private,
        **more,
    }


def test_public_tests_are_shown_and_do_not_count(tmp_path: Path) -> None:
    public, private = [case("1", "2"), case("3", "4")], [case("5", "6")]
    expected = io_tests(["5"], ["6"])
    for packing in (lambda x: x, json.dumps, lambda x: packed(json.dumps(x))):
        (task,) = load(tmp_path, listed(json.dumps(public), packing(private)))
        assert task.hidden_tests == expected
        assert task.task_id == "abc_a"
        assert all(f"('{one['input']}', '{one['output']}')" in task.files["test_solution.py"] for one in public)
        assert "'6'" not in task.files["test_solution.py"]


def test_calls_have_an_argument_a_line(tmp_path: Path) -> None:
    cases = [case('[1, 2]\n"a"', "true", "functional"), case('[]\n""', "null", "functional")]
    (task,) = load(tmp_path, listed(cases[:1], cases[1:], metadata='{"func_name": "f"}', starter_code=STARTER))
    assert task.hidden_tests == call_tests("Solution().f", [[[], ""]], [None])
    assert "assert Solution().f([1, 2], 'a') == True" in task.prompt


@pytest.mark.parametrize("odd", ["\u2028", "\x85", "\u2029", "a\u2028\n", "\x7f\x85\x85"])
def test_an_argument_ends_at_a_newline_only(tmp_path: Path, odd: str) -> None:
    """Lines may end in \\r\\n too, which is space to JSON."""
    text = json.dumps(odd, ensure_ascii=False)
    cases = [case(f"{text}\r\n2", text, "functional"), case(f"\n{text}\n3\n", "null", "functional")]
    (task,) = load(tmp_path, listed(cases[:1], cases[1:], metadata='{"func_name": "f"}'))
    assert task.hidden_tests == call_tests("f", [[odd, 3]], [None])


def test_half_a_surrogate_pair_in_a_row_is_no_text(tmp_path: Path) -> None:
    """In a field, in JSON in a field, and in what LiveCodeBench packed."""
    cases = json.dumps([case('"\ud83d"', '"\udc80"', "functional")], ensure_ascii=False)
    row = listed([case('"a"', "1", "functional")], packed(cases), metadata='{"func_name": "f"}')
    (task,) = load(tmp_path, {**row, "question_id": "a\ud83d", "question_content": "Q \ud83d", "solution": "# \udfff"})
    assert (task.task_id, task.reference_solution) == ("a\ufffd", "# \ufffd")
    assert task.prompt.startswith("Q \ufffd")
    assert task.hidden_tests == call_tests("f", [["\ufffd"]], ["\ufffd"])
    for text in (task.prompt, task.hidden_tests, *task.files.values()):
        assert text.encode()


def test_lines_of_a_call_end_at_newlines_only(tmp_path: Path) -> None:
    cases = [case('"a"', "1", "functional"), case('"a\u2028b\x85"\n2', "4", "functional")]
    (task,) = load(tmp_path, listed(cases[:1], cases[1:], metadata='{"func_name": "f"}'))
    assert task.hidden_tests == call_tests("f", [["a\u2028b\x85", 2]], [4])


def test_integers_of_any_length(tmp_path: Path) -> None:
    """In a row, in JSON texts of it, shown and hidden; Python's own limit stays as it was."""
    digits = "7" * 5000
    cases = [case("1", digits, "functional"), case(digits, "2", "functional")]
    text = json.dumps(listed(cases[:1], cases[1:], metadata='{"func_name": "f"}'))
    row = (
        f'{{"question_id": 1, "question": "Q", "fn_name": "f", "inputs": [[1], [{digits}]], "outputs": [{digits}, 2]}}'
    )
    path = tmp_path / "apps.jsonl"
    path.write_text(f"{text}\n{row}\n")
    listed_task, row_task = load_tasks(CodingSettings(dataset_name=str(path), dataset_format="apps"))
    assert (
        listed_task.hidden_tests
        == row_task.hidden_tests
        == f"from solution import f\n\nassert f({digits}) == Json(2)\n"
    )
    assert digits in checks_of(row_task).source
    with pytest.raises(ValueError, match="4300"):
        int(digits)


def test_public_tests_alone_are_not_all_shown(tmp_path: Path) -> None:
    (task,) = load(tmp_path, listed([case("1", "2"), case("3", "4")], []))
    assert "('1', '2')" in task.files["test_solution.py"]
    assert "('3', '4')" not in task.files["test_solution.py"]


class _Runs:
    """Unpickled, it would run code."""

    def __reduce__(self) -> Any:
        return (print, ("ran",))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "Q"},
            r"line 1: no field 'input_output' or 'inputs' or 'public_test_cases' or .*; there is question",
        ),
        ({**PROGRAM, "input_output": ""}, r"line 1: field 'input_output' is empty"),
        ({**PROGRAM, "input_output": "{"}, r"field 'input_output' \(input_output\) is not valid JSON"),
        ({**PROGRAM, "input_output": [1]}, r"must be an object with inputs and outputs, got list"),
        ({**PROGRAM, "input_output": {"inputs": []}}, r"must hold the lists inputs and outputs; there is inputs"),
        ({**PROGRAM, "input_output": {"inputs": [], "outputs": []}}, r"got 0 inputs, 0 outputs"),
        ({**PROGRAM, "input_output": {"inputs": ["a"], "outputs": []}}, r"got 1 inputs, 0 outputs"),
        (
            {**PROGRAM, "input_output": {"inputs": [[1]], "outputs": ["a"]}},
            r"lists of lines, if there is no fn_name",
        ),
        ({**FUNCTION, "input_output": {"fn_name": "f", "inputs": [1], "outputs": [1]}}, r"list of arguments for .* f"),
        ({**FUNCTION, "input_output": {"fn_name": "f g", "inputs": [[1]], "outputs": [1]}}, r"cannot call 'f g'"),
        ({**PROGRAM, "solutions": '["a", 1]'}, r"field 'solutions' \(reference_solution\) must be a list of texts"),
        (listed([{"input": "a"}], []), r"must be a list of objects with the texts input and output"),
        (listed([case("1", "2")], [case("1", "2", "functional")]), r"must be of one testtype, stdin or functional"),
        (listed([case("1", "2", "functional")], []), r"neither entry_point nor metadata's func_name is there"),
        (listed([case("x", "2", "functional")], [], fn_name="f"), r"an input or output is not JSON"),
        (listed([], "what?"), r"is neither JSON nor packed as LiveCodeBench packs its tests"),
        (listed([], packed(_Runs())), r"it names builtins.print, and only plain text is accepted"),
    ],
)
def test_broken_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str], row: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        load(tmp_path, row)
    assert capsys.readouterr().out == ""


@pytest.mark.sandbox
def test_the_public_examples_run_in_the_sandbox(tmp_path: Path) -> None:
    """The lines that the agent reads for right, wrong and failing programs, and for a method that returns a tuple."""
    pairs = {"fn_name": "double", "inputs": [[1], [2]], "outputs": [[2, [1]], [4, [2]]]}
    program, method = load(tmp_path, PROGRAM, {**FUNCTION, "input_output": pairs, "starter_code": STARTER})

    async def output(task: Task, solution: str) -> tuple[int | None, str]:
        async with BubblewrapSandbox() as sandbox:
            await put_files(sandbox, {**task.files, "solution.py": solution})
            result = await sandbox.run("python test_solution.py", 30.0)
            return result.exit_code, result.text

    async def main() -> list[tuple[int | None, str]]:
        return await asyncio.gather(
            output(program, program.reference_solution or ""),
            output(program, "print(4)"),
            output(program, "print(' 3.0000000001 \\n')"),
            output(program, "raise ValueError('no')"),
            output(method, "class Solution:\n    def double(self, x): return 2 * x, (x,)"),
        )

    right, wrong, close, failing, of_class = asyncio.run(main())
    assert right == (0, "ok   example 1\n1 of 1 examples passed\n")
    assert wrong == (1, "FAIL example 1: expected '3\\n', got '4\\n'\n0 of 1 examples passed\n")
    assert failing[0] == 1
    assert failing[1].startswith("FAIL example 1: exit code 1\nTraceback")
    assert close == (0, "ok   example 1\n1 of 1 examples passed\n")
    assert of_class == (0, "ok   Solution().double(1)\n1 of 1 examples passed\n")
