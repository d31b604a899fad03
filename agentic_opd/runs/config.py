"""Settings of a run: its order, how much of it happens at once, and whether it continues an earlier one."""

from pydantic import BaseModel, Field, model_validator


class RunConfig(BaseModel):
    """How a run is run."""

    seed: int = Field(default=0, ge=0, description="Seed of the order in which tasks are drawn.")
    eval_samples: int = Field(default=1, ge=1, description="Samples of each task in an evaluation, for pass@k.")
    eval_temperature: float = Field(default=0.0, ge=0.0, le=2.0, description="Sampling temperature of evaluations.")
    max_concurrent_episodes: int = Field(default=64, ge=1, description="Episodes that run at the same time.")
    max_concurrent_groups: int = Field(default=8, ge=1, description="Groups that run at the same time.")
    server_retry_s: float = Field(
        default=60.0, ge=0, description="Seconds to go on asking a server that does not answer before giving up."
    )
    resume: bool = Field(default=False, description="Continue the file of an earlier run; goes before overwrite.")
    overwrite: bool = Field(default=False, description="Replace the file of an earlier run.")

    @model_validator(mode="after")
    def _check_samples(self) -> "RunConfig":
        if self.eval_samples > 1 and self.eval_temperature == 0.0:
            raise ValueError(
                "eval_samples above 1 needs an eval_temperature above 0: at temperature 0 all samples are the same"
            )
        return self
