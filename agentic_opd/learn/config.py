"""Settings of `agentic-opd learn`: what is held out, the smallest numbers, and the bounds of the guards."""

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from agentic_opd.settings.fields import FIRST, Section, SettingGroup
from agentic_opd.training.config import TrainerConfig


class GuardConfig(Section):
    """How far each figure without a judge may fall; a figure beyond its bound refuses the adapter."""

    setting_group: ClassVar = SettingGroup(19, "guards", "Guards: figures without a judge")

    logprob: float = Field(
        default=0.05,
        ge=0,
        description="Largest fall of the mean log-probability (nats a token) of held-out answers without a hint.",
    )
    calls_parse: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Where the log has a call: largest fall of the share of answers that call, and whose calls all "
        "parse and name a tool that the log declares or has called.",
    )
    over_calling: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Where the log has no call, and declares tools or has called some: largest rise of the share of "
        "answers that call.",
    )
    repetition: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Largest rise of the mean share of an answer's sequences of four words that repeat an earlier one.",
    )
    length: float = Field(
        default=2.0, ge=1, description="Largest factor by which the mean length of answers, in tokens, may change."
    )


class LearnConfig(BaseModel):
    """Settings of the split, the evaluation and the verdict."""

    model_config = ConfigDict(extra="forbid")
    setting_group: ClassVar = SettingGroup(18, "learn", "The split, the evaluation and the verdict")

    held_out: Annotated[float, FIRST] = Field(
        default=0.2, gt=0, lt=1, description="Share of the answers that is held out: whole projects, or the latest."
    )
    min_hints: Annotated[int, FIRST] = Field(
        default=20, ge=1, description="Smallest number of answers with a hint to train on; with fewer it is refused."
    )
    min_held_out: Annotated[int, FIRST] = Field(
        default=20, ge=2, description="Smallest number of held-out answers that are graded; with fewer it is refused."
    )
    max_held_out: Annotated[int, FIRST] = Field(
        default=200,
        ge=2,
        description="Largest number of held-out answers that are sampled anew and graded, drawn by learn.seed; those "
        "that a user replied to come first.",
    )
    temperature: float = Field(default=0.0, ge=0, le=2, description="Sampling temperature of the evaluated answers.")
    max_tokens: int = Field(default=512, ge=1, description="Maximum number of tokens of an evaluated answer.")
    seed: int = Field(default=0, ge=0, description="Seed of the drawn answers, their sampling, and the judge's order.")
    guards: GuardConfig = GuardConfig()


def train_defaults() -> TrainerConfig:
    """Return the settings of the training that differ from `agentic-opd train`'s defaults."""
    return TrainerConfig(
        model="", lora_rank=16, lr=1e-4, batch_size=16, epochs_per_batch=1, minibatches=1, groups_epochs=3
    )


SET_HERE = (
    *("model", "output_dir", "resume", "overwrite", "groups", "api_url", "image_folders", "vllm_urls", "vllm_api_key"),
    *("weights_dir", "weight_transfer", "push_every", "pushes_kept", "ema_decay", "teacher_urls", "brake"),
)
"""Settings of the trainer that follow from the command's own."""
