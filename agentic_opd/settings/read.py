"""The settings of a run: defaults, then a YAML file, then flags. Every wrong one is named at once."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError

from agentic_opd.core.errors import ConfigError
from agentic_opd.settings.flags import flag_values, nearest
from agentic_opd.settings.groups import NO_EFFECT


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run is made of: the environment's settings and one server's or several servers'.

    `without_effect` names what was set and does nothing.
    """

    env: Any
    servers: list[Any]
    without_effect: tuple[str, ...] = ()


def read_settings(
    arguments: argparse.Namespace,
    env_defaults: BaseModel,
    server_defaults: Sequence[BaseModel],
    misunderstood: Sequence[str] = (),
) -> Settings:
    """Join defaults, YAML and flags.

    Args:
        arguments: What the command line held.
        env_defaults: The environment's own settings.
        server_defaults: Its servers'; the first one's are the defaults of each in the file.
        misunderstood: What was wrong with the command line already.

    Raises:
        ConfigError: names every wrong setting, unreadable file or unknown name at once.
    """
    wrong, first = list(misunderstood), server_defaults[0]
    env_file, rows = _sections(arguments.config, wrong)
    env_values = {**env_file, **flag_values(arguments, "env", type(env_defaults), wrong)}
    env = _validate(type(env_defaults), "env", {**_own_values(env_defaults), **env_values}, wrong)
    flags = flag_values(arguments, "openai", type(first), wrong)
    if len(rows) > 1 and flags:
        wrong.append("--openai.* flags do not go with several servers in the file: which one is meant?")
    server_values = [{**row, **flags} for row in rows]
    servers = [_validate(type(first), "openai", {**_own_values(first), **row}, wrong) for row in server_values]
    for server in servers:
        if server is not None and not server.base_url.startswith(("http://", "https://")):
            wrong.append(f"openai.base_url must be http://... or https://..., got {server.base_url!r}")
        if server is not None and not server.api_key:
            server.api_key = os.environ.get("VLLM_API_KEY", "")
    if wrong:
        raise refusal(wrong)
    idle = {f"env.{name}" for name in NO_EFFECT["env"] & env_values.keys()}
    idle |= {f"openai.{name}" for row in server_values for name in NO_EFFECT["openai"] & row.keys()}
    return Settings(env, servers, tuple(sorted(idle)))


def refusal(wrong: Sequence[str]) -> ConfigError:
    """The error that names each thing that is wrong."""
    return ConfigError("settings are wrong:\n" + "\n".join(f"  - {line}" for line in dict.fromkeys(wrong)))


def read_yaml(path: Path, holds: str) -> dict[str, Any]:
    """What a file of settings holds; `holds` is what the error says that it should.

    Raises:
        ConfigError: it can't be read, or does not hold names and values.
    """
    try:
        data = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the file {str(path)!r} can't be read: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"the file {str(path)!r} must hold {holds}, got {type(data).__name__}")
    return cast(dict[str, Any], data)


def wrong_values(error: ValidationError, section: str = "", known: Sequence[str] = ()) -> list[str]:
    """What is wrong with each setting and what it was; of secrets, only what is wrong. `known` are all real names."""
    lines: list[str] = []
    for entry in error.errors(include_url=False, include_context=False):
        where = ".".join([*filter(None, [section]), *(str(part) for part in entry["loc"])])
        if entry["type"] == "extra_forbidden":
            lines.append(f"{where} is unknown{nearest(where, known)}")
            continue
        # What is missing has all other settings as its input, keys among them.
        is_shown = entry["loc"] and entry["type"] != "missing" and "key" not in where
        got = "" if not is_shown else f", got {entry['input']!r}"
        lines.append(f"{where or 'settings'}: {entry['msg'].removeprefix('Value error, ')}{got}")
    return lines


def _sections(path: Path | None, wrong: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The file's settings of the environment, and of each server: one without settings where the file names none."""
    try:
        sections = read_yaml(path, "the sections env and openai") if path else {}
    except ConfigError as error:
        wrong.append(str(error))
        sections = {}
    for name in sections:
        if name not in ("env", "openai"):
            wrong.append(f"section {name!r} in {str(path)!r} is unknown{nearest(name, ['env', 'openai'])}")
    listed = sections.get("openai") or {}
    rows: list[Any] = listed if isinstance(listed, list) else [listed]
    for name, section in (("env", sections.get("env") or {}), *(("openai", row) for row in rows)):
        if not isinstance(section, dict):
            wrong.append(f"section {name!r} in {str(path)!r} must hold names and values, got {section!r}")
    env = sections.get("env") or {}
    return env if isinstance(env, dict) else {}, [row if isinstance(row, dict) else {} for row in rows] or [{}]


def _own_values(defaults: BaseModel) -> dict[str, Any]:
    return {name: getattr(defaults, name) for name in type(defaults).model_fields}


def _validate(model: type[BaseModel], section: str, values: dict[str, Any], wrong: list[str]) -> Any:
    known = list(model.model_fields)
    wrong += [f"{section}.{name} is unknown{nearest(name, known)}" for name in values if name not in known]
    try:
        return model.model_validate({name: value for name, value in values.items() if name in known})
    except ValidationError as error:
        wrong += wrong_values(error, section)
    return None
