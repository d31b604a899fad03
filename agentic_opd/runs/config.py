"""Settings of a run: its order, how much of it happens at once, and whether it continues an earlier one."""

from typing import Annotated

from pydantic import BaseModel, Field, model_validator

from agentic_opd.settings.groups import CONCURRENCY, EVALUATION, MOST_USED, RUN_ONLY, TASKS


class RunConfig(BaseModel):
    """How a run is run."""

    seed: Annotated[int, TASKS] = Field(default=0, ge=0, description="Seed of the order in which tasks are drawn.")
    eval_samples: Annotated[int, EVALUATION, RUN_ONLY] = Field(
        default=1, ge=1, description="Samples of each task in an evaluation, for pass@k."
    )
    eval_temperature: Annotated[float, EVALUATION, RUN_ONLY] = Field(
        default=0.0, ge=0.0, le=2.0, description="Sampling temperature of evaluations."
    )
    max_concurrent_episodes: Annotated[int, CONCURRENCY, RUN_ONLY] = Field(
        default=64, ge=1, description="Episodes that run at the same time."
    )
    max_concurrent_groups: Annotated[int, CONCURRENCY, RUN_ONLY] = Field(
        default=8, ge=1, description="Groups that run at the same time."
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

    @model_validator(mode="after")
    def _check_samples(self) -> "RunConfig":
        if self.eval_samples > 1 and self.eval_temperature == 0.0:
            raise ValueError(
                "eval_samples above 1 needs an eval_temperature above 0: at temperature 0 all samples are the same"
            )
        return self
