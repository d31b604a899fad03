"""Settings of the reference trainer, read from a YAML file and the command line. Does not import torch."""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from agentic_opd.core.errors import ConfigError, PlaceError
from agentic_opd.settings.fields import SettingGroup, Url
from agentic_opd.settings.files import read_yaml
from agentic_opd.settings.flags import flag_values
from agentic_opd.settings.read import refuse, validated

PARTS = ("token_advantage", "forward_kl", "reverse_kl", "jensen_shannon", "grpo", "step_reward")
"""Names of the loss settings that are weights of parts."""
MOST_SKIPPED_STEPS = 3
"""Consecutive steps of which every update is skipped, after which the run fails: the weights or the data are broken."""
DEFAULT_PARTS: dict[str, float] = {"forward_kl": 1.0}
"""Weights if no part is given one. In the experiments of docs/learning, adding GRPO did not improve on this loss."""


class LossConfig(BaseModel):
    """Weights and bounds of the combined loss; a weight of 0 leaves a part out.

    If any part is given a weight, the others default to 0. Otherwise the weights are `DEFAULT_PARTS`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    setting_group: ClassVar = SettingGroup(1, "Parts of the loss")

    forward_kl: float = Field(default=0.0, ge=0, description="Weight of KL(teacher || student) over the top K.")
    reverse_kl: float = Field(default=0.0, ge=0, description="Weight of KL(student || teacher) over the top K.")
    jensen_shannon: float = Field(
        default=0.0, ge=0, description="Weight of the Jensen-Shannon divergence of teacher and student over the top K."
    )
    token_advantage: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the clipped surrogate on log p_teacher - log p_student of the sampled token.",
    )
    grpo: float = Field(default=0.0, ge=0, description="Weight of GRPO on the groups' scores.")
    step_reward: float = Field(
        default=0.0, ge=0, description="Weight of the clipped surrogate on the judge's score of each turn."
    )
    start_kl: float = Field(
        default=0.0,
        ge=0,
        description="Weight of KL(student || policy at the start of the run), estimated at the sampled tokens, "
        "which limits drift where there is nothing to learn. It is added to the other parts, and their weights stay "
        "the same.",
    )
    contrast: bool = Field(
        default=False,
        description="Learn what the hint says beyond a control hint (env.control). token_advantage uses the "
        "control's reading as its baseline, and the divergences use a target that moves the policy by the "
        "difference of both readings.",
    )
    contrast_reference: Literal["start", "batch"] = Field(
        default="start",
        description="Policy that the divergences' contrast target moves: start (at the start of the run; stored as "
        "a second copy of the weights, or with adapters as the weights without them) or batch (before each batch). "
        "With batch, nothing limits how far the policy moves in total.",
    )
    gap_clip: float = Field(
        default=5.0, gt=0, description="token_advantage and contrast: maximum difference of two readings, in nats."
    )
    beta: float = Field(default=0.5, gt=0, lt=1, description="jensen_shannon: share of the teacher in the mixture.")
    clip_low: float = Field(default=0.2, ge=0, le=1, description="Surrogates: maximum distance of the ratio below 1.")
    clip_high: float = Field(default=0.2, ge=0, description="Surrogates: maximum distance of the ratio above 1.")
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
    def contrasts_with_start(self) -> bool:
        """Whether the contrast target of the divergences refers to the policy at the start of the run."""
        return self.contrast and self.has_divergence and self.contrast_reference == "start"

    @property
    def reads_start(self) -> bool:
        """Whether every step needs the policy at the start of the run."""
        return self.contrasts_with_start or self.start_kl > 0

    @model_validator(mode="before")
    @classmethod
    def _default_parts(cls, values: Any) -> Any:
        if isinstance(values, dict) and not any(name in values for name in PARTS):
            return {**cast(dict[str, Any], values), **DEFAULT_PARTS}
        return values

    @model_validator(mode="after")
    def _check_weights(self) -> "LossConfig":
        if not any(getattr(self, name) for name in PARTS):
            raise ValueError("one of the loss weights must be above 0")
        if self.contrast and not (self.token_advantage or self.has_divergence):
            raise ValueError("contrast changes token_advantage and the divergences: give one of them a weight")
        return self


class TrainerConfig(BaseModel):
    """Settings of a training run, except those of the loss's parts (`LossConfig`)."""

    model_config = ConfigDict(extra="forbid")
    setting_group: ClassVar = SettingGroup(0, "Training")

    model: str = Field(description="Checkpoint to start from: a folder or a name on the hub.")
    output_dir: Path = Field(default=Path("runs/train"), description="Folder for checkpoints and metrics.jsonl.")
    resume: bool = Field(default=False, description="Continue from the last checkpoint in output_dir.")
    overwrite: bool = Field(
        default=False, description="Replace the files of an earlier run in output_dir; resume takes precedence."
    )
    device: str = Field(default="auto", description="cuda, cpu, or auto (cuda if available).")
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32", description="Precision of the forward pass; weights stay float32."
    )
    seed: int = Field(default=0, ge=0, description="Seed of the order of minibatches and of new adapters' weights.")

    api_url: Url = Field(default="http://127.0.0.1:8001", description="Trajectory API (run-api).")
    vllm_urls: list[Url] = Field(
        default_factory=lambda: ["http://127.0.0.1:8000"],
        description="vLLM servers that receive the new weights. Empty: weights are only saved.",
    )
    vllm_api_key: SecretStr | None = Field(
        default=None, description="API key of the vLLM servers. Unset: the variable VLLM_API_KEY, or none."
    )
    weights_dir: Path = Field(
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

    total_steps: int = Field(default=100, ge=1, description="Number of batches to train on.")
    batch_size: int = Field(
        default=32,
        ge=1,
        description="Number of sequences in a batch, on which one step trains; a multiple of the group size.",
    )
    max_token_len: int = Field(default=16384, ge=16, description="Maximum length of an accepted sequence, in tokens.")
    micro_tokens: int = Field(
        default=16384,
        ge=1,
        description="Approximate number of tokens in one forward pass, including padding if sequences are padded.",
    )
    pack: bool = Field(
        default=True,
        description="Concatenate the sequences of a forward pass and compute common prefixes only once; losses and "
        "gradients are the same. false: pad the sequences, as always for models that cannot read packed ones.",
    )
    epochs_per_batch: int = Field(
        default=4,
        ge=1,
        description="Passes over each batch. More passes learn more from the same rollouts: the divergences' "
        "targets stay the same, and the surrogates are clipped.",
    )
    minibatches: int = Field(
        default=4,
        ge=1,
        description="Number of parts, each of whole groups, into which a pass divides the batch, in an order set by "
        "the seed. Each part is one optimizer update.",
    )
    lr: float = Field(
        default=1e-5,
        gt=0,
        description="Learning rate after the warm-up, of each of a step's epochs_per_batch * minibatches updates. "
        "The default suits adapters of a model with billions of parameters; its whole weights need about 1e-6, the "
        "demo policy 1e-4.",
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
    lora_rank: int | None = Field(
        default=None,
        ge=1,
        description="Rank of the adapters to train with peft. Servers started with --max-lora-rank receive the "
        "adapters alone, as versions beside their weights; others receive the weights with the adapters merged in.",
    )
    ema_decay: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Share that a moving average of the adapters' factors keeps of itself at each step (an average "
        "of their products would have a higher rank). The average is pushed as the teacher of env.teacher ema.",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass: less memory, more time."
    )
    loss: LossConfig = Field(
        default_factory=LossConfig,
        description="Parts of the loss. If any part has a weight, each part that is not named has weight 0.",
    )

    save_every: int = Field(default=50, ge=1, description="Steps between two checkpoints, from which a run can resume.")
    use_wandb: bool = Field(default=False, description="Also log metrics to Weights & Biases.")
    wandb_project: str = Field(default="agentic_opd", description="Project on Weights & Biases.")
    wandb_group: str = Field(default="agentic_opd", description="Group of runs on Weights & Biases.")

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings that determine how a batch changes the weights, by flag name, as JSON data."""
        kept = self.model_dump(mode="json", include=set(_RECIPE))
        return {**{f"loss.{name}": value for name, value in kept.pop("loss").items()}, **kept}

    def check_recipe(self, saved: Mapping[str, Any] | None) -> list[str]:
        """Compare the recipe with that of the checkpoint to resume from.

        Args:
            saved: The checkpoint's recipe; None for checkpoints from earlier versions, which lack it.

        Returns:
            Lines to log: one for each value that these settings change explicitly; if `saved` is None, one about the
            losses' divisor, which has changed since.

        Raises:
            ConfigError: a value would change that these settings do not set, because its default has changed.
        """
        recipe, before = self.recipe, _EARLIER_DEFAULTS if saved is None else saved
        changed = [name for name, value in before.items() if recipe.get(name) != value]
        if unnamed := [name for name in changed if name.partition(".")[0] not in self.model_fields_set]:
            raise ConfigError(
                "the checkpoint is of a run with other defaults: "
                + "; ".join(f"{name} was {before[name]} and would be {recipe.get(name)}" for name in unnamed)
                + f". Name {' and '.join(dict.fromkeys(name.partition('.')[0] for name in unnamed))} in the settings."
            )
        if saved is None:
            return ["the losses are divided by the sampled tokens now, where those on hints were by the scored ones"]
        return [f"{name} was {before[name]} and is {recipe.get(name)} now" for name in changed]

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        left = 1.0 - (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        shares = {"constant": 1.0, "linear": left, "cosine": (1.0 - math.cos(math.pi * left)) / 2.0}
        return self.lr * shares[self.lr_schedule]

    @model_validator(mode="after")
    def _check_together(self) -> "TrainerConfig":
        if self.warmup_steps >= self.total_steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be below total_steps ({self.total_steps})")
        if self.ema_decay is not None and self.lora_rank is None:
            raise ValueError("ema_decay averages adapters: set lora_rank")
        return self


_RECIPE = (
    *("loss", "epochs_per_batch", "minibatches", "lr", "warmup_steps", "lr_schedule"),
    *("weight_decay", "adam_betas", "max_grad_norm"),
)
"""Settings whose values are stored in each checkpoint."""
_EARLIER_DEFAULTS: dict[str, Any] = {
    **{"loss.token_advantage": 1.0, "loss.forward_kl": 0.0, "loss.grpo": 1.0},
    "epochs_per_batch": 1,
    "minibatches": 1,
    "lr_schedule": "constant",
}
"""Defaults of the versions whose checkpoints lack a recipe, where they differ from the current ones."""


DEFAULTS: dict[str, BaseModel] = {"": TrainerConfig(model=""), "loss": LossConfig()}
"""Default settings by the prefix of their flags: `--lr`, `--loss.grpo`."""


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
        values = read_yaml(arguments.config, "settings") if arguments.config else {}
    except ConfigError as error:
        raise ConfigError("\n".join([str(error), *wrong])) from error
    values |= flag_values(arguments, "", TrainerConfig, wrong)
    parts = flag_values(arguments, "loss", LossConfig, wrong)
    if parts:
        loss = values.get("loss")
        values["loss"] = {**(loss if isinstance(loss, dict) else {}), **parts}
    config = validated(TrainerConfig, "", values, wrong)
    refuse(wrong)
    return config
