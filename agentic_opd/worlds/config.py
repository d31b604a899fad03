"""Settings of the environment that worlds of any kind read."""

from typing import Annotated, Literal

from pydantic import Field

from agentic_opd.sandboxes.config import SandboxConfig
from agentic_opd.settings.fields import AGENT, EVALUATION

DatasetFormat = Literal["generic", "humaneval", "mbpp", "apps"]


class WorldConfig(SandboxConfig):
    """The sandbox, the limits of tool calls, and the tasks that are held out."""

    eval_fraction: Annotated[float, EVALUATION] = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of the dataset's tasks held out for evaluation, by a hash of the task's id. The eight "
        "built-in tasks are used for both training and evaluation.",
    )
    eval_seed: Annotated[int, EVALUATION] = Field(
        default=0, ge=0, description="Seed of the hash that selects the held-out tasks."
    )
    eval_dataset_name: Annotated[str | None, EVALUATION] = Field(
        default=None,
        description="Dataset for evaluation, in the form of world.dataset_name; with it, no tasks are held out.",
    )
    eval_dataset_split: Annotated[str | None, EVALUATION] = Field(
        default=None,
        description="Split for evaluation, of eval_dataset_name (unset: world.dataset_split), or of world.dataset_name "
        "if eval_dataset_name is unset.",
    )
    eval_dataset_format: Annotated[Literal["same", DatasetFormat], EVALUATION] = Field(
        default="same",
        description="Preset of the dataset for evaluation; same: world.dataset_format and world.dataset_fields apply.",
    )
    eval_dataset_fields: Annotated[dict[str, str], EVALUATION] = Field(
        default_factory=dict, description="Overrides of eval_dataset_format, in the form of world.dataset_fields."
    )
    tool_timeout_s: Annotated[float, AGENT] = Field(
        default=30.0, gt=0, description="Time limit of one tool call, in seconds."
    )
    tool_output_max_chars: Annotated[int, AGENT] = Field(
        default=4000,
        ge=200,
        description="Maximum number of characters of a tool result; longer results are cut in the middle.",
    )
