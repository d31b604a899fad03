"""The environment's side of Atropos' trajectory API (`run-api`): register, ask for the queue, send groups (I/O).

Every call is one attempt; `serve.py` decides what to wait for.
"""

import asyncio
import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from agentic_opd.core.errors import ServerRequestError, ServerUnreachableError
from agentic_opd.core.http import JsonClient

_HINT = "run-api --host 127.0.0.1 --port PORT starts one."

ModelT = TypeVar("ModelT", bound=BaseModel)


class Registration(BaseModel):
    """What the API answers when it takes an environment."""

    env_id: int
    wandb_name: str
    starting_step: int
    num_steps: int


class TrainerInfo(BaseModel):
    """What the trainer asks for; -1 where it does not say."""

    batch_size: int
    max_token_len: int


class QueueStatus(BaseModel):
    """How far the trainer is, and how much waits for it. Sizes are in groups of the asking environment."""

    current_step: int
    queue_size: int
    self_queue_size: int = 0
    env_weight: float = Field(default=1.0, ge=0.0)
    unallocated_fraction: float = 1.0
    """Of each batch: what no environment was promised (`min_batch_allocation`)."""


class UnknownEnvError(Exception):
    """The API does not know this environment: it was started again, or its data was reset."""


@dataclass(frozen=True, slots=True)
class EnvDescription:
    """How an environment presents itself."""

    name: str
    max_token_length: int
    weight: float
    group_size: int
    min_batch_allocation: float | None


class TrajectoryApi:
    """A client of one API."""

    def __init__(self, url: str) -> None:
        """Make a client; nothing is asked yet."""
        self.url = url
        self._client = JsonClient(url, retry_s=0.0, timeout_s=120.0, hint=_HINT)

    @property
    def connections(self) -> int:
        """Connections opened so far; while it stays the same, one process answers."""
        return self._client.connections

    async def register(self, env: EnvDescription) -> Registration | None:
        """Register; None where no trainer has asked for a batch yet.

        Raises:
            ServerUnreachableError, ServerRequestError: as `JsonClient.request`.
        """
        answer = await self._client.post(
            "/register-env",
            {
                "max_token_length": env.max_token_length,
                "desired_name": env.name,
                "weight": env.weight,
                "group_size": env.group_size,
                "min_batch_allocation": env.min_batch_allocation,
            },
        )
        return _parse(Registration, answer, self.url) if answer.get("status") == "success" else None

    async def info(self) -> TrainerInfo:
        """What the trainer asks for.

        Raises:
            ServerUnreachableError, ServerRequestError: as `JsonClient.request`.
        """
        return _parse(TrainerInfo, await self._client.get("/info"), self.url)

    async def wandb_info(self) -> tuple[str | None, str | None]:
        """The trainer's W&B project and group.

        Raises:
            ServerUnreachableError, ServerRequestError: as `JsonClient.request`.
        """
        answer = await self._client.get("/wandb_info")
        return answer.get("project"), answer.get("group")

    async def status(self, env_id: int) -> QueueStatus:
        """How far the trainer is.

        Raises:
            UnknownEnvError: the API is there but does not know `env_id`.
            ServerUnreachableError: nobody answers.
        """
        try:
            answer = await self._client.request("GET", "/status-env", json.dumps({"env_id": env_id}).encode())
        except ServerUnreachableError as error:
            # An API without its state answers this with 500; whether it is there at all, another route tells.
            await self._client.get("/status")
            raise UnknownEnvError(str(error)) from error
        return _parse(QueueStatus, answer, self.url)

    async def send(self, group: Mapping[str, Any], env_id: int) -> None:
        """Send one scored group.

        Raises:
            ServerUnreachableError, ServerRequestError: as `JsonClient.request`.
        """
        data = await asyncio.to_thread(_pack, {**group, "env_id": env_id})
        await self._client.request("POST", "/scored_data", data, {"Content-Encoding": "gzip"})

    async def disconnect(self, env_id: int) -> None:
        """Say that this environment sends no more.

        Raises:
            ServerUnreachableError, ServerRequestError: as `JsonClient.request`.
        """
        await self._client.post("/disconnect-env", {"env_id": env_id})

    async def close(self) -> None:
        """Close pooled connections."""
        await self._client.close()


def _pack(group: Mapping[str, Any]) -> bytes:
    return gzip.compress(json.dumps(group, allow_nan=False).encode(), compresslevel=3)


def _parse(model: type[ModelT], answer: Any, url: str) -> ModelT:
    try:
        return model.model_validate(answer)
    except ValidationError as error:
        raise ServerRequestError(
            f"{url} is no trajectory API, or another version of it: {error.errors(include_url=False)[:3]}", 200
        ) from error
