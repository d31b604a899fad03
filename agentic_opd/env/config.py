"""The settings of the environments: Atropos' own, the run's, the rollout's, the world's and distillation's, flat."""

from typing import Any, Literal

from atroposlib.envs.base import APIServerConfig, BaseEnvConfig, EvalHandlingEnum
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
    group_size: int = Field(default=4, ge=1, description="Episodes of one task that form a group.")
    total_steps: int = Field(
        default=-1,
        ge=-1,
        description="process: groups to make (-1: each task once). serve: training steps (-1: the trainer's).",
    )
    rollout_server_url: str = Field(
        default="http://127.0.0.1:8001", description="serve: the trajectory API (run-api), on another port than vLLM's."
    )
    max_batches_offpolicy: int = Field(
        default=3, ge=1, description="serve: batches that may wait for the trainer at most."
    )
    eval_handling: EvalHandlingEnum = Field(
        default=EvalHandlingEnum.LIMIT_TRAIN,
        description="serve: what training may use during an evaluation: nothing (STOP_TRAIN), eval_limit_ratio of its "
        "groups (LIMIT_TRAIN), or all (NONE). Groups under way go on.",
    )
    use_wandb: bool = Field(default=False, description="Log metrics to Weights & Biases.")
    ensure_scores_are_not_same: bool = Field(
        default=False, description="Drop groups whose scores are all equal; such a group still has hints to learn from."
    )
    report: bool = Field(
        default=True, description="process: write an HTML report beside the groups at the end of the run."
    )
    include_messages: bool = Field(default=True, description="Send the messages along with the tokens.")
    inference_weight: float = Field(
        default=1.0, gt=0, description="serve: share of the trainer's batches, against other environments' weights."
    )
    min_batch_allocation: float | None = Field(
        default=None, ge=0, le=1, description="serve: least share of each batch that is this environment's."
    )
    steps_per_eval: int = Field(
        default=100, description="serve: training steps between two evaluations; 0 or less: none."
    )
    eval_limit_ratio: float = Field(default=0.5, ge=0, le=1, description="serve: see eval_handling.")
    data_path_to_save_groups: str | None = Field(
        default=None,
        description="JSONL file of scored groups, with metrics.jsonl beside it. Unset: process writes "
        "runs/process/groups.jsonl, serve writes no groups.",
    )
    data_dir_to_save_evals: str | None = Field(
        default=None,
        description="Folder of metrics.json and samples.jsonl. Unset: evaluate writes to runs/evaluate, serve to none.",
    )
    wandb_name: str | None = Field(default=None, description="Name of the run on Weights & Biases.")
    num_rollouts_to_keep: int = Field(
        default=32, ge=0, description="Rollouts in the table that each logging step sends to Weights & Biases."
    )
    num_rollouts_per_group_for_logging: int = Field(
        default=1, ge=-1, description="Of these, how many of each group at most; -1: all."
    )


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
