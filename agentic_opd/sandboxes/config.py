"""Settings of the sandbox: which backend, and what its processes may use."""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from agentic_opd.settings.fields import RUN_ONLY, SANDBOX


class SandboxConfig(BaseModel):
    """Where model-written code runs, and what it may use."""

    setting_group: ClassVar = SANDBOX

    sandbox_backend: Literal["bubblewrap", "docker"] = Field(
        default="bubblewrap",
        description="Isolation of model-written code: bubblewrap (namespaces of this machine) or docker "
        "(containers of Docker or podman).",
    )
    sandbox_container_command: str = Field(
        default="docker",
        min_length=1,
        description="Command line for sandbox_backend docker: docker or podman, with its path and options if "
        "needed, for example `podman --runtime runc`.",
    )
    sandbox_image: str = Field(
        default="python:3.11-slim",
        min_length=1,
        description="Image for sandbox_backend docker, with Python 3.8 or later (`python`), a shell, coreutils, tar "
        "and findutils. It is never pulled, so it must be present on this machine.",
    )
    sandbox_memory_mb: int = Field(
        default=1024,
        ge=64,
        description="Memory limit of a whole sandbox in MiB, including its processes, their shared memory and files "
        "in memory.",
    )
    sandbox_file_mb: int = Field(
        default=64, ge=1, description="Maximum size of each file that a process writes, in MiB."
    )
    sandbox_disk_mb: int = Field(default=512, ge=1, description="Maximum total size of a sandbox's files, in MiB.")

    sandbox_max_concurrent: Annotated[int | None, RUN_ONLY] = Field(
        default=None,
        ge=1,
        description="Maximum number of sandboxes in use at a time, for example memory of the machine / "
        "sandbox_memory_mb; further episodes wait. Unset: no limit.",
    )
    sandbox_warm: Annotated[int, RUN_ONLY] = Field(
        default=0,
        ge=0,
        description="Number of further containers that are started ahead, so that an episode does not wait for its "
        "start (sandbox_backend docker, worlds other than harbor). A container is used by one episode only.",
    )

    @model_validator(mode="after")
    def _check_warm(self) -> "SandboxConfig":
        if self.sandbox_warm and self.sandbox_backend != "docker":
            raise ValueError(
                f"sandbox_warm needs sandbox_backend docker: a sandbox of {self.sandbox_backend} starts in milliseconds"
            )
        return self
