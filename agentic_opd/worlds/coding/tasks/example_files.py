"""Build the source of `test_solution.py`, which runs a task's public examples in the agent's sandbox. Pure.

The file prints a line for each example, with the expected and the actual value of a failure. It exits with 1 unless all
examples pass.
"""

import ast
from collections.abc import Iterable, Sequence
from importlib import resources

from agentic_opd.core.syntax import parse_module
from agentic_opd.worlds.coding.hidden_tests.digits import many_digits

TEST_FILE = "test_solution.py"

_CALLS_DOC = '"""Runs the task\'s examples on solution.py."""\nimport sys\n\nsys.set_int_max_str_digits(0)\n'
_PROGRAM_DOC = '''"""Runs the task's examples: solution.py reads the input, and what it prints is compared."""
import subprocess
import sys

PYTHON = [sys.executable, "-X", "int_max_str_digits=0", "solution.py"]
'''

_IMPORT = """try:
    from solution import ENTRY_POINT
except BaseException as error:
    print(f"FAIL import: {type(error).__name__}: {error}")
    sys.exit(1)
"""

_RUN_CALLS = """
passed = 0
for call, expected in EXAMPLES:
    try:
        EVALUATE
    except Exception as error:
        print(f"FAIL {call}: {type(error).__name__}: {error}")
        continue
    if got == expected:
        passed += 1
        print(f"ok   {call}")
    else:
        print(f"FAIL {call}: expected {expected!r}, got {got!r}")
"""

_RUN_PROGRAM = """

passed = 0
for number, (text, expected) in enumerate(EXAMPLES, start=1):
    try:
        done = subprocess.run(PYTHON, input=text, capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        print(f"FAIL example {number}: no end after 10 s")
        continue
    if done.returncode != 0:
        print(f"FAIL example {number}: exit code {done.returncode}\\n{done.stderr[-2000:]}")
    elif done.stdout == Printed(expected):
        passed += 1
        print(f"ok   example {number}")
    else:
        print(f"FAIL example {number}: expected {expected!r}, got {done.stdout[:2000]!r}")
"""

_END = """print(f"{passed} of {len(EXAMPLES)} examples passed")
sys.exit(0 if passed == len(EXAMPLES) else 1)
"""


def _grading() -> str:
    """Return the source of grading.py without its docstring, so that examples are compared as in verification."""
    source = (resources.files("agentic_opd.worlds.coding") / "grading.py").read_text(encoding="utf-8")
    return source.partition('"""\n\n\n')[2]


def builtin_file(entry_point: str, examples: Sequence[str]) -> str:
    """Return a test file for `call == expected` lines about one function."""
    pairs = [line.strip().rpartition(" == ") for line in examples]
    rows = _examples(f"({call!r}, {expected})" for call, _, expected in pairs)
    run = _RUN_CALLS.replace("EVALUATE", "got = eval(call)")
    return "\n".join([_CALLS_DOC, rows, _IMPORT.replace("ENTRY_POINT", entry_point)]) + run + _END


def calls_file(setup: str, checks: Sequence[str], *, as_json: bool = False) -> str:
    """Return a test file for calls of the solution: `setup` imports from it, and each of `checks` is one `assert`.

    With `as_json`, returned values are compared by the rules of grading.py.
    """
    before = setup.strip() + "\n" + (f"\n\n{_grading()}\n" if as_json else "")
    with many_digits():
        rows = _examples(repr(pair) for check in checks for pair in _pairs(check))
    expected = "Json(eval(expected))" if as_json else "eval(expected)"
    run = _RUN_CALLS.replace("EVALUATE", f"got, expected = eval(call), {expected}")
    return "\n".join([_CALLS_DOC, before, rows]) + run + _END


def program_file(examples: Sequence[tuple[str, str]]) -> str:
    """Return a test file for a program, from its (input, expected output) texts."""
    return "\n".join([_PROGRAM_DOC, "", _grading(), "", _examples(map(repr, examples))]) + _RUN_PROGRAM + _END


def _examples(rows: Iterable[str]) -> str:
    return "EXAMPLES = [\n" + "".join(f"    {row},\n" for row in rows) + "]\n"


def _pairs(check: str) -> list[tuple[str, str]]:
    """Return the call and the expected value of each `assert` in `check`, as sources."""
    asserts = [node.test for node in ast.walk(parse_module(check)) if isinstance(node, ast.Assert)]
    return [_pair(test) for test in asserts]


def _pair(test: ast.expr) -> tuple[str, str]:
    match test:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            return ast.unparse(left), ast.unparse(right)
        case _:
            return f"bool({ast.unparse(test)})", "True"
