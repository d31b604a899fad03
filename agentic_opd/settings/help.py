"""Help of settings: those that people set first, one group, or all."""

import argparse
import shutil
import textwrap
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path

from pydantic import BaseModel

from agentic_opd.core.text import text_lines
from agentic_opd.settings.fields import CUSTOM, NO_EFFECT, Mode, SettingGroup
from agentic_opd.settings.listing import Setting, settings_in

_RULES = """\
Flags override the YAML file, and the file overrides the defaults. Values are read as YAML: 8, true, null, {key: value}.
"""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """One line per option, its description below it; texts keep their line breaks, and long lines are wrapped."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=8, width=help_width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = partial(textwrap.fill, width=width, initial_indent=indent, subsequent_indent=indent)
        return "\n".join(map(fill, text_lines(text)))


def help_width() -> int:
    """Return the number of columns of a help text."""
    return min(shutil.get_terminal_size().columns, 120)


class SettingsHelp:
    """The settings of a command, for its help."""

    def __init__(
        self, models: Mapping[str, BaseModel], mode: Mode | None = None, effective: Collection[str] | None = None
    ) -> None:
        """Show the groups of settings that `mode` needs (None: all).

        `effective`, if given, names the fields and sections, without the prefix, that have an effect in the command.
        """
        self._models, self._mode, self._effective = models, mode, effective

    def first(self) -> str:
        """Return the most used settings, and the names of all groups."""
        rows = [
            row
            for row in self._rows(all_types=False)
            if (row.is_first or row.group is CUSTOM) and self._is_of_mode(row.group)
        ]
        width = max(map(len, self.groups()))
        groups = (f"  {name:<{width}}  {group.title}" for name, group in self.groups().items())
        footer = ["--help GROUP shows one group of settings, --help all shows all. Groups:", *groups, "", _RULES]
        return "\n".join([_rendered(rows), *footer])

    def of_group(self, name: str) -> str | None:
        """Return the settings of one group, or those of `all`; None if there is no such group."""
        if name != "all" and name not in self.groups():
            return None
        return _rendered(row for row in self._rows(all_types=True) if name in ("all", row.group.name))

    def groups(self) -> dict[str, SettingGroup]:
        """Return the groups by name, in the order of the help."""
        groups = {row.group.name: row.group for row in self._rows(all_types=False)}
        return {name: group for name, group in groups.items() if self._is_of_mode(group)}

    def _rows(self, *, all_types: bool) -> list[Setting]:
        rows = settings_in(self._models, all_types=all_types)
        return [row for row in rows if row.group is not NO_EFFECT and self._has_effect(row)]

    def _has_effect(self, row: Setting) -> bool:
        return self._effective is None or any(part in self._effective for part in row.flag.split("."))

    def _is_of_mode(self, group: SettingGroup) -> bool:
        return self._mode is None or self._mode in group.modes


def _rendered(rows: Iterable[Setting]) -> str:
    """Return the settings below the titles of their groups."""
    lines: list[str] = []
    group: SettingGroup | None = None
    for row in rows:
        if row.group is not group:
            group = row.group
            lines += ["", f"{group.title}:"]
        value = row.placeholder()
        several = f" [{value} ...]" if row.info.annotation == list[Path] else ""
        lines.append(f"  --{row.flag} {value}{several}")
        if text := row.described():
            indent = " " * 8
            lines.append(textwrap.fill(text, help_width(), initial_indent=indent, subsequent_indent=indent))
    return "\n".join([*lines, ""]).lstrip("\n")
