"""How many hints the leak filter drops, of those that leak and of those that do not.

Figures of hints and tasks that the filter had never met, each at its first look and with the filter of that moment:

                                                           leaking dropped      honest dropped
    held out, before there was a reader                    10 of 66             0 of 66
    held out, first version                                62 of 66 (93.9%)     0 of 66
    37 fresh hints (style `fresh`), first version          16 of 18 (88.9%)     1 of 19
    80 hints on six tasks (style `slimmed`), second        29 of 40 (72.5%)     4 of 40
    blind, second version                                  53 of 65 (81.5%)     2 of 65 (3.1%)
    blind, first version                                   56 of 65 (86.2%)     1 of 65 (1.5%)
    60 hints on four tasks (style `grounds`), second       20 of 30 (66.7%)     2 of 30
    46 hints on four tasks (style `after`), third          18 of 23 (78.3%)     1 of 23
    blind_2, third version                                 55 of 60 (91.7%)     3 of 60 (5.0%)
    blind_3, third version                                 44 of 50 (88.0%)     2 of 50 (4.0%)
    blind_3, after general rules for the misses of blind_2 45 of 50 (90.0%)     2 of 50 (4.0%)
    68 hints on the built-in tasks (style `fourth`)        27 of 34 (79.4%)     1 of 34 (2.9%)

`blind.yaml`, `blind_2.yaml` and `blind_3.yaml` were each written by an author who had not seen the filter, nor what it
missed of other sets; their first looks are the honest figures of how the filter of that moment generalised, and none
reached the goal of 95% and 3%. All the other hints are by authors of the filter. General rules were then changed for
what was missed, so all of them are development data since, and what is asserted below is no promise for hints of
another hand. The fourth version had 977 lines; the fifth, below,
has half of them, without its special cases (dates, names of brackets, tuples, loops over bad inputs):

                        fourth                                           fifth
    development         250 of 263 (95.1%)   2 of 295 (0.7%)             240 of 263 (91.3%)   3 of 295 (1.0%)
    held out            65 of 66 (98.5%)     0 of 66                     64 of 66 (97.0%)     0 of 66
    blind               65 of 65 (100%)      0 of 65                     60 of 65 (92.3%)     0 of 65
    blind_2             58 of 60 (96.7%)     1 of 60 (1.7%)              54 of 60 (90.0%)     1 of 60 (1.7%)
    blind_3             48 of 50 (96.0%)     0 of 50                     44 of 50 (88.0%)     0 of 50
    fresh               25 of 34 (73.5%)     0 of 34                     25 of 34 (73.5%)     0 of 34

`fresh.yaml` was written before the fifth version was run on it, and neither version was changed for it: those rates
are what to expect of hints on new tasks.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentic_opd.distill.leaks import leaks
from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks

HINTS = Path(__file__).parent / "leak_hints"
LEAST_LEAKING_DROPPED = {"fresh": 0.7}
MOST_HONEST_DROPPED = 0.02


@dataclass(frozen=True)
class Shown:
    """What is hidden from the agent, and what it saw."""

    hidden_tests: str
    public_text: str


def read(name: str) -> Any:
    return yaml.safe_load((HINTS / name).read_text(encoding="utf-8"))


BUILTIN = {str(t.entry_point): Shown(t.hidden_tests, "\n".join([t.prompt, *t.files.values()])) for t in builtin_tasks()}
OWN = {n: Shown(t["hidden_tests"], f"{t['prompt']}\n{t.get('shown', '')}") for n, t in read("tasks.yaml").items()}
BLIND, BLIND_2, FRESH = (
    {t["name"]: Shown(t["hidden_tests"], t["prompt"]) for t in read(name)["tasks"]}
    for name in ("blind.yaml", "blind_2.yaml", "fresh.yaml")
)
TASKS = {
    "development": BUILTIN | OWN,
    "held_out": BUILTIN | OWN,
    "blind": BUILTIN | BLIND,
    "blind_2": BLIND_2 | {f"builtin/{name}": shown for name, shown in BUILTIN.items()},
    "blind_3": BUILTIN,
    "fresh": FRESH,
}


def hints(name: str) -> list[Any]:
    rows = read(f"{name}.yaml")
    return rows["hints"] if isinstance(rows, dict) else rows


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_leaking_hints_are_dropped_and_honest_ones_pass(name: str) -> None:
    rows, tasks = hints(name), TASKS[name]
    dropped = [leaks(row["hint"], tasks[row["task"]].hidden_tests, tasks[row["task"]].public_text) for row in rows]
    leaking = [is_dropped for row, is_dropped in zip(rows, dropped, strict=True) if row["leaks"]]
    honest = [is_dropped for row, is_dropped in zip(rows, dropped, strict=True) if not row["leaks"]]
    wrong = [row for row, is_dropped in zip(rows, dropped, strict=True) if row["leaks"] != is_dropped]
    misses = "\n".join(f"leaks={row['leaks']} {row['task']}: {row['hint']}" for row in wrong)
    figures = f"{sum(leaking)} of {len(leaking)} leaking and {sum(honest)} of {len(honest)} honest dropped\n{misses}"
    assert len(rows) >= 60, figures
    assert sum(leaking) >= LEAST_LEAKING_DROPPED.get(name, 0.88) * len(leaking), figures
    assert sum(honest) <= MOST_HONEST_DROPPED * len(honest), figures


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_a_hint_that_was_shown_to_the_agent_does_not_leak(name: str) -> None:
    for row in hints(name):
        task = TASKS[name][row["task"]]
        assert not leaks(row["hint"], task.hidden_tests, f"{task.public_text}\n\n{row['hint']}"), row
