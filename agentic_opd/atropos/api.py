"""The routes of the trajectory API. Every call is one attempt; a malformed response raises ServerMismatchError."""

import gzip
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, Field

from agentic_opd.core.errors import ServerUnreachableError
from agentic_opd.core.http import JsonClient, read_answer
from agentic_opd.core.text import json_body

AnswerT = TypeVar("AnswerT", bound=BaseModel)

_RUNNING = "run-api --host 127.0.0.1 --port PORT starts a trajectory API."


@dataclass(frozen=True, slots=True)
class EnvDescription:
    """Registration of an environment."""

    name: str
    max_token_length: int
    weight: float
    group_size: int
    min_batch_allocation: float | None


@dataclass(frozen=True, slots=True)
class TrainerDescription:
    """Registration of a trainer; sizes are in sequences and tokens."""

    wandb_group: str
    wandb_project: str
    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int


class Registration(BaseModel):
    """Response to an accepted registration of an environment."""

    env_id: int
    wandb_name: str
    starting_step: int
    num_steps: int


class TrainerInfo(BaseModel):
    """Sizes that the trainer requests; -1 before a trainer has registered."""

    batch_size: int
    max_token_len: int


class QueueStatus(BaseModel):
    """The trainer's step and the queue sizes, in groups of the asking environment's size."""

    current_step: int
    queue_size: int
    self_queue_size: int = 0
    env_weight: float = Field(default=1.0, ge=0.0)
    unallocated_fraction: float = Field(default=1.0, allow_inf_nan=False)
    """Share of each batch that is not promised to any environment (`min_batch_allocation`)."""


class _Outcome(BaseModel):
    status: str = "success"


class _WandbNames(BaseModel):
    project: str | None
    group: str | None


class _Batch(_Outcome):
    batch: list[Any] | None


class UnknownEnvError(Exception):
    """The API does not know this environment: the API was restarted, or its data was reset."""


class UnknownTrainerError(Exception):
    """The API does not know any trainer: the API was restarted, or its data was reset."""


class TrajectoryApi:
    """A client of one API.

    Every method that sends a request raises ServerUnreachableError if the API does not answer, ServerRequestError if it
    refuses the request, and ServerMismatchError if the response is malformed.
    """

    def __init__(self, url: str) -> None:
        """Create a client; no request is sent yet."""
        self.url = url
        self._client = JsonClient(url, retry_s=0.0, timeout_s=120.0, hint=_RUNNING)

    @property
    def connections(self) -> int:
        """Number of connections opened so far; while it does not change, the same process answers."""
        return self._client.connections

    async def register(self, env: EnvDescription) -> Registration | None:
        """Register an environment; return None if no trainer has requested a batch yet."""
        body = asdict(env)
        body["desired_name"] = body.pop("name")
        answer = await self._client.post("/register-env", body)
        if self._read(_Outcome, answer).status != "success":
            return None
        return self._read(Registration, answer)

    async def register_trainer(self, trainer: TrainerDescription) -> None:
        """Register a trainer. The API accepts it only while it has no registration and no groups; see `info`."""
        await self._client.post("/register", asdict(trainer))

    async def info(self) -> TrainerInfo:
        """Return the sizes that the trainer requests."""
        return self._read(TrainerInfo, await self._client.get("/info"))

    async def wandb_info(self) -> tuple[str | None, str | None]:
        """Return the trainer's W&B project and group."""
        names = self._read(_WandbNames, await self._client.get("/wandb_info"))
        return names.project, names.group

    async def status(self, env_id: int | None = None) -> QueueStatus:
        """Return the trainer's step and the queue sizes, from the trainers' route if `env_id` is None.

        Raises:
            UnknownEnvError: the API answers but does not know `env_id`.
        """
        if env_id is None:
            return self._read(QueueStatus, await self._client.get("/status"))
        try:
            answer = await self._client.request("GET", "/status-env", json.dumps({"env_id": env_id}).encode())
        except ServerUnreachableError as error:
            # An API that lost its state answers with 500; another route shows whether it is reachable.
            await self._client.get("/status")
            raise UnknownEnvError(str(error)) from error
        return self._read(QueueStatus, answer)

    async def batch(self) -> list[Any] | None:
        """Return the next batch, scored groups as JSON; None if there are not enough groups.

        Raises:
            UnknownTrainerError: the API does not know any trainer.
        """
        answer = self._read(_Batch, await self._client.get("/batch"))
        if answer.status == "error":
            raise UnknownTrainerError(f"{self.url} knows no trainer")
        return answer.batch

    async def reset(self) -> None:
        """Delete the API's registrations and all its groups."""
        with suppress(ServerUnreachableError):  # The response is not JSON.
            await self._client.get("/reset_data")

    @staticmethod
    def body_of(line: Mapping[str, Any], env_id: int) -> bytes:
        """Return the request that sends one group in the wire format; call it in a thread."""
        return gzip.compress(json_body({**line, "env_id": env_id}), compresslevel=1)

    async def send(self, body: bytes) -> None:
        """Send one scored group (see `body_of`), only over a connection that is open already.

        A restarted API that receives a group before its trainer registers never starts: it takes the trainer for
        registered, and answers every environment that no trainer is registered.

        Raises:
            NotSentError: no connection is open.
        """
        await self._client.request("POST", "/scored_data", body, {"Content-Encoding": "gzip"}, reuse=True)

    async def disconnect(self, env_id: int) -> None:
        """Announce that this environment sends no more groups."""
        await self._client.post("/disconnect-env", {"env_id": env_id})

    async def close(self) -> None:
        await self._client.close()

    def _read(self, model: type[AnswerT], answer: object) -> AnswerT:
        return read_answer(model, answer, self.url, "a trajectory API of this version")
