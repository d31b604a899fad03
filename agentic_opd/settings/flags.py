"""A command line made of the settings' own fields: `--env.group_size 8`, `--openai.base_url http://127.0.0.1:8000/v1`."""

import argparse
import difflib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr

from agentic_opd.settings.groups import GROUPS, NO_EFFECT, Mode

NO_VALUE = "<no value>"
"""What a flag holds that was given without the value that it needs."""

_EPILOG = """\
Flags go over the YAML file, the YAML file over the defaults. Values are read as YAML: 8, true, null, {key: value}.
Exit code 0: done; 1: failed, or not all done; 2: wrong settings; 130: interrupted."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A flag on one line, what it is below it."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=8, width=min(shutil.get_terminal_size().columns, 120))

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        """Without the brackets of a value that may be left out, where it may not."""
        if action.const == NO_VALUE:
            return str(action.metavar)
        return super()._format_args(action, default_metavar)


def add_settings(parser: argparse.ArgumentParser, models: Mapping[str, BaseModel], mode: Mode) -> None:
    """Give `parser` a flag for each field of `models` (prefix -> defaults); its help shows those that `mode` needs."""
    parser.formatter_class = HelpFormatter
    parser.usage = f"{parser.prog} [--config FILE] [--env.NAME VALUE ...] [--openai.NAME VALUE ...]"
    parser.epilog = _EPILOG
    parser.add_argument("--config", metavar="FILE", type=Path, help="YAML file with the sections env and openai")
    parser.add_argument("--verbose", action="store_true", help="show the log lines of all libraries")
    for title, prefix, names in sorted_settings(models, mode):
        group = parser.add_argument_group(title) if title else parser
        for name in names:
            info = type(models[prefix]).model_fields[name]
            help_text = describe(models[prefix], name) if title else argparse.SUPPRESS
            group.add_argument(
                f"--{prefix}.{name}",
                nargs="?",
                const="true" if info.annotation is bool else NO_VALUE,
                metavar=value_kind(info.annotation),
                help=help_text.replace("%", "%%") if title else argparse.SUPPRESS,
            )


def sorted_settings(models: Mapping[str, BaseModel], mode: Mode | None) -> Iterator[tuple[str, str, list[str]]]:
    """Every field of `models` once: (title, prefix, names); the title is empty where `mode`'s help leaves them out.

    The most used ones come first, then where the policy is, then the rest.
    """
    hidden: list[tuple[str, str, list[str]]] = []
    shown: list[tuple[str, str, list[str]]] = []
    for prefix, defaults in models.items():
        rest = [name for name in type(defaults).model_fields if name not in NO_EFFECT[prefix]]
        for group in GROUPS[prefix]:
            names = [name for name in group.names if name in rest]
            rest = [name for name in rest if name not in names]
            (shown if mode is None or mode in group.modes else hidden).append((group.title, prefix, names))
        if rest:
            shown.append(("This environment's own", prefix, rest))
        hidden.append(("", prefix, sorted(NO_EFFECT[prefix] & type(defaults).model_fields.keys())))
    servers = [entry for entry in shown if entry[1] == "openai"]
    env = [entry for entry in shown if entry[1] == "env"]
    yield from (*env[:1], *servers, *env[1:])
    yield from (("", prefix, names) for _, prefix, names in hidden)


def describe(defaults: BaseModel, name: str) -> str:
    """What a setting is, and its default."""
    text = (type(defaults).model_fields[name].description or "").rstrip(".")
    default = shown_default(defaults, name)
    if default == "needed":
        return f"{text} (needed)"
    return text if "Unset:" in text and default == "unset" else f"{text} (default: {default})".lstrip()


def shown_default(defaults: BaseModel, name: str) -> str:
    """The default as a person writes it; a secret is not shown."""
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
    return "unset" if default in (None, "") else str(default)


def value_kind(annotation: Any) -> str:
    """What a flag's value looks like."""
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
    if get_origin(annotation) is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "{KEY: VALUE}"
    if hasattr(annotation, "__metadata__"):
        return "URL"
    if get_origin(annotation) in (list, tuple):
        return f"[{value_kind(kinds[0])}, ...]"
    if all(isinstance(kind, str) for kind in kinds):
        return "{" + ",".join(kinds) + "}"
    kind = kinds[0]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "{" + ",".join(str(member.value) for member in kind) + "}"
    if get_origin(kind) is not None or hasattr(kind, "__metadata__"):
        return "URL"
    return {"int": "N", "float": "X", "bool": "true|false", "SecretStr": "KEY"}.get(kind.__name__, "TEXT")


def flag_values(arguments: argparse.Namespace, prefix: str, model: type[BaseModel], wrong: list[str]) -> dict[str, Any]:
    """The values of the flags that were given; what lacks its value is added to `wrong`."""
    given = {name: getattr(arguments, f"{prefix}.{name}") for name in model.model_fields}
    wrong += [f"--{prefix}.{name} needs a value" for name, value in given.items() if value == NO_VALUE]
    return {
        name: _flag_value(model.model_fields[name].annotation, value)
        for name, value in given.items()
        if value not in (None, NO_VALUE)
    }


def _flag_value(annotation: Any, text: str) -> Any:
    """A flag's value: text where text is meant (a key may look like a number), else what YAML makes of it."""
    kinds = get_args(annotation) or (annotation,)
    if text.lower() in ("null", "none") and type(None) in kinds:
        return None
    is_text = any(kind in (str, SecretStr) or isinstance(kind, str) for kind in kinds) and dict not in kinds
    try:
        return text if is_text and get_origin(annotation) is not dict else yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def misunderstood(unknown: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """What is wrong with the arguments that `parser` did not understand; an unknown flag's value goes with its flag."""
    known = [flag for action in parser._actions for flag in action.option_strings]  # pyright: ignore[reportPrivateUsage]
    wrong: list[str] = []
    flag_before = False
    for text in unknown:
        if text.startswith("-"):
            name, has_value, _ = text.partition("=")
            wrong.append(f"{name} is unknown{nearest(name, known)}")
            flag_before = not has_value
        else:
            if not flag_before:
                wrong.append(f"{text!r} belongs to no flag; settings are written --env.NAME VALUE")
            flag_before = False
    return wrong


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean 'group_size'?` where a real name is close, else nothing."""
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
