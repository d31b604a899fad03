"""`env.world`: the settings of a world are the parameters of its constructor."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import Field

from agentic_opd.core.errors import ConfigError
from agentic_opd.core.types import Task
from agentic_opd.env.command import build_parser
from agentic_opd.env.config import AgentEnvConfig, default_settings
from agentic_opd.settings.fields import line_settings
from agentic_opd.settings.flags import parse
from agentic_opd.settings.read import read_settings
from agentic_opd.worlds.choose import make_world, settings_model
from agentic_opd.worlds.coding.config import CodingSettings
from agentic_opd.worlds.custom import CustomWorld, HookedWorld

LEVELS = """\
from agentic_opd.worlds.custom import CustomWorld, Task

class Levels(CustomWorld):
    def __init__(self, level: int, prompt: str = "Go."):
        self.level, self.prompt = level, prompt

    def tasks(self):
        yield Task("t", self.prompt, None)

    def verify(self, task, state):
        return 1.0
"""


def read(*argv: str) -> AgentEnvConfig:
    env, servers = default_settings()
    parser = build_parser("prog", "text", {"env": env, "openai": servers[0]})
    return read_settings(parse(parser, ["process", *argv]), env, servers).env


def refusal(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(*argv)
    return [line.removeprefix("  - ") for line in str(caught.value).splitlines()[1:]]


def test_flags_of_the_coding_world() -> None:
    world = read("--env.world.dataset_name", "tasks.jsonl", "--env.world.dataset_fields", "{prompt: question}").world
    assert world == CodingSettings(dataset_name="tasks.jsonl", dataset_fields={"prompt": "question"})


@pytest.mark.parametrize(
    "argv",
    [
        ["--env.world", "sql", "--env.world.file", "q.json", "--env.world.databases", "d"],
        ["--env.world.type", "sql", "--env.world.file", "q.json", "--env.world.databases", "d"],
        ["--env.world", "{type: sql, file: q.json, databases: d}"],
    ],
)
def test_a_world_and_its_settings_as_flags(argv: list[str]) -> None:
    world: Any = read(*argv).world
    assert (world.type, world.file, world.databases, world.skip_broken) == ("sql", Path("q.json"), Path("d"), False)


def test_flags_go_over_the_file_and_another_world_drops_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "env.yaml"
    path.write_text(yaml.safe_dump({"env": {"world": {"type": "sql", "file": "q.json", "databases": "d"}}}))
    world: Any = read("--config", str(path), "--env.world.file", "other.json").world
    assert (world.type, world.file, world.databases) == ("sql", Path("other.json"), Path("d"))
    world = read("--config", str(path), "--env.world", "functions", "--env.world.questions", "q").world
    assert (world.type, world.questions) == ("functions", "q")


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (
            ["--env.world", "sqll"],
            ["env.world.type: there is no world 'sqll'. There are coding, babyai, functions, harbor, "],
        ),
        (
            ["--env.world", "own.py"],
            ["env.world.type: there is no world 'own.py'. There are coding, "],
        ),
        (["--env.world", ":Own"], ["env.world.type: ':Own' does not name a class: expected FILE.py:CLASS or"]),
        (
            ["--env.world", "own.py:no class"],
            ["env.world.type: 'own.py:no class' does not name a class: expected FILE.py"],
        ),
        (["--env.world", "no.py:Own"], ["env.world.type: there is no file 'no.py'"]),
        (["--env.world", "sql"], ["env.world.file: Field required", "env.world.databases: Field required"]),
        (["--env.world.file", "q.json"], ["env.world.file is a setting of env.world.type sql, and the type is coding"]),
        (["--env.world.limits", "3"], ["env.world.limits is unknown; did you mean 'env.world.limit'?"]),
        (
            ["--env.world", "functions", "--env.world.questions", "q", "--env.world.held_out", "2"],
            ["env.world.held_out: Input should be less than or equal to 1, got 2"],
        ),
        (["--env.sql_file", "q.json"], ["env.sql_file is now env.world.file"]),
        (["--env.dataset_name", "t.jsonl"], ["env.dataset_name is now env.world.dataset_name"]),
        (["--env.world_options", "{a: 1}"], ["env.world_options was removed: its entries are settings of env.world"]),
    ],
)
def test_wrong_settings_of_a_world_are_named(argv: list[str], lines: list[str]) -> None:
    refused = refusal(*argv)
    assert len(refused) == len(lines)
    assert [text.startswith(line) for text, line in zip(refused, lines, strict=True)] == [True] * len(lines), refused


def test_a_file_brings_a_world_with_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("levels.py").write_text(LEVELS)
    config = read("--env.world", "levels.py:Levels", "--env.world.level", "3")
    world = make_world(config)
    assert isinstance(world, HookedWorld)
    assert (world.hooks.level, world.hooks.prompt) == (3, "Go.")  # type: ignore[attr-defined]
    written = {name: value for name, value in line_settings(config).items() if name.startswith("world.")}
    assert written == {"world.type": "levels.py:Levels", "world.level": 3, "world.prompt": "Go."}
    assert refusal("--env.world", "levels.py:Levels", "--env.world.levl", "3") == [
        "env.world.levl is unknown; did you mean 'env.world.level'?",
        "env.world.level: Field required",
    ]
    assert refusal("--env.world", "levels.py:Levels", "--env.world.level", "high") == [
        "env.world.level: Input should be a valid integer, unable to parse string as an integer, got 'high'"
    ]


def test_a_file_is_imported_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "counted_imports", [], raising=False)
    count = "import sys\nsys.counted_imports.append(1)\n"
    Path("counted.py").write_text(f"{count}{LEVELS}")
    make_world(read("--env.world", "counted.py:Levels", "--env.world.level", "3"))
    assert sys.counted_imports == [1]  # type: ignore[attr-defined]
    Path("counted.py").write_text(f"{count}{LEVELS}# changed\n")
    make_world(read("--env.world", "counted.py:Levels", "--env.world.level", "3"))
    assert sys.counted_imports == [1, 1]  # type: ignore[attr-defined]


class Described(CustomWorld):
    """A world with many kinds of parameters."""

    def __init__(
        self,
        config: AgentEnvConfig,
        size: Annotated[int, Field(ge=1)],
        mode: Literal["fast", "slow"] = "fast",
        copy: bool = False,
        *,
        anything: Any = None,
    ) -> None:
        """Remember.

        Args:
            config: Settings of the environment.
            size: Number of rooms.
            mode: How.
        """
        self.config, self.size, self.arguments = config, size, (mode, copy, anything)


def test_parameters_of_a_constructor_are_settings() -> None:
    fields = settings_model(Described).model_fields
    assert [*fields] == ["type", "size", "mode", "copy", "anything"]
    assert [fields[name].description for name in ("size", "mode", "copy")] == ["Number of rooms.", "How.", None]
    assert fields["size"].is_required()


class Typed(CustomWorld):
    """A world whose parameter has the name of the world's name."""

    def __init__(self, type: str) -> None:
        self.name = type


class Private(CustomWorld):
    """A world with a parameter that can't be a setting."""

    def __init__(self, _seed: int = 0) -> None:
        self.seed = _seed


@pytest.mark.parametrize(
    ("kind", "problem"),
    [(Typed, "Typed has a parameter `type`"), (Private, "the parameters of Private can't be settings: .*_seed")],
)
def test_parameters_that_can_be_no_settings_are_refused(kind: type, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        settings_model(kind)


class Whole:
    """A world without hooks: it implements `core.types.World` itself."""

    system_prompt = "Go."
    tools = ()

    def __init__(self, config: AgentEnvConfig, rooms: int = 2) -> None:
        self.config, self.rooms = config, rooms

    def session(self, task: Task) -> Any: ...

    async def train_and_eval_tasks(self) -> tuple[list[Task], list[Task]]:
        return [], []

    async def verify(self, task: Task, left: Any) -> Any: ...

    async def check(self) -> None: ...


def test_a_class_may_be_a_whole_world() -> None:
    config = AgentEnvConfig(world={"type": f"{__name__}:Whole", "rooms": 5})  # type: ignore[arg-type]
    world: Any = make_world(config)
    assert (type(world).__name__, world.rooms, world.config is config) == ("Whole", 5, True)
