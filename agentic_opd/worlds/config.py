"""Settings of the environment that worlds of any kind read."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from agentic_opd.sandboxes.config import AnySandbox, BubblewrapConfig
from agentic_opd.settings.fields import AGENT, EVALUATION, FIRST, RUN_ONLY, Section
from agentic_opd.settings.old_names import RootSettings

DatasetFormat = Literal["generic", "humaneval", "mbpp", "apps"]


class EvalConfig(Section):
    """Tasks and sampling of evaluations."""

    setting_group: ClassVar = EVALUATION

    fraction: Annotated[float, FIRST] = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of the dataset's tasks held out for evaluation, by a hash of the task's id. The eight "
        "built-in tasks are used for both training and evaluation.",
    )
    seed: int = Field(default=0, ge=0, description="Seed of the hash that selects the held-out tasks.")
    samples: Annotated[int, RUN_ONLY] = Field(
        default=1, ge=1, description="Number of samples per task in an evaluation, for pass@k."
    )
    temperature: Annotated[float, RUN_ONLY] = Field(
        default=0.0, ge=0.0, le=2.0, description="Sampling temperature of evaluations."
    )
    learner: Annotated[str | None, RUN_ONLY] = Field(
        default=None,
        description="Learner of a gateway whose adapter `evaluate` samples from. Unset: the policy of all.",
    )
    dataset_name: str | None = Field(
        default=None,
        description="Dataset for evaluation, in the form of world.dataset_name; with it, no tasks are held out.",
    )
    dataset_split: str | None = Field(
        default=None,
        description="Split for evaluation, of eval.dataset_name (unset: world.dataset_split), or of world.dataset_name "
        "if eval.dataset_name is unset.",
    )
    dataset_format: Literal["same", DatasetFormat] = Field(
        default="same",
        description="Preset of the dataset for evaluation; same: world.dataset_format and world.dataset_fields apply.",
    )
    dataset_fields: dict[str, str] = Field(
        default_factory=dict, description="Overrides of eval.dataset_format, in the form of world.dataset_fields."
    )

    @model_validator(mode="after")
    def _check_samples(self) -> "EvalConfig":
        if self.samples > 1 and self.temperature == 0.0:
            raise ValueError("samples above 1 need a temperature above 0: at temperature 0 all samples are the same")
        return self


class WorldConfig(RootSettings):
    """The sandbox, the limits of tool calls, and the tasks that are held out."""

    sandbox: AnySandbox = BubblewrapConfig()
    eval: EvalConfig = EvalConfig()

    tool_timeout_s: Annotated[float, AGENT] = Field(
        default=30.0, gt=0, description="Time limit of one tool call, in seconds."
    )
    tool_output_max_chars: Annotated[int, AGENT] = Field(
        default=4000,
        ge=200,
        description="Maximum number of characters of a tool result; longer results are cut in the middle.",
    )
