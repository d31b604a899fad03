"""Settings of the world of Harbor tasks."""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BaseModel, Field

from agentic_opd.settings.fields import FIRST, WORLD


class HarborConfig(BaseModel):
    """Where Harbor tasks are, and what their files leave open."""

    setting_group: ClassVar = WORLD

    tasks_dir: Annotated[Path | None, FIRST] = Field(
        default=None,
        description="harbor: a task in Harbor's format (a folder with task.toml), or a folder with tasks at any depth "
        "(docs/harbor.md).",
    )
    tasks_network: bool = Field(
        default=False,
        description="harbor: network of the tasks whose task.toml has neither network_mode nor allow_internet.",
    )
    tasks_variables: dict[str, str] = Field(
        default_factory=dict,
        description="harbor: values of ${NAME} in the env tables of task.toml. The variables of this process are never "
        "read.",
    )
    tasks_keep_processes: bool = Field(
        default=False,
        description="harbor: let the agent's processes run on while the tests run, for tasks about servers. Off: they "
        "are killed before, since such a process can forge the verdict.",
    )
