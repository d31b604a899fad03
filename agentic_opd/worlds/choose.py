"""The world that the settings name."""

from agentic_opd.core.types import World
from agentic_opd.worlds.coding.config import CodingConfig
from agentic_opd.worlds.coding.world import CodingWorld
from agentic_opd.worlds.own import HookedWorld, load_own_world


def make_world(name: str, config: CodingConfig, system_prompt: str | None) -> World:
    """The world of `env.world`; nothing is started yet.

    Raises:
        ConfigError: there is no such world, or its class is not one.
        SandboxError: the sandbox's extra is not installed.
    """
    if name == "coding":
        return CodingWorld(config, system_prompt)
    return HookedWorld(load_own_world(name), config, system_prompt)
