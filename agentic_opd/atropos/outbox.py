"""An environment's registration at a trajectory API, and the finished groups that wait to be sent to it (I/O).

Groups are sent oldest first and kept during outages. A group whose answer was lost is sent again under the same
`group_id`, by which the trainer's client drops the repetition.
"""

import asyncio
import logging
import secrets
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from agentic_opd.atropos.api import (
    EnvDescription,
    QueueStatus,
    Registration,
    TrainerInfo,
    TrajectoryApi,
    UnknownEnvError,
)
from agentic_opd.core.errors import ConfigError, NotSentError, ServerRequestError, ServerUnreachableError
from agentic_opd.core.notices import Notices
from agentic_opd.core.types import IGNORED
from agentic_opd.wire.group import ScoredGroup, ScoredRollout
from agentic_opd.wire.packed import packed

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

_PATIENCE_S = 1.0
"""Pause in seconds between attempts to reach the API."""
_SENT_AT_ONCE = 4
_MANY_SKIPPED = 20
"""Number of consecutive skipped groups per warning."""


class Membership:
    """One environment at one API; `registration` and `trainer` are the API's latest answers.

    The API numbers environments from 0 and keeps the ids in memory only. After a restart it may give our id to another
    environment. The environment therefore registers again after every outage and on every new connection. Its name is
    unique, and the API counts the registrations per name. A count of 0 means that the API is new. A higher count means
    that it is the same API; the earlier registration is then removed, because it would still count in the weights.
    """

    def __init__(self, api: TrajectoryApi, env: EnvDescription, *, packs_rows: bool = False) -> None:
        """Choose a unique name; the API is not contacted yet. `packs_rows`: send rows as text (wire/packed.py)."""
        self.api, self._packs_rows = api, packs_rows
        self.env = replace(env, name=f"{env.name}-{secrets.token_hex(4)}")
        self.registration: Registration | None = None
        self.trainer = TrainerInfo(batch_size=-1, max_token_len=-1)
        self.new_apis = 0
        """Number of times that the API was found to be new, without the groups sent before."""
        self.notices = Notices()
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
                self.notices.say_once(waiting)
                await asyncio.sleep(_PATIENCE_S)
                continue
            self.notices.forget(waiting)
            before, self.registration = self.registration, registration
            self._is_sure, self._connections = True, self.api.connections
            if before is not None and registration.wandb_name == f"{self.env.name}_0":
                self.new_apis += 1
                logger.warning("%s is a new API, or its data was reset: registered again", self.api.url)
            elif before is not None:
                await self._until_answered(partial(self.api.disconnect, before.env_id))
            self.trainer = await self._until_answered(self.api.info)
            self._step = registration.starting_step
            self._check_sizes()
        return self.registration

    def _check_sizes(self) -> None:
        batch, group = self.trainer.batch_size, self.env.group_size
        if 0 < batch < group:
            raise ConfigError(
                f"a group of {group} rollouts does not fit the trainer's batches of {batch}: lower env.group_size, or "
                "raise the trainer's batch size"
            )
        if batch > 0 and batch % group:
            logger.warning(
                "the trainer's batches of %d are not a multiple of env.group_size (%d): the API makes one only if "
                "groups of other environments fill it up",
                *(batch, group),
            )

    async def status(self) -> QueueStatus:
        """Return the API's status for this environment; register again if needed."""
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

    async def body(self, group: ScoredGroup) -> bytes:
        """Return the request that sends a group under the latest registration; it is made in a thread."""
        assert self.registration is not None
        env_id = self.registration.env_id

        def build() -> bytes:
            line = packed(group.to_wire()) if self._packs_rows else group.to_wire()
            return self.api.body_of(line, env_id)

        return await asyncio.to_thread(build)

    async def send(self, body: bytes) -> None:
        """Try once to send a group; call only if `is_sure`, with a body of this registration.

        Raises:
            ServerUnreachableError: no answer; the API may have received the group.
            ServerRequestError: the API refused the group.
        """
        try:
            await self.api.send(body)
        except ServerUnreachableError:
            self._is_sure = False
            raise

    async def leave(self) -> None:
        """Unregister, if the registration is certainly valid."""
        if self.registration is not None and self.is_sure:
            await self.api.disconnect(self.registration.env_id)

    async def _until_answered(self, ask: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        waiting = f"waiting for the trajectory API at {self.api.url}"
        while True:
            try:
                answer = await ask()
            except ServerUnreachableError as error:
                self._is_sure = False
                self.notices.say_once(waiting, str(error))
                await asyncio.sleep(_PATIENCE_S)
            else:
                self.notices.forget(waiting)
                return answer


@dataclass
class SentCounts:
    """Counts of finished groups by result; `str()` gives a summary line."""

    sent: int = 0
    repeated: int = 0
    """Groups sent again because the answer was lost; the API may have them twice, with the same `group_id`."""
    skipped: Counter[str] = field(default_factory=Counter[str])
    """Skipped groups by reason: too_long, equal_scores, refused."""

    def __str__(self) -> str:
        skipped = "".join(f", {count} skipped ({reason})" for reason, count in sorted(self.skipped.items()))
        return f"{self.sent} groups sent ({self.repeated} twice){skipped}"


class Outbox:
    """Finished groups of one environment, waiting for one API; `counts` is updated in place."""

    def __init__(self, member: Membership, counts: SentCounts) -> None:
        self._member, self._counts = member, counts
        self._groups: deque[ScoredGroup] = deque()
        self._unanswered: ScoredGroup | None = None
        self._skips_in_a_row = 0

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: ScoredGroup) -> None:
        """Queue a finished group; skip parts with more tokens than the trainer accepts."""
        limit = self._member.trainer.max_token_len
        for part in parts(group, self._member.env.group_size):
            longest = max(len(rollout.tokens_T) for rollout in part.rollouts)
            if 0 < limit <= longest:
                self.skip("too_long", f"it has {longest} tokens, the trainer takes less than {limit}")
            else:
                self._groups.append(part)

    def skip(self, reason: str, why: str) -> None:
        """Count a group that is not sent, and log the reason."""
        self._counts.skipped[reason] += 1
        self._skips_in_a_row += 1
        self._member.notices.say_once(f"groups that the trainer can't take are not sent ({reason})", why)
        if self._skips_in_a_row % _MANY_SKIPPED == 0:
            logger.warning("the last %d groups were all not sent: the trainer waits. %s", self._skips_in_a_row, why)

    async def send(self) -> None:
        """Send a few of the queued groups, oldest first; stop at the first one that can't be sent now.

        Groups may finish faster than they are sent, so sending all of them would never end.
        """
        if not self._member.is_sure:
            return
        groups = list(self._groups)[:_SENT_AT_ONCE]
        # The next bodies are made while one is sent.
        bodies = [asyncio.create_task(self._member.body(group)) for group in groups]
        try:
            for group, body in zip(groups, bodies, strict=True):
                if not self._member.is_sure or not await self._is_done(group, await body):
                    return
                self._groups.popleft()
        finally:
            for body in bodies:
                body.cancel()
            await asyncio.gather(*bodies, return_exceptions=True)

    async def _is_done(self, group: ScoredGroup, body: bytes) -> bool:
        """Send the oldest group and count the result; return whether it is not to be sent again."""
        is_again, self._unanswered = group is self._unanswered, group
        try:
            await self._member.send(body)
        except NotSentError:
            self._unanswered = group if is_again else None
            return False
        except ServerUnreachableError:
            self._counts.repeated += is_again
            return False
        except ServerRequestError as error:
            self.skip("refused", str(error))
        else:
            self._counts.sent += 1
            self._skips_in_a_row = 0
        self._counts.repeated += is_again
        self._unanswered = None
        return True

    async def send_all(self) -> None:
        """Send all groups, and wait for the API as long as necessary.

        A cancelled request closes its connection, so the registration may have to be renewed first.
        """
        while self._groups or not self._member.is_sure:
            await self._member.ensure()
            await self.send()


def parts(group: ScoredGroup, group_size: int) -> Iterator[ScoredGroup]:
    """Split a group into items that the API can batch: of `group_size` sequences, or of one.

    A group with one sequence per rollout is one item. If rollouts have several branches, one item holds the branch with
    the most sampled tokens of each rollout, and every other branch is a separate item. Each item carries the scores of
    all rollouts (`rollout_scores`), so that the reward reaches every branch and each rollout counts once, and those of
    all turns by their number (`turn_scores`). If rollouts are missing, as in a group of conversations that was closed
    early, each sequence is a separate item.
    """
    firsts = group.first_turns
    rollouts = [
        replace(rollout, first_turn=first or None) for rollout, first in zip(group.rollouts, firsts, strict=True)
    ]
    best: dict[int, ScoredRollout] = {}
    for rollout, number in zip(rollouts, group.rollout_numbers, strict=True):
        if number not in best or _sampled(rollout) > _sampled(best[number]):
            best[number] = rollout
    full = list(best.values()) if len(best) == group_size else []
    alone = [[rollout] for rollout in rollouts if not any(rollout is chosen for chosen in full)]
    items = [*([full] if full else []), *alone]
    if len(items) == 1:
        yield group
        return
    for index, item in enumerate(items):
        outcomes = Counter(turn.outcome.value for rollout in item for turn in rollout.turns or ())
        yield replace(
            group,
            rollouts=tuple(item),
            group_id=f"{group.group_id}/{index}",
            distillation=group.distillation and replace(group.distillation, outcomes=outcomes),
            rollout_scores=group.compared_scores or None,
            turn_scores=group.compared_turns or None,
        )


def _sampled(rollout: ScoredRollout) -> int:
    return sum(mask != IGNORED for mask in rollout.masks_T)
