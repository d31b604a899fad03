"""The trainer's side of the trajectory API: register, then fetch batches (I/O)."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from agentic_opd.atropos.api import TrainerDescription, TrajectoryApi, UnknownTrainerError
from agentic_opd.core.errors import ConfigError, ServerUnreachableError
from agentic_opd.core.notices import Notices
from agentic_opd.wire.checks import read_group
from agentic_opd.wire.group import ScoredGroup
from agentic_opd.wire.packed import unpacked

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_PATIENCE_S = 1.0
_LONG_S = 60.0
"""Seconds without a batch after which the client logs a hint."""
_WAITING = "waiting for the trajectory API"
_NO_BATCH = "waiting for a batch"
_NO_BATCH_HINT = (
    "Groups come from environments: is one serving to this trajectory API? `serve` ends once the API has counted the "
    "last batch; after that, a trainer or an API that was started again needs it to be started again too."
)
_REMEMBERED = 100_000
"""Number of group ids remembered to detect duplicates."""


class TrainerClient:
    """Fetches batches; waits through an outage of the API, and registers again after its restart.

    Duplicate groups are dropped, which makes the batch smaller; `duplicates` counts them. If the API's response to a
    group was lost, `serve` sends the group again with the same `group_overrides["group_id"]`, and the API does not
    detect the repetition.

    If the API's response with a batch was lost, the API has counted that batch and does not send it again. The batch
    becomes an empty step; `lost_batches` counts them.
    """

    def __init__(
        self, url: str, trainer: TrainerDescription, until_open: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Create a client of the API at `url`; no request is sent yet.

        `register` replaces the `starting_step` of `trainer`. `until_open` is awaited before each request for a batch,
        so that the API keeps the groups while no step may begin.
        """
        self._until_open = until_open
        self._trainer = trainer
        self._is_known = False
        self._is_registered = False
        self.duplicates = 0
        self.lost_batches = 0
        self._notices = Notices()
        self._received_ids: dict[str, None] = {}
        self._api = TrajectoryApi(url)

    @property
    def state(self) -> Mapping[str, Any]:
        """Nothing: the API has the queue."""
        return {}

    @property
    def metrics(self) -> dict[str, float]:
        return {"duplicates": self.duplicates, "lost_batches": self.lost_batches}

    def resume(self, total_steps: int, state: Mapping[str, Any]) -> None:
        """Continue the run of a checkpoint.

        If that run had the same number of steps, a registration at the API that matches step and settings is the run's
        own, and is kept.

        Raises:
            ConfigError: that run took its batches from files.
        """
        if state:
            raise ConfigError(
                f"the checkpoint's run trained on the files {[path for path, _ in state['files']]}. Name them with "
                "groups to continue it, or start another run in another output_dir, with model set to the folder of "
                "its weights."
            )
        self._is_known = total_steps == self._trainer.num_steps

    def return_to(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; the API has given the batches since then."""

    async def register(self, step: int) -> None:
        """Register this trainer, which is at `step`. The first request for a batch opens the API to environments.

        The API is reset, and its queue dropped, if it is registered for another run or is at another step. Otherwise it
        would report the other run's last step to environments, or count batches that no trainer received.

        Raises:
            ServerRequestError: the API refused the registration.
            ServerMismatchError: the server at this URL is not a trajectory API.
        """
        trainer = replace(self._trainer, starting_step=step)
        while True:
            try:
                await self._reset_other_run(step)
                await self._api.register_trainer(trainer)
                if (await self._api.info()).batch_size > 0:
                    self._is_known = self._is_registered = True
                    self._notices.forget(_WAITING)
                    return
                await self._api.reset()  # The API ignores a registration if a group arrived between the reset and it.
            except ServerUnreachableError as error:
                self._notices.say_once(_WAITING, str(error))
                await asyncio.sleep(_PATIENCE_S)

    async def _reset_other_run(self, step: int) -> None:
        status, info = await self._api.status(), await self._api.info()
        batch_size, api_step = self._trainer.batch_size, status.current_step
        is_same = (info.batch_size, info.max_token_len) == (batch_size, self._trainer.max_token_len)
        # After our registration, an API that is ahead of us has batches for us, or a response of it was lost.
        is_same = is_same and (api_step >= step if self._is_registered else api_step == step)
        if info.batch_size > 0 and not (is_same and self._is_known):
            logger.warning(
                "the trajectory API is at step %d with batches of %d, left by %s; this trainer is at step %d with "
                "batches of %d. The API is reset, and drops its queue: %d groups, and the batches that it has "
                "assembled already",
                *(api_step, info.batch_size, "this run" if self._is_known else "another run"),
                *(step, batch_size, status.queue_size),
            )
            await self._api.reset()

    async def batch(self, step: int) -> list[ScoredGroup]:
        """Wait for the next batch, for the trainer's `step`.

        The batch is empty if all its groups are duplicates, or if the API's response with it was lost.

        Raises:
            ServerRequestError: the API refused the request.
            ServerMismatchError: the server at this URL is not a trajectory API.
            WireError: a group can't be read; the message names the group and the error.
        """
        start = time.monotonic()
        while True:
            if self._until_open is not None:
                await self._until_open()
            try:
                batch = await self._ask_for_batch(step)
            except ServerUnreachableError as error:
                self._notices.say_once(_WAITING, str(error))
                await asyncio.sleep(_PATIENCE_S)
                await self.register(step)
                continue
            self._notices.forget(_WAITING)
            if batch is not None:
                self._notices.forget(_NO_BATCH)
                return batch
            if time.monotonic() - start > _LONG_S:
                self._notices.say_once(_NO_BATCH, f"none for {_LONG_S:g} s. {_NO_BATCH_HINT}")
            await asyncio.sleep(_POLL_S)

    async def _ask_for_batch(self, step: int) -> list[ScoredGroup] | None:
        try:
            batch = await self._api.batch()
        except UnknownTrainerError:
            logger.warning("the trajectory API knows no trainer (it was restarted): registering again")
            await self.register(step)
            return None
        if batch is not None:
            origins = [f"group {number} of the batch for step {step + 1}" for number in range(len(batch))]
            groups = [read_group(unpacked(row, origin), origin) for row, origin in zip(batch, origins, strict=True)]
            return [_as_sent(group) for group in groups if self._is_fresh(group)]
        # The API has no batch ready. If it is ahead of our step, a response with a batch was lost.
        if (await self._api.status()).current_step <= step:
            return None
        self.lost_batches += 1
        logger.warning("the batch of step %d was lost with an answer of the trajectory API: no update", step + 1)
        return []

    def _is_fresh(self, group: ScoredGroup) -> bool:
        group_id = group.group_id
        if group_id is None:
            return True
        if group_id in self._received_ids:
            self.duplicates += 1
            logger.warning("the group %s was received twice, and is trained on once", group_id)
            return False
        self._received_ids[group_id] = None
        if len(self._received_ids) > _REMEMBERED:
            del self._received_ids[next(iter(self._received_ids))]
        return True

    async def close(self) -> None:
        await self._api.close()


def _as_sent(group: ScoredGroup) -> ScoredGroup:
    """Return the group without the fields that the API adds: `env_id`, and null for each field that was not sent."""
    extra = {name: value for name, value in group.extra.items() if value is not None and name != "env_id"}
    return replace(group, extra=extra)
