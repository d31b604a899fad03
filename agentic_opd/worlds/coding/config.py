"""Settings of the coding world: its tasks and its hidden tests."""

from typing import Annotated, Literal

from pydantic import Field

from agentic_opd.settings.fields import FIRST, REWARD
from agentic_opd.worlds.config import DatasetFormat
from agentic_opd.worlds.settings import WorldSettings


class CodingSettings(WorldSettings):
    """The source of coding tasks, and the limit of their hidden tests."""

    type: Literal["coding"] = "coding"  # type: ignore[mutable-override]

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
    limit: int | None = Field(default=None, ge=1, description="Use only the first N tasks of a dataset.")
    builtin_examples: bool = Field(
        default=True,
        description="Show examples, and a file that runs them, in the built-in tasks. Off: only the hidden tests, "
        "after the episode, tell whether a solution is right.",
    )
    skip_broken: bool = Field(
        default=False, description="Skip rows that cannot become tasks, and report their number, instead of failing."
    )
    in_process: Literal["keep", "skip", "refuse"] = Field(
        default="skip",
        description="Training tasks whose hidden tests run in the solution's process, where cheating is easier: "
        "keep them with a warning, skip them, or refuse to start. Evaluation keeps them, marks them and counts them.",
    )
    verify_timeout_s: Annotated[float, REWARD] = Field(
        default=30.0,
        gt=0,
        description="Limit for the hidden tests of one episode in seconds of processor time, independent of other "
        "load. The limit by the clock is at most twenty times as many seconds, plus ten.",
    )
