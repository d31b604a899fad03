"""The settings of the environments: the run's, the rollout's, the world's, Atropos' own, and distillation's, flat.

They are declared without atroposlib, whose import takes seconds, so that help and errors come at once. `joined` makes
them objects of Atropos' own classes too when an environment is made.
"""

from enum import Enum
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field, create_model

from agentic_opd.distill.config import DistillConfig
from agentic_opd.rollout.config import RolloutConfig
from agentic_opd.runs.config import RunConfig
from agentic_opd.settings.atropos import IdleEnvSettings, IdleServerSettings
from agentic_opd.settings.groups import (
    EVALUATION,
    LOGGING,
    MOST_USED,
    POLICY_SERVER,
    POLICY_SERVER_LIMITS,
    RUN_ONLY,
    TRAINER,
    is_run_only,
)
from agentic_opd.worlds.coding.config import CodingConfig


class EvalHandling(Enum):
    """What training may use during an evaluation; the values of Atropos' EvalHandlingEnum."""

    STOP_TRAIN = "STOP_TRAIN"
    LIMIT_TRAIN = "LIMIT_TRAIN"
    NONE = "NONE"

    @classmethod
    def _missing_(cls, value: object) -> "EvalHandling | None":
        """Atropos' own members are taken too."""
        return cls(value.value) if isinstance(value, Enum) else None


class AgentEnvConfig(RunConfig, RolloutConfig, CodingConfig, IdleEnvSettings):
    """All settings of `AgentEnv`; each of Atropos' BaseEnvConfig is among them."""

    setting_group: ClassVar = TRAINER

    group_size: Annotated[int, MOST_USED] = Field(
        default=4, ge=1, description="Episodes of one task that form a group."
    )
    total_steps: Annotated[int, MOST_USED, RUN_ONLY] = Field(
        default=-1,
        ge=-1,
        description="process: groups to make (-1: each task once). serve: training steps (-1: the trainer's).",
    )
    tokenizer_name: Annotated[str, MOST_USED] = Field(
        default="", description="Tokenizer of the policy. Unset: that of the server's model."
    )
    rollout_server_url: str = Field(
        default="http://127.0.0.1:8001", description="serve: the trajectory API (run-api), on another port than vLLM's."
    )
    max_batches_offpolicy: int = Field(
        default=3, ge=1, description="serve: batches that may wait for the trainer at most."
    )
    eval_handling: EvalHandling = Field(
        default=EvalHandling.LIMIT_TRAIN,
        description="serve: what training may use during an evaluation: nothing (STOP_TRAIN), eval_limit_ratio of its "
        "groups (LIMIT_TRAIN), or all (NONE). Groups under way go on.",
    )
    use_wandb: Annotated[bool, MOST_USED, RUN_ONLY] = Field(
        default=False, description="Log metrics to Weights & Biases."
    )
    ensure_scores_are_not_same: bool = Field(
        default=False, description="Drop groups whose scores are all equal; such a group still has hints to learn from."
    )
    report: Annotated[bool, LOGGING, RUN_ONLY] = Field(
        default=True, description="process: write an HTML report beside the groups at the end of the run."
    )
    include_messages: Annotated[bool, LOGGING] = Field(
        default=True, description="Send the messages along with the tokens."
    )
    inference_weight: float = Field(
        default=1.0, gt=0, description="serve: share of the trainer's batches, against other environments' weights."
    )
    min_batch_allocation: float | None = Field(
        default=None, ge=0, le=1, description="serve: least share of each batch that is this environment's."
    )
    steps_per_eval: Annotated[int, TRAINER, RUN_ONLY] = Field(
        default=100, description="serve: training steps between two evaluations; 0 or less: none."
    )
    eval_limit_ratio: float = Field(default=0.5, ge=0, le=1, description="serve: see eval_handling.")
    data_path_to_save_groups: Annotated[str | None, MOST_USED, RUN_ONLY] = Field(
        default=None,
        description="JSONL file of scored groups, with metrics.jsonl beside it. Unset: process writes "
        "runs/process/groups.jsonl, serve writes no groups.",
    )
    data_dir_to_save_evals: Annotated[str | None, EVALUATION, RUN_ONLY] = Field(
        default=None,
        description="Folder of metrics.json and samples.jsonl. Unset: evaluate writes to runs/evaluate, serve to none.",
    )
    wandb_name: Annotated[str | None, LOGGING, RUN_ONLY] = Field(
        default=None, description="Name of the run on Weights & Biases."
    )
    num_rollouts_to_keep: Annotated[int, LOGGING] = Field(
        default=32, ge=0, description="Rollouts in the table that each logging step sends to Weights & Biases."
    )
    num_rollouts_per_group_for_logging: Annotated[int, LOGGING] = Field(
        default=1, ge=-1, description="Of these, how many of each group at most; -1: all."
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
