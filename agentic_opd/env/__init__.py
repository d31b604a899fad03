"""The Atropos environments: `AgentEnv` rolls out and rewards, `AgenticOPDEnv` distills too; `Hindsight` adds
distillation to an environment of any origin.

In: settings and policy servers. Out: scored groups for a trainer or a file, and evaluations.
`python -m agentic_opd.env serve | process | evaluate` runs one. Heavy imports happen only when an environment class is
accessed.

torch is kept out of the process, because transformers would load it if installed (300 MB, 5 s) and an environment needs
only the tokenizers. transformers is therefore imported here as if torch were not installed, and then has no models.
`import torch` still works afterwards. An environment that needs transformers' models must import torch before this
package, or be started with USE_TORCH=1. Importing a class from its module (`agentic_opd.env.opd`) does not hide torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentic_opd.core.light import keep_torch_out

if TYPE_CHECKING:
    from agentic_opd.env.agent import AgentEnv
    from agentic_opd.env.config import AgentEnvConfig, AgenticOPDEnvConfig
    from agentic_opd.env.hindsight import Hindsight
    from agentic_opd.env.opd import AgenticOPDEnv
    from agentic_opd.settings.atropos import PolicyServerConfig

__all__ = ["AgentEnv", "AgentEnvConfig", "AgenticOPDEnv", "AgenticOPDEnvConfig", "Hindsight", "PolicyServerConfig"]

_ENVIRONMENTS = {"AgentEnv": "agent", "AgenticOPDEnv": "opd"}
_MODULES = {**_ENVIRONMENTS, "Hindsight": "hindsight"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _ENVIRONMENTS:
        keep_torch_out()
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'config')}"), name)
