"""Merge settings of several layers - defaults, a file, flags - into one mapping, in which each name is a setting.

A later layer replaces single settings, however deeply nested. Where a later layer changes a section's `type`, only the
settings that all types share are kept of the earlier ones. Names that are no settings are collected as sentences.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agentic_opd.core.errors import ConfigError
from agentic_opd.settings import old_names
from agentic_opd.settings.fields import Kinds, kinds_of, section_of
from agentic_opd.settings.flags import FlagText
from agentic_opd.settings.listing import dotted, names_of, nearest, value_kind

Layer = Sequence[Mapping[str, Any]]
"""Settings of one origin, which may be several mappings: one for each flag. The last one wins."""


class _FlagTree(dict[str, Any]):
    """A mapping made from a dotted flag."""


def flags_layer(flags: Sequence[FlagText], prefix: str) -> Layer:
    """Return the flags with a prefix (`env`) as a layer."""
    before = f"{prefix}." if prefix else ""
    layer: list[Mapping[str, Any]] = []
    for flag in flags:
        if flag.flag.startswith(before):
            tree: Any = flag
            for part in reversed(flag.flag.removeprefix(before).split(".")):
                tree = _FlagTree({part: tree})
            layer.append(tree)
    return layer


def nested_layer(settings: Mapping[str, Any], model: type[BaseModel], without: Collection[str] = ()) -> Layer:
    """Return settings with dotted names as a layer, without those of `without` and those that are not in `model`."""
    outer = model.model_fields.keys() - {*without}
    return [_tree(name, value) for name, value in settings.items() if name.partition(".")[0] in outer]


def _tree(name: str, value: Any) -> Mapping[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def set_values(config: BaseModel) -> dict[str, Any]:
    """Return the settings that were set when `config` was created or since; sections as mappings."""
    values: dict[str, Any] = {}
    for name, info in type(config).model_fields.items():
        if section_of(info) is not None:
            values[name] = set_values(getattr(config, name))
            if kinds_of(info):
                values[name]["type"] = getattr(config, name).type
        elif name in config.model_fields_set:
            values[name] = getattr(config, name)
    return values


_VARIABLE = re.compile(r"\$(?:\{[A-Za-z_][A-Za-z0-9_]{0,99}\}|[A-Z_][A-Z0-9_]{0,99})")


def _in_sections(name: str) -> str:
    """Return a dotted name as YAML: `judge: {temperature: ...}`."""
    *sections, text = f"{name}: ...".split(".", name.count("."))
    for section in reversed(sections):
        text = f"{section}: {{{text}}}"
    return text


class Merge:
    """Merges the layers of one model whose names begin with `prefix`; `wrong` collects the sentences."""

    def __init__(self, model: type[BaseModel], prefix: str, wrong: list[str]) -> None:
        self._root, self._prefix, self._wrong = model, prefix, wrong
        self._elsewhere: dict[str, list[str]] = {}

    def merged(self, layers: Sequence[Layer]) -> dict[str, Any]:
        """Return the settings of all layers, without those that the model does not have."""
        position = len(self._wrong)
        values = self._settings(self._root, self._prefix, layers)
        self._wrong[position:position] = [
            f"{', '.join(names)}: known to {command}, and not to this command"
            for command, names in self._elsewhere.items()
        ]
        return values

    def _settings(
        self,
        model: type[BaseModel],
        path: str,
        layers: Sequence[Layer],
        kinds: Kinds | None = None,
        type_name: str = "",
    ) -> dict[str, Any]:
        values: dict[str, Any] = {}
        names: dict[Any, None] = dict.fromkeys(name for layer in layers for part in layer for name in part)
        for name in names:
            if not isinstance(name, str):  # YAML reads `5:` and `~:` as other names.
                self._wrong.append(f"{path or 'the file'}: the name of a setting is a text, got {name!r}")
                continue
            entries = [[part[name] for part in layer if name in part] for layer in layers]
            info = model.model_fields.get(name)
            if info is None:
                self._refuse(dotted(path, name), model, kinds, type_name)
            elif (section := section_of(info)) is not None:
                values[name] = self._section(section, kinds_of(info), dotted(path, name), entries)
            else:
                last = [entry for layer in entries for entry in layer][-1]
                try:
                    values[name] = self._value(info, dotted(path, name), last)
                except ConfigError as error:
                    self._wrong.append(str(error))
        return values

    def _value(self, info: FieldInfo, path: str, entry: Any) -> Any:
        """Return the value of a setting.

        Raises:
            ConfigError: a flag has no value, a flag names a part of the value, a number is true or false, or the value
                names a variable of the environment.
        """
        if isinstance(entry, _FlagTree):
            raise ConfigError(f"{dotted(path, next(iter(entry)))} is unknown: {path} is a single value")
        value = entry.value(info.annotation) if isinstance(entry, FlagText) else entry
        if isinstance(value, bool) and value_kind(info.annotation) in ("N", "X"):
            raise ConfigError(f"{path}: expected a number, got {str(value).lower()}")
        if isinstance(entry, str) and _VARIABLE.fullmatch(entry):
            raise ConfigError(
                f"{path}: {entry!r} stays as it is in a file, which reads no variables of the environment; give the "
                f'value as a flag, --{path} "{entry}"'
            )
        return value

    def _section(
        self, base: type[BaseModel], kinds: Kinds | None, path: str, entries: Sequence[Sequence[Any]]
    ) -> dict[str, Any]:
        """Return the merged settings of a section; `entries` are its inputs by layer."""
        layers = [[self._mapping(entry, path, kinds) for entry in layer] for layer in entries]
        if kinds is None:
            return self._settings(base, path, layers)
        type_name = kinds.default
        for number, layer in enumerate(layers):
            named = [str(part["type"]) for part in layer if part.get("type") is not None]
            if named and named[-1] != type_name:
                type_name, shared = named[-1], base.model_fields.keys()
                layers[:number] = [
                    [{name: part[name] for name in part if name in shared} for part in earlier]
                    for earlier in layers[:number]
                ]
        try:
            model = kinds.model_of(type_name)
        except ValueError as error:
            listed = nearest(type_name, kinds.names())
            self._wrong.append(f"{path}.type: {error}{listed}")
            return {}
        return {**self._settings(model, path, layers, kinds, type_name), "type": type_name}

    def _mapping(self, entry: Any, path: str, kinds: Kinds | None) -> Mapping[str, Any]:
        """Return an input of a section as a mapping; a text is the type of a section that has types."""
        try:
            data = entry.data() if isinstance(entry, FlagText) else entry
        except ConfigError as error:
            self._wrong.append(str(error))
            return {}
        if data is None:
            return {}
        if kinds is not None and isinstance(data, str):
            return {"type": data}
        if not isinstance(data, Mapping):
            renamed = old_names.answer(path.removeprefix("env."))
            self._wrong.append(f"{path} {renamed or f'holds settings by name, got {data!r}'}")
            return {}
        settings = cast(Mapping[str, Any], data)
        if isinstance(settings.get("type"), FlagText):
            return {**settings, "type": settings["type"].value(str)}
        return settings

    def _refuse(self, path: str, model: type[BaseModel], kinds: Kinds | None, type_name: str) -> None:
        """Add a sentence about a name that is not a setting: old, wrong, or of another command or type."""
        below = path.removeprefix(f"{self._prefix}.") if self._prefix else path
        section, _, name = path.rpartition(".")
        outermost = old_names.RENAMED.get(below, below).partition(".")[0]
        elsewhere: Mapping[str, str] = getattr(self._root, "settings_elsewhere", {})
        removed: Mapping[str, str] = getattr(model, "removed_settings", {})
        if name in removed:
            self._wrong.append(f"{path}: {removed[name]}")
        elif outermost in elsewhere and outermost not in self._root.model_fields:
            self._elsewhere.setdefault(elsewhere[outermost], []).append(path)
        elif self._prefix == "env" and (renamed := old_names.answer(below)) is not None:
            self._wrong.append(f"{path} {renamed}")
        elif kinds is not None and (owners := self._owners(name, kinds)):
            of_types = f"is a setting of {section}.type {' and '.join(owners)}"
            self._wrong.append(f"{path} {of_types}, and the type is {type_name}")
        else:
            within = dotted(*section.split(".")[1:]) if self._prefix else section
            names = [*names_of("", self._root), *(names_of(within, model) if kinds else ())]
            if below in names:
                self._wrong.append(f"{path} is unknown as one name; write it in sections: {_in_sections(below)}")
            else:
                self._wrong.append(f"{path} is unknown{nearest(below, names, self._prefix)}")

    def _owners(self, name: str, kinds: Kinds) -> list[str]:
        owners: list[str] = []
        for kind in kinds.names():
            with suppress(ValueError):  # Do not suggest a type whose settings can't be read.
                owners += [kind] if name in kinds.model_of(kind).model_fields else []
        return owners
