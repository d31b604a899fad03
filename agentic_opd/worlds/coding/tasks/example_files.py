"""A task's public examples -> the source of `test_solution.py`, which lies in the agent's sandbox. Pure.

Like that of the built-in tasks it prints a line an example, with what was expected and what came, and exits with 1
unless all of them pass.
"""

import ast
from collections.abc import Sequence

TEST_FILE = "test_solution.py"

_CALLS = '''"""Runs the task's examples on solution.py."""
import sys

{setup}

EXAMPLES = [
{examples}
]

passed = 0
for call, expected in EXAMPLES:
    try:
        got, wanted = {got}, eval(expected)
    except Exception as error:
        print(f"FAIL {{call}}: {{type(error).__name__}}: {{error}}")
        continue
    if got == wanted:
        passed += 1
        print(f"ok   {{call}}")
    else:
        print(f"FAIL {{call}}: expected {{wanted!r}}, got {{got!r}}")
print(f"{{passed}} of {{len(EXAMPLES)}} examples passed")
sys.exit(0 if passed == len(EXAMPLES) else 1)
'''

_AS_JSON = """

def as_json(value):
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    return {key: as_json(item) for key, item in value.items()} if isinstance(value, dict) else value
"""

_PROGRAM = '''"""Runs the task's examples: solution.py reads the input, and what it prints is compared."""
import subprocess
import sys

EXAMPLES = [
{examples}
]


def lines(text):
    return [line.rstrip() for line in text.rstrip().split("\\n")]


passed = 0
for number, (text, expected) in enumerate(EXAMPLES, start=1):
    try:
        done = subprocess.run([sys.executable, "solution.py"], input=text, capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        print(f"FAIL example {{number}}: no end after 10 s")
        continue
    if done.returncode != 0:
        print(f"FAIL example {{number}}: exit code {{done.returncode}}\\n{{done.stderr[-2000:]}}")
    elif lines(done.stdout) == lines(expected):
        passed += 1
        print(f"ok   example {{number}}")
    else:
        print(f"FAIL example {{number}}: expected {{expected!r}}, got {{done.stdout[:2000]!r}}")
print(f"{{passed}} of {{len(EXAMPLES)}} examples passed")
sys.exit(0 if passed == len(EXAMPLES) else 1)
'''


def calls_file(setup: str, checks: Sequence[str], *, as_json: bool = False) -> str:
    """Test file for some calls.

    Args:
        setup: Runs first, and imports from solution.
        checks: Sources of one `assert` each.
        as_json: What a call returns is compared as JSON would hold it: a tuple as a list.
    """
    rows = "\n".join(f"    {pair!r}," for check in checks for pair in _pairs(check))
    got = "as_json(eval(call))" if as_json else "eval(call)"
    return _CALLS.format(setup=(setup + (_AS_JSON if as_json else "")).strip(), examples=rows, got=got)


def program_file(examples: Sequence[tuple[str, str]]) -> str:
    """Test file for (input, output) texts of a program."""
    return _PROGRAM.format(examples="\n".join(f"    {pair!r}," for pair in examples))


def _pairs(check: str) -> list[tuple[str, str]]:
    """The call and the expected value of each `assert` in `check`, as sources."""
    asserts = [node.test for node in ast.walk(ast.parse(check)) if isinstance(node, ast.Assert)]
    return [_pair(test) for test in asserts]


def _pair(test: ast.expr) -> tuple[str, str]:
    match test:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            return ast.unparse(left), ast.unparse(right)
        case _:
            return f"bool({ast.unparse(test)})", "True"
