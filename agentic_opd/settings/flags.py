"""A command line built from settings fields: `--env.group_size 8`, `--openai.base_url http://127.0.0.1:8000/v1`."""

import argparse
import difflib
import shutil
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from inspect import get_annotations
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr

from agentic_opd.core.exit_codes import EXIT_CODES
from agentic_opd.core.text import text_lines
from agentic_opd.settings.fields import Mode, SettingGroup, group_of
from agentic_opd.settings.files import parse_yaml

NO_VALUE = "<no value>"
"""Value of a flag that was given without its required value."""

_EPILOG = """\
Flags go over the YAML file, the YAML file over the defaults. Values are read as YAML: 8, true, null, {key: value}.
"""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """One line per flag, its description below it; texts keep their line breaks, and long lines are wrapped."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=8, width=min(shutil.get_terminal_size().columns, 120))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = partial(textwrap.fill, width=width, initial_indent=indent, subsequent_indent=indent)
        return "\n".join(map(fill, text_lines(text)))

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        """Write brackets only around optional values."""
        if action.nargs == "*":
            return f"{action.metavar} [{action.metavar} ...]"
        if action.const == NO_VALUE:
            return str(action.metavar)
        return super()._format_args(action, default_metavar)


def add_settings(
    parser: argparse.ArgumentParser,
    models: Mapping[str, BaseModel],
    mode: Mode | None = None,
    shown: Collection[str] | None = None,
) -> None:
    """Add a flag to `parser` for each field of `models`, a mapping from flag prefix to default settings.

    Help shows the settings that `mode` needs (None: all settings), and of those the ones named in `shown`, if given.
    """
    sections = f"the sections {' and '.join(models)}" if "" not in models else "settings"
    usage = " ".join(f"[--{_written(prefix, 'NAME')} VALUE ...]" for prefix in models)
    parser.formatter_class = HelpFormatter
    parser.usage = f"{parser.prog} [--config FILE] {usage}"
    parser.epilog = _EPILOG + EXIT_CODES
    parser.add_argument("--config", metavar="FILE", type=Path, help=f"YAML file with {sections}")
    parser.add_argument("--verbose", action="store_true", help="show the log lines of all libraries")
    for group, defaults, written in grouped_settings(models):
        in_help = {name for name in written.values() if shown is None or name in shown}
        if mode is not None and mode not in group.modes:
            in_help = set[str]()
        place = parser.add_argument_group(group.title) if in_help else parser
        for flag, name in written.items():
            is_shown = name in in_help
            info = type(defaults).model_fields[name]
            const = "true" if info.annotation is bool else NO_VALUE
            values: dict[str, Any] = {"nargs": "*"} if info.annotation == list[Path] else {"nargs": "?", "const": const}
            place.add_argument(
                f"--{flag}",
                metavar=value_kind(info.annotation),
                help=describe(defaults, name).replace("%", "%%") if is_shown else argparse.SUPPRESS,
                **values,
            )


class GroupedSettings(NamedTuple):
    """A group of settings, and the default settings that they belong to."""

    group: SettingGroup
    defaults: BaseModel
    written: dict[str, str]
    """Flag with prefix -> field name."""


def grouped_settings(models: Mapping[str, BaseModel]) -> list[GroupedSettings]:
    """Return every field of `models` (flag prefix -> default settings) once, by group, the most used group first.

    In a group, a subclass's own settings come before inherited ones.
    """
    groups: dict[tuple[SettingGroup, str], GroupedSettings] = {}
    for prefix, defaults in models.items():
        model = type(defaults)
        declared = dict.fromkeys(name for base in model.__mro__ for name in get_annotations(base))
        for name in filter(model.model_fields.__contains__, declared):
            group = group_of(model, name)
            row = groups.setdefault((group, prefix), GroupedSettings(group, defaults, {}))
            row.written[_written(prefix, name)] = name
    return sorted(groups.values(), key=lambda row: row.group.place)


def _written(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def describe(defaults: BaseModel, name: str) -> str:
    """Return a setting's description and default."""
    text = (type(defaults).model_fields[name].description or "").rstrip(".")
    default = shown_default(defaults, name)
    if default == "needed":
        return f"{text} (needed)"
    return text if "Unset:" in text and default == "unset" else f"{text} (default: {default})".lstrip()


def shown_default(defaults: BaseModel, name: str) -> str:
    """Return the default as written on a command line; secrets are hidden."""
    if type(defaults).model_fields[name].is_required():
        return "needed"
    default = getattr(defaults, name)
    if isinstance(default, BaseModel):
        default = default.model_dump(exclude_unset=True)
    if isinstance(default, SecretStr):
        return "hidden"
    if isinstance(default, Enum):
        default = default.value
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return f"[{', '.join(map(str, default))}]"
    return "unset" if default in (None, "") else str(default)


def value_kind(annotation: Any) -> str:
    """Return the placeholder for a flag's value in help."""
    origin, kinds = get_origin(annotation), [kind for kind in get_args(annotation) if kind is not NoneType]
    if origin in (Union, UnionType):
        return value_kind(kinds[0])
    if origin is Annotated:
        return "URL"
    if origin is Literal:
        return "{" + ",".join(map(str, kinds)) + "}"
    if annotation == list[Path]:
        return "FILE"
    if origin in (list, tuple):
        return f"[{value_kind(kinds[0])}, ...]"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "{KEY: VALUE}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "{" + ",".join(str(member.value) for member in annotation) + "}"
    kind = getattr(annotation, "__name__", "")
    return {"int": "N", "float": "X", "bool": "true|false", "SecretStr": "KEY"}.get(kind, "TEXT")


def flag_values(arguments: argparse.Namespace, prefix: str, model: type[BaseModel], wrong: list[str]) -> dict[str, Any]:
    """Return the values of the given flags; add flags without their value to `wrong`."""
    given = {name: getattr(arguments, _written(prefix, name)) for name in model.model_fields}
    wrong += [f"--{_written(prefix, name)} needs a value" for name, value in given.items() if value in (NO_VALUE, [])]
    return {
        name: _flag_value(model.model_fields[name].annotation, value)
        for name, value in given.items()
        if value not in (None, NO_VALUE, [])
    }


def _flag_value(annotation: Any, text: str | list[str]) -> Any:
    """Return a flag's value: the text for text fields (a key may look like a number), else the parsed YAML.

    A list of files is given as several arguments, or as one YAML list.
    """
    if isinstance(text, list):
        if len(text) > 1 or not text[0].startswith("["):
            return text
        text = text[0]
    kinds = get_args(annotation) or (annotation,)
    if text.lower() in ("null", "none") and type(None) in kinds:
        return None
    is_text = any(kind in (str, SecretStr, Path) or isinstance(kind, str) for kind in kinds)
    try:
        return text if is_text and get_origin(annotation) not in (dict, list, tuple) else parse_yaml(text)
    except yaml.YAMLError:
        return text


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line whose unknown arguments are errors among others: `misunderstood` of the result lists them.

    The value of an unknown flag is not listed.
    """
    arguments, unknown = parser.parse_known_args(argv)
    known = _flags_of(parser)
    example = "--env.NAME" if "--env.group_size" in known else "--NAME"
    wrong: list[str] = []
    flag_before = False
    for text in unknown:
        if text.startswith("-"):
            name, has_value, _ = text.partition("=")
            wrong.append(f"{name} is unknown{nearest(name, known)}")
            flag_before = not has_value
        else:
            if not flag_before:
                wrong.append(f"{text!r} belongs to no flag; settings are written {example} VALUE")
            flag_before = False
    arguments.misunderstood = wrong
    return arguments


def _flags_of(parser: argparse.ArgumentParser) -> dict[str, None]:
    """Return the flags of a parser and its sub-commands, each once."""
    flags: dict[str, None] = {}
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage]
        flags |= dict.fromkeys(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage]
            for command in action.choices.values():
                flags |= _flags_of(command)
    return flags


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'group_size'?` if a known name is close, else an empty text."""
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
