"""Settings of the environments in one model: run, rollout, world, Atropos, and distillation, nested by what they set.

They are declared without atroposlib, whose import takes seconds, so that help and errors appear immediately. Atropos
reads only their fields.
"""

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from agentic_opd.distill.config import DistillConfig
from agentic_opd.gateway.config import GatewayConfig
from agentic_opd.rollout.config import RolloutConfig
from agentic_opd.runs.config import RunConfig
from agentic_opd.settings.atropos import IdleEnvSettings, PolicyServerConfig
from agentic_opd.settings.fields import FIRST, RUN, WORLD
from agentic_opd.worlds.coding.config import CodingSettings
from agentic_opd.worlds.config import WorldConfig
from agentic_opd.worlds.settings import WORLD_KINDS, WorldSettings


class AgentEnvConfig(RunConfig, RolloutConfig, WorldConfig, IdleEnvSettings):
    """All settings of `AgentEnv`, including each of Atropos' BaseEnvConfig."""

    setting_group: ClassVar = RUN

    tokenizer_name: Annotated[str, FIRST] = Field(
        default="", description="Tokenizer of the policy. Unset: the tokenizer of the server's model."
    )

    world: Annotated[WorldSettings, WORLD_KINDS, WORLD] = CodingSettings()
    skip_too_long: Annotated[bool, WORLD] = Field(
        default=False,
        description="Skip tasks whose first prompt does not fit max_token_length, and report them, instead of failing.",
    )

    @model_validator(mode="after")
    def _check_eval_dataset(self) -> "AgentEnvConfig":
        if self.eval.dataset_name is None and self.eval.dataset_split is None:
            return self
        if not isinstance(self.world, CodingSettings):
            raise ValueError(f"eval.dataset_* are settings of the world coding, and the world is {self.world.type}")
        if self.eval.dataset_name is None and self.world.dataset_name is None:
            raise ValueError("eval.dataset_split is set, but neither eval.dataset_name nor world.dataset_name is")
        return self


class AgenticOPDEnvConfig(DistillConfig, AgentEnvConfig):
    """All settings of `AgenticOPDEnv`."""

    settings_elsewhere: ClassVar = dict.fromkeys(GatewayConfig.model_fields, "`agentic-opd gateway`")
    """Command of each setting that other commands have."""

    @model_validator(mode="after")
    def _check_siblings(self) -> "AgenticOPDEnvConfig":
        if "sibling" in self.hint.source and self.group_size == 1:
            raise ValueError("hint.source sibling needs other rollouts of the task: set group_size above 1")
        return self


def default_settings() -> tuple[AgenticOPDEnvConfig, list[PolicyServerConfig]]:
    """Return the default settings of `AgenticOPDEnv`, with a vLLM server on this machine."""
    return AgenticOPDEnvConfig(), [PolicyServerConfig()]


def tokenizer_names(config: AgentEnvConfig, server: PolicyServerConfig) -> tuple[str, ...]:
    """Return the names of the policy's tokenizer in the settings, the preferred one first."""
    names = (config.tokenizer_name, server.tokenizer_name, server.model_name)
    return tuple(name for name in names if name not in ("", "none"))
