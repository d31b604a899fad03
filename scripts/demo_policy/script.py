"""What the demo policy is taught to do: scripted turns of one episode, and the turn a hint should lead to.

In: a task's variants and a random generator. Out: `Step`s, each a turn's text and tool calls with what the script knows
about it. Nothing is run or rendered here.
"""

import json
from dataclasses import dataclass
from random import Random
from typing import Literal

from demo_policy.variants import Fault, TaskVariants

RUN = ("terminal", {"command": "python test_solution.py"})

_OPENING_TEXTS = ("I write the solution and run the examples.", "Let me write it and run the tests.")
_REPAIR_TEXTS = ("Some examples fail, so I mend the solution.", "I see the fault and fix it.")
_DONE_TEXTS = (
    "All examples pass.",
    "Done, solution.py passes all examples.",
    "The solution is written and tested.",
    "solution.py works: all examples pass ✓",
)
_GIVE_UP_TEXTS = (
    "I could not make all examples pass.",
    "Some examples still fail, I stop here.",
    "The solution is not right yet… some examples fail.",
)


@dataclass(frozen=True, slots=True)
class Rates:
    """How often the scripted agent does what; probabilities in [0, 1]."""

    visible_fault: float = 0.49
    """The first solution has a fault that the examples show."""
    hidden_fault: float = 0.06
    """It has one that only hidden tests show."""
    repair: float = 0.25
    """Failing examples lead to a repair, not to giving up."""
    repair_works: float = 0.85
    read_first: float = 0.05
    stumble_first: float = 0.05
    """The first turn is a broken tool call."""
    write_alone: float = 0.12
    """Writing and running take two turns instead of parallel calls in one."""
    read_before_repair: float = 0.12
    patch: float = 0.6
    """A repair is a patch, not a whole new file."""
    opening_text: float = 0.25
    repair_text: float = 0.35


@dataclass(frozen=True, slots=True)
class State:
    """Where an episode stands before a turn."""

    solution: str | None = None
    fault: Fault | None = None
    tested: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One scripted turn: from `before` to `after`. `hints` is what the judge may say of it, empty for -1."""

    before: State
    after: State
    text: str
    calls: tuple[tuple[str, dict[str, str]], ...]
    hints: tuple[str, ...] = ()
    broken_call: str | None = None
    kind: Literal["stumble", "read", "write", "run", "repair", "final"] = "write"

    def completion(self) -> str:
        """The turn as the model writes it, without its end token."""
        bodies = [json.dumps({"name": name, "arguments": args}, ensure_ascii=False) for name, args in self.calls]
        if self.broken_call is not None:
            bodies.append(self.broken_call)
        blocks = [f"<tool_call>\n{body}\n</tool_call>" for body in bodies]
        return "\n".join(part for part in (self.text, *blocks) if part)


@dataclass(frozen=True, slots=True)
class _Stumble:
    """A tool call that fails, and what the judge says of it."""

    hints: tuple[str, ...]
    call: tuple[str, dict[str, str]] | None = None
    broken: str | None = None


_STUMBLES = (
    _Stumble(
        ("There is no tool named bash. Use terminal to run commands.", "Use the terminal tool for shell commands."),
        call=("bash", {"command": "python test_solution.py"}),
    ),
    _Stumble(
        ("Give write_file the content as well as the path.", "A write_file call needs path and content."),
        call=("write_file", {"path": "solution.py"}),
    ),
    _Stumble(
        ("Write solution.py first, it does not exist yet.", "Do not read solution.py before you have written it."),
        call=("read_file", {"path": "solution.py"}),
    ),
    _Stumble(
        ("Close the quotes and braces, the arguments must be valid JSON.", "The call was not valid JSON. Close it."),
        broken='{"name": "terminal", "arguments": {"command": "ls -la}}',
    ),
)

STUMBLE_HINTS = tuple(hint for stumble in _STUMBLES for hint in stumble.hints)
"""What the judge says of broken tool calls, whatever the task."""


def plan_episode(variants: TaskVariants, rng: Random, rates: Rates) -> list[Step]:
    """Draw the turns of one episode; the last one calls no tool."""
    steps: list[Step] = []
    opening = rng.random()
    if opening < rates.stumble_first:
        steps.append(_stumble(rng))
    elif opening < rates.stumble_first + rates.read_first:
        steps.append(Step(State(), State(), "", (("read_file", {"path": "test_solution.py"}),), kind="read"))
    steps += _write(State(), *_draw_solution(variants, rng, rates), rng, rates)
    while (fault := steps[-1].after.fault) is not None and not fault.hidden and rng.random() < rates.repair:
        steps += _repair(steps[-1].after, variants, rng, rates)
    return [*steps, _final(steps[-1].after, rng)]


def plan_hinted(step: Step, hinted: Fault) -> Step:
    """Return the turn that the hint for `hinted` should lead to instead of `step`.

    It stays as near to `step` as it can: the same words and calls around another solution, and of all correct solutions
    the one nearest to the fault, so that what the hint changes stands out.
    """
    before = step.before
    if before.solution is None:
        write = write_call(hinted.mended)
        if step.kind == "write" and not step.after.tested:
            return Step(before, State(hinted.mended), step.text, (write,))
        return _tested(before, hinted.mended, None, step.text, (write, RUN), "write")
    if before.fault is not None:
        return _mend(before, before.fault, "", patch=True)
    return _run(before) if not before.tested else Step(before, before, _DONE_TEXTS[0], (), kind="final")


def _draw_solution(variants: TaskVariants, rng: Random, rates: Rates) -> tuple[str, Fault | None]:
    roll = rng.random()
    if roll < rates.visible_fault:
        fault = rng.choice(variants.visible)
    elif roll < rates.visible_fault + rates.hidden_fault:
        fault = rng.choice(variants.hidden)
    else:
        return rng.choice(variants.correct), None
    return fault.solution, fault


def _write(before: State, solution: str, fault: Fault | None, rng: Random, rates: Rates) -> list[Step]:
    text = rng.choice(_OPENING_TEXTS) if rng.random() < rates.opening_text else ""
    write = write_call(solution)
    if rng.random() < rates.write_alone:
        written = State(solution, fault)
        return [Step(before, written, text, (write,)), _run(written)]
    return [_tested(before, solution, fault, text, (write, RUN), "write")]


def _tested(
    before: State,
    solution: str,
    fault: Fault | None,
    text: str,
    calls: tuple[tuple[str, dict[str, str]], ...],
    kind: Literal["write", "run", "repair"],
) -> Step:
    hints = fault.hints if fault is not None and not fault.hidden else ()
    return Step(before, State(solution, fault, tested=True), text, calls, hints, kind=kind)


def _run(before: State) -> Step:
    assert before.solution is not None
    return _tested(before, before.solution, before.fault, "", (RUN,), "run")


def _repair(before: State, variants: TaskVariants, rng: Random, rates: Rates) -> list[Step]:
    assert before.fault is not None
    steps: list[Step] = []
    if rng.random() < rates.read_before_repair:
        steps.append(Step(before, before, "", (("read_file", {"path": "solution.py"}),), kind="read"))
    text = rng.choice(_REPAIR_TEXTS) if rng.random() < rates.repair_text else ""
    if rng.random() < rates.repair_works:
        return [*steps, _mend(before, before.fault, text, patch=rng.random() < rates.patch)]
    fault = rng.choice(variants.visible)
    return [*steps, _tested(before, fault.solution, fault, text, (write_call(fault.solution), RUN), "repair")]


def _mend(before: State, fault: Fault, text: str, *, patch: bool) -> Step:
    call = write_call(fault.mended)
    if patch:
        call = ("patch", {"path": "solution.py", "old": fault.bad, "new": fault.good})
    return _tested(before, fault.mended, None, text, (call, RUN), "repair")


def write_call(solution: str) -> tuple[str, dict[str, str]]:
    """The call that writes a solution's file."""
    return ("write_file", {"path": "solution.py", "content": solution})


def _stumble(rng: Random) -> Step:
    stumble = rng.choice(_STUMBLES)
    calls = () if stumble.call is None else (stumble.call,)
    return Step(State(), State(), "", calls, stumble.hints, stumble.broken, kind="stumble")


def _final(before: State, rng: Random) -> Step:
    failed = before.fault is not None and not before.fault.hidden
    hints = before.fault.hints if before.fault is not None else ()
    return Step(before, before, rng.choice(_GIVE_UP_TEXTS if failed else _DONE_TEXTS), (), hints, kind="final")
