"""Settings of a run: task order, concurrency, evaluation, outputs and logging."""

import math
from enum import Enum
from typing import Annotated, ClassVar

from pydantic import Field

from agentic_opd.settings.fields import CONCURRENCY, EVALUATION, FIRST, LOGGING, RUN, RUN_ONLY, TRAINER, WORLD
from agentic_opd.settings.old_names import RootSettings
from agentic_opd.worlds.config import EvalConfig


class EvalHandling(Enum):
    """Use of the servers by training during an evaluation; the values of Atropos' EvalHandlingEnum."""

    STOP_TRAIN = "STOP_TRAIN"
    LIMIT_TRAIN = "LIMIT_TRAIN"
    NONE = "NONE"

    @classmethod
    def _missing_(cls, value: object) -> "EvalHandling | None":
        """Accept members of Atropos' enum as well."""
        return cls(value.value) if isinstance(value, Enum) else None


class RunConfig(RootSettings):
    """Settings of a run and its outputs."""

    setting_group: ClassVar = RUN

    eval: EvalConfig = EvalConfig()

    seed: Annotated[int, WORLD] = Field(default=0, ge=0, description="Seed of the order in which tasks are drawn.")
    max_concurrent_episodes: Annotated[int, CONCURRENCY, RUN_ONLY, FIRST] = Field(
        default=64,
        ge=1,
        description="Number of episodes that run at the same time; the next one starts while an earlier one is "
        "judged and scored.",
    )
    max_concurrent_groups: Annotated[int | None, CONCURRENCY, RUN_ONLY] = Field(
        default=None,
        ge=1,
        description="Number of groups that run at the same time. Unset: 8 in serve; in process 1.5 times the groups "
        "that max_concurrent_episodes holds, so that episodes of further groups fill free slots.",
    )
    server_retry_s: Annotated[float, CONCURRENCY, RUN_ONLY] = Field(
        default=60.0, ge=0, description="Seconds to retry a server that does not answer before giving up."
    )
    resume: Annotated[bool, FIRST, RUN_ONLY] = Field(
        default=False, description="Continue the file of an earlier run; takes precedence over overwrite."
    )
    overwrite: Annotated[bool, FIRST, RUN_ONLY] = Field(
        default=False, description="Replace the file of an earlier run."
    )
    group_size: Annotated[int, FIRST] = Field(
        default=4, ge=1, description="Number of episodes of one task that form a group."
    )
    total_steps: Annotated[int, FIRST, RUN_ONLY] = Field(
        default=-1,
        ge=-1,
        description="process: number of groups to make (-1: one per task). serve: number of training steps (-1: the "
        "trainer's).",
    )
    rollout_server_url: Annotated[str, TRAINER, FIRST] = Field(
        default="http://127.0.0.1:8001",
        description="serve: trajectory API (run-api); its port must differ from vLLM's.",
    )
    max_batches_offpolicy: Annotated[int, TRAINER] = Field(
        default=3,
        ge=0,
        description="serve: maximum number of batches that wait for the trainer. With 0, sampler and trainer "
        "alternate and no batch is off-policy: a batch starts only when the policy has the weights of all steps "
        "before it, so the trainer must push each step.",
    )
    eval_handling: Annotated[EvalHandling, TRAINER] = Field(
        default=EvalHandling.LIMIT_TRAIN,
        description="serve: groups that training may start during an evaluation: none (STOP_TRAIN), the share "
        "eval_limit_ratio of them (LIMIT_TRAIN), or all (NONE). Groups that have already started are finished.",
    )
    use_wandb: Annotated[bool, LOGGING, RUN_ONLY] = Field(default=False, description="Log metrics to Weights & Biases.")
    ensure_scores_are_not_same: Annotated[bool, TRAINER] = Field(
        default=False,
        description="Drop groups whose scores are all equal, although such a group may have hints to learn from.",
    )
    report: Annotated[bool, LOGGING, RUN_ONLY] = Field(
        default=True, description="process: write an HTML report beside the groups at the end of the run."
    )
    include_messages: Annotated[bool, LOGGING] = Field(
        default=True, description="Send the messages together with the tokens."
    )
    packed_rows: Annotated[bool, TRAINER, RUN_ONLY] = Field(
        default=False,
        description="serve: send the distillation rows as text, which costs the trajectory API a fraction of the time "
        "and memory (docs/hardware.md). Only this package's trainer reads them so.",
    )
    inference_weight: Annotated[float, TRAINER] = Field(
        default=1.0,
        gt=0,
        description="serve: weight of this environment in the trainer's batches, relative to the "
        "weights of other environments.",
    )
    min_batch_allocation: Annotated[float | None, TRAINER] = Field(
        default=None, ge=0, le=1, description="serve: minimum share of this environment in each batch."
    )
    steps_per_eval: Annotated[int, TRAINER, RUN_ONLY] = Field(
        default=100, description="serve: training steps between two evaluations; 0 or less disables evaluations."
    )
    eval_limit_ratio: Annotated[float, TRAINER] = Field(
        default=0.5,
        ge=0,
        le=1,
        description="serve: share of the groups that run during an evaluation with eval_handling LIMIT_TRAIN.",
    )
    data_path_to_save_groups: Annotated[str | None, FIRST, RUN_ONLY] = Field(
        default=None,
        description="JSONL file of scored groups, with metrics.jsonl beside it. Unset: process writes "
        "runs/process/groups.jsonl, serve writes no groups.",
    )
    data_dir_to_save_evals: Annotated[str | None, EVALUATION, RUN_ONLY] = Field(
        default=None,
        description="Folder for metrics.json and samples.jsonl. Unset: evaluate writes to runs/evaluate, serve "
        "writes neither.",
    )
    wandb_name: Annotated[str | None, LOGGING, RUN_ONLY] = Field(
        default=None, description="Name of the run on Weights & Biases."
    )
    num_rollouts_to_keep: Annotated[int, LOGGING] = Field(
        default=32,
        ge=0,
        description="Number of rollouts in the table that each logging step sends to Weights & Biases.",
    )
    num_rollouts_per_group_for_logging: Annotated[int, LOGGING] = Field(
        default=1,
        ge=-1,
        description="Maximum number of rollouts of one group in the table for Weights & Biases; -1: all.",
    )

    @property
    def groups_at_a_time(self) -> int:
        """Concurrent groups in `process`, enough that new episodes start as soon as others end."""
        return self.max_concurrent_groups or math.ceil(1.5 * self.max_concurrent_episodes / self.group_size)
