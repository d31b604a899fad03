"""Which calls change what the verdict is about, on a real sandbox."""

import asyncio
from collections.abc import Sequence

import pytest

from agentic_opd.core.types import Task, ToolCall, Verification
from agentic_opd.worlds.coding.world import CodingWorld
from agentic_opd.worlds.config import WorldConfig

pytestmark = pytest.mark.sandbox

GIVEN = Task("t", "Write f.", "assert True", files={"test_solution.py": "import solution\n"})
BEGUN = Task("t", "Mend f.", "assert True", files={"solution.py": "x = 1\n"})


def parsed(calls: Sequence[dict[str, str]]) -> list[ToolCall]:
    return [ToolCall("c", one["tool"], {name: one[name] for name in one if name != "tool"}, "") for one in calls]


def changes(task: Task, *calls: dict[str, str]) -> list[bool]:
    async def run() -> list[bool]:
        async with CodingWorld(WorldConfig()).session(task) as session:
            return [(await session.run_tool(call)).is_change for call in parsed(calls)]

    return asyncio.run(run())


def made_by(task: Task, *calls: dict[str, str]) -> list[int]:
    """The calls, of which each is a change, that something is left of in what is judged."""

    async def run() -> Verification:
        world = CodingWorld(WorldConfig())
        async with world.session(task) as session:
            assert all([(await session.run_tool(call)).is_change for call in parsed(calls)])
            left = await session.collect()
        return await world.verify(task, left)

    found = asyncio.run(run()).made_by
    assert found is not None
    return sorted(found)


def terminal(command: str) -> dict[str, str]:
    return {"tool": "terminal", "command": command}


def write(path: str, content: str) -> dict[str, str]:
    return {"tool": "write_file", "path": path, "content": content}


def test_whatever_changes_a_judged_file_counts() -> None:
    assert changes(
        GIVEN,
        write("solution.py", "x = 1\n"),
        write("solution.py", "x = 1\n"),
        {"tool": "patch", "path": "solution.py", "old": "1", "new": "2"},
        terminal("sed -i s/2/3/ solution.py"),
        terminal("cat > helper.py <<END\ny = 1\nEND"),
        terminal("rm helper.py"),
        {"tool": "read_file", "path": "solution.py"},
        {"tool": "patch", "path": "solution.py", "old": "nowhere", "new": "2"},
    ) == [True, False, True, True, True, True, False, False]


@pytest.mark.parametrize(
    "command",
    ["ls", "python test_solution.py", "mkdir .pytest_cache && echo > .pytest_cache/x", "chmod 600 solution.py"],
)
def test_looking_and_testing_do_not(command: str) -> None:
    assert changes(GIVEN, write("solution.py", "x = 1\n"), terminal(command))[1] is False


@pytest.mark.parametrize("path", ["test_solution.py", ".hidden.py", ".cache/x", "notes.txt"])
def test_whatever_is_collected_is_judged(path: str) -> None:
    """A solution may run or read any of it: `exec(open('.hidden.py').read())`, `from test_solution import f`."""
    assert changes(GIVEN, write("solution.py", "x = 1\n"), write(path, "y = 1\n")) == [True, True]


def test_a_solution_that_was_begun_counts_from_how_it_was() -> None:
    assert changes(BEGUN, terminal("cat solution.py"), terminal("touch solution.py")) == [False, False]
    assert changes(BEGUN, terminal("sed -i s/1/2/ solution.py")) == [True]


BAD = "def double(x):\n    return x * 3\n"
DOUBLE = Task(
    "t",
    "Write double(x):\n\ndef double(x):",
    "from solution import double\nassert double(2) == 4\n",
    files={"test_solution.py": "print('ok')\n"},
)


@pytest.mark.parametrize(
    "later",
    [
        terminal("echo done > notes.txt"),
        terminal("echo '# checked' >> solution.py"),
        terminal("sed -i 's/$/  # ok/; s/    return/  return/' solution.py"),
        terminal("mv solution.py other.py; cp other.py solution.py"),
        terminal("printf '\\n\\n' >> solution.py"),
        write("solution.py", BAD + "\n\ndef other():\n    return 1\n"),
        write("test_solution.py", "print('fine')\n"),
    ],
    ids=["notes", "a comment", "another form", "another name", "blank lines", "one more function", "its tests"],
)
def test_the_verdict_stays_with_the_call_that_wrote_the_fault(later: dict[str, str]) -> None:
    assert made_by(DOUBLE, write("solution.py", BAD), later) == [0, 1]
    assert made_by(DOUBLE, write("solution.py", BAD), later, terminal("echo more >> notes.txt")) == [0, 1, 2]


def test_what_was_replaced_is_not_judged() -> None:
    again = write("solution.py", "def double(x):\n    return x + 1\n")
    assert made_by(DOUBLE, write("solution.py", BAD), again) == [1], "the signature is the task's"
    patch = {"tool": "patch", "path": "solution.py", "old": "x * 3", "new": "x + 2"}
    assert made_by(DOUBLE, write("solution.py", BAD), patch) == [1]
    assert made_by(DOUBLE, write("solution.py", f"import re\n{BAD}"), patch) == [0, 1]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (write("solution.py", "exec(open('.i').read())\n"), write(".i", BAD)),
        (write("solution.py", "from test_solution import double\n"), write("test_solution.py", BAD)),
        (write("solution.py", "from pkg.a import double\n"), terminal("mkdir pkg; echo 'double = abs' > pkg/a.py")),
    ],
)
def test_what_the_solution_runs_is_judged_wherever_it_is(first: dict[str, str], second: dict[str, str]) -> None:
    assert made_by(DOUBLE, first, second) == [0, 1]
    assert made_by(DOUBLE, first, second, terminal("echo 'done' > notes.txt")) == [0, 1, 2]


def test_a_solution_beside_many_files_keeps_what_it_imports(caplog: pytest.LogCaptureFixture) -> None:
    task = Task("t", "Write f.", "from solution import f\nassert f(1) == 2\nassert f(2) == 4\n")

    async def run() -> Verification:
        world = CodingWorld(WorldConfig())
        calls = [
            terminal("for i in $(seq 100 300); do echo > a$i.txt; done; echo 'def f(x): return 2 * x' > util.py"),
            write("solution.py", "from util import f\n"),
        ]
        async with world.session(task) as session:
            for call in parsed(calls):
                await session.run_tool(call)
            left = await session.collect()
        return await world.verify(task, left)

    verdict = asyncio.run(run())
    assert (verdict.passed, verdict.total) == (2, 2)
    note = "The tests did not get 3 files of the work directory, beyond 200 files, 1 MiB each or 4 MiB in all: "
    assert verdict.report.split("\n")[1] == f"{note}'a298.txt', 'a299.txt', 'a300.txt'."
    assert verdict.judge_report.split("\n")[1].startswith(note)
    assert note in caplog.text
