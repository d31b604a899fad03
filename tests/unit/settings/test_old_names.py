"""Names of settings in earlier versions are answered with those of today, on command lines, in files and in Python."""

import json
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from agentic_opd.cli.run_settings import settings_of_run
from agentic_opd.core.errors import ConfigError
from agentic_opd.env.command import build_parser
from agentic_opd.env.config import AgenticOPDEnvConfig, default_settings
from agentic_opd.gateway.command import build_parser as gateway_parser
from agentic_opd.gateway.command import default_config
from agentic_opd.report.read import read_settings as run_file
from agentic_opd.settings.atropos import PolicyServerConfig
from agentic_opd.settings.flags import parse
from agentic_opd.settings.listing import settings_in
from agentic_opd.settings.old_names import REMOVED, RENAMED, current_names
from agentic_opd.settings.read import read_settings

ENV, SERVERS = default_settings()
SETTINGS = {row.flag for row in settings_in({"env": ENV})}


def refusal(*argv: str) -> list[str]:
    parser = build_parser("prog", "text", {"env": ENV, "openai": SERVERS[0]})
    with pytest.raises(ConfigError) as caught:
        read_settings(parse(parser, ["process", *argv]), ENV, SERVERS)
    return [line.removeprefix("  - ") for line in str(caught.value).splitlines()[1:]]


def test_the_names_of_today_are_settings() -> None:
    assert {f"env.{name}" for name in RENAMED.values()} <= SETTINGS
    assert not {f"env.{name}" for name in (*RENAMED, *REMOVED)} & SETTINGS


def test_each_old_flag_is_answered_all_at_once() -> None:
    lines = refusal(*(text for name in RENAMED for text in (f"--env.{name}", "1")))
    assert sorted(lines) == sorted(f"env.{old} is now env.{new}" for old, new in RENAMED.items())


def test_each_old_name_in_a_file_is_answered(tmp_path: Path) -> None:
    file = tmp_path / "env.yaml"
    file.write_text(yaml.safe_dump({"env": {**dict.fromkeys(RENAMED, 1), **dict.fromkeys(REMOVED, 1)}}))
    lines = refusal("--config", str(file))
    assert sorted(lines) == sorted(
        [*(f"env.{old} is now env.{new}" for old, new in RENAMED.items())]
        + [f"env.{name} was removed: {reason}" for name, reason in REMOVED.items()]
    )


def test_the_gateway_answers_the_names_that_it_has_and_names_the_command_of_others() -> None:
    argv = ["--env.judge_temperature", "0", "--env.sandbox_image", "slim", "--env.renderer", "qwen3"]
    with pytest.raises(ConfigError) as caught:
        read_settings(parse(gateway_parser(), argv), default_config(), [PolicyServerConfig()])
    assert "env.judge_temperature is now env.judge.temperature" in str(caught.value)
    assert "env.renderer is now env.renderer.name" in str(caught.value)
    assert "env.sandbox_image: known to `agentic-opd process`" in str(caught.value)


def test_old_names_in_python_are_errors_too() -> None:
    with pytest.raises(ValidationError, match=r"judge_temperature is now env\.judge\.temperature"):
        AgenticOPDEnvConfig.model_validate({"judge_temperature": 0})


def test_a_run_file_of_an_earlier_version_is_read_by_the_names_of_today(tmp_path: Path) -> None:
    old = {
        **{"judge_temperature": 0.1, "teacher": "frozen", "hindsight": "next_state", "control": "neutral"},
        **{"renderer": "qwen3", "renderer_options": {"enable_thinking": False}, "group_size": 2},
        **{"sandbox_backend": "docker", "sandbox_image": "slim", "sandbox_swerex_url": None, "eval_fraction": 0.5},
    }
    path = tmp_path / "groups.run.json"
    path.write_text(json.dumps(old))
    assert run_file(path)["teacher.weights"] == "frozen"
    config = settings_of_run(ENV, tmp_path / "groups.jsonl")
    assert (config.judge.temperature, config.teacher.weights) == (0.1, "frozen")
    assert config.hindsight.evidence == "next_state"
    assert (config.renderer.name, config.renderer.options) == ("qwen3", {"enable_thinking": False})
    assert (config.sandbox.type, config.sandbox.model_dump()["image"], config.eval.fraction) == ("docker", "slim", 0.5)
    assert (config.hint.control, config.group_size) == ("neutral", 2)


def test_a_run_file_of_today_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "groups.run.json"
    path.write_text(json.dumps({"judge.temperature": 0.1, "judge.no_such": 1}))
    with pytest.raises(ConfigError, match=r"judge\.no_such is unknown"):
        settings_of_run(ENV, tmp_path / "groups.jsonl")
    assert current_names({"judge.temperature": 0.1}) == {"judge.temperature": 0.1}
