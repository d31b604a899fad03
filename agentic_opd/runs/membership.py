"""An environment's registration at a trajectory API, renewed if the API may have restarted (I/O).

The API numbers environments from 0 and keeps the ids in memory only. After a restart it may give our id to another
environment. The environment therefore registers again after every outage and on every new connection. Its name is
unique, and the API counts the registrations per name. A count of 0 means that the API is new. A higher count means that
it is the same API; the earlier registration is then removed, because it would still count in the weights.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from agentic_opd.core.errors import ConfigError, ServerUnreachableError
from agentic_opd.core.notices import Notices
from agentic_opd.core.trajectory_api import (
    EnvDescription,
    QueueStatus,
    Registration,
    TrainerInfo,
    TrajectoryApi,
    UnknownEnvError,
)
from agentic_opd.wire.group import ScoredGroup

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

_PATIENCE_S = 1.0
"""Pause in seconds between attempts to reach the API."""


class Membership:
    """One environment at one API; `registration` and `trainer` are the API's latest answers."""

    def __init__(self, api: TrajectoryApi, env: EnvDescription, notices: Notices) -> None:
        """Choose a unique name; the API is not contacted yet."""
        self.api = api
        self.env = replace(env, name=f"{env.name}-{secrets.token_hex(4)}")
        self.registration: Registration | None = None
        self.trainer = TrainerInfo(batch_size=-1, max_token_len=-1)
        self.new_apis = 0
        """Number of times that the API was found to be new, without the groups sent before."""
        self._notices = notices
        self._is_sure = False
        self._connections = 0
        self._step = 0

    @property
    def is_sure(self) -> bool:
        """Whether the API is certainly the one that issued our id."""
        return self._is_sure and self.api.connections == self._connections

    async def ensure(self) -> Registration:
        """Register unless the registration is certainly valid; wait for the API and for a trainer.

        Raises:
            ConfigError: a group does not fit the trainer's batches.
            ServerRequestError: the server is not a trajectory API.
        """
        waiting = f"waiting for a trainer to ask {self.api.url} for a batch"
        while self.registration is None or not self.is_sure:
            registration = await self._until_answered(partial(self.api.register, self.env))
            if registration is None:
                self._notices.say_once(waiting)
                await asyncio.sleep(_PATIENCE_S)
                continue
            self._notices.forget(waiting)
            before, self.registration = self.registration, registration
            self._is_sure, self._connections = True, self.api.connections
            if before is not None:
                await self._replace(before, registration)
            self.trainer = await self._until_answered(self.api.info)
            self._step = registration.starting_step
            self._check_sizes()
        return self.registration

    async def _replace(self, before: Registration, now: Registration) -> None:
        if now.wandb_name == f"{self.env.name}_0":
            self.new_apis += 1
            logger.warning("%s is a new API, or its data was reset: registered again", self.api.url)
        else:
            await self._until_answered(partial(self.api.disconnect, before.env_id))

    def _check_sizes(self) -> None:
        if 0 < self.trainer.batch_size < self.env.group_size:
            raise ConfigError(
                f"a group of {self.env.group_size} rollouts does not fit the trainer's batches of "
                f"{self.trainer.batch_size}: lower env.group_size, or raise the trainer's batch size"
            )
        if self.trainer.batch_size > 0 and self.trainer.batch_size % self.env.group_size:
            logger.warning(
                "the trainer's batches of %d are not a multiple of env.group_size (%d): the API makes one only if "
                "groups of other environments fill it up",
                *(self.trainer.batch_size, self.env.group_size),
            )

    async def status(self) -> QueueStatus:
        """Return the API's status for this environment; register again if needed.

        Raises:
            ConfigError, ServerRequestError: as `ensure`.
        """
        while True:
            registration = await self.ensure()
            try:
                status = await self._until_answered(partial(self.api.status, registration.env_id))
            except UnknownEnvError:
                self._is_sure = False
                await asyncio.sleep(_PATIENCE_S)
                continue
            if status.current_step >= self._step and self.is_sure:
                self._step = status.current_step
                return status
            self._is_sure = False

    async def send(self, group: ScoredGroup) -> None:
        """Try once to send a group; call only if `is_sure`.

        Raises:
            ServerUnreachableError: no answer; the API may have received the group.
            ServerRequestError: the API refused the group.
        """
        assert self.registration is not None
        try:
            await self.api.send(await asyncio.to_thread(group.to_wire), self.registration.env_id)
        except ServerUnreachableError:
            self._is_sure = False
            raise

    async def leave(self) -> None:
        """Unregister, if the registration is certainly valid.

        Raises:
            ServerUnreachableError, ServerRequestError: as `JsonClient.request`.
        """
        if self.registration is not None and self.is_sure:
            await self.api.disconnect(self.registration.env_id)

    async def _until_answered(self, ask: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        waiting = f"waiting for the trajectory API at {self.api.url}"
        while True:
            try:
                answer = await ask()
            except ServerUnreachableError as error:
                self._is_sure = False
                self._notices.say_once(waiting, str(error))
                await asyncio.sleep(_PATIENCE_S)
            else:
                self._notices.forget(waiting)
                return answer
