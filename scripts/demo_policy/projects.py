"""Tasks of several functions, written a turn each, whose tests run turns later: mistakes in a turn that is known.

    write a  ->  append b  ->  append c  ->  [look]  ->  run all examples  ->  [repair, run]  ->  end, verdict

In: the variants of two or three functions and a random generator. Out: a task and its `Step`s; a step with hints holds
a planted mistake. Which functions a task has decides whether it is one to train on or one to measure.
"""

import re
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import combinations
from random import Random

from agentic_opd.core.types import Message, Task, ToolCall, ToolResult, Verification, VerifyOutcome
from agentic_opd.worlds.authors import Authors
from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks
from agentic_opd.worlds.coding.tasks.example_files import TEST_FILE, builtin_file
from agentic_opd.worlds.coding.verifier.verify import SOLUTION_FILE
from agentic_opd.worlds.coding.world import LeftFiles
from demo_policy.episodes import RememberingSession, RememberingWorld
from demo_policy.script import RUN, State, Step, write_call
from demo_policy.variants import Fault, TaskVariants, load_variants

FUNCTIONS = (2, 3)
"""Functions of a task."""
HELD_OUT_SHARE = 5
"""Of so many combinations of functions one is never trained on."""
_LOOK = ("read_file", {"path": SOLUTION_FILE})
_FAILED = "\n[exit code 1]"
_CHECK = re.compile(r"FAIL check (\d+):")
_MOST_FAILURES = 3
"""Failures of a verdict."""
_APPEND, _END = f"cat >> {SOLUTION_FILE} <<'EOF'\n", "EOF"
_WRITING_TEXTS = ("First {}.", "I begin with {}.", "Now {}.", "Next is {}.")
_REPAIR_TEXTS = ("Some examples fail, so I mend the solution.", "I see the fault and fix it.")
_RIGHT_TEXTS = ("All functions are written.", "solution.py holds all functions.", "Done, every function is written.")
_WRONG_TEXTS = ("Some examples still fail, I stop here.", "I could not make all examples pass.")


@dataclass(frozen=True, slots=True)
class ProjectRates:
    """How often the scripted agent does what; probabilities in [0, 1]."""

    right: float = 0.25
    """No function has a mistake."""
    both: float = 0.2
    """A second function has a mistake too."""
    look: float = 0.3
    """A turn that only looks comes before the tests."""
    repair: float = 0.35
    """What failed is mended, and the tests run again."""
    text: float = 0.3
    """A turn that writes says so."""


def combinations_of(*, held_out: bool) -> list[tuple[str, ...]]:
    """Return the combinations of functions to train on, or those that are held out, in a fixed order."""
    names = sorted(load_variants())
    return [
        combination
        for size in FUNCTIONS
        for combination in combinations(names, size)
        if (blake2b(" ".join(combination).encode()).digest()[0] % HELD_OUT_SHARE == 0) is held_out
    ]


def project_task(entry_points: Sequence[str], *, examples: bool) -> Task:
    """Return the task to write these functions of the built-in tasks into one file, in this order."""
    tasks = {task.entry_point: task for task in builtin_tasks()}
    chosen = [tasks[name] for name in entry_points]
    statements = [task.prompt.partition("\n\nExamples (")[0] for task in chosen]
    lines = [line for task in chosen for line in task.prompt.partition("):\n")[2].split("\n")]
    names = ", ".join(entry_points)
    checks = "\n".join((task.hidden_tests or "").partition("\n\n")[2] for task in chosen)
    example_lines = f"\n\nExamples ({TEST_FILE} runs them):\n" + "\n".join(lines) if examples else ""
    return Task(
        task_id=f"project/{'+'.join(entry_points)}",
        prompt="\n".join(statements) + example_lines,
        hidden_tests=f"from solution import {names}\n\n{checks}",
        files={TEST_FILE: builtin_file(names, lines)} if examples else {},
        reference_solution="\n\n".join(task.reference_solution or "" for task in chosen),
    )


def plan_project(functions: Sequence[TaskVariants], rng: Random, rates: ProjectRates, *, examples: bool) -> list[Step]:
    """Draw the turns of an episode; a step's hints are those of the mistake that it makes."""
    faults = _draw_faults(functions, rng, rates, examples=examples)
    steps: list[Step] = []
    state = State(examples=examples)
    for number, function in enumerate(functions):
        fault = faults.get(number)
        source = fault.solution if fault else rng.choice(function.correct)
        text = rng.choice(_WRITING_TEXTS[:2] if number == 0 else _WRITING_TEXTS[2:]).format(function.entry_point)
        written = replace(state, solution=f"{state.solution}\n\n{source}" if state.solution else source)
        call = write_call(source) if number == 0 else ("terminal", {"command": append_command(source)})
        text = text if rng.random() < rates.text else ""
        steps.append(Step(state, replace(written, fault=fault), text, (call,), fault.hints if fault else ()))
        state = written
    if rng.random() < rates.look:
        steps.append(Step(state, state, "", (_LOOK,), kind="read"))
    if examples:
        steps.append(Step(state, replace(state, tested=True), "", (RUN,), kind="run"))
    is_wrong = any(not fault.hidden for fault in faults.values()) and examples
    patches = _repairs(state.solution or "", faults.values()) if is_wrong else []
    if patches and rng.random() < rates.repair:
        steps.append(Step(state, state, rng.choice(("", *_REPAIR_TEXTS)), (*patches, RUN), kind="repair"))
        is_wrong = False
    steps.append(Step(state, state, rng.choice(_WRONG_TEXTS if is_wrong else _RIGHT_TEXTS), (), kind="final"))
    return steps


def append_command(source: str) -> str:
    """Return the command that appends a function to the solution."""
    return f"{_APPEND}\n\n{source.rstrip()}\n{_END}"


def _draw_faults(
    functions: Sequence[TaskVariants], rng: Random, rates: ProjectRates, *, examples: bool
) -> dict[int, Fault]:
    """Return the mistakes by the number of their function; with examples, those that an example shows."""
    if rng.random() < rates.right:
        return {}
    count = 2 if rng.random() < rates.both else 1
    numbers = sorted(rng.sample(range(len(functions)), count))
    return {
        number: rng.choice(functions[number].visible if examples else functions[number].faults) for number in numbers
    }


def _repairs(solution: str, faults: Iterable[Fault]) -> list[tuple[str, dict[str, str]]]:
    """Return the patches of all mistakes; none if a text to replace occurs more than once in the solution."""
    faults = list(faults)
    if any(solution.count(fault.bad) != 1 for fault in faults):
        return []
    return [("patch", {"path": SOLUTION_FILE, "old": fault.bad, "new": fault.good}) for fault in faults]


class ProjectWorld(RememberingWorld):
    """Remembers as `RememberingWorld`, and which changes are left in the solution, as the coding world does.

    What the scripted calls that write and read the solution do is known without a sandbox. Tests run for each function
    by itself, and their results are put together: thousands of projects cost as many runs as there are variants.
    """

    def __init__(self) -> None:
        super().__init__()
        self._functions = {
            examples: {task.entry_point: task for task in builtin_tasks(with_examples=examples)}
            for examples in (True, False)
        }

    async def call(self, task: Task, solution: str | None, call: ToolCall) -> tuple[ToolResult, str | None]:
        """Return the call's result and what solution.py holds after it."""
        if (scripted := known_result(solution, call)) is not None:
            content, after = scripted
            return ToolResult(content, is_change=after != solution), after
        if (parts := self._parts(task, solution)) and (call.name, call.arguments) == RUN:
            results = [await super(ProjectWorld, self).call(part, source, call) for part, source in parts]
            return ToolResult(examples_text([result.content for result, _ in results])), solution
        return await super().call(task, solution, call)

    def _parts(self, task: Task, solution: str | None) -> list[tuple[Task, str]]:
        """Return the task and the source of each function of a whole project; empty for anything else."""
        kind, _, names = task.task_id.partition("/")
        sources = [f"{source.rstrip()}\n" for source in (solution or "").split("\n\n\n")]
        functions = [self._functions[bool(task.files)].get(name) for name in names.split("+")]
        if kind != "project" or len(sources) != len(functions):
            return []
        pairs = [(part, source) for part, source in zip(functions, sources, strict=True) if part is not None]
        is_whole = all(source.startswith(f"def {part.entry_point}(") for part, source in pairs)
        return pairs if is_whole and len(pairs) == len(sources) else []

    @asynccontextmanager
    async def session(self, task: Task) -> AsyncGenerator["ProjectSession"]:
        """See `core.types.World`."""
        yield ProjectSession(self, task, authors=Authors(task.prompt))

    async def verify(self, task: Task, left: Mapping[str, bytes] | None) -> Verification:
        """See `core.types.World`."""
        left = left or {}
        solution = left.get(SOLUTION_FILE, b"").decode()
        parts = self._parts(task, solution)
        if parts:
            verification = together(
                [
                    (part, await super(ProjectWorld, self).verify(part, {SOLUTION_FILE: source.encode()}))
                    for part, source in parts
                ]
            )
        else:
            verification = await super().verify(task, dict(left))
        return replace(verification, made_by=left.made_by) if isinstance(left, LeftFiles) else verification


def examples_text(outputs: Sequence[str]) -> str:
    """Return what the examples of several functions print, from what those of each print."""
    lines, passed, total = list[str](), 0, 0
    for output in outputs:
        *results, count = output.removesuffix(_FAILED).split("\n")
        numbers = re.fullmatch(r"(\d+) of (\d+) examples passed", count)
        assert numbers is not None
        lines += results
        passed, total = passed + int(numbers[1]), total + int(numbers[2])
    text = "\n".join([*lines, f"{passed} of {total} examples passed"])
    return text if passed == total else text + _FAILED


def together(verifications: Sequence[tuple[Task, Verification]]) -> Verification:
    """Return the verdict of the hidden tests of several functions, from those of each."""
    passed = sum(verification.passed for _, verification in verifications)
    total = sum(verification.total for _, verification in verifications)
    report, judge_report, checks = list[str](), list[str](), 0
    for task, verification in verifications:
        assert verification.outcome is VerifyOutcome.RAN
        report += verification.report.split("\n")[1:]
        judge_report += [
            _CHECK.sub(lambda match, before=checks: f"FAIL check {int(match[1]) + before}:", line)
            for line in verification.judge_report.split("\n")[1:]
        ]
        checks += (task.hidden_tests or "").count("\nassert ")
    count = f"Hidden tests: {passed} of {total} passed."
    texts = ["\n".join([count, *lines[:_MOST_FAILURES]]) for lines in (report, judge_report)]
    return Verification(VerifyOutcome.RAN, passed, total, *texts)


def known_result(solution: str | None, call: ToolCall) -> tuple[str, str] | None:
    """Return what the coding world's tools answer, and the solution after it; None: only a sandbox tells."""
    match call.name, call.arguments:
        case "write_file", {"path": "solution.py", "content": str(content)} if content.endswith("\n"):
            num_lines = content.count("\n")
            return f"wrote {num_lines} lines to {SOLUTION_FILE}", content
        case "terminal", {"command": str(command)} if solution and command.startswith(_APPEND):
            return "[no output]", solution + command.removeprefix(_APPEND).removesuffix(_END)
        case "read_file", {"path": "solution.py"} if solution:
            return solution, solution
        case "patch", {"path": "solution.py", "old": str(old), "new": str(new)} if (solution or "").count(old) == 1:
            return f"patched {SOLUTION_FILE}", (solution or "").replace(old, new)
        case _:
            return None


@dataclass(kw_only=True)
class ProjectSession(RememberingSession):
    """One episode in a `ProjectWorld`."""

    authors: Authors

    async def run_tool(self, call: ToolCall) -> ToolResult:
        """Run one call, or return its remembered result."""
        result = await super().run_tool(call)
        self.authors.changed({} if self.solution is None else {SOLUTION_FILE: self.solution.encode()})
        return result

    async def collect(self, messages: Sequence[Message] = ()) -> LeftFiles:
        """The solution, if there is one, and the changes that are left in it."""
        left = LeftFiles(await super().collect(messages))
        left.made_by = self.authors.left()
        return left
