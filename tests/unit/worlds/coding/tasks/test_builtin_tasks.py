import ast
import asyncio

import pytest

from agentic_opd.core.types import Task, VerifyOutcome
from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox
from agentic_opd.sandboxes.protocol import Sandbox
from agentic_opd.sandboxes.workdir import put_files
from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks
from agentic_opd.worlds.coding.verifier.verify import verify
from tests.support.sandboxes import in_sandbox

TASKS = {task.entry_point: task for task in builtin_tasks()}


def test_the_eight_tasks_in_order() -> None:
    assert [*TASKS] == [
        "fizzbuzz",
        "is_palindrome",
        "two_sum",
        "flatten",
        "longest_common_prefix",
        "group_anagrams",
        "valid_parentheses",
        "merge_intervals",
    ]


def test_the_prompt_word_for_word() -> None:
    assert TASKS["fizzbuzz"].prompt == (
        "Write `fizzbuzz(n)` in solution.py: return 'Fizz' if n is divisible by 3, 'Buzz' if by 5, 'FizzBuzz' if by "
        "both, else str(n).\n\n"
        "Examples (test_solution.py runs them):\n"
        "fizzbuzz(3) == 'Fizz'\nfizzbuzz(10) == 'Buzz'\nfizzbuzz(15) == 'FizzBuzz'\nfizzbuzz(7) == '7'"
    )


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_hidden_checks_are_many_plain_and_not_public(task: Task) -> None:
    checks = [node.test for node in ast.walk(ast.parse(task.hidden_tests)) if isinstance(node, ast.Assert)]
    public = task.prompt.split("runs them):\n")[1].splitlines()
    assert len(checks) >= 10
    assert 3 <= len(public) <= 5
    for check in checks:
        assert isinstance(check, ast.Compare)
        call = ast.unparse(check.left)
        assert call.startswith(f"{task.entry_point}(")
        assert not any(line.startswith(f"{call} ==") for line in public)


def run_public_tests(task: Task, solution: str) -> tuple[int, str]:
    async def use(sandbox: Sandbox) -> tuple[int, str]:
        await put_files(sandbox, {**task.files, "solution.py": solution})
        result = await sandbox.run("python test_solution.py", 20.0)
        return result.exit_code, result.text

    return in_sandbox(use)


@pytest.mark.sandbox
def test_the_references_pass_the_hidden_tests() -> None:
    async def main() -> None:
        for task in TASKS.values():
            assert task.reference_solution is not None
            verdict = await verify(
                task, BubblewrapSandbox, {"solution.py": task.reference_solution.encode()}, timeout_s=20.0
            )
            assert (verdict.outcome, verdict.correctness) == (VerifyOutcome.RAN, 1.0), verdict.report
            assert not verdict.in_process

    asyncio.run(main())


@pytest.mark.sandbox
def test_output_of_the_public_tests() -> None:
    task = TASKS["two_sum"]
    assert task.reference_solution is not None
    assert run_public_tests(task, task.reference_solution) == (
        0,
        "ok   two_sum([2, 7, 11, 15], 9)\n"
        "ok   two_sum([3, 2, 4], 6)\n"
        "ok   two_sum([1, 2], 5)\n"
        "3 of 3 examples passed\n",
    )
    wrong = "def two_sum(nums, target):\n    return [0, 1] if nums[2] else nums[9]\n"
    assert run_public_tests(task, wrong) == (
        1,
        "ok   two_sum([2, 7, 11, 15], 9)\n"
        "FAIL two_sum([3, 2, 4], 6): expected [1, 2], got [0, 1]\n"
        "FAIL two_sum([1, 2], 5): IndexError: list index out of range\n"
        "1 of 3 examples passed\n",
    )
    code, output = run_public_tests(task, "def two_sum(nums, target)\n")
    assert (code, output.split(" (")[0]) == (1, "FAIL import: SyntaxError: expected ':'")
