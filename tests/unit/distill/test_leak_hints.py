"""Hints that the leak filter drops, and honest ones that it lets pass.

The hints are a tenth of those that it was measured on. `blind`, `blind_2` and `blind_3` were written by authors who had
not seen a filter; the others by authors of one. Dropped hints, leaking and honest, of the filter that had 536 lines, of
the next one with 363, and of this one:

                        536 lines                  363 lines                  now
                        leaking     honest         leaking     honest         leaking     honest
    development         240 of 263  3 of 295       237 of 263  5 of 295       242 of 263  3 of 295
    held out            64 of 66    0 of 66        61 of 66    1 of 66        64 of 66    0 of 66
    blind               60 of 65    0 of 65        60 of 65    0 of 65        60 of 65    0 of 65
    blind_2             54 of 60    1 of 60        54 of 60    1 of 60        54 of 60    1 of 60
    blind_3             44 of 50    0 of 50        43 of 50    0 of 50        44 of 50    0 of 50
    fresh               25 of 34    0 of 34        29 of 34    0 of 34        30 of 34    0 of 34
    12 forms            2744 of 2948               2743 of 2948               2747 of 2948
    27 forms            6487 of 6927               6577 of 6927               6573 of 6927
    other tasks                     33 of 1861                 35 of 1861                 31 of 1861
    other tasks, again              43 of 2850                 43 of 2850                 39 of 2850

The forms are checks of HumanEval that the task does not show: in code, prose, words, tables, French, German, other
quotes, another order, by line, with grouped digits, and the result or an input alone. The last rows are honest hints of
other tasks. All these hints were known when this version was written, so the figures are no promise for others.
"""

from pathlib import Path

import pytest
import yaml

from agentic_opd.distill.leaks import leaks
from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks

DATA = yaml.safe_load(Path(__file__).with_name("leak_hints.yaml").read_text(encoding="utf-8"))
TASKS = {name: (task["hidden_tests"], task["public"]) for name, task in DATA["tasks"].items()} | {
    str(task.entry_point): (task.hidden_tests or "", "\n".join([task.prompt, *task.files.values()]))
    for task in builtin_tasks()
}
KINDS = ("leaking", "honest", "leaking, and not found", "honest, and dropped all the same")


@pytest.mark.parametrize("kind", KINDS)
def test_leaking_hints_are_dropped_and_honest_ones_pass(kind: str) -> None:
    """A hint of the last two kinds that is judged rightly belongs to one of the first two."""
    is_dropped = kind in ("leaking", "honest, and dropped all the same")
    wrong = [
        (task, hint) for task, hints in DATA[kind].items() for hint in hints if leaks(hint, *TASKS[task]) != is_dropped
    ]
    assert not wrong


@pytest.mark.parametrize("kind", KINDS)
def test_a_hint_that_was_shown_to_the_agent_does_not_leak(kind: str) -> None:
    for task, hints in DATA[kind].items():
        hidden_tests, public = TASKS[task]
        for hint in hints:
            assert not leaks(hint, hidden_tests, f"{public}\n\n{hint}"), hint
