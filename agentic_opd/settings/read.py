"""The settings of a run: defaults, overridden by a YAML file, then by flags. One error lists every invalid setting."""

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from agentic_opd.core.errors import ConfigError
from agentic_opd.settings.fields import NO_EFFECT, group_of
from agentic_opd.settings.files import read_yaml
from agentic_opd.settings.layers import Layer, Merge, flags_layer, set_values
from agentic_opd.settings.listing import dotted, names_of, nearest


@dataclass(frozen=True, slots=True)
class Settings:
    """A run's settings: the environment's, and those of one or several servers.

    `without_effect` names the given settings that have no effect. `sections` holds those of a command's other sections.
    """

    env: Any
    servers: list[Any]
    without_effect: tuple[str, ...] = ()
    sections: Mapping[str, Any] = field(default_factory=dict[str, Any])


def read_settings(
    arguments: argparse.Namespace,
    env_defaults: BaseModel,
    server_defaults: Sequence[BaseModel],
    section_defaults: Mapping[str, BaseModel] | None = None,
) -> Settings:
    """Join defaults, YAML and flags.

    The first of `server_defaults` applies to each server in the file. `section_defaults` are those of further sections
    by their names.

    Raises:
        ConfigError: lists every invalid setting, unreadable file and unknown name.
    """
    wrong, first = list(arguments.misunderstood), server_defaults[0]
    section_defaults = section_defaults or {}
    env_file, rows, other_files = _sections(arguments.config, wrong, [*section_defaults])
    env_layers = [[env_file], flags_layer(arguments.flags, "env")]
    env = validated(type(env_defaults), "env", [[set_values(env_defaults)], *env_layers], wrong)
    flags = flags_layer(arguments.flags, "openai")
    if len(rows) > 1 and flags:
        wrong.append("--openai.* flags do not go with several servers in the file: which one is meant?")
    servers: list[Any] = []
    for row in rows:
        layers = [[set_values(first)], [row], flags]
        values = Merge(type(first), "openai", wrong).merged(layers)
        servers += [_model(type(first), "openai", {**values, **url}, wrong) for url in _urls(values)]
    for server in servers:
        if server is not None and not str(server.base_url).startswith(("http://", "https://")):
            wrong.append(f"openai.base_url must be http://... or https://..., got {server.base_url!r}")
        if server is not None and not server.api_key:
            server.api_key = os.environ.get("VLLM_API_KEY", "")
    sections = {
        name: validated(
            type(defaults),
            name,
            [[defaults.model_dump(exclude_unset=True)], [other_files[name]], flags_layer(arguments.flags, name)],
            wrong,
        )
        for name, defaults in section_defaults.items()
    }
    refuse(wrong)
    idle = {*_idle("env", env_defaults, env_layers), *_idle("openai", first, [rows, flags])}
    return Settings(env, servers, tuple(sorted(idle)), sections)


def refuse(wrong: Sequence[str]) -> None:
    """Raise the collected errors, if there are any.

    Raises:
        ConfigError: `wrong` is not empty.
    """
    if wrong:
        raise ConfigError("settings are wrong:\n" + "\n".join(f"  - {line}" for line in dict.fromkeys(wrong)))


def validated(model: type[BaseModel], prefix: str, layers: Sequence[Layer], wrong: list[str]) -> Any:
    """Return the merged layers as a `model`, None if a value is invalid.

    Invalid values and unknown names are added to `wrong`, with `prefix` before the name.
    """
    return _model(model, prefix, Merge(model, prefix, wrong).merged(layers), wrong)


def _model(model: type[BaseModel], prefix: str, values: dict[str, Any], wrong: list[str]) -> Any:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        wrong += wrong_values(error, prefix, [*names_of(prefix, model)])
    return None


def wrong_values(error: ValidationError, prefix: str, names: Sequence[str]) -> Iterable[str]:
    """Yield the problem of each setting, with its value; for secrets, without the value.

    `prefix` precedes the names of the error's fields (`env.world`), and `names` are all dotted names.
    """
    for entry in error.errors(include_url=False, include_context=False):
        path = dotted(prefix, *map(str, entry["loc"])) or "settings"
        if entry["type"] == "extra_forbidden":
            yield f"{path} is unknown{nearest(path, names)}"
            continue
        # The input of a section or a missing setting holds other settings, including keys.
        is_shown = entry["loc"] and entry["type"] != "missing" and "key" not in path
        suffix = f", got {entry['input']!r}" if is_shown and not isinstance(entry["input"], Mapping) else ""
        yield f"{path}: {entry['msg'].removeprefix('Value error, ')}{suffix}"


def _sections(
    path: Path | None, wrong: list[str], further_sections: Sequence[str]
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the file's settings of the environment, of each server (without servers, one empty entry), and of
    `further_sections` by name.
    """
    names = ["env", "openai", *further_sections]
    try:
        sections = read_yaml(path, "environment") if path else {}
    except ConfigError as error:
        wrong.append(str(error))
        sections = {}
    for name in sections:
        if name not in names:
            wrong.append(f"section {name!r} in {str(path)!r} is unknown{nearest(name, names)}")
    listed = sections.get("openai") or {}
    rows: list[Any] = listed if isinstance(listed, list) else [listed]
    unnumbered = {name: sections.get(name) or {} for name in names if name != "openai"}
    for name, section in (*unnumbered.items(), *(("openai", row) for row in rows)):
        if not isinstance(section, dict):
            wrong.append(f"section {name!r} in {str(path)!r} must hold names and values, got {section!r}")
    read = {name: section if isinstance(section, dict) else {} for name, section in unnumbered.items()}
    return read["env"], [row if isinstance(row, dict) else {} for row in rows] or [{}], read


def _urls(row: dict[str, Any]) -> list[dict[str, str]]:
    """Split an address with commas into the addresses of servers that are otherwise alike."""
    text = row.get("base_url")
    return [{"base_url": url.strip()} for url in text.split(",")] if isinstance(text, str) else [{}]


def _idle(prefix: str, defaults: BaseModel, layers: Sequence[Layer]) -> Iterable[str]:
    """Return the settings in the layers that have no effect."""
    model = type(defaults)
    names = {name for layer in layers for part in layer for name in part}
    return (dotted(prefix, name) for name in names if group_of(model, name) is NO_EFFECT)
