"""Settings of the reference trainer, read from a YAML file and the command line. Does not import torch."""

import argparse
import math
import shlex
from collections.abc import Collection, Mapping
from datetime import datetime, time
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from agentic_opd.core.attachments.files import ImageFolder
from agentic_opd.core.errors import ConfigError, PlaceError
from agentic_opd.settings.fields import FIRST, SettingGroup, Url
from agentic_opd.settings.files import read_yaml
from agentic_opd.settings.layers import flags_layer
from agentic_opd.settings.read import refuse, validated

GAP_PARTS = ("token_advantage", "combined")
"""Parts that use the difference of two readings of the sampled token."""
PARTS = ("token_advantage", "forward_kl", "reverse_kl", "jensen_shannon", "grpo", "step_reward", "combined")
"""Names of the loss settings that are weights of parts, except `start_kl`, which is added to the other parts."""
DISTRIBUTION_PARTS = ("token_advantage", "grpo", "step_reward", "combined", "start_kl")
"""Parts whose estimate is over the distribution from which the tokens were sampled: the surrogates, and start_kl."""
_EXAMPLES = "scripts/learning/loss_parts.py"
_MOVED_PARTS = ("rlsd", "sdar", "rlcsd", "rejection")
MOVED = {
    **{part: f"it is an example now: set loss.custom to {{{_EXAMPLES}:{part}: 1.0}}" for part in _MOVED_PARTS},
    **dict.fromkeys(
        ("rlsd_clip", "gate_slope", "rlcsd_scale", "rlcsd_temperature", "reject_below"),
        f"it is a constant of {_EXAMPLES} now: change it in a copy of the file, and name the copy in loss.custom",
    ),
}
"""What to do in place of each loss setting that has gone."""
PASS_WINDOW = 4
"""Number of batches over which the pass rate is measured that ends a part (`Schedule.until`)."""
DEFAULT_PART_TOKENS = 16_384
"""Value of `micro_tokens` where it is unset and no GPU's memory is known."""
MOST_SKIPPED_STEPS = 3
"""Consecutive steps of which every update is skipped, after which the run fails: the weights or the data are broken."""
MOST_FAILED_EVALUATIONS = 3
"""Consecutive evaluations of the brake that fail, after which the run fails: it would train without a brake."""
DEFAULT_PARTS: dict[str, float] = {"forward_kl": 1.0}
"""Weights if no part is given one. In the experiments of docs/learning, adding GRPO did not improve on this loss."""


class Schedule(BaseModel):
    """Course of a part's weight over the steps, as a factor of the weight. The default is constant."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the factor rises to 1."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Steps after the warm-up over which the factor falls linearly to `floor`; None: it does not fall."""
    floor: float = Field(default=0.0, ge=0, le=1)
    until: float | None = Field(default=None, gt=0, le=1)
    """Pass rate of the rollouts of `PASS_WINDOW` batches from which on the factor is 0, for the rest of the run."""

    def factor(self, step: int) -> float:
        """Return the factor at a step, counted from 0, regardless of `until`."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.decay_steps is None:
            return 1.0
        return max(self.floor, 1.0 - (1.0 - self.floor) * (step - self.warmup_steps) / self.decay_steps)


def read_hours(hours: str) -> tuple[time, time]:
    """Return the first minute of `22:00-06:00`, and the minute at which it ends; over midnight if that is earlier.

    Raises:
        ValueError: it has another form, or no length.
    """
    try:
        begin, end = (datetime.strptime(text, "%H:%M").time() for text in hours.split("-"))
    except ValueError as error:
        raise ValueError("expected always, idle or hours such as 22:00-06:00") from error
    if begin == end:
        raise ValueError("expected hours of some length: set always to train at any hour")
    return begin, end


def _check_train_when(train_when: str) -> str:
    if train_when not in ("always", "idle"):
        read_hours(train_when)
    return train_when


def custom_name(name: str) -> str:
    """Return the short name of a part of `loss.custom`: NAME of `FILE.py:NAME`."""
    return name.rpartition(":")[2]


def _weight(part: str) -> Any:
    return Field(default=0.0, ge=0, description=f"Weight of {part}.")


def _bound(description: str, *, gt: float) -> Any:
    return Field(default=None, gt=gt, description=f"{description}. Unset: no bound.")


class LossConfig(BaseModel):
    """Weights and bounds of the combined loss; a weight of 0 leaves a part out.

    If any part is given a weight, the others default to 0. Otherwise the weights are `DEFAULT_PARTS`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    setting_group: ClassVar = SettingGroup(1, "loss", "Parts of the loss")
    removed_settings: ClassVar = MOVED

    forward_kl: Annotated[float, FIRST] = _weight("KL(teacher || student) over the top K")
    reverse_kl: Annotated[float, FIRST] = _weight("KL(student || teacher) over the top K")
    jensen_shannon: Annotated[float, FIRST] = _weight(
        "the Jensen-Shannon divergence of teacher and student over the top K"
    )
    token_advantage: Annotated[float, FIRST] = _weight(
        "the clipped surrogate on log p_teacher - log p_student of the sampled token"
    )
    grpo: Annotated[float, FIRST] = _weight("GRPO on the groups' scores")
    step_reward: float = _weight("the clipped surrogate on the judge's score of each turn")
    combined: float = _weight("OpenClaw-RL's combined method: one surrogate on the reward's advantage plus the gap")
    start_kl: Annotated[float, FIRST] = _weight(
        "KL(student || policy at the start of the run), estimated at the sampled tokens, which limits drift where "
        "there is nothing to learn. It is added to the other parts, and their weights stay the same"
    )
    custom: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        default_factory=dict,
        description="Weights of parts from Python files, by FILE.py:NAME or package.module:NAME (docs/losses.md), for "
        "example {parts.py:rlsd: 1.0}.",
    )
    contrast: bool = Field(
        default=False,
        description="Learn only the effect of the hint beyond that of a control hint (env.hint.control). The gap of "
        "token_advantage, combined and custom parts uses the control's reading as its baseline, and the divergences "
        "use a target that moves the policy by the difference of both readings.",
    )
    contrast_reference: Literal["start", "batch"] = Field(
        default="start",
        description="Policy that the divergences' contrast target moves: start (at the start of the run; stored as "
        "a second copy of the weights, or with adapters as the weights without them) or batch (before each batch). "
        "With batch, nothing limits how far the policy moves in total.",
    )
    gap_clip: float = Field(default=5.0, gt=0, description="Maximum difference of two readings of a token, in nats.")
    beta: float = Field(default=0.5, gt=0, lt=1, description="jensen_shannon: share of the teacher in the mixture.")
    clip_low: float = Field(default=0.2, ge=0, le=1, description="Surrogates: maximum distance of the ratio below 1.")
    clip_high: float = Field(default=0.2, ge=0, description="Surrogates: maximum distance of the ratio above 1.")
    negative_ratio_bound: float | None = _bound(
        "Surrogates: ratio above which a negative advantage adds no more loss and no gradient", gt=1
    )
    entry_clip: float | None = _bound(
        "Divergences: maximum of one entry's term, in nats; a larger term has no gradient", gt=0
    )
    position_clip: float | None = _bound(
        "Divergences: maximum at one position, in nats; a larger value is scaled down, with its gradient", gt=0
    )
    temperature: Literal["group"] | Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = Field(
        default="group",
        description="Temperature of the sampled tokens' log-probabilities in ratios and start_kl: group (at which each "
        "turn was sampled, as its group records it; 1 where it does not) or a number. The divergences' rows and the "
        "gaps are at 1.",
    )
    teacher_temperature: float = Field(
        default=1.0,
        gt=0,
        description="Divergences: temperature of the teacher's row, normalised over the top K and the tail as one "
        "token. With that of the rollouts (env.temperature) below 1, the policy learns what the teacher would sample, "
        "instead of how unsure a hint makes it.",
    )
    entropy_weight: float = Field(
        default=0.0,
        description="Divergences: weigh each position by exp(-entropy_weight H), where H (nats) is the entropy of the "
        "teacher's row. Above 0, sure teachers count more; below 0, unsure ones.",
    )
    forward_above_entropy: float | None = Field(
        default=None,
        ge=0,
        description="Apply forward_kl only where the entropy of the teacher's row is above this, in nats; with "
        "reverse_kl this is EOPD. Unset: everywhere.",
    )
    mean: Literal["token", "turn"] = Field(
        default="token",
        description="Mean over all sampled tokens, or over turns of each turn's mean.",
    )
    turn_weights: Literal["equal", "trajectory"] = Field(
        default="equal",
        description="Weight of each scored turn in the divergences, token_advantage, the gap of combined, and custom "
        "parts that apply to scored tokens: 1 (equal), or relative to the other scored turns of its rollout, with a "
        "mean of 1 over them (trajectory).",
    )
    turn_weight_source: Literal["votes", "gap"] = Field(
        default="votes",
        description="turn_weights trajectory: measure of the weights: the number of the judge's votes for a "
        "hint (votes), or the mean |gap| of the turn's scored tokens (gap).",
    )
    skip_special_tokens: bool = Field(
        default=False,
        description="Leave the tokenizer's special tokens out of all parts; they still count in the mean's divisor.",
    )
    step_scores: Literal["plain", "normalized"] = Field(
        default="plain",
        description="Advantage of step scores: the score, or outcome plus score, normalized by group and turn number.",
    )
    schedules: dict[str, Schedule] = Field(
        default_factory=dict,
        description="Course of a part's weight by its name, for example {forward_kl: {warmup_steps: 5, decay_steps: "
        "50, floor: 0.1, until: 0.9}}: the weight rises, falls linearly to floor times itself, and becomes 0 once the "
        "pass rate of the last batches reaches until. Parts that are not named have a constant weight.",
    )
    route_by_turn: bool = Field(
        default=True,
        description="Apply GRPO and start_kl only to turns without a hint; false: to all sampled tokens.",
    )
    divide_by_std: bool = Field(
        default=True, description="GRPO: divide advantages by the standard deviation of the group's scores."
    )

    @property
    def has_divergence(self) -> bool:
        """Whether one of the divergences has a weight."""
        return any((self.forward_kl, self.reverse_kl, self.jensen_shannon))

    @property
    def distribution_parts(self) -> list[str]:
        """Names of the parts with a weight that need the distribution from which the tokens were sampled."""
        return [name for name in DISTRIBUTION_PARTS if self.weight_of(name)]

    @property
    def contrasts_with_start(self) -> bool:
        """Whether the contrast target of the divergences refers to the policy at the start of the run."""
        return self.contrast and self.has_divergence and self.contrast_reference == "start"

    @property
    def reads_start(self) -> bool:
        """Whether every step needs the policy at the start of the run."""
        return self.contrasts_with_start or self.start_kl > 0

    @property
    def weighs_turns_by(self) -> Literal["votes", "gap"] | None:
        """What the weights of scored turns are proportional to; None: all weights are 1."""
        return self.turn_weight_source if self.turn_weights == "trajectory" else None

    def weight_of(self, part: str) -> float:
        """Return the weight of a part, by its name in `schedules`."""
        return self.custom[part] if part in self.custom else getattr(self, part)

    def at_step(self, step: int, ended: Collection[str] = ()) -> "LossConfig":
        """Return the settings with the weights of a step, counted from 0; parts in `ended` have none."""
        weights = {
            name: 0.0 if name in ended else self.weight_of(name) * schedule.factor(step)
            for name, schedule in self.schedules.items()
        }
        custom = {name: weights.pop(name, weight) for name, weight in self.custom.items()}
        return self.model_copy(update={**weights, "custom": custom})

    @model_validator(mode="before")
    @classmethod
    def _default_parts(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        settings = cast(dict[str, Any], values)
        if moved := [f"{name}: {MOVED[name]}" for name in settings if name in MOVED]:
            raise ValueError("; ".join(moved))
        if not settings.get("custom") and not any(name in settings for name in PARTS):
            return {**settings, **DEFAULT_PARTS}
        return settings

    @model_validator(mode="after")
    def _check_weights(self) -> "LossConfig":
        if not any(map(self.weight_of, (*PARTS, *self.custom))):
            raise ValueError("one of the loss weights must be above 0")
        if self.contrast and not (self.has_divergence or any(map(self.weight_of, (*GAP_PARTS, *self.custom)))):
            raise ValueError(
                f"contrast changes {', '.join(GAP_PARTS)}, custom parts and the divergences: give one of them a weight"
            )
        if unknown := self.schedules.keys() - {*PARTS, "start_kl", *self.custom}:
            raise ValueError(f"schedules: {', '.join(sorted(unknown))} is no part of the loss")
        names = [*type(self).model_fields, *map(custom_name, self.custom)]
        if repeated := [name for name in self.custom if names.count(custom_name(name)) > 1]:
            raise ValueError(f"custom: {', '.join(repeated)}: each part needs a name that no other loss setting has")
        return self


class BrakeConfig(BaseModel):
    """Settings of the brake: a held-out evaluation that rolls the served weights back if they get worse."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    setting_group: ClassVar = SettingGroup(2, "brake", "Brake")
    removed_settings: ClassVar = {"kept": "it is brake.versions_kept now"}

    command: Annotated[str | None, FIRST] = Field(
        default=None,
        description="Command that evaluates the served policy, for example agentic-opd evaluate --config "
        "configs/demo.yaml. The trainer adds --openai.base_url, --env.data_dir_to_save_evals and --env.overwrite, and "
        "reads the score of each line of samples.jsonl there. Unset: no brake.",
    )
    every: int = Field(
        default=1,
        ge=1,
        description="Number of pushes between two evaluations. The trainer waits for an evaluation; the servers "
        "answer meanwhile. The first weights and the last ones are evaluated too.",
    )
    bound: float = Field(
        default=3.5,
        gt=0,
        le=100,
        description="Fall of the mean score below that of a kept version, in standard errors of the difference over "
        "the same tasks, from which on the weights are rolled back to the best kept version, and training ends with "
        "code 3.",
    )
    timeout_s: float = Field(
        default=7200.0,
        gt=0,
        allow_inf_nan=False,
        description="Time limit of one evaluation, in seconds; a longer one is killed and counts as failed.",
    )
    versions_kept: int = Field(
        default=3,
        ge=1,
        description="Number of good versions kept as checkpoints, with the optimizer: the best one and the last ones. "
        "New weights are compared with each.",
    )

    @field_validator("command")
    @classmethod
    def _check_command(cls, command: str | None) -> str | None:
        if command is not None and not shlex.split(command):
            raise ValueError("it is empty")
        return command


class LearnerTrainingConfig(BaseModel):
    """Settings of a trainer of several learners, each with an adapter of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    setting_group: ClassVar = SettingGroup(3, "learners", "Learners")

    folder: Annotated[Path | None, FIRST] = Field(
        default=None,
        description="Folder of a gateway's learners (its env.learners.folder), whose adapters are trained in turn, in "
        "place of one policy. It takes their groups from there and keeps their versions there. Unset: one policy.",
    )
    start: str | None = Field(
        default=None,
        description="Learner from whose newest version new learners start, with its optimizer. Its sessions are then "
        "in their weights too, and a deletion there reaches them. Unset: they start from the base weights.",
    )
    held_out_turns: int = Field(
        default=16,
        ge=1,
        description="Number of held-out turns on which a learner's brake evaluates; until a learner has as many, it is "
        "not evaluated.",
    )


class TrainerConfig(BaseModel):
    """Settings of a training run, except those of the loss's parts (`LossConfig`) and of the brake."""

    model_config = ConfigDict(extra="forbid")
    setting_group: ClassVar = SettingGroup(0, "training", "Training")

    model: Annotated[str, FIRST] = Field(description="Checkpoint to start from: a folder or a name on the hub.")
    output_dir: Annotated[Path, FIRST] = Field(
        default=Path("runs/train"), description="Folder for checkpoints and metrics.jsonl."
    )
    resume: Annotated[bool, FIRST] = Field(
        default=False, description="Continue from the last checkpoint in output_dir."
    )
    overwrite: Annotated[bool, FIRST] = Field(
        default=False, description="Replace the files of an earlier run in output_dir; resume takes precedence."
    )
    device: Annotated[str, FIRST] = Field(default="auto", description="cuda, cpu, or auto (cuda if available).")
    precision: Annotated[Literal["fp32", "bf16"], FIRST] = Field(
        default="fp32",
        description="Precision of the forward pass, and of frozen weights; trained weights stay float32.",
    )
    seed: int = Field(default=0, ge=0, description="Seed of the order of minibatches and of new adapters' weights.")

    groups: Annotated[list[Path], FIRST] = Field(
        default_factory=list[Path],
        description="Files of scored groups to train on, in place of the trajectory API, as process, distill and the "
        "gateway write them; .gz is unpacked. A batch has whole groups, in an order set by the seed, and at most "
        "batch_size sequences; the last batch of a pass has the groups that are left.",
    )
    groups_epochs: int = Field(
        default=1, ge=1, description="Passes over groups, each in another order; a set total_steps ends them earlier."
    )
    api_url: Annotated[Url, FIRST] = Field(
        default="http://127.0.0.1:8001", description="Trajectory API (run-api), if groups names no files."
    )
    image_folders: list[Path] = Field(
        default_factory=list[Path],
        description="Folders of the pictures that the trajectory API's groups name: the gateway's groups.images. Those "
        "of groups are beside their files.",
    )
    vllm_urls: Annotated[list[Url], FIRST] = Field(
        default_factory=lambda: ["http://127.0.0.1:8000"],
        description="vLLM servers that receive the new weights. Empty, as by default with groups: weights are only "
        "saved.",
    )
    vllm_api_key: SecretStr | None = Field(
        default=None, description="API key of the vLLM servers. Unset: the variable VLLM_API_KEY, or none."
    )
    weights_dir: Annotated[Path, FIRST] = Field(
        default=Path("runs/train/weights"),
        description="Folder for pushed weights, the --weights-root of the vLLM servers.",
    )
    weight_transfer: Literal["files", "nccl", "gloo"] = Field(
        default="files",
        description="Transfer of whole weights to the servers: files below weights_dir, or vLLM's own transfer from "
        "memory (nccl between GPUs, gloo between CPUs) to servers started with the same --weight-transfer. Adapters "
        "are always sent as files.",
    )
    server_retry_s: float = Field(
        default=300.0,
        ge=0,
        description="Seconds to retry a server that does not answer, for example while it restarts.",
    )
    push_every: int = Field(default=1, ge=1, description="Steps between two pushes of the weights.")
    pushes_kept: int = Field(
        default=2,
        ge=2,
        description="Number of pushed weights kept on disk; a server may still be reading those before the latest.",
    )
    probe_tolerance: float | None = Field(
        default=None,
        gt=0,
        description="Maximum difference (nats) after a push between a server's logprobs and the trainer's, with the "
        "weights as sent. Unset: the difference that the coarser of the two precisions explains; the server names "
        "its precision.",
    )

    train_when: Annotated[str, AfterValidator(_check_train_when), FIRST] = Field(
        default="always",
        description="When a step may begin: always; idle (once vllm_urls have had no request for idle_s); or hours of "
        "the day in local time, such as 22:00-06:00. Groups wait meanwhile; a step under way is finished.",
    )
    idle_s: float = Field(
        default=300.0,
        gt=0,
        allow_inf_nan=False,
        description="train_when idle: seconds without a request, except the trainer's own.",
    )

    total_steps: Annotated[int, FIRST] = Field(
        default=100, ge=1, description="Number of batches to train on. Unset with groups: all."
    )
    batch_size: Annotated[int, FIRST] = Field(
        default=32,
        ge=1,
        description="Number of sequences in a batch, on which one step trains; a multiple of the group size.",
    )
    max_token_len: Annotated[int, FIRST] = Field(
        default=16384, ge=16, description="Maximum length of an accepted sequence, in tokens."
    )
    micro_tokens: Annotated[int | None, FIRST] = Field(
        default=None,
        ge=1,
        description="Approximate number of tokens in one forward pass, including padding if sequences are padded. "
        f"Unset: what fits the GPU's free memory; {DEFAULT_PART_TOKENS} on a CPU.",
    )
    pack: bool = Field(
        default=True,
        description="Concatenate the sequences of a forward pass and compute common prefixes only once; losses and "
        "gradients are the same. false: pad the sequences, as always for models that cannot read packed ones.",
    )
    epochs_per_batch: Annotated[int, FIRST] = Field(
        default=4,
        ge=1,
        description="Passes over each batch. More passes learn more from the same rollouts: the divergences' "
        "targets stay the same, and the surrogates are clipped.",
    )
    minibatches: Annotated[int, FIRST] = Field(
        default=4,
        ge=1,
        description="Number of parts, each of whole groups, into which a pass divides the batch, in an order set by "
        "the seed. Each part is one optimizer update.",
    )
    lr: Annotated[float, FIRST] = Field(
        default=1e-5,
        ge=0,
        allow_inf_nan=False,
        description="Learning rate after the warm-up, of each of a step's epochs_per_batch * minibatches updates; 0 "
        "runs the whole loop and changes no weight. The default suits adapters of a model with billions of parameters; "
        "its whole weights need about 1e-6, the demo policy 1e-4.",
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps over which the learning rate rises to lr.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="linear",
        description="Learning rate after the warm-up: constant at lr, or falling towards 0 at total_steps, linearly "
        "or along half a cosine.",
    )
    weight_decay: float = Field(default=0.0, ge=0, description="Weight decay of AdamW.")
    adam_betas: tuple[float, float] = Field(default=(0.9, 0.98), description="Betas of AdamW.")
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="Maximum gradient norm; larger gradients are scaled down to it."
    )
    lora_rank: Annotated[int | None, FIRST] = Field(
        default=None,
        ge=1,
        description="Rank of the adapters to train with peft. Servers started with --max-lora-rank receive the "
        "adapters alone, as versions beside their weights; others receive the weights with the adapters merged in.",
    )
    ema_decay: Annotated[float | None, FIRST] = Field(
        default=None,
        gt=0,
        lt=1,
        description="Share that a moving average of the trained weights keeps of itself at each step. With adapters it "
        "is the average of their factors (an average of their products would have a higher rank), and it is pushed as "
        "the teacher of env.teacher.weights ema. Whole weights are pushed to teacher_urls.",
    )
    teacher_urls: list[Url] = Field(
        default_factory=list[Url],
        description="vLLM servers that receive the moving average of whole weights, for env.teacher.base_url. Their "
        "--weights-root must hold weights_dir/teacher.",
    )
    gradient_checkpointing: bool | None = Field(
        default=None,
        description="Recompute activations in the backward pass: less memory, more time. Unset: on a GPU, for those "
        "forward passes alone whose activations do not fit its free memory.",
    )
    loss: LossConfig = Field(
        default_factory=LossConfig,
        description="Parts of the loss. If any part has a weight, each part that is not named has weight 0.",
    )

    brake: BrakeConfig = Field(default_factory=BrakeConfig, description="The brake on live learning.")

    learners: LearnerTrainingConfig = Field(
        default_factory=LearnerTrainingConfig, description="A gateway's learners, each with an adapter of its own."
    )

    measure_start: bool = Field(
        default=False,
        description="Log kl_to_start without loss.start_kl too, at the cost of loss.start_kl.",
    )
    collapse_share: float = Field(
        default=0.2,
        ge=0,
        lt=1,
        description="Warn once if entropy or row_mass falls below this share of its first value, or entropy rises to "
        "its inverse (0.2: five times the first value); 0: never.",
    )
    save_every: Annotated[int, FIRST] = Field(
        default=50, ge=1, description="Steps between two checkpoints, from which a run can resume."
    )
    use_wandb: Annotated[bool, FIRST] = Field(default=False, description="Also log metrics to Weights & Biases.")
    wandb_project: str = Field(default="agentic_opd", description="Project on Weights & Biases.")
    wandb_group: str = Field(default="agentic_opd", description="Group of runs on Weights & Biases.")

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings that determine how a batch changes the weights, by flag name, as JSON data."""
        recipe = self.model_dump(mode="json", include=set(_RECIPE))
        return {**{f"loss.{name}": value for name, value in recipe.pop("loss").items()}, **recipe}

    @property
    def receipt_settings(self) -> dict[str, Any]:
        """The settings in the receipt of a version: what determines its weights beside the groups, as JSON data."""
        return {**self.model_dump(mode="json", include=set(_IN_RECEIPTS)), **self.recipe}

    def check_recipe(self, saved: Mapping[str, Any]) -> list[str]:
        """Compare the recipe with the one in the checkpoint to resume from.

        Returns:
            Lines to log, one for each value that these settings change explicitly.

        Raises:
            ConfigError: a value would change that these settings do not set, because its default has changed.
        """
        recipe = self.recipe
        moved = {f"loss.{name}" for name in MOVED if not (name in _MOVED_PARTS and saved.get(f"loss.{name}"))}
        changed = [name for name, value in saved.items() if name not in moved and recipe.get(name) != value]
        if unnamed := [name for name in changed if name.partition(".")[0] not in self.model_fields_set]:
            raise ConfigError(
                "the checkpoint is of a run with other defaults: "
                + "; ".join(f"{name} was {saved[name]} and would be {recipe.get(name)}" for name in unnamed)
                + f". Name {' and '.join(dict.fromkeys(name.partition('.')[0] for name in unnamed))} in the settings."
            )
        return [f"{name} was {saved[name]} and is {recipe.get(name)} now" for name in changed]

    @property
    def part_tokens(self) -> int:
        """Approximate number of tokens in one forward pass."""
        return self.micro_tokens or DEFAULT_PART_TOKENS

    @property
    def picture_folders(self) -> list[ImageFolder]:
        """The folders of all pictures that the groups of a run may name."""
        return [*map(ImageFolder, self.image_folders), *map(ImageFolder.beside, self.groups)]

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        left = 1.0 - (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        shares = {"constant": 1.0, "linear": left, "cosine": (1.0 - math.cos(math.pi * left)) / 2.0}
        return self.lr * shares[self.lr_schedule]

    @model_validator(mode="before")
    @classmethod
    def _default_together(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        settings, learners = cast(dict[str, Any], values), values.get("learners")
        if settings.get("groups"):
            return {"vllm_urls": [], **settings}
        if isinstance(learners, dict) and learners.get("folder"):
            return {"lr_schedule": "constant", **settings}
        return settings

    @model_validator(mode="after")
    def _check_together(self) -> "TrainerConfig":
        # Files determine how many steps there are; `open_source` compares them.
        if self.warmup_steps >= self.total_steps and not self.groups:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be below total_steps ({self.total_steps})")
        if self.learners.folder is not None:
            self._check_learners()
        is_whole_average = self.ema_decay is not None and self.lora_rank is None
        if is_whole_average != bool(self.teacher_urls):
            raise ValueError(
                "teacher_urls receive the moving average of whole weights: set ema_decay and teacher_urls, "
                "without lora_rank"
            )
        if self.train_when == "idle" and not self.vllm_urls:
            raise ValueError("train_when idle watches the requests to vllm_urls: name them, or set train_when to hours")
        if self.brake.command is not None and not self.vllm_urls:
            raise ValueError("brake.command evaluates the policy that vllm_urls serve: name both, or neither")
        return self

    def _check_learners(self) -> None:
        """Raise ValueError for settings that a trainer of several learners does not have."""
        if self.lora_rank is None:
            raise ValueError("learners.folder trains adapters: set lora_rank")
        if self.lr_schedule != "constant":
            raise ValueError("a learner has no last step: leave lr_schedule unset, or constant")
        wrong = {
            "groups": bool(self.groups),
            "ema_decay": self.ema_decay is not None,
            "use_wandb": self.use_wandb,
            "resume": self.resume,
            "overwrite": self.overwrite,
        }
        if named := [name for name, is_set in wrong.items() if is_set]:
            raise ValueError(
                f"learners.folder always continues, with the learners' own groups: leave out {', '.join(named)}"
            )


_RECIPE = (
    *("loss", "epochs_per_batch", "minibatches", "lr", "warmup_steps", "lr_schedule"),
    *("weight_decay", "adam_betas", "max_grad_norm"),
)
"""Settings whose values are stored in each checkpoint."""
_IN_RECEIPTS = (
    *("model", "precision", "seed", "total_steps", "batch_size", "max_token_len", "groups_epochs"),
    *("lora_rank", "ema_decay"),
)
"""Settings whose values are stored in each receipt, beside those of checkpoints. None of them is a secret."""

DEFAULTS: dict[str, BaseModel] = {"": TrainerConfig(model="")}
"""Default settings by the prefix of their flags, which is empty: `--lr`, `--loss.grpo`, `--brake.every`."""


def check_new(output_dir: Path) -> None:
    """Refuse an `output_dir` that holds an earlier run.

    Raises:
        PlaceError: it does.
    """
    if (output_dir / "metrics.jsonl").exists() or (output_dir / "checkpoints").exists():
        raise PlaceError(
            f"{str(output_dir)!r} holds an earlier run. Continue it with --resume, replace it with --overwrite, or "
            "choose another output_dir."
        )


def read_config(arguments: argparse.Namespace) -> TrainerConfig:
    """Merge defaults, YAML file and flags; `--loss.grpo 0.5` overrides one value of the file's `loss` section.

    Raises:
        ConfigError: the message lists every wrong setting and every argument that is `misunderstood`.
    """
    wrong = list(arguments.misunderstood)
    try:
        values = read_yaml(arguments.config, "trainer") if arguments.config else {}
    except ConfigError as error:
        raise ConfigError("\n".join([str(error), *wrong])) from error
    config = validated(TrainerConfig, "", [[values], flags_layer(arguments.flags, "")], wrong)
    moved = {f"loss.{name}": text for name, text in MOVED.items()} | {"brake.kept": "it is brake.versions_kept now"}
    names = [line.partition(" is unknown")[0] for line in wrong]
    refuse([f"{name}: {moved[name]}" if name in moved else line for name, line in zip(names, wrong, strict=True)])
    return config
