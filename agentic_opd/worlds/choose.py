"""The world that the settings name."""

from typing import Any

from agentic_opd.core.types import World
from agentic_opd.worlds.coding.world import CodingWorld
from agentic_opd.worlds.own import HookedWorld, load_own_world
from agentic_opd.worlds.sql.world import SqlWorld


def make_world(name: str, config: Any, system_prompt: str | None) -> World:
    """The world of `env.world`; nothing is started yet.

    Args:
        name: coding, sql, or where a class is.
        config: A `CodingConfig` that is a `SqlConfig` too.
        system_prompt: Replaces the world's own.

    Raises:
        ConfigError: there is no such world, or its class is not one.
        SandboxError: the sandbox's extra is not installed.
    """
    if name == "coding":
        return CodingWorld(config, system_prompt)
    if name == "sql":
        return HookedWorld(SqlWorld(config, config.eval_fraction, config.eval_seed), config, system_prompt)
    return HookedWorld(load_own_world(name), config, system_prompt)
