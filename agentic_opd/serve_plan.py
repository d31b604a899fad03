"""How much `serve` makes: far enough ahead of the trainer that it never waits, and no further (pure)."""

import math
from dataclasses import dataclass

from agentic_opd.trajectory_api import EnvDescription, QueueStatus

_LEAST_PART = 0.01
"""Where others were promised whole batches; as the API does with weights."""


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What one environment makes for one trainer."""

    env: EnvDescription
    max_groups: int
    """Groups under way at the same time, where this environment has the servers to itself."""
    max_batches_offpolicy: int
    total_steps: int | None
    """The trainer's step at which to end; None: its own last one."""
    skip_equal_scores: bool

    def most_under_way(self, status: QueueStatus, *, batch_size: int, finished: int, share: float) -> int:
        """How many groups may be under way now; 0 or less where the queue is full.

        Args:
            status: What the API said last.
            batch_size: Sequences that the trainer takes a step.
            finished: Groups of this environment that wait to be sent.
            share: Which part of `max_groups` may be under way at all, in [0, 1].
        """
        # Sequences of all environments together, as groups of this one's size.
        ahead = self.max_batches_offpolicy * batch_size // self.env.group_size
        part = self._part(status)
        own_room = math.ceil(part * ahead) - status.self_queue_size
        room = ahead - status.queue_size
        if self.env.min_batch_allocation is not None:  # Others may fill the queue; this part of it is ours.
            room = max(room, own_room)
        elif status.unallocated_fraction < 1.0:  # A part of it is theirs.
            room = min(room, own_room)
        return min(math.ceil(min(self.max_groups, ahead) * part * share), room - finished)

    def _part(self, status: QueueStatus) -> float:
        """Which part of all groups this environment should make: what it was promised, or else its weight's part."""
        if self.env.min_batch_allocation is not None:
            return min(1.0, max(self.env.min_batch_allocation, status.env_weight))
        return min(1.0, status.env_weight, max(status.unallocated_fraction, _LEAST_PART))
