"""What the judge reads of hidden tests: which checks failed and how, and nothing that only the tests know."""

import asyncio

import pytest

from agentic_opd.core.types import Task
from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox
from agentic_opd.worlds.coding.verifier.verify import verify

pytestmark = pytest.mark.sandbox

TESTS = """from solution import f
assert f(4711) == 'expected-secret'
assert f(1) == 2
assert f('input-secret') > 7
"""
SECRETS = ("4711", "expected-secret", "input-secret", "7")


def judge_report(source: str, tests: str = TESTS, prompt: str = "Write f; f(1) == 2.") -> str:
    task = Task("t", prompt, tests)
    return asyncio.run(verify(task, BubblewrapSandbox, {"solution.py": source.encode()}, 10.0)).judge_report


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        (
            "def f(x):\n    return x",
            [
                "check 1: it gives a value of type int where a value of type str is expected",
                "f(1): it gives another value than expected",
                "check 3: it raises TypeError",
            ],
        ),
        (
            "def f(x):\n    if x == 1:\n        return None\n    return {}[x]",
            [
                "check 1: it raises KeyError in line 4 of solution.py: return {}[x]",
                "f(1): it gives None where a value of type int is expected",
                "check 3: it raises KeyError in line 4 of solution.py: return {}[x]",
            ],
        ),
        (
            "class Odd(Exception): pass\ndef f(x):\n    raise Odd(x)",
            [
                f"{name}: it raises Odd in line 3 of solution.py: raise Odd(x)"
                for name in ("check 1", "f(1)", "check 3")
            ],
        ),
    ],
)
def test_a_failed_check_is_named_and_its_values_are_not(source: str, lines: list[str]) -> None:
    """A call is named where the task shows it, and does not count."""
    report = judge_report(source)
    assert report.split("\n") == ["Hidden tests: 0 of 2 passed.", *(f"FAIL {line}" for line in lines)]
    assert not any(secret in report.replace(source.split("\n")[-1].strip(), "") for secret in SECRETS)


def test_a_solution_that_can_not_be_imported_shows_its_own_error() -> None:
    assert judge_report("def f(x:").split("\n")[1].startswith("solution.py could not be imported: SyntaxError")


def test_tests_that_end_early_say_what_they_import_and_no_more() -> None:
    assert judge_report("g = 1").split("\n")[1] == "The tests ended early: cannot import name 'f'."
    raising = "from solution import f\nassert f(1) == 1\nraise ValueError('secret' + str(f(1)))\n"
    assert judge_report("def f(x): return x", raising).split("\n")[1] == "The tests ended early."


def test_a_test_file_names_its_tests() -> None:
    tests = "from solution import f\n\n\ndef test_large():\n    assert f(4711) == 'expected-secret'\n"
    assert judge_report("def f(x):\n    return 'x'", tests).split("\n")[1:] == [
        "FAIL test_large: an assertion of the test failed"
    ]


def test_the_line_is_found_when_both_share_a_process() -> None:
    tests = "import inspect\nfrom solution import f\nassert f(1) == 2\n"
    assert judge_report("def f(x):\n    return [][x]", tests).split("\n")[1:] == [
        "FAIL f(1): it raises IndexError in line 2 of solution.py: return [][x]"
    ]


ODD = "class Odd(Exception): pass\n"


@pytest.mark.parametrize(
    ("source", "manner"),
    [
        ("def f(x): raise type('E' + repr(x), (Exception,), {})()", "it raises Exception in line 1"),
        (
            "def f(x): raise type('E' + repr(x), (KeyError,), {'__module__': repr(x)})(x)",
            "it raises KeyError in line 1",
        ),
        (f"{ODD}def f(x): raise Odd(x)", "it raises Odd in line 2"),
        (f"{ODD}Odd.__name__ = 'Other'\ndef f(x): raise Odd(x)", "it raises Other in line 3"),
        ("import json\ndef f(x): json.loads(repr(x) + '{')", "it raises ValueError in line 2"),
        ("def f(x): return type('V' + repr(x), (), {})()", "it raises TypeError"),
    ],
)
def test_an_error_s_name_stands_in_the_solution_or_is_built_in(source: str, manner: str) -> None:
    first = judge_report(source, "from solution import f\nassert f(4711) == 1\n").split("\n")[1]
    assert first.removeprefix("FAIL check 1: ").startswith(manner)


def test_an_error_s_name_may_stand_in_another_file_of_the_solution() -> None:
    files = {"solution.py": b"from util import f", "util.py": f"{ODD}def f(x): raise Odd(x)".encode()}
    report = asyncio.run(verify(Task("t", "p", TESTS), BubblewrapSandbox, files, 10.0)).judge_report
    assert report.split("\n")[1] == "FAIL check 1: it raises Odd"


PADDING = "\n".join(f"a{number} = {number}" for number in range(20))


@pytest.mark.parametrize(
    "source",
    [
        "def f(x): exec(compile('\\n' * (x - 1) + 'raise KeyError', __file__, 'exec'))",
        "def f(x): exec(compile('\\n' * (x - 1) + 'raise KeyError', 'solution.py', 'exec'))",
        "def f(x): exec(compile('\\n' * (x - 1) + 'raise KeyError', 'other/solution.py', 'exec'))",
        "def f(x): g.__code__ = g.__code__.replace(co_firstlineno=x); g()\ndef g(): raise KeyError",
        "def f(x): g.__code__ = g.__code__.replace(co_linetable=bytes([0x80 | 12 << 3 | 7, x, 0, 0])); g()\n"
        "def g(): raise KeyError",
    ],
)
def test_only_code_of_the_solution_s_file_has_a_line(source: str) -> None:
    """The judge reads the line that calls other code, and never one that the other code chooses."""
    report = judge_report(f"{source}\n{PADDING}", "from solution import f\nassert f(17) == 1\n")
    assert report.split("\n")[1].startswith("FAIL check 1: it raises KeyError in line 1 of solution.py: def f(x)")


def test_a_line_without_code_or_of_a_very_long_file_is_not_told() -> None:
    raising = "def f(x):\n    raise KeyError\n"
    tests = "from solution import f\nassert f(17) == 1\n"
    assert judge_report(raising + "\n" * 900, tests).endswith(
        "it raises KeyError in line 2 of solution.py: raise KeyError"
    )
    assert judge_report(raising + "\n" * 1000, tests).endswith("it raises KeyError")


@pytest.mark.parametrize("name", ["x4711", "solution", "len"])
def test_a_name_that_the_tests_do_not_import_is_not_told(name: str) -> None:
    source = f"def f(x): raise ImportError(\"cannot import name '{name}' from 'solution'\")"
    tests = "from solution import f\nassert f(1) == 1\nf(2)\n"
    assert judge_report(source, tests).split("\n")[1] == "The tests ended early."


def test_an_import_that_fails_beside_the_tests_shows_no_text() -> None:
    """The solution may have read the tests in its own process by then."""
    tests = "import inspect\nfrom solution import f\nassert f(4711) == 1\n"
    assert (
        judge_report("raise ValueError('4711')", tests).split("\n")[1]
        == "solution.py could not be imported: ValueError."
    )
    assert judge_report("raise type('E4711', (Exception,), {})", tests).split("\n")[1] == (
        "solution.py could not be imported."
    )
