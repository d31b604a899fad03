"""Scored groups of a file -> recorded episodes with their tasks, to be replayed. Pure.

ScoredGroup, tasks of the world -> recorded_episodes -> RecordedEpisode: the branches of one rollout as a Recording
"""

from collections.abc import Mapping
from dataclasses import dataclass

from agentic_opd.core.types import Recording, Task, World
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.replay import ReplayError
from agentic_opd.wire.group import ScoredGroup


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """A rollout of a group, as it can be replayed; `sequences` are the indices of its branches in the group."""

    recording: Recording
    sequences: tuple[int, ...]

    def position(self, turn_index: int) -> tuple[int, int]:
        """Return the index of the turn's sequence in the group, and the turn's number in this sequence, from 0."""
        raise NotImplementedError


def recorded_episodes(
    group: ScoredGroup, tasks: Mapping[str, Task], world: World, chat: ChatFormat
) -> list[RecordedEpisode | ReplayError]:
    """Return the rollouts of a group, in order; an error in place of each that can't be replayed.

    `tasks` are the world's, by id. `chat` has the world's tools.
    """
    raise NotImplementedError
