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

    flags: Flags = Field(default={}, description="Flags of its own command, without the dashes; they win.")
    variables: dict[str, str] = Field(default={}, description="Environment variables on top of this process's own.")


class ServerConfig(PartConfig):
    """A vLLM server."""

    model: str = Field(description="Checkpoint: a folder or a name on the hub.")
    port: Port = Field(default=8000, description="Port on this machine.")
    serves: Literal["policy", "judge", "teacher"] = Field(
        default="policy", description="The policy is sampled and gets new weights; the others keep theirs."
    )
    devices: str | None = Field(
        default=None, description="GPUs that it sees, as CUDA_VISIBLE_DEVICES writes them: '0,1'. Unset: all."
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

    mode: Literal["serve", "gateway"] = Field(default="serve", description="Tasks, or conversations that happen.")
    script: Path | None = Field(
        default=None, description="An environment of your own, whose `serve` is run. Unset: this package's."
    )
    config: Path | None = Field(default=None, description="Its YAML file.")

    @model_validator(mode="after")
    def _check_script(self) -> "EnvironmentConfig":
        if self.script is not None and self.mode == "gateway":
            raise ValueError("script is an environment of your own: it goes with mode serve")
        return self


class TrainerPartConfig(PartConfig):
    """The reference trainer."""

    config: Path | None = Field(default=None, description="Its YAML file.")
    devices: str | None = Field(default=None, description="GPUs that it sees. Unset: all.")
    processes: int = Field(
        default=1, ge=1, description="Processes that torchrun starts, each with a device of its own."
    )


class UpConfig(BaseModel):
    """A loop: its parts by name, and its time limits."""

    model_config = ConfigDict(extra="forbid")

    output_dir: Path = Field(
        default=Path("runs/up"), description="Where logs, groups, metrics, checkpoints and weights are written."
    )
    servers: dict[Name, ServerConfig] = Field(min_length=1, description="vLLM servers.")
    api: ApiConfig = Field(default_factory=ApiConfig, description="The trajectory API.")
    environments: dict[Name, EnvironmentConfig] = Field(min_length=1, description="What makes groups.")
    trainer: TrainerPartConfig = Field(default_factory=TrainerPartConfig, description="What trains on them.")
    ready_s: float = Field(default=900.0, gt=0, description="Seconds that a server may take until it answers.")
    stop_s: float = Field(default=60.0, gt=0, description="Seconds that a part may take to end before it is killed.")

    @model_validator(mode="after")
    def _check_parts(self) -> "UpConfig":
        names = [*self.servers, "api", *self.environments, "trainer"]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two parts have the same name: {', '.join(twice)}")
        ports = [self.api.port, *(server.port for server in self.servers.values())]
        if shared := sorted({port for port in ports if ports.count(port) > 1}):
            raise ValueError(f"two parts have the same port: {', '.join(map(str, shared))}")
        if not any(server.serves == "policy" for server in self.servers.values()):
            raise ValueError("no server serves the policy")
        for role in ("judge", "teacher"):
            if sum(server.serves == role for server in self.servers.values()) > 1:
                raise ValueError(f"several servers serve the {role}, and an environment asks one")
        policies = {server.model for server in self.servers.values() if server.serves == "policy"}
        if len(policies) > 1:
            raise ValueError(f"servers of the policy have different models: {', '.join(sorted(policies))}")
        return self
