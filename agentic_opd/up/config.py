"""Settings of `agentic-opd up`: the parts of a loop and its time limits."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Flags = dict[str, Any]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,39}$")]
Port = Annotated[int, Field(ge=1, le=65535)]


class PartConfig(BaseModel):
    """Settings common to all parts."""

    model_config = ConfigDict(extra="forbid")

    flags: Flags = Field(
        default={},
        description="Flags of the part's command, without the dashes; they take precedence.",
    )
    variables: dict[str, str] = Field(
        default={}, description="Environment variables of the part, in addition to this process's."
    )


class ServerConfig(PartConfig):
    """A vLLM server."""

    model: str = Field(description="Checkpoint: a folder or a name on the hub.")
    port: Port = Field(default=8000, description="Port on this machine.")
    serves: Literal["policy", "judge", "teacher"] = Field(
        default="policy",
        description="Role of the server: the policy is sampled and receives new weights, the others keep theirs.",
    )
    devices: str | None = Field(
        default=None,
        description="GPUs that the server may use, in the form of CUDA_VISIBLE_DEVICES: '0,1'. Unset: all.",
    )
    vllm_args: list[str] = Field(default=[], description="Arguments for vLLM itself.")

    @property
    def url(self) -> str:
        """Address of the server, without `/v1`."""
        return f"http://127.0.0.1:{self.port}"


class ApiConfig(PartConfig):
    """Atropos' trajectory API, `run-api`."""

    port: Port = Field(default=8001, description="Port on this machine.")

    @property
    def url(self) -> str:
        """Address of the API."""
        return f"http://127.0.0.1:{self.port}"


class EnvironmentConfig(PartConfig):
    """A producer of groups: `serve`, or the gateway."""

    mode: Literal["serve", "gateway"] = Field(
        default="serve", description="Source of groups: tasks (serve) or live conversations (gateway)."
    )
    script: Path | None = Field(
        default=None,
        description="Script of a custom environment whose `serve` is run. Unset: the package's environment.",
    )
    config: Path | None = Field(default=None, description="YAML file of the environment's settings.")

    @model_validator(mode="after")
    def _check_script(self) -> "EnvironmentConfig":
        if self.script is not None and self.mode == "gateway":
            raise ValueError("script is your own environment, which needs mode serve")
        return self


class TrainerPartConfig(PartConfig):
    """The reference trainer."""

    config: Path | None = Field(default=None, description="YAML file of the trainer's settings.")
    devices: str | None = Field(
        default=None, description="GPUs that the trainer may use, in the form of CUDA_VISIBLE_DEVICES. Unset: all."
    )
    processes: int = Field(
        default=1, ge=1, description="Number of processes that torchrun starts, each with a separate device."
    )


class BrakePartConfig(PartConfig):
    """The evaluation by which the trainer rolls worse weights back: `evaluate` with these settings."""

    script: Path | None = Field(
        default=None, description="Script of a custom environment whose `evaluate` is run. Unset: the package's."
    )
    config: Path | None = Field(default=None, description="YAML file of the environment's settings.")


class UpConfig(BaseModel):
    """A loop: its parts by name, and its time limits."""

    model_config = ConfigDict(extra="forbid")

    output_dir: Path = Field(
        default=Path("runs/up"), description="Folder for logs, groups, metrics, checkpoints and weights."
    )
    servers: dict[Name, ServerConfig] = Field(min_length=1, description="vLLM servers.")
    api: ApiConfig = Field(default_factory=ApiConfig, description="Trajectory API.")
    environments: dict[Name, EnvironmentConfig] = Field(min_length=1, description="Producers of groups.")
    trainer: TrainerPartConfig = Field(
        default_factory=TrainerPartConfig, description="Trainer that learns from the groups."
    )
    brake: BrakePartConfig | None = Field(
        default=None,
        description="Held-out evaluation after pushes, which the trainer's `brake.` flags tune. Unset: no brake.",
    )
    ready_s: float = Field(
        default=900.0, gt=0, description="Seconds that a server may take from its start until it answers."
    )
    stop_s: float = Field(default=60.0, gt=0, description="Seconds that a part may take to stop before it is killed.")

    @property
    def policies(self) -> list[ServerConfig]:
        return [server for server in self.servers.values() if server.serves == "policy"]

    @model_validator(mode="after")
    def _check_parts(self) -> "UpConfig":
        names = [*self.servers, "api", *self.environments, "trainer"]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two parts have the same name: {', '.join(twice)}")
        ports = [self.api.port, *(server.port for server in self.servers.values())]
        if shared := sorted({port for port in ports if ports.count(port) > 1}):
            raise ValueError(f"two parts have the same port: {', '.join(map(str, shared))}")
        if not self.policies:
            raise ValueError("no server serves the policy")
        for role in ("judge", "teacher"):
            if sum(server.serves == role for server in self.servers.values()) > 1:
                raise ValueError(f"several servers serve the {role}, but an environment uses only one")
        if len(models := {server.model for server in self.policies}) > 1:
            raise ValueError(f"servers of the policy have different models: {', '.join(sorted(models))}")
        return self
