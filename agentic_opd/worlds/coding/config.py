"""Settings of the coding world: its tasks, its tools and its hidden tests."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from agentic_opd.sandboxes.config import SandboxConfig
from agentic_opd.settings.fields import AGENT, MOST_USED, REWARD, TASKS

DatasetFormat = Literal["generic", "humaneval", "mbpp", "apps"]


class CodingConfig(SandboxConfig):
    """Where coding tasks come from, what the agent's tools may do, and how long the hidden tests may take."""

    setting_group: ClassVar = TASKS

    dataset_name: Annotated[str | None, MOST_USED] = Field(
        default=None,
        description="Where tasks come from: a local .jsonl, .jsonl.gz or .parquet file, a folder (of such files, or "
        "saved by `datasets`), or a name on the hub (OWNER/NAME or OWNER/NAME:CONFIG). Unset: the built-in tasks.",
    )
    dataset_split: str = Field(default="train", description="Split to load, where the dataset has splits.")
    dataset_format: Annotated[DatasetFormat, MOST_USED] = Field(
        default="generic",
        description="Preset that says which field of a row holds what; apps is for LiveCodeBench and other sets of "
        "inputs and outputs too.",
    )
    dataset_fields: dict[str, str] = Field(
        default_factory=dict,
        description="Overrides of the preset: our name -> the row's field, for example {prompt: question}.",
    )
    dataset_limit: int | None = Field(default=None, ge=1, description="Use only the first N tasks of a dataset.")
    builtin_examples: bool = Field(
        default=True,
        description="The built-in tasks show examples and a file that runs them; off: nothing but the hidden tests, "
        "after the end, says whether a solution is right.",
    )
    dataset_skip_broken: bool = Field(
        default=False, description="Leave out rows that cannot become tasks, and say how many, instead of stopping."
    )
    dataset_skip_too_long: bool = Field(
        default=False,
        description="Leave out tasks whose first prompt does not fit max_token_length, and say so, instead of ending.",
    )
    dataset_in_process: Literal["keep", "skip", "refuse"] = Field(
        default="skip",
        description="Training tasks whose hidden tests must share a process with the solution, where it is easier to "
        "cheat: keep them with a warning, leave them out, or stop. Evaluation keeps them, and marks and counts them.",
    )
    eval_fraction: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of the dataset's tasks that is held out for evaluation, by a hash of the task's id. The "
        "built-in tasks, being only eight, are used for both.",
    )
    eval_seed: int = Field(default=0, ge=0, description="Seed of that hash: which tasks are held out.")
    eval_dataset_name: str | None = Field(
        default=None, description="A dataset to evaluate on, named as in dataset_name; nothing is held out then."
    )
    eval_dataset_split: str | None = Field(
        default=None,
        description="Split to evaluate on, of eval_dataset_name (unset: dataset_split) or else of dataset_name.",
    )
    eval_dataset_format: Literal["same", DatasetFormat] = Field(
        default="same", description="Preset of the dataset to evaluate on; same: dataset_format and dataset_fields."
    )
    eval_dataset_fields: dict[str, str] = Field(
        default_factory=dict, description="Overrides of that preset, as in dataset_fields."
    )
    tool_timeout_s: Annotated[float, AGENT] = Field(default=30.0, gt=0, description="Seconds one tool call may take.")
    tool_output_max_chars: Annotated[int, AGENT] = Field(
        default=4000, ge=200, description="Characters of a tool result; what is longer is cut in the middle."
    )
    verify_timeout_s: Annotated[float, REWARD] = Field(
        default=30.0,
        gt=0,
        description="Seconds of processor time the hidden tests of one episode may take, whatever else the machine "
        "does; by the clock at most twenty times as many, and ten more.",
    )

    @model_validator(mode="after")
    def _check_eval_split(self) -> "CodingConfig":
        if self.eval_dataset_split is not None and self.eval_dataset_name is None and self.dataset_name is None:
            raise ValueError("eval_dataset_split is set, but neither eval_dataset_name nor dataset_name is")
        return self
