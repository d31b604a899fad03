"""Settings of the sandbox: which backend, and what its processes may use."""

from collections.abc import Collection
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field, SecretStr, model_validator

from agentic_opd.settings.fields import RUN_ONLY, SANDBOX, Url


class SandboxConfig(BaseModel):
    """Where model-written code runs, and what it may use."""

    setting_group: ClassVar = SANDBOX

    sandbox_backend: Literal["bubblewrap", "docker", "swerex"] = Field(
        default="bubblewrap",
        description="Isolation of model-written code: bubblewrap (namespaces of this machine), docker (containers "
        "of Docker or podman), or swerex (a SWE-ReX server, extra [swerex]).",
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
    sandbox_swerex_url: Url | None = Field(
        default=None, description="Server for sandbox_backend swerex, for example http://127.0.0.1:8880."
    )
    sandbox_swerex_token: SecretStr | None = Field(
        default=None, description="Token of the SWE-ReX server, the value of its --auth-token."
    )
    sandbox_swerex_servers: Annotated[dict[str, Url], RUN_ONLY] = Field(
        default_factory=dict,
        description="sandbox_backend swerex: image -> its server, for tasks that name an image, since a server is one "
        "machine or container. All have sandbox_swerex_token.",
    )
    sandbox_memory_mb: int = Field(
        default=1024,
        ge=64,
        description="Memory limit of a whole sandbox in MiB, including its processes, their shared memory and files "
        "in memory. With swerex, the limit applies to the address space of each process.",
    )
    sandbox_file_mb: int = Field(
        default=64, ge=1, description="Maximum size of each file that a process writes, in MiB."
    )
    sandbox_disk_mb: int = Field(
        default=512, ge=1, description="Maximum total size of a sandbox's files, in MiB; swerex does not enforce it."
    )

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

    @property
    def task_images(self) -> Collection[str] | None:
        """Return the images that tasks may name; None: any."""
        if self.sandbox_backend == "docker":
            return None
        return self.sandbox_swerex_servers.keys() if self.sandbox_backend == "swerex" else ()

    @model_validator(mode="after")
    def _check_warm(self) -> "SandboxConfig":
        if self.sandbox_warm and self.sandbox_backend != "docker":
            raise ValueError(
                f"sandbox_warm needs sandbox_backend docker, got {self.sandbox_backend}: the others start in "
                "milliseconds"
            )
        return self

    @model_validator(mode="after")
    def _check_swerex(self) -> "SandboxConfig":
        if self.sandbox_backend == "swerex" and None in (self.sandbox_swerex_url, self.sandbox_swerex_token):
            raise ValueError("sandbox_backend swerex needs sandbox_swerex_url and sandbox_swerex_token")
        return self
