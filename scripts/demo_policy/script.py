"""What the demo policy is taught to do: scripted turns of one episode, and the turn a hint should lead to.

In: a task's variants and a random generator. Out: `Step`s, each a turn's text and tool calls with what the script knows
about it. Nothing is run or rendered here.
"""

import json
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from demo_policy.variants import Fault, TaskVariants

RUN = ("terminal", {"command": "python test_solution.py"})

_OPENING_TEXTS = ("I write the solution and run the examples.", "Let me write it and run the tests.")
_WRITING_TEXTS = ("I write the solution.", "Let me write it.")
_REPAIR_TEXTS = ("Some examples fail, so I mend the solution.", "I see the fault and fix it.")
_CORRECTED_TEXTS = ("I see the fault and fix it.", "You are right, I mend it.")
_DONE_TEXTS = (
    "All examples pass.",
    "Done, solution.py passes all examples.",
    "The solution is written and tested.",
    "solution.py works: all examples pass ✓",
)
_WRITTEN_TEXTS = (
    "The solution is written.",
    "solution.py is written.",
    "Done, the function is in solution.py.",
    "I wrote the function, there are no examples to run.",
)
_THANKED_TEXTS = ("You are welcome.", "Glad to help.")
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
    user_complains: float = 0.25
    """A user says what is wrong with a solution that is left with a fault, and the agent goes on."""
    user_thanks: float = 0.06


@dataclass(frozen=True, slots=True)
class State:
    """The state of an episode before a turn."""

    solution: str | None = None
    fault: Fault | None = None
    tested: bool = False
    examples: bool = True
    """The task has examples, and a file that runs them."""

    def writing(self, solution: str, fault: Fault | None = None) -> "State":
        """The state after `solution` was written and, if there are examples, run."""
        return replace(self, solution=solution, fault=fault, tested=self.examples)


@dataclass(frozen=True, slots=True)
class Step:
    """One scripted turn: from `before` to `after`. `hints` is what the judge may say of it once its fault shows."""

    before: State
    after: State
    text: str
    calls: tuple[tuple[str, dict[str, str]], ...]
    hints: tuple[str, ...] = ()
    broken_call: str | None = None
    kind: Literal["stumble", "read", "write", "run", "repair", "final"] = "write"
    reply: Literal["complaint", "thanks"] | None = None
    """What the user says to it."""

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

UNDONE_HINTS = (
    "Write solution.py before you end, the task asks for it.",
    "Do not stop without a solution. Write the function to solution.py.",
)
"""What the judge says of an end without a solution."""

NEUTRAL_HINTS = (
    "Take your time and think about the next step.",
    "Work carefully and go on step by step.",
    "Keep going, and stay with your plan.",
)
"""Sentences that say nothing about any task."""

STUMBLE_HINTS = tuple(hint for stumble in _STUMBLES for hint in stumble.hints)
"""What the judge says of broken tool calls, whatever the task."""


def plan_episode(variants: TaskVariants, rng: Random, rates: Rates, *, examples: bool = True) -> list[Step]:
    """Draw the turns of one episode of a task with or without examples; the last one calls no tool."""
    steps: list[Step] = []
    opening, start = rng.random(), State(examples=examples)
    if opening < rates.stumble_first:
        steps.append(_stumble(start, rng))
    elif opening < rates.stumble_first + rates.read_first:
        looking = ("read_file", {"path": "test_solution.py"}) if examples else ("terminal", {"command": "ls"})
        steps.append(Step(start, start, "", (looking,), kind="read"))
    steps += _write(start, *_draw_solution(variants, rng, rates), rng, rates)
    while _is_seen(steps[-1]) and rng.random() < rates.repair:
        steps += _repair(steps[-1].after, variants, rng, rates)
    steps.append(_final(steps[-1].after, rng))
    if steps[-1].after.fault is not None and rng.random() < rates.user_complains:
        steps[-1] = replace(steps[-1], reply="complaint")
        steps += _repair(steps[-1].after, variants, rng, rates)
        steps.append(_final(steps[-1].after, rng))
    elif steps[-1].after.fault is None and rng.random() < rates.user_thanks:
        steps[-1] = replace(steps[-1], reply="thanks")
        steps.append(Step(steps[-1].after, steps[-1].after, rng.choice(_THANKED_TEXTS), (), kind="final"))
    return steps


def _is_seen(step: Step) -> bool:
    """Whether the agent has seen that its solution fails."""
    fault = step.after.fault
    return fault is not None and not fault.hidden and step.after.tested


def plan_nothing(*, examples: bool) -> list[Step]:
    """An agent that gives up at once."""
    start = State(examples=examples)
    return [Step(start, start, "I could not solve it.", (), UNDONE_HINTS, kind="final")]


def plan_hinted(step: Step, hinted: Fault) -> Step:
    """Return the turn that the hint for `hinted` should lead to instead of `step`.

    It stays as near to `step` as it can: the same words and calls around another solution, and of all correct solutions
    the one nearest to the fault, so that what the hint changes stands out.
    """
    before = step.before
    if before.solution is None:
        if step.kind == "write" and not step.after.tested:
            return Step(before, replace(before, solution=hinted.mended), step.text, (write_call(hinted.mended),))
        return _write_step(before, hinted.mended, None, step.text, write_call(hinted.mended), "write")
    if before.fault is not None:
        return _mend(before, before.fault, "", patch=True)
    if before.examples and not before.tested:
        return _run(before)
    return Step(before, before, (_DONE_TEXTS if before.examples else _WRITTEN_TEXTS)[0], (), kind="final")


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
    texts = _OPENING_TEXTS if before.examples else _WRITING_TEXTS
    text = rng.choice(texts) if rng.random() < rates.opening_text else ""
    if before.examples and rng.random() < rates.write_alone:
        written = replace(before, solution=solution, fault=fault, tested=False)
        hints = fault.hints if fault is not None else ()
        return [Step(before, written, text, (write_call(solution),), hints), _run(written)]
    return [_write_step(before, solution, fault, text, write_call(solution), "write")]


def _write_step(
    before: State,
    solution: str,
    fault: Fault | None,
    text: str,
    call: tuple[str, dict[str, str]],
    kind: Literal["write", "repair"],
) -> Step:
    """A turn that writes the solution and, if there are examples, runs them."""
    calls = (call, RUN) if before.examples else (call,)
    return Step(
        before, before.writing(solution, fault), text, calls, fault.hints if fault is not None else (), kind=kind
    )


def _run(before: State) -> Step:
    return Step(before, replace(before, tested=True), "", (RUN,), kind="run")


def _repair(before: State, variants: TaskVariants, rng: Random, rates: Rates) -> list[Step]:
    assert before.fault is not None
    steps: list[Step] = []
    if rng.random() < rates.read_before_repair:
        steps.append(Step(before, before, "", (("read_file", {"path": "solution.py"}),), kind="read"))
    texts = _REPAIR_TEXTS if before.examples else _CORRECTED_TEXTS
    text = rng.choice(texts) if rng.random() < rates.repair_text else ""
    if rng.random() < rates.repair_works:
        return [*steps, _mend(before, before.fault, text, patch=rng.random() < rates.patch)]
    fault = rng.choice(variants.visible)
    return [*steps, _write_step(before, fault.solution, fault, text, write_call(fault.solution), "repair")]


def _mend(before: State, fault: Fault, text: str, *, patch: bool) -> Step:
    call = write_call(fault.mended)
    if patch:
        call = ("patch", {"path": "solution.py", "old": fault.bad, "new": fault.good})
    return _write_step(before, fault.mended, None, text, call, "repair")


def write_call(solution: str) -> tuple[str, dict[str, str]]:
    """The call that writes a solution's file."""
    return ("write_file", {"path": "solution.py", "content": solution})


def _stumble(before: State, rng: Random) -> Step:
    stumble = rng.choice(_STUMBLES)
    calls = () if stumble.call is None else (stumble.call,)
    return Step(before, before, "", calls, stumble.hints, stumble.broken, kind="stumble")


def _final(before: State, rng: Random) -> Step:
    failed = before.fault is not None and not before.fault.hidden
    texts = (_GIVE_UP_TEXTS if failed else _DONE_TEXTS) if before.examples else _WRITTEN_TEXTS
    return Step(
        before, before, rng.choice(texts), (), before.fault.hints if before.fault is not None else (), kind="final"
    )
