"""The settings of the environments: Atropos' own, the run's, the rollout's, the world's and distillation's, flat."""

from typing import Any, Literal

from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from pydantic import BaseModel, Field

from agentic_opd.distill.config import DistillConfig
from agentic_opd.rollout.config import RolloutConfig
from agentic_opd.runs.config import RunConfig
from agentic_opd.worlds.coding.config import CodingConfig

_RUN_ONLY = frozenset(
    {"resume", "overwrite", "data_path_to_save_groups", "total_steps", "use_wandb", "wandb_name", "server_retry_s"}
    | {"report"}
    | {"eval_samples", "eval_temperature", "data_dir_to_save_evals", "steps_per_eval"}
    | {"max_concurrent_episodes", "max_concurrent_groups", "max_concurrent_judgements", "max_concurrent_scores"}
)
"""Settings that no written line depends on."""


class AgentEnvConfig(RunConfig, RolloutConfig, CodingConfig, BaseEnvConfig):
    """Atropos' settings and the rollout's."""

    tokenizer_name: str = Field(default="", description="Tokenizer of the policy. Unset: that of the server's model.")


class AgenticOPDEnvConfig(DistillConfig, AgentEnvConfig):
    """All settings of `AgenticOPDEnv`."""


class PolicyServerConfig(APIServerConfig):
    """Where one of the policy's vLLM servers is."""

    server_type: Literal["openai", "trl", "sglang", "vllm"] = "vllm"
    health_check: bool = False
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
    timeout: int = Field(default=1200, ge=1, description="Seconds one request may take.")
    num_max_requests_at_once: int = Field(
        default=512, ge=1, description="Sampling requests under way at the same time."
    )
    num_requests_for_eval: int = Field(
        default=64, ge=1, description="Sampling requests of an evaluation under way at the same time."
    )
    rolling_buffer_length: int = Field(
        default=1000, ge=1, description="How many of the latest requests train/sample_s is measured over."
    )


def line_settings(config: BaseModel) -> dict[str, Any]:
    """The settings that a written line depends on; secrets and what only says how a run is run are left out."""
    dumped = config.model_dump(mode="json")
    return {name: value for name, value in dumped.items() if name not in _RUN_ONLY and not name.endswith("_key")}
