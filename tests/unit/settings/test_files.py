"""A settings file that is another command's is refused in one sentence, with the command that takes it."""

import json
from pathlib import Path

import pytest
import yaml

from agentic_opd.core.errors import ConfigError
from agentic_opd.env.command import build_parser as environment_parser
from agentic_opd.env.config import default_settings
from agentic_opd.gateway.command import build_parser as gateway_parser
from agentic_opd.gateway.command import default_config
from agentic_opd.settings.atropos import PolicyServerConfig
from agentic_opd.settings.files import SETTINGS_FILES, SettingsKind, read_yaml
from agentic_opd.settings.flags import parse
from agentic_opd.settings.read import read_settings
from agentic_opd.training.command import build_parser as trainer_parser
from agentic_opd.training.config import TrainerConfig, read_config
from agentic_opd.up.command import read
from agentic_opd.up.config import UpConfig
from tests.unit.wire.sample import group

COMMANDS = {"environment": "agentic-opd process`", "trainer": "agentic-opd train --config", "loop": "agentic-opd up"}
CONFIGS = sorted(Path("configs").glob("*.yaml"))
OTHER_FILES = {
    "groups": ("agentic-opd report FILE", [group()]),
    "several groups": ("agentic-opd report FILE", [group(), group()]),
    "a log": ("agentic-opd distill PATH", [{"messages": [{"role": "user", "content": "Hello"}]}]),
    "tasks": ("env.world.dataset_name", [{"prompt": "Add.", "tests": []}, {"prompt": "Subtract.", "tests": []}]),
    "a model": ("openai.model_name", [{"model_type": "qwen3"}]),
}


def read_as(kind: str, path: Path) -> None:
    """Read a file as a command does."""
    if kind == "environment":
        env, servers = default_settings()
        parser = environment_parser("agentic-opd", "", {"env": env, "openai": servers[0]})
        read_settings(parse(parser, ["process", "--config", str(path)]), env, servers)
    elif kind == "trainer":
        read_config(parse(trainer_parser(), ["--config", str(path)]))
    else:
        read(path)


def kind_of(path: Path) -> str:
    name = path.stem.partition("_")[0]
    return {"train": "trainer", "up": "loop"}.get(name, "environment")


def test_the_keys_of_each_kind_are_settings_of_its_command() -> None:
    assert SETTINGS_FILES["trainer"].keys <= TrainerConfig.model_fields.keys()
    assert SETTINGS_FILES["loop"].keys <= UpConfig.model_fields.keys()
    assert SETTINGS_FILES["loop"].keys.isdisjoint(TrainerConfig.model_fields)


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_a_file_of_another_command_is_refused_in_a_sentence(kind: SettingsKind, path: Path) -> None:
    if kind_of(path) == kind:
        assert read_yaml(path, kind)
        return
    with pytest.raises(ConfigError) as error:
        read_as(kind, path)
    message = str(error.value)
    assert COMMANDS[kind_of(path)] in message
    assert str(path) in message
    assert len(message.removeprefix("settings are wrong:\n").splitlines()) == 1


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize("content", OTHER_FILES)
def test_a_file_that_holds_no_settings_is_told_by_its_content(kind: str, content: str, tmp_path: Path) -> None:
    advice, rows = OTHER_FILES[content]
    path = tmp_path / "groups.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(ConfigError) as error:
        read_as(kind, path)
    assert advice.replace("FILE", str(path)) in str(error.value)
    assert len(str(error.value).removeprefix("settings are wrong:\n").splitlines()) == 1


def test_settings_may_be_json(tmp_path: Path) -> None:
    path = tmp_path / "env.json"
    for text in (json.dumps({"env": {"group_size": 2}}), json.dumps({"env": {"group_size": 2}}, indent=1)):
        path.write_text(text)
        assert read_yaml(path, "environment") == {"env": {"group_size": 2}}


def test_settings_of_tasks_are_not_the_gateways_and_the_reverse(tmp_path: Path) -> None:
    path = tmp_path / "env.yaml"
    path.write_text(
        yaml.safe_dump({"env": {"max_turns": 3, "world": {"dataset_name": "tasks.jsonl"}, "hint_sauce": 1}})
    )
    with pytest.raises(ConfigError) as error:
        read_settings(parse(gateway_parser(), ["--config", str(path)]), default_config(), [PolicyServerConfig()])
    tasks, unknown = str(error.value).splitlines()[1:]
    assert tasks.startswith("  - env.max_turns, env.world: known to `agentic-opd process`")
    assert unknown.startswith("  - env.hint_sauce is unknown; did you mean 'env.hint.source'")
    path.write_text(yaml.safe_dump({"env": {"port": 8080, "session_idle_s": 60}}))
    with pytest.raises(ConfigError, match=r"env\.port, env\.session_idle_s: known to `agentic-opd gateway`, and not"):
        read_as("environment", path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "env:\n  group_size: 2\n group: 3\n",
            "is not YAML, line 3: while parsing a block mapping, expected <block end>",
        ),
        ("env: {group_size: 2\n", "is not YAML, line 2: while parsing a flow mapping"),
        (
            "env:\n\tgroup_size: 2\n",
            "is not YAML, line 2: while scanning for the next token, found character '\\\\t' .*with spaces",
        ),
        (b"env:\n  a: x\0y\n".decode(), "can't be read: unacceptable character #x0000"),
        ("env: {a: 1, a: 2}\n", "can't be read: 'a' is set in line 1 and again in line 1"),
        (None, "there is no file '.*' \\(the current folder is /"),
    ],
)
def test_a_file_that_is_not_yaml_is_refused_in_a_line(text: str | None, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "env.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=problem) as error:
        read_yaml(path, "environment")
    assert "\n" not in str(error.value)
