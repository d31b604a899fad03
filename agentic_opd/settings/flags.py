"""Flags of settings (`--env.judge.temperature 0.5`): their positions on a command line, and how values are read.

Flags are taken from the command line before argparse reads the rest, because which settings there are may depend on
other settings (`env.sandbox.type`).
"""

import argparse
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr

from agentic_opd.core.errors import ConfigError
from agentic_opd.core.exit_codes import EXIT_CODES, EXIT_OK, EXIT_USAGE, CommandParser
from agentic_opd.settings.fields import Mode
from agentic_opd.settings.files import parse_yaml
from agentic_opd.settings.help import HelpFormatter, SettingsHelp
from agentic_opd.settings.listing import dotted, names_of, nearest

_NUMBER = re.compile(r"-[0-9.][0-9.eE+-]*")
"""A value that begins with a dash."""


@dataclass(frozen=True, slots=True)
class FlagText:
    """The values after a flag on the command line; empty for a flag without one."""

    flag: str
    texts: tuple[str, ...]

    def value(self, annotation: Any) -> Any:
        """Return the value for a field: the text for text fields (a key may look like a number), else its YAML.

        A list of files is written as several arguments, or as one YAML list. A field of a text or a list takes a YAML
        list too.

        Raises:
            ConfigError: the flag needs a value.
        """
        if not self.texts:
            if annotation is bool:
                return True
            raise ConfigError(f"--{self.flag} needs a value")
        text = self.texts[0]
        if annotation == list[Path] and not (len(self.texts) == 1 and text.startswith("[")):
            return list(self.texts)
        kinds = get_args(annotation) or (annotation,)
        if text.lower() in ("null", "none") and NoneType in kinds:
            return None
        is_text = any(kind in (str, SecretStr, Path) or isinstance(kind, str) for kind in kinds)
        if not is_text or _is_list(annotation):
            return self.data()
        return self.data() if text.startswith("[") and any(map(_is_list, kinds)) else text

    def data(self) -> Any:
        """Return the YAML data of the text; the text itself if it is not YAML.

        Raises:
            ConfigError: the flag needs a value.
        """
        if not self.texts:
            raise ConfigError(f"--{self.flag} needs a value")
        try:
            return parse_yaml(self.texts[0])
        except yaml.YAMLError:
            return self.texts[0]


def _is_list(annotation: Any) -> bool:
    origin = get_origin(annotation)
    return isinstance(origin, type) and issubclass(origin, Collection)


class SettingsParser(CommandParser):
    """A parser of a command's own options, to which `add_settings` adds settings."""

    settings: SettingsHelp | None = None
    models: Mapping[str, BaseModel]
    """Prefix of the flags -> default settings."""
    footer = EXIT_CODES

    def format_help(self) -> str:
        """Return the short help: the command's own options, the settings that people set first, and the groups."""
        if self.settings is None:
            return super().format_help()
        return f"{super().format_help()}\n{self.settings.first()}{self.footer}\n"

    def show_group(self, name: str) -> NoReturn:
        """Print one group of settings, or `all`, and exit."""
        assert self.settings is not None
        try:
            text = self.settings.of_group(name)
        except ValueError as error:  # A type of a section whose settings can't be read.
            self.exit(EXIT_USAGE, f"error: --help {name}: {error}\n")
        if text is None:
            groups = ", ".join((*self.settings.groups(), "all"))
            self.exit(EXIT_USAGE, f"error: --help {name}: there is no such group of settings; there are {groups}\n")
        print(text)
        raise SystemExit(EXIT_OK)


class _ShowHelp(argparse.Action):
    """`--help`, `--help GROUP` or `--help all`."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> NoReturn:
        assert isinstance(parser, SettingsParser)
        if values is None:
            parser.print_help()
            raise SystemExit(EXIT_OK)
        parser.show_group(values)


def add_settings(
    parser: SettingsParser,
    models: Mapping[str, BaseModel],
    mode: Mode | None = None,
    effective: Collection[str] | None = None,
) -> None:
    """Let `parser`, created with `add_help=False`, take a flag for each setting of `models` (prefix -> defaults).

    Help shows the groups that `mode` needs (None: all), and of those the fields and sections in `effective`, if given.
    """
    *names, last = models
    listed = f"{', '.join(names)} and {last}" if names else last
    sections = "settings" if "" in models else f"the sections {listed}"
    usage = " ".join(f"[--{dotted(prefix, 'NAME')} VALUE ...]" for prefix in models)
    parser.formatter_class = HelpFormatter
    parser.usage = f"{parser.prog} [--config FILE] {usage}"
    parser.models, parser.settings = models, SettingsHelp(models, mode, effective)
    parser.add_argument(
        *("-h", "--help"),
        nargs="?",
        metavar="GROUP",
        action=_ShowHelp,
        help="show this text, one group of settings, or all of them",
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help=f"YAML file with {sections}")
    parser.add_argument("--verbose", action="store_true", help="show the log lines of all libraries")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line: `flags` of the result holds the settings, `misunderstood` a sentence for each wrong word.

    The value of an unknown flag is not listed.
    """
    words, flags = _separated(list(sys.argv[1:] if argv is None else argv), parser)
    arguments, unknown = parser.parse_known_args(words)
    models = _models(parser)
    settings = (name for prefix, defaults in models.items() for name in names_of(prefix, type(defaults)))
    options = [*_options(parser), *(f"--{name}" for name in settings)]
    example = "--NAME" if "" in models else "--env.NAME"
    wrong = [
        f"{word.partition('=')[0]} is unknown{nearest(word.partition('=')[0], options)}"
        if word.startswith("-")
        else f"{word!r} belongs to no flag; settings are written {example} VALUE"
        for word in unknown
    ]
    arguments.flags = []
    for text in flags:
        if "" in models or text.flag.partition(".")[0] in models:
            arguments.flags.append(text)
        else:
            wrong.append(f"--{text.flag} is unknown{nearest(f'--{text.flag}', options)}")
    arguments.misunderstood = wrong
    return arguments


def _separated(argv: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[FlagText]]:
    """Return the words for argparse, and the flags of settings with their values."""
    options, lists = _options(parser), _flags_of_files(_models(parser))
    words: list[str] = []
    flags: list[FlagText] = []
    remaining = list(argv)
    while remaining:
        word = remaining.pop(0)
        flag, has_value, text = word.removeprefix("--").partition("=")
        if word == "--":
            words += [word, *remaining]
            break
        if not word.startswith("--") or f"--{flag}" in options:
            words.append(word)
            continue
        texts = [text] if has_value else []
        while remaining and not has_value and (not texts or flag in lists):
            if remaining[0].startswith("-") and not _NUMBER.fullmatch(remaining[0]):
                break
            texts.append(remaining.pop(0))
        flags.append(FlagText(flag, tuple(texts)))
    return words, flags


def _models(parser: argparse.ArgumentParser) -> dict[str, BaseModel]:
    """Return the default settings of a parser and its sub-commands by the prefix of their flags."""
    models = dict(getattr(parser, "models", {}))
    for command in _commands(parser):
        models |= _models(command)
    return models


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """Return the options that argparse reads, of a parser and its sub-commands."""
    options = {text for action in parser._actions for text in action.option_strings}  # pyright: ignore[reportPrivateUsage]
    return options.union(*map(_options, _commands(parser)))


def _commands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    groups = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))  # pyright: ignore[reportPrivateUsage]
    return [command for group in groups for command in group.choices.values()]


def _flags_of_files(models: Mapping[str, BaseModel]) -> set[str]:
    """Return the flags that take several arguments."""
    return {
        dotted(prefix, name)
        for prefix, defaults in models.items()
        for name, info in type(defaults).model_fields.items()
        if info.annotation == list[Path]
    }
