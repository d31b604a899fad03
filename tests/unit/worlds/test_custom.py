"""Worlds of one's own: the documented one as written, one in a sandbox with a user, the skeleton, and every fault."""

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from pydantic import ValidationError

from agentic_opd.core.errors import AlignmentError, ConfigError, WorldError
from agentic_opd.core.types import Task, ToolCall, ToolResult, Verification
from agentic_opd.env.config import AgentEnvConfig
from agentic_opd.gateway.agent_process import ProgramWorld
from agentic_opd.rollout.loop import first_messages
from agentic_opd.sandboxes.program import Program
from agentic_opd.worlds.choose import make_world
from agentic_opd.worlds.config import EvalConfig, WorldConfig
from agentic_opd.worlds.custom import (
    Checks,
    CustomWorld,
    HookedSession,
    HookedWorld,
    Left,
    ToolError,
    tool,
    world_problems,
)

TASK = Task("t", "Do it.", "secret")


def documented(folder: Path, place: int) -> str:
    """A world of docs/worlds.md, as a file."""
    code = re.findall(r"```python\n(.*?)```", Path("docs/worlds.md").read_text(), re.DOTALL)[place]
    (folder / "documented.py").write_text(code)
    return f"{folder / 'documented.py'}:{('Reasoning', 'Shop', 'Blackjack', 'RemoteWorld', 'OpenEnvWorld')[place]}"


def acted(
    world: Any, task: Task, *calls: tuple[str, dict[str, Any] | None]
) -> tuple[list[ToolResult], Verification, str | None]:
    """The results of calls, the verdict, and what the user says at the end."""

    async def episode() -> tuple[list[ToolResult], Verification, str | None]:
        await world.check()
        async with world.session(task) as session:
            made = [
                ToolCall("c", name, given, "raw", None if given is not None else "no JSON") for name, given in calls
            ]
            results = [await session.run_tool(one) for one in made]
            reply = await session.user_reply([{"role": "assistant", "content": "Done."}])
            left = await session.collect()
        return results, await world.verify(task, left), reply

    return asyncio.run(episode())


class Stateless(CustomWorld):
    def tasks(self) -> list[Task]:
        return [TASK]

    @tool
    def look_up(self, state: None, subject: str) -> str:
        """Look something up.

        Args:
            state: None.
            subject: What.
        """
        return subject.upper()

    def verify(self, task: Task, state: None) -> float:
        return 1.0


class Remembering(Stateless):
    def start(self, task: Task) -> list[str]:
        return ["a line of the state"]


@pytest.mark.parametrize(("kind", "threads"), [(Stateless, 1), (Remembering, 3)])
def test_only_the_worlds_own_code_and_a_state_need_threads(
    kind: type[CustomWorld], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, to_thread = list[str](), asyncio.to_thread

    async def counted(function: Any, *args: Any) -> Any:
        calls.append(function.__name__)
        return await to_thread(function, *args)

    async def answered() -> ToolResult:
        async with HookedWorld(kind(), WorldConfig()).session(TASK) as session:
            monkeypatch.setattr(asyncio, "to_thread", counted)
            result = await session.run_tool(ToolCall("c", "look_up", {"subject": "x"}, "raw"))
            monkeypatch.setattr(asyncio, "to_thread", to_thread)
        return result

    assert asyncio.run(answered()) == ToolResult("X", is_error=False, is_change=False)
    assert len(calls) == threads


def test_the_documented_world_of_function_calls(tmp_path: Path) -> None:
    world = make_world(
        AgentEnvConfig(world=documented(tmp_path, 1), eval=EvalConfig(fraction=0.0), system_prompt="Sell.")
    )
    tasks, held_out = asyncio.run(world.train_and_eval_tasks())
    assert ([task.hidden_tests for task in tasks], held_out) == (["1.20", "5.40", "10.90"], [])
    assert world.system_prompt == "Sell."
    assert [[one["function"]["name"] for one in task.tools or ()] for task in tasks] == [["ask", "add"]] * 3
    assert [[*(task.tools or ())][1]["function"]["parameters"]["properties"]["item"]["enum"] for task in tasks[1:]] == [
        ["bread", "roll"],
        ["milk", "cheese"],
    ]
    right = acted(world, tasks[0], *[("add", {"item": "roll"})] * 3, ("ask", {"total": 1.2}))
    assert (right[1].passed, right[1].total, right[1].report) == (2, 2, "The basket is right, the sum is right.")
    assert [result.is_change for result in right[0]] == [True] * 4
    wrong = acted(world, tasks[0], ("add", {"item": "milk"}), ("ask", {"total": "1.20"}), ("buy", {}))
    assert wrong[0][0].content == "Error: we have no 'milk'. There are: bread, roll."
    assert (wrong[0][0].is_error, wrong[0][0].is_change) == (True, False)
    assert wrong[0][2].content == 'Error: the name must be one of "ask", "add".'
    assert wrong[1].judge_report == "The basket is wrong, the sum is right."
    nothing = asyncio.run(world.verify(tasks[0], None))
    assert (nothing.passed, nothing.total) == (0, 2)


class StandIn:
    """A dataset with the interface of reasoning-gym's."""

    def __init__(self, name: str, size: int, seed: int) -> None:
        self.entries = [{"question": f"{seed} + {n} =", "answer": str(seed + n)} for n in range(size)]

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(self.entries)

    def score_answer(self, answer: str | None, entry: dict[str, str]) -> float:
        return float(answer == entry["answer"])


def test_the_documented_world_of_reasoning_gym(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("reasoning_gym") is None:
        monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=StandIn))  # type: ignore[arg-type]
    name = documented(tmp_path, 0)
    assert len((tmp_path / "documented.py").read_text().splitlines()) <= 37
    config = AgentEnvConfig(world={"type": name, "size": 5, "seed": 3}, eval=EvalConfig(fraction=0.0))
    world = make_world(config)
    tasks, _ = asyncio.run(world.train_and_eval_tasks())
    assert (len(tasks), list(world.tools), tasks[0].limits) == (5, [], {"max_turns": 1})

    def verdict(text: str) -> tuple[float, str]:
        async def episode() -> Verification:
            async with world.session(tasks[1]) as session:
                left = await session.collect([{"role": "assistant", "content": text}])
            return await world.verify(tasks[1], left)

        made = asyncio.run(episode())
        return made.correctness, made.judge_report

    assert verdict(f"It is <answer>{tasks[1].hidden_tests}</answer>") == (1.0, "The answer is right.")
    assert verdict("It is <answer>none of them</answer>")[1] == "The answer is wrong."
    assert verdict("It is 4.") == (0.0, "There is no answer between <answer> and </answer>.")


def test_a_tools_schema_is_its_signature_and_docstring() -> None:
    assert [one["function"]["name"] for one in HookedWorld(Notes(), WorldConfig()).tools] == ["go", "write", "look"]
    assert HookedWorld(Notes(), WorldConfig()).tools[1]["function"] == {
        "name": "write",
        "description": "Write them anew.",
        "parameters": {
            "type": "object",
            "properties": {"notes": {"type": "array", "items": {"type": "string"}, "description": "All."}},
            "required": ["notes"],
            "additionalProperties": False,
        },
    }


class Chores(CustomWorld):
    """Files in a sandbox, an asynchronous tool, and a user who insists."""

    def tasks(self) -> list[Task]:
        return [TASK]

    def eval_tasks(self) -> list[Task]:
        return [Task("other", "Do it.", "secret")]

    async def start(self, task: Task) -> dict[str, int]:
        return {"calls": 0, "replies": 0}

    @tool
    async def shell(self, state: dict[str, int], sandbox: Any, line: str) -> str:
        """Run a line of shell.

        Args:
            line: What to run,
                all of it.
        """
        state["calls"] += 1
        return cast(str, (await sandbox.run(line, timeout_s=10)).text)

    @tool
    async def sleep(self, state: dict[str, int]) -> str:
        """Sleep for long."""
        await asyncio.sleep(60)
        return "slept"

    async def verify(self, task: Task, state: dict[str, int], files: dict[str, bytes] | None = None) -> Checks:
        return Checks(int((files or {}).get("done") == b"yes\n"), 1)

    def judged(self, state: dict[str, int]) -> None:
        return None

    async def user_reply(self, task: Task, state: dict[str, int], messages: Any) -> str | None:
        state["replies"] += 1
        return "Are you sure?" if state["replies"] < 2 else None


@pytest.mark.sandbox
def test_a_world_in_a_sandbox_with_a_user() -> None:
    world = HookedWorld(Chores(), WorldConfig())
    assert world.tools[0]["function"]["parameters"]["properties"]["line"]["description"] == "What to run, all of it."
    task = Task("t", "Do it.", "secret", files={"given.txt": "hello\n"})
    calls = [("shell", {"line": "cat given.txt"}), ("shell", {"line": "echo yes > done"})]
    results, verdict, reply = acted(world, task, *calls)
    assert [result.content for result in results] == ["hello\n", ""]
    assert [result.is_change for result in results] == [False, True]
    assert (verdict.passed, verdict.report, reply) == (1, "1 of 1 checks passed.", "Are you sure?")
    train, evaluation = asyncio.run(world.train_and_eval_tasks())
    assert (train, [task.task_id for task in evaluation]) == ([TASK], ["other"])


@pytest.mark.sandbox
def test_a_tool_that_takes_too_long_is_ended() -> None:
    (result,), _, _ = acted(HookedWorld(Chores(), WorldConfig(tool_timeout_s=0.1)), TASK, ("sleep", {}))
    assert (result.content, result.is_change) == ("Error: sleep took longer than 0.1 s.", False)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("fly", {}, 'the name must be one of "shell", "sleep".'),
        ("shell", None, "no JSON."),
        ("shell", {}, "shell can't be called like this. line: field required."),
        ("shell", {"line": 3}, "line: input should be a valid string."),
        ("shell", {"line": "ls", "sandbox": 1}, "sandbox: extra inputs are not permitted."),
    ],
)
@pytest.mark.sandbox
def test_what_the_policy_does_wrong_is_a_result(name: str, given: dict[str, Any] | None, said: str) -> None:
    (result,), _, _ = acted(HookedWorld(Chores(), WorldConfig()), TASK, (name, given))
    assert result.is_error
    assert said in result.content


class Plain(CustomWorld):
    """What the faulty ones override."""

    def tasks(self) -> Any:
        return [TASK]

    def start(self, task: Task) -> Any:
        return [0]

    @tool
    def go(self, state: list[int]) -> str:
        """Go on."""
        state[0] += 1
        return "gone"

    def verify(self, task: Task, state: Any) -> Any:
        return Checks(int(bool(state)), 1)


def raising(*args: Any) -> Any:
    raise KeyError("x")


def lying(value: Any) -> Callable[..., Any]:
    return lambda *args: value


@pytest.mark.parametrize(
    ("hook", "does", "said"),
    [
        ("start", raising, "world Plain: start raised KeyError: 'x'"),
        ("verify", raising, "world Plain: verify raised KeyError: 'x'"),
        ("judged", raising, "world Plain: judged raised KeyError: 'x'"),
        ("user_reply", raising, "world Plain: user_reply raised KeyError: 'x'"),
        ("go", raising, "world Plain: go raised KeyError: 'x'"),
        ("verify", lying("good"), "world Plain: verify returned str, expected a number in .0, 1., Checks, or either"),
        ("verify", lying(1.5), "world Plain: verify returned 1.5, expected a number in"),
        ("verify", lying(float("nan")), "world Plain: verify returned nan, expected a number in"),
        ("verify", lying((1.0, None)), "world Plain: verify returned a text of type NoneType"),
        ("verify", lying(Checks(2, 1)), "world Plain: verify returned wrong Checks: .* got 2 of 1"),
        ("verify", lying(Checks(0.5, 1)), "world Plain: verify returned 0.5 of 1, expected counts"),  # type: ignore[arg-type]
        ("verify", lying(Checks(1, 1, score=1.5)), "world Plain: verify returned wrong Checks: .* got 1.5"),
        ("verify", lying(Checks(1, 1, score="much")), "world Plain: verify returned wrong Checks: .*'much'"),  # type: ignore[arg-type]
        ("judged", lying(lambda: 0), "judged returned function, which can't be pickled"),
        ("user_reply", lying(3), "user_reply returned int, expected text or None"),
        ("go", lying(None), "tool go returned NoneType, expected text"),
    ],
)
def test_a_hook_that_fails_is_named(hook: str, does: Any, said: str) -> None:
    hooks = Plain()
    world = HookedWorld(hooks, WorldConfig())
    setattr(hooks, hook, does)
    with pytest.raises(WorldError, match=said):
        acted(world, TASK, ("go", {}))


class Timed(Plain):
    """A world whose episodes end after two calls, or when the conversation has four messages."""

    def start(self, task: Task) -> list[Any]:
        return []

    @tool
    def wait(self, state: list[Any]) -> str:
        """Wait."""
        state.append("waited")
        return "waited"

    def is_over(self, state: list[Any], messages: Any) -> Any:
        return np.bool_(len(state) > 1 or len(messages) > 3)


def test_a_world_ends_its_episodes() -> None:
    async def ends() -> list[bool]:
        async with HookedWorld(Timed(), WorldConfig()).session(TASK) as session:
            said = list[bool]()
            for messages in ([], [{}] * 4, []):
                await session.run_tool(ToolCall("c", "wait", {}, ""))
                said.append(await session.is_over(messages))
            return said

    assert asyncio.run(ends()) == [False, True, True]


def test_a_world_that_does_not_say_whether_it_is_over_is_named() -> None:
    class Vague(Timed):
        async def is_over(self, state: list[Any]) -> Any:
            return "yes"

    async def asked() -> None:
        async with HookedWorld(Vague(), WorldConfig()).session(TASK) as session:
            await session.is_over([])

    with pytest.raises(WorldError, match="world Vague: is_over returned str, expected True or False"):
        asyncio.run(asked())


class Growing(Plain):
    """A world that gains a function once one is called."""

    def tasks(self) -> Any:
        return [replace(TASK, tools=[{"name": "open"}])]

    def call(self, state: list[Any], name: str, arguments: dict[str, Any]) -> str:
        state.append(name)
        return f"{name} ran"

    def added_tools(self, state: list[Any]) -> Any:
        return ["enter"] if "open" in state else []


def test_a_function_that_is_added_can_be_called_from_then_on() -> None:
    world = HookedWorld(Growing(), WorldConfig())
    (task,), _ = asyncio.run(world.train_and_eval_tasks())
    results, _, _ = acted(world, task, ("enter", {}), ("open", {}), ("enter", {}), ("leave", {}))
    assert [result.content for result in results] == [
        'Error: the name must be one of "go", "open".',
        "open ran",
        "enter ran",
        'Error: the name must be one of "go", "open", "enter".',
    ]
    world.hooks.added_tools = lying(None)
    with pytest.raises(WorldError, match="world Growing: added_tools returned NoneType, expected names"):
        acted(world, task, ("enter", {}))


WRITTEN = """\
from agentic_opd.worlds.custom import CustomWorld, Task, tool

def lookup(table, key):
    return table[key]  # line 4

class Written(CustomWorld):
    def __init__(self, fails=""):
        self.fails = fails
        if fails == "__init__":
            lookup({}, "missing")

    def tasks(self):
        if self.fails == "fields":
            return [Task("t", "Do it.", limits={"turns": 3})]  # line 14
        return lookup({"": [Task("t", "Do it.")]}, self.fails if self.fails == "tasks" else "")

    def start(self, task):
        return next(iter([])) if self.fails == "start" else {}  # line 18

    @tool
    async def go(self, state) -> str:
        "Go on."
        return lookup({}, "missing") if self.fails == "go" else "gone"

    @tool  # line 25
    def quit(self, state) -> str:
        "Leave."
        return 3 if self.fails == "type" else exit(4)  # line 28

    def verify(self, task, state):
        return 2 if self.fails == "verify" else 1.0
"""


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("tasks", r"world Written: tasks raised KeyError: 'tasks' \(world\.py:4\)"),
        ("fields", r"limit turns=3, expected .* \(world\.py:14\)"),
        ("start", r"world Written: start raised StopIteration:  \(world\.py:18\)"),
        ("go", r"world Written: go raised KeyError: 'missing' \(world\.py:4\)"),
        ("type", r"world Written: tool quit returned int, expected text \(world\.py:25\)"),
        ("quit", r"world Written: quit raised SystemExit: 4 \(world\.py:28\)"),
        ("verify", r"world Written: verify returned 2, expected a number .* \(world\.py:30\)"),
        ("__init__", r"env\.world: Written\(\) raised KeyError: 'missing' \(world\.py:4\)"),
    ],
)
def test_an_error_in_a_hook_names_the_file_and_line_of_the_world(
    fails: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("world.py").write_text(WRITTEN)

    def play() -> None:
        config = AgentEnvConfig(world={"type": "./world.py:Written", "fails": fails})
        world = make_world(config)
        (task,), _ = asyncio.run(world.train_and_eval_tasks())
        acted(world, task, ("go", {}), *([("quit", {})] if fails in ("type", "quit") else []))

    with pytest.raises((AlignmentError, ConfigError, WorldError, ValidationError), match=message) as caught:
        play()
    assert str(caught.value).count("world.py:") == 1


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1\n1 / 0\n", r"world\.py can't be imported: ZeroDivisionError: .* \(world\.py:2\)"),
        ("class Own:\n  x = (\n", r"world\.py can't be imported: SyntaxError: .*world\.py, line 2\)"),
        (
            "from agentic_opd.worlds.custom import CustomWorld\nclass Own(CustomWorld):\n    def tasks(self): ...\n"
            "    def verify(self, task): ...\n",
            r"verify\(task\): too many positional arguments; .* \(world\.py:4\)",
        ),
    ],
)
def test_an_error_of_the_worlds_file_names_its_line(
    code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("world.py").write_text(code)
    with pytest.raises((ConfigError, ValidationError), match=message):
        make_world(AgentEnvConfig(world="world.py:Own"))


def test_a_verdict_of_truth_values_is_written_as_counts() -> None:
    hooks = Plain()
    hooks.verify = lying(Checks(True, True))  # type: ignore[method-assign]
    verification = asyncio.run(HookedWorld(hooks, WorldConfig()).verify(TASK, Left([0], {})))
    assert (
        json.dumps([verification.passed, verification.total, verification.report]) == '[1, 1, "1 of 1 checks passed."]'
    )


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        (raising, "tasks raised KeyError: 'x'"),
        (lying([]), "tasks returned no task"),
        (lying(["task"]), "tasks returned str, expected Task"),
        (lying([TASK, TASK]), "tasks returned 2 tasks of the id 't'"),
        (lying(3), "tasks raised TypeError"),
    ],
)
def test_wrong_tasks_are_named(gives: Any, said: str) -> None:
    hooks = Plain()
    hooks.tasks = gives  # type: ignore[method-assign]
    with pytest.raises(WorldError, match=said):
        asyncio.run(HookedWorld(hooks, WorldConfig()).train_and_eval_tasks())


def test_a_world_may_have_tasks_to_evaluate_on_alone() -> None:
    hooks = Plain()
    hooks.tasks = lying([])  # type: ignore[method-assign]
    hooks.eval_tasks = lying([TASK])  # type: ignore[method-assign]
    assert asyncio.run(HookedWorld(hooks, WorldConfig()).train_and_eval_tasks()) == ([], [TASK])


def test_what_a_tool_quotes_can_be_tokenised() -> None:
    hooks = Plain()
    world = HookedWorld(hooks, WorldConfig())
    hooks.go = lying("you said \ud83d")  # type: ignore[method-assign]
    (result,), _, _ = acted(world, TASK, ("go", {}))
    assert (result.content, result.is_error) == ("you said \ufffd", False)


def test_tool_errors_are_the_policys() -> None:
    def go(state: list[int]) -> str:
        raise ToolError("not \ud83d this way")

    hooks = Plain()
    world = HookedWorld(hooks, WorldConfig())
    hooks.go = go  # type: ignore[method-assign]
    (result,), _, _ = acted(world, TASK, ("go", {}))
    assert (result.content, result.is_error) == ("Error: not \ufffd this way", True)


HEAD = "from agentic_opd.worlds.custom import CustomWorld, tool\n"


@pytest.mark.parametrize(
    ("code", "name", "said"),
    [
        ("", "own.py", "name a class as FILE.py:CLASS or package.module:CLASS"),
        ("", "own.py:Own.er", "expected FILE.py:CLASS or package.module:CLASS"),
        ("", "own.py:Missing", "own.py has no class Missing"),
        ("class Own: pass\n", "own.py:Own", "expected a subclass of CustomWorld or a World"),
        ("1 / 0\n", "own.py:Own", "own.py can't be imported: ZeroDivisionError"),
        ("", "missing.py:Own", "there is no file 'missing.py'"),
        ("", "no.such.module:Own", "no.such.module can't be imported: ModuleNotFoundError"),
        (
            HEAD + "class Own(CustomWorld): pass\n",
            "own.py:Own",
            "world Own: tasks is not defined; verify is not defined",
        ),
        (
            HEAD + "class Own(CustomWorld):\n    def __init__(self): 1 / 0\n",
            "own.py:Own",
            r"Own\(\) raised ZeroDivision",
        ),
        (
            HEAD + "class Own(CustomWorld):\n    @tool\n    def f(self, s): pass\n",
            "own.py:Own",
            "tool f has no docstring",
        ),
        (
            HEAD + "class Own(CustomWorld):\n    @tool\n    def f(self, s, x):\n        'Do.'\n",
            "own.py:Own",
            "tool f: parameter 'x' has no type",
        ),
        (
            HEAD + "class Own(CustomWorld):\n    @tool\n    def f(self, s, x: 'Missing'):\n        'Do.'\n",
            "own.py:Own",
            "tool f: its types can't be read: name 'Missing'",
        ),
        (
            HEAD + "class Own(CustomWorld):\n    @tool\n"
            "    def f(self, s, x: CustomWorld):\n        'Do.\\n\\nArgs:\\n    x: It.'\n",
            "own.py:Own",
            "tool f: its parameters have no JSON schema",
        ),
        (
            HEAD + "class Own(CustomWorld):\n    @tool\n    def f(self, s, x: int):\n        'Do.'\n",
            "own.py:Own",
            "tool f: parameter 'x' has no line in the docstring's Args",
        ),
    ],
)
def test_what_is_no_world_is_refused(
    code: str, name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(code)
    with pytest.raises((ConfigError, ValidationError), match=said):
        make_world(AgentEnvConfig(world=name))


@pytest.mark.parametrize("name", ["worlds/own_one.py:Own", "own_two:Own"])
def test_a_world_imports_what_lies_beside_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    file = Path(name.partition(":")[0]).with_suffix(".py")
    file.parent.mkdir(exist_ok=True)
    beside = f"beside_{file.stem}"
    file.with_name(f"{beside}.py").write_text("SAYS = 'Go.'\n")
    hooks = "    system_prompt = SAYS\n    def tasks(self): ...\n    def verify(self, task, state): ...\n"
    file.write_text(f"{HEAD}from {beside} import SAYS\nclass Own(CustomWorld):\n{hooks}")
    assert make_world(AgentEnvConfig(world=name)).system_prompt == "Go."


class Notes(Plain):
    """A list of texts, which a user may change too."""

    def start(self, task: Task) -> dict[str, Any]:
        return {"notes": [], "by": {"user": 0}}

    @tool
    def write(self, state: dict[str, Any], notes: list[str]) -> str:
        """Write them anew.

        Args:
            notes: All.
        """
        state["notes"] = notes
        return "written"

    @tool
    def look(self, state: dict[str, Any]) -> str:
        """Look."""
        return str(state)

    def user_reply(self, task: Task, state: dict[str, Any], messages: Any) -> str:
        state["by"]["user"] += 1
        return "I did something."


@pytest.mark.parametrize(
    ("written", "made_by"),
    [
        ([["a"], ["a", "b"]], {0, 1}),
        ([["a"], ["b", "a"], ["b", "a", "c"]], {0, 1, 2}),
        ([["a"], ["b"]], {1}),
        ([["a\nb"], ["a\nc"]], {0, 1}),
        ([["a", "b"], ["a"]], {0, 1}),
    ],
)
def test_each_call_of_which_something_is_left_made_what_is_judged(written: list[list[str]], made_by: set[int]) -> None:
    calls: list[tuple[str, dict[str, Any] | None]] = [("write", {"notes": notes}) for notes in written]
    _, verification, _ = acted(HookedWorld(Notes(), WorldConfig()), TASK, *calls)
    assert verification.made_by == made_by


Colour = Enum("Colour", ("A", "B", "C", "D", "E", "F", "G", "H"))


class Town(Notes):
    """Places of which each knows all others, and a colour of an enumeration."""

    def start(self, task: Task) -> dict[str, Any]:
        places = [SimpleNamespace(name=str(number)) for number in range(30)]
        for place in places:
            place.ways = places
        return {"notes": [], "by": {"user": 0}, "colour": Colour.A, "places": places[: int(task.prompt)]}


@pytest.mark.slow
@pytest.mark.parametrize(("places", "made_by"), [("0", {1}), ("1", {0, 1})])
def test_a_state_of_enumerations_and_of_objects_that_know_each_other(places: str, made_by: set[int]) -> None:
    calls: list[tuple[str, dict[str, Any] | None]] = [("write", {"notes": ["a"]}), ("write", {"notes": ["b"]})]
    _, verification, _ = acted(HookedWorld(Town(), WorldConfig()), Task("t", places, None), *calls)
    assert verification.made_by == made_by  # Too large to be compared by lines: both.


def test_what_a_user_changes_is_no_calls_work() -> None:
    async def results() -> list[bool]:
        async with HookedWorld(Notes(), WorldConfig()).session(TASK) as session:
            await session.user_reply([])
            return [(await session.run_tool(ToolCall("c", "look", {}, ""))).is_change]

    assert asyncio.run(results()) == [False]


def test_sessions_do_not_share_their_state() -> None:
    async def episodes() -> list[int]:
        world = HookedWorld(Plain(), WorldConfig())
        async with world.session(TASK) as one, world.session(TASK) as other:
            assert isinstance(one, HookedSession)
            await one.run_tool(ToolCall("c", "go", {}, ""))
            return [one.state[0], other.state[0]]

    assert asyncio.run(episodes()) == [1, 0]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def start(self): ...", "start(): too many positional arguments; expected start(self, task), and by name any"),
        (
            "def verify(self, task): ...",
            "verify(task): too many positional arguments; expected verify(",
        ),
        ("def verify(self, task, state, answer): ...", "verify(task, state, answer): missing a required argument"),
        ("def verify(self, task, state, sandbox, files, messages): ...", ""),
        ("def call(self, state, name, arguments, sandbox=None): ...", ""),
        ("def tools(self, task): ...", "call is not defined, which runs the functions of tools"),
        ("async def tasks(self): ...", "tasks is async, expected a plain method"),
        ("def judged(self, *states): ...", ""),
    ],
)
def test_wrong_hooks_are_found_without_a_call(code: str, said: str) -> None:
    names: dict[str, Any] = {}
    exec(code, names)
    hooks = type("World", (Plain,), {name: hook for name, hook in names.items() if name != "__builtins__"})()
    problems = world_problems(hooks)
    assert bool(problems) == bool(said)
    if problems:
        assert said in problems[0]
        with pytest.raises(ConfigError, match="world World: "):
            HookedWorld(hooks, WorldConfig())


@pytest.mark.parametrize(
    ("result", "passed", "total", "report", "judge_report"),
    [
        (0.5, 0, 1, "The result is 0.5 of 1.", "The result is 0.5 of 1."),
        (True, 1, 1, "The result is 1 of 1.", "The result is 1 of 1."),
        ((0, "Too slow."), 0, 1, "Too slow.", "Too slow."),
        ((Checks(1, 3, "secret"), "Two fail."), 1, 3, "Two fail.", "Two fail."),
        (np.float32(0.5), 0, 1, "The result is 0.5 of 1.", "The result is 0.5 of 1."),
        (np.bool_(True), 1, 1, "The result is 1 of 1.", "The result is 1 of 1."),
        (Checks(np.int64(1), np.int64(3), "a", "b"), 1, 3, "a", "b"),  # type: ignore[arg-type]
    ],
)
def test_a_verdict_may_be_a_number_and_have_a_text(
    result: Any, passed: int, total: int, report: str, judge_report: str
) -> None:
    hooks = Plain()
    hooks.verify = lying(result)  # type: ignore[method-assign]
    made = asyncio.run(HookedWorld(hooks, WorldConfig()).verify(TASK, Left([0], {})))
    assert (made.passed, made.total, made.report, made.judge_report) == (passed, total, report, judge_report)


@pytest.mark.parametrize(
    ("number", "has_passed"), [(0.9996, False), (0.0004, False), (1e-9, False), (0.7 + 0.2 + 0.1, True), (1, True)]
)
def test_a_number_stays_exact_and_passes_at_one(number: float, has_passed: bool) -> None:
    hooks = Plain()
    hooks.verify = lying(number)  # type: ignore[method-assign]
    made = asyncio.run(HookedWorld(hooks, WorldConfig()).verify(TASK, Left([0], {})))
    assert (made.correctness, made.all_passed) == (number, has_passed)
    assert made.report == f"The result is {number:.15g} of 1."


@pytest.mark.parametrize("score", [0.25, np.float64(0.25)])
def test_checks_may_have_a_score_beside_them(score: Any) -> None:
    hooks = Plain()
    hooks.verify = lying(Checks(2, 2, "Slow.", score=score))  # type: ignore[method-assign]
    made = asyncio.run(HookedWorld(hooks, WorldConfig()).verify(TASK, Left([0], {})))
    assert (made.correctness, made.all_passed, made.passed, made.total, made.report) == (0.25, True, 2, 2, "Slow.")


class Room(CustomWorld):
    """A verdict that reads the sandbox and the conversation."""

    def tasks(self) -> list[Task]:
        return [Task("t", "Do it.", files={"a": "1"}, limits={"sandbox_memory_mb": 256})]

    async def start(self, task: Task, sandbox: Any) -> str:
        return cast(str, (await sandbox.run("cat a", timeout_s=10)).text)

    async def verify(self, task: Task, state: str, sandbox: Any, messages: Sequence[Any], files: Any) -> Any:
        again = (await sandbox.run("cat a", timeout_s=10)).text
        return float(state == again), f"{state} {again} {len(messages)} {sorted(files)}"


@pytest.mark.sandbox
def test_a_verdict_may_read_the_sandbox_and_the_conversation() -> None:
    world = HookedWorld(Room(), WorldConfig(eval=EvalConfig(fraction=0.0)))
    assert world.runs_programs

    async def episode() -> Verification:
        (task,), _ = await world.train_and_eval_tasks()
        async with world.session(task) as session:
            left = await session.collect([{"role": "user", "content": "Do it."}])
        return await world.verify(task, left)

    made = asyncio.run(episode())
    assert (made.passed, made.report) == (1, "1 1 1 ['a']")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"limits": {"turns": 3}}, "limit turns=3, expected a positive one of max_turns, tool_timeout_s"),
        ({"limits": {"max_turns": 0}}, "limit max_turns=0"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "end with role",
        ),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}, "role 'system'"),
    ],
)
def test_wrong_fields_of_a_task_are_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(AlignmentError, match=said):
        Task("t", "Do it.", **fields)


def test_messages_stand_for_the_prompt() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    task = Task("t", messages=messages)
    assert (task.prompt, first_messages(HookedWorld(Plain(), WorldConfig()), task)) == ("u", messages)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Task("t", "p", image="python:3.12"), "task 't' has an image, which needs env.sandbox.type docker, not none"),
        (Task("t", "p", tools=[{"name": "go"}]), "two tools of one name"),
        (Task("t", "p", tools=[{"name": "fly"}]), "has tools, but the world has no hook call"),
        (Task("t", "p", tools=[{"description": "?"}]), "tools raised ValueError: a function without a name"),
    ],
)
def test_what_a_task_asks_for_in_vain_is_named(task: Task, said: str) -> None:
    hooks = Plain()
    hooks.tasks = lying([task])  # type: ignore[method-assign]
    with pytest.raises((ConfigError, WorldError), match=said):
        asyncio.run(HookedWorld(hooks, WorldConfig()).train_and_eval_tasks())


def test_settings_go_to_the_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(
        "from agentic_opd.worlds.custom import CustomWorld\n"
        "class Own(CustomWorld):\n    def __init__(self, level=1): self.level = level\n"
        "    def tasks(self): ...\n    def verify(self, task, state): ...\n"
    )
    world = make_world(AgentEnvConfig(world={"type": "own.py:Own", "level": 3}))
    assert cast(Any, world).hooks.level == 3
    with pytest.raises(ValidationError, match=r"world.lvl\n  Extra inputs are not permitted"):
        AgentEnvConfig(world={"type": "own.py:Own", "lvl": 3})


class Written(CustomWorld):
    """A verdict about a file that an agent program writes."""

    def tasks(self) -> list[Task]:
        return [Task("t", "Do it.", files={"a": "1"})]

    def verify(self, task: Task, state: Any, files: Any) -> float:
        return float(files.get("b") == b"1\n")


@pytest.mark.sandbox
def test_a_program_acts_in_any_world_whose_verdict_reads_files() -> None:
    world = HookedWorld(Written(), WorldConfig())
    assert isinstance(world, ProgramWorld)
    assert (world.runs_programs, HookedWorld(Plain(), WorldConfig()).runs_programs) == (True, False)

    async def episode() -> tuple[Any, Verification]:
        (task,) = Written().tasks()
        async with world.program_session(task, ()) as session:
            run = await session.run_program(Program("cat a > b; echo >> b", task.prompt, "key", "model", 20.0, {}))
            assert sorted(await session.judged_files()) == ["a", "b"]
            left = await session.collect()
        return run, await world.verify(task, left)

    run, made = asyncio.run(episode())
    assert (run.exit_code, made.passed) == (0, 1), run
