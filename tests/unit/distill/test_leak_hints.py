"""Hints that the leak filter drops, and honest ones that it lets pass.

The hints are a tenth of those that it was measured on. `blind`, `blind_2` and `blind_3` were written by authors who had
not seen a filter; the others by authors of one. Figures of the filter before (536 lines) and of this one (360):

                        before                                           now
    development         240 of 263 (91.3%)   3 of 295 (1.0%)             237 of 263 (90.1%)   5 of 295 (1.7%)
    held out            64 of 66 (97.0%)     0 of 66                     61 of 66 (92.4%)     1 of 66 (1.5%)
    blind               60 of 65 (92.3%)     0 of 65                     60 of 65 (92.3%)     0 of 65
    blind_2             54 of 60 (90.0%)     1 of 60 (1.7%)              54 of 60 (90.0%)     1 of 60 (1.7%)
    blind_3             44 of 50 (88.0%)     0 of 50                     43 of 50 (86.0%)     0 of 50
    fresh               25 of 34 (73.5%)     0 of 34                     29 of 34 (85.3%)     0 of 34
    made from HumanEval 2882 of 3188 (90.4%) 33 of 1861 (1.8%)           2877 of 3188 (90.2%) 35 of 1861 (1.9%)

The last row are checks of HumanEval in twelve forms (code, prose, words, tables, French, German, the result alone), and
honest hints of other tasks.
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
