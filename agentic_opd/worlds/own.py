"""Earlier names of `worlds.custom`, so that existing worlds run unchanged."""

from agentic_opd.worlds.custom import Checks, Message, Task, ToolError, tool
from agentic_opd.worlds.custom import CustomWorld as OwnWorld

__all__ = ["Checks", "Message", "OwnWorld", "Task", "ToolError", "tool"]
