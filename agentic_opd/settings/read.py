"""The settings of a run: defaults, overridden by a YAML file, then by flags. One error lists every invalid setting."""

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from agentic_opd.core.errors import ConfigError
from agentic_opd.settings.fields import NO_EFFECT, group_of
from agentic_opd.settings.files import read_yaml
from agentic_opd.settings.flags import flag_values, nearest


@dataclass(frozen=True, slots=True)
class Settings:
    """A run's settings: the environment's, and those of one or several servers.

    `without_effect` names the given settings that have no effect.
    """

    env: Any
    servers: list[Any]
    without_effect: tuple[str, ...] = ()


def read_settings(
    arguments: argparse.Namespace, env_defaults: BaseModel, server_defaults: Sequence[BaseModel]
) -> Settings:
    """Join defaults, YAML and flags.

    The first of `server_defaults` applies to each server in the file.

    Raises:
        ConfigError: lists every invalid setting, unreadable file and unknown name.
    """
    wrong, first = list(arguments.misunderstood), server_defaults[0]
    env_file, rows = _sections(arguments.config, wrong)
    env_values = {**env_file, **flag_values(arguments, "env", type(env_defaults), wrong)}
    env = validated(type(env_defaults), "env", {**_own_values(env_defaults), **env_values}, wrong)
    flags = flag_values(arguments, "openai", type(first), wrong)
    if len(rows) > 1 and flags:
        wrong.append("--openai.* flags do not go with several servers in the file: which one is meant?")
    server_values = [{**row, **flags, **url} for row in rows for url in _urls({**row, **flags})]
    servers = [validated(type(first), "openai", {**_own_values(first), **row}, wrong) for row in server_values]
    for server in servers:
        if server is not None and not str(server.base_url).startswith(("http://", "https://")):
            wrong.append(f"openai.base_url must be http://... or https://..., got {server.base_url!r}")
        if server is not None and not server.api_key:
            server.api_key = os.environ.get("VLLM_API_KEY", "")
    refuse(wrong)
    idle = {*_idle("env", env_defaults, env_values)}.union(*(_idle("openai", first, row) for row in server_values))
    return Settings(env, servers, tuple(sorted(idle)))


def refuse(wrong: Sequence[str]) -> None:
    """Raise the collected errors, if there are any.

    Raises:
        ConfigError: `wrong` is not empty.
    """
    if wrong:
        raise ConfigError("settings are wrong:\n" + "\n".join(f"  - {line}" for line in dict.fromkeys(wrong)))


def validated(model: type[BaseModel], section: str, values: dict[str, Any], wrong: list[str]) -> Any:
    """Return `values` as a `model`, None if a value is invalid; add invalid values and unknown names to `wrong`."""
    nested = {name: info.annotation for name, info in model.model_fields.items()}
    known = [*nested, *(f"{outer}.{name}" for outer, inner in nested.items() for name in _fields(inner))]
    before = f"{section}." if section else ""
    unknown = [name for name in values if name not in nested]
    elsewhere: Mapping[str, str] = getattr(model, "settings_elsewhere", {})
    for command in dict.fromkeys(elsewhere[name] for name in unknown if name in elsewhere):
        names = ", ".join(f"{before}{name}" for name in unknown if elsewhere.get(name) == command)
        wrong.append(f"{names}: known to {command}, and not to this command")
    wrong += [f"{before}{name} is unknown{nearest(name, known)}" for name in unknown if name not in elsewhere]
    try:
        return model.model_validate({name: value for name, value in values.items() if name in nested})
    except ValidationError as error:
        wrong += wrong_values(error, before, known)
    return None


def wrong_values(error: ValidationError, before: str, known: Sequence[str]) -> Iterable[str]:
    """Yield what is wrong with each setting and its value; for secrets, without the value."""
    for entry in error.errors(include_url=False, include_context=False):
        name = ".".join(str(part) for part in entry["loc"])
        where = f"{before}{name}" or "settings"
        if entry["type"] == "extra_forbidden":
            yield f"{where} is unknown{nearest(name, known)}"
            continue
        # The input of a missing setting holds all other settings, including keys.
        is_shown = entry["loc"] and entry["type"] != "missing" and "key" not in where
        got = f", got {entry['input']!r}" if is_shown else ""
        yield f"{where.rstrip('.')}: {entry['msg'].removeprefix('Value error, ')}{got}"


def _sections(path: Path | None, wrong: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the file's settings of the environment and of each server; without servers, one empty entry."""
    try:
        sections = read_yaml(path, "environment") if path else {}
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


def _urls(row: dict[str, Any]) -> list[dict[str, str]]:
    """Split an address with commas into the addresses of servers that are otherwise alike."""
    text = row.get("base_url")
    return [{"base_url": url.strip()} for url in text.split(",")] if isinstance(text, str) else [{}]


def _own_values(defaults: BaseModel) -> dict[str, Any]:
    return {name: getattr(defaults, name) for name in type(defaults).model_fields}


def _fields(annotation: Any) -> Iterable[str]:
    return annotation.model_fields if isinstance(annotation, type) and issubclass(annotation, BaseModel) else ()


def _idle(section: str, defaults: BaseModel, values: dict[str, Any]) -> Iterable[str]:
    """Return the settings among `values` that have no effect."""
    return (f"{section}.{name}" for name in values if group_of(type(defaults), name) is NO_EFFECT)
