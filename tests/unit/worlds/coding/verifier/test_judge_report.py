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
