"""Settings of the environments in one flat model: run, rollout, worlds, Atropos, and distillation.

They are declared without atroposlib, whose import takes seconds, so that help and errors appear immediately. Atropos
reads only their fields.
"""

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from agentic_opd.distill.config import DistillConfig
from agentic_opd.env.world_settings import HarborConfig, SqlConfig
from agentic_opd.gateway.config import GatewayConfig
from agentic_opd.rollout.config import RolloutConfig
from agentic_opd.runs.config import RunConfig
from agentic_opd.settings.atropos import IdleEnvSettings, PolicyServerConfig
from agentic_opd.settings.fields import FIRST, RUN, WORLD
from agentic_opd.worlds.coding.config import CodingConfig


class AgentEnvConfig(RunConfig, RolloutConfig, CodingConfig, SqlConfig, HarborConfig, IdleEnvSettings):
    """All settings of `AgentEnv`, including each of Atropos' BaseEnvConfig."""

    setting_group: ClassVar = RUN

    tokenizer_name: Annotated[str, FIRST] = Field(
        default="", description="Tokenizer of the policy. Unset: the tokenizer of the server's model."
    )

    world: Annotated[str, WORLD, FIRST] = Field(
        default="coding",
        description="World in which the agent acts: coding (Python tasks with hidden tests), sql (questions over "
        "databases, docs/sql.md), functions (function calls, docs/functions.md), harbor (tasks in Harbor's format, "
        "docs/harbor.md), replay (for evaluate: turns of a gateway's journal, docs/gateway.md), or a custom class as "
        "FILE.py:CLASS or package.module:CLASS (docs/worlds.md).",
    )
    world_options: Annotated[dict[str, Any], WORLD] = Field(
        default_factory=dict,
        description="Keyword arguments of the world's class (functions, replay, custom classes), for example "
        "{level: 3}.",
    )

    @model_validator(mode="after")
    def _check_world(self) -> "AgentEnvConfig":
        if self.sql_file is not None and self.world != "sql":
            raise ValueError(f"sql_file is set, but the world is {self.world}: set world to sql")
        if self.sql_file is None and self.world == "sql":
            raise ValueError("the world sql needs questions: set sql_file and sql_databases (docs/sql.md)")
        if self.dataset_name is not None and self.world != "coding":
            raise ValueError(f"dataset_name is set, but it is for the world coding, and the world is {self.world}")
        if self.tasks_dir is not None and self.world != "harbor":
            raise ValueError(f"tasks_dir is set, but the world is {self.world}: set world to harbor")
        if self.tasks_dir is None and self.world == "harbor":
            raise ValueError("the world harbor needs tasks: set tasks_dir (docs/harbor.md)")
        if self.world == "harbor" and self.sandbox_backend != "docker":
            raise ValueError(
                "the world harbor runs each task in a container of docker or podman on this machine: set "
                f"sandbox_backend docker, and sandbox_container_command for podman; got {self.sandbox_backend}"
            )
        if self.world_options and self.world in ("coding", "sql", "harbor"):
            raise ValueError(f"world_options are set, but the world {self.world} has none")
        return self


class AgenticOPDEnvConfig(DistillConfig, AgentEnvConfig):
    """All settings of `AgenticOPDEnv`."""

    settings_elsewhere: ClassVar = dict.fromkeys(GatewayConfig.model_fields, "`agentic-opd gateway`")
    """Command of each setting that other commands have."""

    @model_validator(mode="after")
    def _check_siblings(self) -> "AgenticOPDEnvConfig":
        if "sibling" in self.hint_source and self.group_size == 1:
            raise ValueError("hint_source sibling needs other rollouts of the task: set group_size above 1")
        return self


def default_settings() -> tuple[AgenticOPDEnvConfig, list[PolicyServerConfig]]:
    """Return the default settings of `AgenticOPDEnv`, with a vLLM server on this machine."""
    return AgenticOPDEnvConfig(), [PolicyServerConfig()]


def tokenizer_names(config: AgentEnvConfig, server: PolicyServerConfig) -> tuple[str, ...]:
    """Return the names of the policy's tokenizer in the settings, the preferred one first."""
    names = (config.tokenizer_name, server.tokenizer_name, server.model_name)
    return tuple(name for name in names if name not in ("", "none"))
