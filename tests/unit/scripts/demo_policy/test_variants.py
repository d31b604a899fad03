from typing import Any

import pytest
from demo_policy.episodes import RememberingWorld
from demo_policy.script import STUMBLE_HINTS
from demo_policy.variants import Fault, load_variants

from agentic_opd.core.errors import DatasetError
from agentic_opd.core.types import Task
from agentic_opd.distill.leaks import leaks
from agentic_opd.distill.protocol import MIN_HINT_CHARS
from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks

pytestmark = pytest.mark.slow

TASKS = [pytest.param(task, id=task.task_id) for task in builtin_tasks()]


def test_every_builtin_task_has_variants():
    assert [task.entry_point for task in builtin_tasks()] == [*load_variants()]


@pytest.mark.processes
@pytest.mark.parametrize("task", TASKS)
def test_correct_variants_pass_and_faulty_ones_fail_where_they_say(task: Task):
    """Examples and hidden tests both pass for a correct solution; a hidden fault passes the examples alone."""
    world, variants = RememberingWorld(), load_variants()[task.entry_point or ""]
    for solution in variants.correct:
        assert world.passes(task, solution)
        assert passes_examples(task, solution)
    for fault in variants.faults:
        assert not world.passes(task, fault.solution), fault.name
        assert passes_examples(task, fault.solution) == fault.hidden, fault.name


def passes_examples(task: Task, solution: str) -> bool:
    """The examples of the prompt, checked here: the solution is the project's own, and no sandbox is faster."""
    names: dict[str, Any] = {}
    exec(solution, names)
    try:
        return all(eval(line, dict(names)) for line in task.prompt.partition("runs them):\n")[2].splitlines())
    except TypeError:
        return False


@pytest.mark.parametrize("task", TASKS)
def test_each_task_has_several_visible_faults_and_a_hidden_one(task: Task):
    variants = load_variants()[task.entry_point or ""]
    assert 3 <= len(variants.visible) <= 5
    assert len(variants.hidden) == 1
    assert len({fault.solution for fault in variants.faults}) == len(variants.faults)


@pytest.mark.parametrize("task", TASKS)
def test_hints_are_long_enough_and_quote_no_hidden_test(task: Task):
    for fault in load_variants()[task.entry_point or ""].faults:
        for hint in fault.hints:
            assert len(hint.strip()) > MIN_HINT_CHARS
            assert not leaks(hint, task.hidden_tests, task.prompt), hint


def test_a_hint_belongs_to_one_fault_alone():
    """Else a foreign hint could fit, and the wrong-hint control would mean nothing."""
    hints = [hint for variants in load_variants().values() for fault in variants.faults for hint in fault.hints]
    assert len({*hints, *STUMBLE_HINTS}) == len(hints) + len(STUMBLE_HINTS)


def test_a_fault_that_is_not_one_edit_is_refused():
    with pytest.raises(DatasetError, match="'twice'"):
        Fault("twice", mended="a\na\n", good="a\n", bad="b\n", hints=("change it back",), hidden=False)
