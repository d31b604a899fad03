"""Queue of finished groups for a trajectory API: sent oldest first, kept during outages (I/O)."""

import logging
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from agentic_opd.core.errors import ServerRequestError, ServerUnreachableError
from agentic_opd.core.notices import Notices
from agentic_opd.core.types import IGNORED
from agentic_opd.runs.membership import Membership
from agentic_opd.wire.group import ScoredGroup, ScoredRollout

logger = logging.getLogger(__name__)

_MANY_SKIPPED = 20
"""Number of consecutive skipped groups per warning."""


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
    """Finished groups of one environment, waiting for one API."""

    def __init__(self, member: Membership, notices: Notices, counts: SentCounts) -> None:
        """Begin empty.

        Args:
            member: The environment's registration at the API.
            notices: Logs each problem once.
            counts: Updated in place.
        """
        self._member, self._notices, self._counts = member, notices, counts
        self._groups: deque[ScoredGroup] = deque()
        self._unanswered: ScoredGroup | None = None
        self._skips_in_a_row = 0

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: ScoredGroup) -> None:
        """Queue a finished group; skip parts with more tokens than the trainer accepts."""
        for part in parts(group, self._member.env.group_size):
            self._add(part)

    def _add(self, group: ScoredGroup) -> None:
        longest, most = max(len(one.tokens_T) for one in group.rollouts), self._member.trainer.max_token_len
        if 0 < most <= longest:
            self.skip("too_long", f"it has {longest} tokens, the trainer takes less than {most}")
        else:
            self._groups.append(group)

    def skip(self, reason: str, why: str) -> None:
        """Count a group that is not sent, and log the reason."""
        self._counts.skipped[reason] += 1
        self._skips_in_a_row += 1
        self._notices.say_once(f"groups that the trainer can't take are not sent ({reason})", why)
        if self._skips_in_a_row % _MANY_SKIPPED == 0:
            logger.warning("the last %d groups were all not sent: the trainer waits. %s", self._skips_in_a_row, why)

    async def send(self) -> None:
        """Send queued groups, oldest first; stop at the first one that can't be sent now."""
        while self._groups and self._member.is_sure:
            group = self._groups[0]
            self._counts.repeated += group is self._unanswered
            self._unanswered = group
            try:
                await self._member.send(group)
            except ServerUnreachableError:
                return
            except ServerRequestError as error:
                self.skip("refused", str(error))
            else:
                self._counts.sent += 1
                self._skips_in_a_row = 0
            self._unanswered = None
            self._groups.popleft()

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
    all rollouts (`rollout_scores`), so that the reward reaches every branch and each rollout counts once. If rollouts
    are missing, as in a group of conversations that was closed early, each sequence is a separate item.

    Args:
        group: The group of one item, or of one or several sessions.
        group_size: Rollouts of a full group.
    """
    best: dict[int, ScoredRollout] = {}
    number = -1
    for one, is_first in zip(group.rollouts, group.is_first_of_rollout, strict=True):
        number += is_first
        if is_first or _sampled(one) > _sampled(best[number]):
            best[number] = one
    whole = list(best.values()) if len(best) == group_size else []
    alone = [[one] for one in group.rollouts if not any(one is chosen for chosen in whole)]
    items = [*([whole] if whole else []), *alone]
    if len(items) == 1:
        yield group
        return
    for place, item in enumerate(items):
        outcomes = Counter(turn.outcome.value for one in item for turn in one.turns or ())
        yield replace(
            group,
            rollouts=tuple(item),
            group_id=f"{group.group_id}/{place}",
            distillation=group.distillation and replace(group.distillation, outcomes=outcomes),
            rollout_scores=group.compared_scores or None,
        )


def _sampled(one: ScoredRollout) -> int:
    return sum(mask != IGNORED for mask in one.masks_T)
