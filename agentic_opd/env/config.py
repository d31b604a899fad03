"""The settings of the environments: the run's, the rollout's, the world's, Atropos' own, and distillation's, flat.

They are declared without atroposlib, whose import takes seconds, so that help and errors come at once. `joined` makes
them objects of Atropos' own classes too when an environment is made.
"""

from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field, create_model

from agentic_opd.distill.config import DistillConfig
from agentic_opd.rollout.config import RolloutConfig
from agentic_opd.runs.config import RunConfig
from agentic_opd.settings.atropos import IdleEnvSettings, IdleServerSettings
from agentic_opd.settings.fields import (
    MOST_USED,
    POLICY_SERVER,
    POLICY_SERVER_LIMITS,
    is_run_only,
)
from agentic_opd.worlds.coding.config import CodingConfig


class AgentEnvConfig(RunConfig, RolloutConfig, CodingConfig, IdleEnvSettings):
    """All settings of `AgentEnv`; each of Atropos' BaseEnvConfig is among them."""

    tokenizer_name: Annotated[str, MOST_USED] = Field(
        default="", description="Tokenizer of the policy. Unset: that of the server's model."
    )


class AgenticOPDEnvConfig(DistillConfig, AgentEnvConfig):
    """All settings of `AgenticOPDEnv`."""


class PolicyServerConfig(IdleServerSettings):
    """Where one of the policy's vLLM servers is; it has each setting of Atropos' APIServerConfig."""

    setting_group: ClassVar = POLICY_SERVER

    base_url: str | None = Field(
        default="http://127.0.0.1:8000/v1", description="The server's address, with or without /v1."
    )
    model_name: str = Field(
        default="default", description="The model by the name it is served under; default: what the server says."
    )
    api_key: str | None = Field(default="", description="The server's key. Unset: the variable VLLM_API_KEY, or none.")
    tokenizer_name: str = Field(
        default="none", description="Its tokenizer, where env.tokenizer_name is unset; none: model_name."
    )
    timeout: Annotated[int, POLICY_SERVER_LIMITS] = Field(
        default=1200, ge=1, description="Seconds one request may take."
    )
    num_max_requests_at_once: Annotated[int, POLICY_SERVER_LIMITS] = Field(
        default=512, ge=1, description="Sampling requests under way at the same time."
    )
    num_requests_for_eval: Annotated[int, POLICY_SERVER_LIMITS] = Field(
        default=64, ge=1, description="Sampling requests of an evaluation under way at the same time."
    )
    rolling_buffer_length: Annotated[int, POLICY_SERVER_LIMITS] = Field(
        default=1000, ge=1, description="How many of the latest requests train/sample_s is measured over."
    )


def default_settings() -> tuple[AgenticOPDEnvConfig, list[PolicyServerConfig]]:
    """Those of `AgenticOPDEnv`: a vLLM server on this machine."""
    return AgenticOPDEnvConfig(), [PolicyServerConfig()]


def line_settings(config: BaseModel) -> dict[str, Any]:
    """The settings that a written line depends on; secrets and what only says how a run is run are left out."""
    dumped = config.model_dump(mode="json")
    left_out = {name for name in dumped if name.endswith("_key") or is_run_only(type(config), name)}
    return {name: value for name, value in dumped.items() if name not in left_out}


def joined(settings: Any, atropos: type[BaseModel]) -> Any:
    """A copy of `settings` that is an instance of its own class and of `atropos`, with the values that it has."""
    if isinstance(settings, atropos):
        return settings
    copy = settings.model_copy()
    copy.__class__ = _joined_class(type(settings), atropos)
    return copy


@cache
def _joined_class(ours: type[BaseModel], atropos: type[BaseModel]) -> type[BaseModel]:
    return create_model(ours.__name__, __base__=(ours, atropos), __module__=ours.__module__, __doc__=ours.__doc__)
