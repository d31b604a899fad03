"""The setting `env.world`: its types are the names of worlds, and each type has the settings of its world.

A world other than coding is imported when its settings are read, and not for help, which appears at once.
"""

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from agentic_opd.core.errors import ConfigError
from agentic_opd.settings.fields import FIRST, WORLD, Kinds, Section

ENTRY_POINTS = "agentic_opd.worlds"
"""Group of the entry points that register worlds."""
CODING = "coding"
"""Name of this package's own world."""


class WorldSettings(Section):
    """The name of a world; subclasses add its settings."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    setting_group: ClassVar = WORLD

    type: Annotated[str, FIRST] = Field(
        description="World in which the agent acts: coding (Python tasks with hidden tests), the name of an installed "
        "world (sql: questions over databases, docs/sql.md; functions: function calls, docs/functions.md; harbor: "
        "tasks in Harbor's format, docs/harbor.md; babyai: missions in a grid world, docs/babyai.md; replay, for "
        "evaluate: turns of a gateway's journal, docs/gateway.md), or a class as FILE.py:CLASS or "
        "package.module:CLASS (docs/worlds.md).",
    )


def registered_worlds() -> list[EntryPoint]:
    """Return the worlds that installed packages register; nothing is imported."""
    return [*entry_points(group=ENTRY_POINTS)]


def world_names() -> Sequence[str]:
    """Return the names of the worlds that are installed."""
    return [CODING, *sorted({entry.name for entry in registered_worlds()})]


def _model_of(name: str) -> type[WorldSettings]:
    """Return the model of a world's settings; import the world unless it is the coding one."""
    if name == CODING:
        from agentic_opd.worlds.coding.config import CodingSettings

        return CodingSettings
    from agentic_opd.worlds.choose import settings_model, world_class

    try:
        return settings_model(world_class(name))
    except ConfigError as error:
        raise ValueError(str(error).removeprefix("env.world: ")) from error


WORLD_KINDS = Kinds(CODING, world_names, _model_of)
