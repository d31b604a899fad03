"""Settings of the sandbox: where model-written code runs, and what its processes may use."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from agentic_opd.settings.fields import FIRST, RUN_ONLY, SANDBOX, Kinds, Section


class SandboxConfig(Section):
    """Settings that all types of sandboxes have."""

    setting_group: ClassVar = SANDBOX

    type: Annotated[Any, FIRST] = Field(
        description="Isolation of model-written code: bubblewrap (namespaces of this machine) or docker (containers "
        "of Docker or podman).",
    )
    memory_mb: int = Field(
        default=1024,
        ge=64,
        description="Memory limit of a whole sandbox in MiB, including its processes, their shared memory and files "
        "in memory.",
    )
    file_mb: int = Field(default=64, ge=1, description="Maximum size of each file that a process writes, in MiB.")
    disk_mb: int = Field(default=512, ge=1, description="Maximum total size of a sandbox's files, in MiB.")
    max_concurrent: Annotated[int | None, RUN_ONLY] = Field(
        default=None,
        ge=1,
        description="Maximum number of sandboxes in use at a time, for example memory of the machine / memory_mb; "
        "further episodes wait. Unset: no limit.",
    )


class BubblewrapConfig(SandboxConfig):
    """Namespaces of this machine."""

    type: Literal["bubblewrap"] = "bubblewrap"


class DockerConfig(SandboxConfig):
    """Containers of Docker or podman."""

    type: Literal["docker"] = "docker"
    container_command: str = Field(
        default="docker",
        min_length=1,
        description="Command line of docker or podman, with its path and options if needed, for example `podman "
        "--runtime runc`.",
    )
    image: str = Field(
        default="python:3.11-slim",
        min_length=1,
        description="Image with Python 3.8 or later (`python`), a shell, coreutils, tar and findutils. It is never "
        "pulled, so it must be present on this machine.",
    )
    warm: Annotated[int, RUN_ONLY] = Field(
        default=0,
        ge=0,
        description="Number of further containers that are started ahead, so that an episode does not wait for its "
        "start (worlds other than harbor). A container is used by one episode only.",
    )


SANDBOX_KINDS = Kinds.of(bubblewrap=BubblewrapConfig, docker=DockerConfig)
AnySandbox = Annotated[SandboxConfig, SANDBOX_KINDS]
"""Type of a setting that is a sandbox, with the settings of its type."""
