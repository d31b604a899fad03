"""Settings of the coding world: its tasks, its tools and its hidden tests."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from agentic_opd.sandboxes.config import SandboxConfig
from agentic_opd.settings.fields import AGENT, FIRST, REWARD, WORLD

DatasetFormat = Literal["generic", "humaneval", "mbpp", "apps"]


class CodingConfig(SandboxConfig):
    """Where coding tasks come from, what the agent's tools may do, and how long the hidden tests may take."""

    setting_group: ClassVar = WORLD

    dataset_name: Annotated[str | None, FIRST] = Field(
        default=None,
        description="Source of the tasks: a local .jsonl, .jsonl.gz or .parquet file, a folder (of such files, or "
        "saved by `datasets`), or a name on the hub (OWNER/NAME or OWNER/NAME:CONFIG). Unset: the built-in tasks.",
    )
    dataset_split: str = Field(default="train", description="Split to load, if the dataset has splits.")
    dataset_format: Annotated[DatasetFormat, FIRST] = Field(
        default="generic",
        description="Preset that maps the fields of a row; apps also fits LiveCodeBench and other datasets of "
        "inputs and outputs.",
    )
    dataset_fields: dict[str, str] = Field(
        default_factory=dict,
        description="Overrides of the preset, from the package's field name to the row's, for example {prompt: "
        "question, test_code: reward_model.ground_truth}; a.b is the field b of the object a.",
    )
    dataset_limit: int | None = Field(default=None, ge=1, description="Use only the first N tasks of a dataset.")
    builtin_examples: bool = Field(
        default=True,
        description="Show examples, and a file that runs them, in the built-in tasks. Off: only the hidden tests, "
        "after the episode, tell whether a solution is right.",
    )
    dataset_skip_broken: bool = Field(
        default=False, description="Skip rows that cannot become tasks, and report their number, instead of failing."
    )
    dataset_skip_too_long: bool = Field(
        default=False,
        description="Skip tasks whose first prompt does not fit max_token_length, and report them, instead of failing.",
    )
    dataset_in_process: Literal["keep", "skip", "refuse"] = Field(
        default="skip",
        description="Training tasks whose hidden tests run in the solution's process, where cheating is easier: "
        "keep them with a warning, skip them, or refuse to start. Evaluation keeps them, marks them and counts them.",
    )
    eval_fraction: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of the dataset's tasks held out for evaluation, by a hash of the task's id. The eight "
        "built-in tasks are used for both training and evaluation.",
    )
    eval_seed: int = Field(default=0, ge=0, description="Seed of the hash that selects the held-out tasks.")
    eval_dataset_name: str | None = Field(
        default=None, description="Dataset for evaluation, in the form of dataset_name; with it, no tasks are held out."
    )
    eval_dataset_split: str | None = Field(
        default=None,
        description="Split for evaluation, of eval_dataset_name (unset: dataset_split), or of dataset_name if "
        "eval_dataset_name is unset.",
    )
    eval_dataset_format: Literal["same", DatasetFormat] = Field(
        default="same",
        description="Preset of the dataset for evaluation; same: dataset_format and dataset_fields apply.",
    )
    eval_dataset_fields: dict[str, str] = Field(
        default_factory=dict, description="Overrides of eval_dataset_format, in the form of dataset_fields."
    )
    tool_timeout_s: Annotated[float, AGENT] = Field(
        default=30.0, gt=0, description="Time limit of one tool call, in seconds."
    )
    tool_output_max_chars: Annotated[int, AGENT] = Field(
        default=4000,
        ge=200,
        description="Maximum number of characters of a tool result; longer results are cut in the middle.",
    )
    verify_timeout_s: Annotated[float, REWARD] = Field(
        default=30.0,
        gt=0,
        description="Limit for the hidden tests of one episode in seconds of processor time, independent of other "
        "load. The limit by the clock is at most twenty times as many seconds, plus ten.",
    )

    @model_validator(mode="after")
    def _check_eval_split(self) -> "CodingConfig":
        if self.eval_dataset_split is not None and self.eval_dataset_name is None and self.dataset_name is None:
            raise ValueError("eval_dataset_split is set, but neither eval_dataset_name nor dataset_name is")
        return self
