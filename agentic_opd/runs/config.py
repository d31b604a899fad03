"""Settings of a run: its order, how much of it happens at once, and whether it continues an earlier one."""

import math
from enum import Enum
from typing import Annotated

from pydantic import BaseModel, Field, model_validator

from agentic_opd.settings.fields import CONCURRENCY, EVALUATION, LOGGING, MOST_USED, RUN_ONLY, TASKS, TRAINER


class EvalHandling(Enum):
    """What training may use during an evaluation; the values of Atropos' EvalHandlingEnum."""

    STOP_TRAIN = "STOP_TRAIN"
    LIMIT_TRAIN = "LIMIT_TRAIN"
    NONE = "NONE"

    @classmethod
    def _missing_(cls, value: object) -> "EvalHandling | None":
        """Atropos' own members are taken too."""
        return cls(value.value) if isinstance(value, Enum) else None


class RunConfig(BaseModel):
    """How a run is run, and what it writes, sends and logs."""

    seed: Annotated[int, TASKS] = Field(default=0, ge=0, description="Seed of the order in which tasks are drawn.")
    eval_samples: Annotated[int, EVALUATION, RUN_ONLY] = Field(
        default=1, ge=1, description="Samples of each task in an evaluation, for pass@k."
    )
    eval_temperature: Annotated[float, EVALUATION, RUN_ONLY] = Field(
        default=0.0, ge=0.0, le=2.0, description="Sampling temperature of evaluations."
    )
    max_concurrent_episodes: Annotated[int, CONCURRENCY, RUN_ONLY] = Field(
        default=64,
        ge=1,
        description="Episodes that run at the same time; while one is judged and scored, the next begins.",
    )
    max_concurrent_groups: Annotated[int | None, CONCURRENCY, RUN_ONLY] = Field(
        default=None,
        ge=1,
        description="Groups that run at the same time. Unset: serve has 8; process has half as many again as "
        "max_concurrent_episodes takes, so that episodes of the next groups fill the places of those that end.",
    )
    server_retry_s: Annotated[float, CONCURRENCY, RUN_ONLY] = Field(
        default=60.0, ge=0, description="Seconds to go on asking a server that does not answer before giving up."
    )
    resume: Annotated[bool, MOST_USED, RUN_ONLY] = Field(
        default=False, description="Continue the file of an earlier run; goes before overwrite."
    )
    overwrite: Annotated[bool, MOST_USED, RUN_ONLY] = Field(
        default=False, description="Replace the file of an earlier run."
    )
    group_size: Annotated[int, MOST_USED] = Field(
        default=4, ge=1, description="Episodes of one task that form a group."
    )
    total_steps: Annotated[int, MOST_USED, RUN_ONLY] = Field(
        default=-1,
        ge=-1,
        description="process: groups to make (-1: each task once). serve: training steps (-1: the trainer's).",
    )
    rollout_server_url: Annotated[str, TRAINER] = Field(
        default="http://127.0.0.1:8001", description="serve: the trajectory API (run-api), on another port than vLLM's."
    )
    max_batches_offpolicy: Annotated[int, TRAINER] = Field(
        default=3,
        ge=0,
        description="serve: batches that may wait for the trainer at most. 0: a batch is begun once the policy has "
        "learned from all before it, so that none is a version old; sampler and trainer take turns, and each step is "
        "pushed.",
    )
    eval_handling: Annotated[EvalHandling, TRAINER] = Field(
        default=EvalHandling.LIMIT_TRAIN,
        description="serve: what training may use during an evaluation: nothing (STOP_TRAIN), eval_limit_ratio of its "
        "groups (LIMIT_TRAIN), or all (NONE). Groups under way go on.",
    )
    use_wandb: Annotated[bool, MOST_USED, RUN_ONLY] = Field(
        default=False, description="Log metrics to Weights & Biases."
    )
    ensure_scores_are_not_same: Annotated[bool, TRAINER] = Field(
        default=False, description="Drop groups whose scores are all equal; such a group still has hints to learn from."
    )
    report: Annotated[bool, LOGGING, RUN_ONLY] = Field(
        default=True, description="process: write an HTML report beside the groups at the end of the run."
    )
    include_messages: Annotated[bool, LOGGING] = Field(
        default=True, description="Send the messages along with the tokens."
    )
    inference_weight: Annotated[float, TRAINER] = Field(
        default=1.0, gt=0, description="serve: share of the trainer's batches, against other environments' weights."
    )
    min_batch_allocation: Annotated[float | None, TRAINER] = Field(
        default=None, ge=0, le=1, description="serve: least share of each batch that is this environment's."
    )
    steps_per_eval: Annotated[int, TRAINER, RUN_ONLY] = Field(
        default=100, description="serve: training steps between two evaluations; 0 or less: none."
    )
    eval_limit_ratio: Annotated[float, TRAINER] = Field(
        default=0.5, ge=0, le=1, description="serve: see eval_handling."
    )
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

    @property
    def groups_at_a_time(self) -> int:
        """Groups under way where nobody waits for a batch: some are ready when episodes of others end."""
        return self.max_concurrent_groups or math.ceil(1.5 * self.max_concurrent_episodes / self.group_size)

    @model_validator(mode="after")
    def _check_samples(self) -> "RunConfig":
        if self.eval_samples > 1 and self.eval_temperature == 0.0:
            raise ValueError(
                "eval_samples above 1 needs an eval_temperature above 0: at temperature 0 all samples are the same"
            )
        return self
