"""Work of an agent in the projects of `log_corpus`, whose calls are really run: requests, calls, results and facts.

A piece of work is a request with the calls that answer it. The worlds of this project run them: a query on the
project's own database (SQL), a change of its settings (coding, in the sandbox), and a call at home (functions).
Explanations need no call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import yaml
from demo_policy.home_world import Home
from demo_policy.sql.databases import TRAINING, Schema, draw_schema, filled
from demo_policy.sql.questions import Query, draw_query, sql, text
from demo_policy.sql.world import GeneratedSql

from agentic_opd.core.types import Task, ToolCall, World, WorldSession
from agentic_opd.worlds.coding.world import CodingWorld
from agentic_opd.worlds.config import WorldConfig
from agentic_opd.worlds.custom import HookedWorld
from agentic_opd_environments.sql.engine import Result, run_query
from agentic_opd_environments.sql.world import Case
from learning.log_person import Demand, Wish

_FUNCTION_WORDS = {"COUNT": "number", "AVG": "average", "SUM": "total", "MIN": "lowest value", "MAX": "highest value"}
_SETTINGS = {
    **{"TIMEOUT": (5, 90), "RETRIES": (1, 9), "WORKERS": (2, 32), "MAX_ROWS": (50, 900), "PAGE_SIZE": (10, 80)},
    **{"CACHE_SIZE": (64, 512), "BATCH_SIZE": (4, 128), "MAX_LENGTH": (100, 999), "INTERVAL": (5, 60)},
}
"""Name -> the smallest and the largest value."""
_SETTING_FILES = ("settings.py", "config.py", "limits.py", "defaults.py")
_GOODS = ("milk", "apples", "soap", "coffee", "bread", "rice", "tea", "paper", "pears", "salt", "flour", "candles")


@dataclass(frozen=True, slots=True)
class Call:
    """A call with its result."""

    name: str
    arguments: Mapping[str, Any]
    result: str


@dataclass(frozen=True, slots=True)
class Work:
    """A request, the calls that answer it, and closing answers: `right` ones and, with a wish, `wrong` ones."""

    request: str
    calls: Sequence[Call]
    right: str
    wrong: str = ""
    demand: Demand | None = None


@dataclass(frozen=True)
class Project:
    """A folder that the agent works in, with a database and a file of settings."""

    name: str
    schema: Schema
    database: bytes
    settings_file: str
    settings: Mapping[str, int]

    @classmethod
    def draw(cls, name: str, seed: int) -> "Project":
        """Draw a project's contents."""
        rng = Random(f"{seed} {name}")
        schema = draw_schema(rng, TRAINING)
        names = rng.sample(list(_SETTINGS), 3)
        settings = {setting: rng.randint(*_SETTINGS[setting]) for setting in names}
        database = filled(schema, rng.randrange(2**32), 20)
        return cls(name, schema, database, rng.choice(_SETTING_FILES), settings)


@cache
def topics() -> list[dict[str, str]]:
    """Return the questions that ask for an explanation."""
    return yaml.safe_load(Path(__file__).with_name("log_topics.yaml").read_text())


class Worlds:
    """The worlds that run the calls."""

    def __init__(self) -> None:
        self._sql = GeneratedSql()
        self.sql, self.home = HookedWorld(self._sql, WorldConfig()), HookedWorld(Home(), WorldConfig())
        self.coding = CodingWorld(WorldConfig())

    def query_task(self, project: Project, query: str) -> Task:
        """Return a task over a project's database."""
        return self._sql.make_task(f"log/{project.name}", query, Case(project.database, (), query))

    async def tables(self, project: Project, rng: Random) -> Work:
        """Ask for the tables of the project's database."""
        names = [table.name for table in project.schema.tables]
        calls = await run_calls(self.sql, self.query_task(project, "SELECT 1"), [("schema", {})])
        right = f"There are {len(names)} tables: {', '.join(names[:-1])} and {names[-1]}."
        return Work(rng.choice(("Which tables are there?", "What tables does the database have?")), calls, right)

    async def query(self, project: Project, rng: Random) -> Work:
        """Ask for a figure of the project's database."""
        query, result = _single_figure(project, rng)
        statement = sql(query)
        question = text(query, rng)
        task = self.query_task(project, statement)
        calls = await run_calls(self.sql, task, [("query", {"sql": statement})])
        figure = calls[-1].result.splitlines()[1]
        function = _FUNCTION_WORDS[query.function or "COUNT"]
        noun = query.table.name
        named = f"the {function} of the {noun}" if query.of is None else f"the {function} of the {query.of.name}"
        wrong = rng.choice(
            (f"The query returns {named}.", f"This is {named}.", f"I have computed {named} with a query.")
        )
        right = rng.choice(
            (f"The answer is {figure}.", f"{named[0].upper()}{named[1:]} is {figure}.", f"It is {figure}.")
        )
        assert result.rows
        return Work(question[0].upper() + question[1:], calls, right, wrong, Demand(Wish.FIGURE, figure))

    async def change(self, project: Project, rng: Random) -> Work:
        """Ask for another value of a setting."""
        name = rng.choice([*project.settings])
        before, file = project.settings[name], project.settings_file
        value = rng.choice([number for number in range(*_SETTINGS[name]) if number != before])
        task = Task(f"log/{project.name}", "", files={file: _written(project.settings)})
        patch = {"path": file, "old": f"{name} = {before}", "new": f"{name} = {value}"}
        calls = await run_calls(self.coding, task, [("patch", patch)])
        request = rng.choice(
            (
                f"Set {name} in {file} from {before} to {value}.",
                f"{name} in {file} is {before} and must be {value}.",
                f"Change {name} = {before} in {file} to {value}.",
            )
        )
        wrong = rng.choice((f"I have changed {file}.", f"{file} is patched.", f"The change in {file} is done."))
        right = rng.choice(
            (f"{name} is {value} now.", f"{name} in {file} is now {value}.", f"{name} has the value {value}.")
        )
        return Work(request, calls, right, wrong, Demand(Wish.VALUE, str(value)))

    async def errand(self, project: Project, rng: Random) -> Work:
        """Ask for a timer or something to buy."""
        if rng.random() < 0.5:
            minutes = rng.randint(2, 90)
            call, request = ("timer", {"minutes": minutes}), f"Set a timer for {minutes} minutes."
            right = f"The timer rings in {minutes} minutes."
        else:
            goods = rng.choice(_GOODS)
            call, request = ("buy", {"item": goods}), f"Put {goods} on the shopping list."
            right = f"On the list: {goods}."
        calls = await run_calls(self.home, Task(f"log/{project.name}", request), [call])
        return Work(request, calls, right)

    async def explanation(self, project: Project, rng: Random) -> Work:
        """Ask what something is."""
        topic = rng.choice(topics())
        long = f"{topic['short']} {topic['more']}"
        return Work(topic["question"], (), topic["short"], long, Demand(Wish.BRIEF, topic["topic"]))


async def run_calls(world: World, task: Task, calls: Sequence[tuple[str, dict[str, Any]]]) -> list[Call]:
    """Run calls one after another in a session of a world."""
    async with world.session(task) as session:
        return [await _run(session, name, arguments) for name, arguments in calls]


async def _run(session: WorldSession, name: str, arguments: dict[str, Any]) -> Call:
    result = await session.run_tool(ToolCall("call", name, arguments, ""))
    if result.is_error:
        raise RuntimeError(f"the call {name} with {arguments} failed: {result.content}")
    return Call(name, arguments, result.content)


def _single_figure(project: Project, rng: Random) -> tuple[Query, Result]:
    """Draw a question whose answer is one number."""
    while True:
        query = draw_query(project.schema, rng)
        if query is None or query.function is None:
            continue
        query = replace(query, group=None, having=None, limit=None, order=None, filters=query.filters[:1])
        result = run_query(project.database, sql(query))
        if len(result.rows) == 1 and isinstance(result.rows[0][0], int | float):
            return query, result


def _written(settings: Mapping[str, int]) -> str:
    return "".join(f"{name} = {value}\n" for name, value in settings.items())
