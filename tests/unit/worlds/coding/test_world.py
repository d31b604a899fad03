"""Which calls change what the verdict is about, on a real sandbox."""

import asyncio

import pytest

from agentic_opd.core.types import Task, ToolCall
from agentic_opd.worlds.coding.config import CodingConfig
from agentic_opd.worlds.coding.world import CodingWorld

pytestmark = pytest.mark.sandbox

GIVEN = Task("t", "Write f.", "assert True", files={"test_solution.py": "import solution\n"})
BEGUN = Task("t", "Mend f.", "assert True", files={"solution.py": "x = 1\n"})


def changes(task: Task, *calls: dict[str, str]) -> list[bool]:
    async def run() -> list[bool]:
        async with CodingWorld(CodingConfig()).session(task) as session:
            made = [ToolCall("c", one.pop("tool"), dict(one), "") for one in calls]
            return [(await session.run_tool(call)).is_change for call in made]

    return asyncio.run(run())


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
    "command", ["ls", "python test_solution.py", "echo '#' >> test_solution.py", "mkdir .cache && echo > .cache/x"]
)
def test_looking_testing_and_changing_what_was_given_do_not(command: str) -> None:
    assert changes(GIVEN, write("solution.py", "x = 1\n"), terminal(command))[1] is False


def test_a_solution_that_was_begun_counts_from_how_it_was() -> None:
    assert changes(BEGUN, terminal("cat solution.py"), terminal("touch solution.py")) == [False, False]
    assert changes(BEGUN, terminal("sed -i s/1/2/ solution.py")) == [True]
