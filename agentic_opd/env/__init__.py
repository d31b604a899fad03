"""The Atropos environments: `AgentEnv` rolls out and rewards, `AgenticOPDEnv` distils too.

In: settings and policy servers. Out: scored groups for a trainer or a file, and evaluations.
`python -m agentic_opd.env serve | process | evaluate` runs one. Nothing heavy is imported before a name is asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentic_opd.env.agent import AgentEnv
    from agentic_opd.env.config import AgentEnvConfig, AgenticOPDEnvConfig, PolicyServerConfig
    from agentic_opd.env.opd import AgenticOPDEnv

__all__ = ["AgentEnv", "AgentEnvConfig", "AgenticOPDEnv", "AgenticOPDEnvConfig", "PolicyServerConfig"]

_HOMES = {"AgentEnv": "agent", "AgenticOPDEnv": "opd"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'config')}"), name)
