"""Scored groups of a file -> recorded episodes with their tasks, to be replayed. Pure.

ScoredGroup, tasks of the world -> recorded_episodes -> RecordedEpisode: the branches of one rollout as a Recording
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from agentic_opd.core.attachments.messages import KIND
from agentic_opd.core.text import read_json
from agentic_opd.core.types import Recording, Task, Trace, World
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.loop import first_messages
from agentic_opd.rollout.replay import ReplayError, ReplayOutcome
from agentic_opd.runs.distill import UNMATCHED, has_messages, trace_of
from agentic_opd.wire.group import ScoredGroup, ScoredRollout


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """A rollout of a group, as it can be replayed; `sequences` are the indices of its branches in the group."""

    recording: Recording
    sequences: tuple[int, ...]

    def position(self, turn_index: int) -> tuple[int, int]:
        """Return the index of the turn's sequence in the group, and the turn's number in this sequence, from 0."""
        firsts = [*accumulate((len(trace.turns) for trace in self.recording.traces), initial=0)]
        number = bisect_right(firsts, turn_index) - 1
        return self.sequences[number], turn_index - firsts[number]


def recorded_episodes(
    group: ScoredGroup, tasks: Mapping[str, Task], world: World, chat: ChatFormat
) -> list[RecordedEpisode | ReplayError]:
    """Return the rollouts of a group, in order; an error in place of each that can't be replayed.

    `tasks` are the world's, by id. `chat` has the world's tools.
    """
    by_rollout: dict[int, list[int]] = {}
    for index, number in enumerate(group.rollout_numbers):
        by_rollout.setdefault(number, []).append(index)
    episodes: list[RecordedEpisode | ReplayError] = []
    for indices in by_rollout.values():
        try:
            recording = _recording(group.task_id, [group.rollouts[index] for index in indices], tasks, world, chat)
        except ReplayError as error:
            episodes.append(error)
        else:
            episodes.append(RecordedEpisode(recording, tuple(indices)))
    return episodes


def _recording(
    task_id: str | None, rollouts: Sequence[ScoredRollout], tasks: Mapping[str, Task], world: World, chat: ChatFormat
) -> Recording:
    """Return the branches of a rollout as one recording; raise ReplayError if it can't be replayed."""
    task = tasks.get(task_id or "")
    if task_id is None or task is None:
        name = "no task, as groups of a gateway" if task_id is None else f"the task {task_id!r}, which is not in it"
        raise ReplayError(
            ReplayOutcome.TASK_MISSING, f"the group names {name}: name the world of the run that wrote it (env.world)"
        )
    for rollout in rollouts:
        if problem := _problem(rollout):
            raise ReplayError(ReplayOutcome.UNREADABLE, f"a rollout of {task_id!r} {problem}")
    chat = chat.with_tools(task.tools)
    try:
        traces = tuple(_with_sampling(trace_of(rollout, chat), rollout) for rollout in rollouts)
    except UNMATCHED as error:
        raise ReplayError(ReplayOutcome.UNREADABLE, f"a rollout of {task_id!r} can't be read: {error}") from error
    recorded = list(traces[0].messages[: traces[0].turns[0].message_index])
    if recorded != read_json(json.dumps(first_messages(world, task))):
        raise ReplayError(
            ReplayOutcome.TASK_CHANGED,
            f"the messages before the first turn of {task_id!r} are not those of the world's task: its prompt, its "
            "examples or env.system_prompt have changed since it was recorded",
        )
    return Recording(task_id, traces, task)


def _problem(rollout: ScoredRollout) -> str | None:
    """Return why a rollout can't be replayed, whatever its task; None if it can."""
    if not has_messages(rollout):
        return "has no messages: record it with env.include_messages"
    if rollout.program is not None:
        return "was held by a program (env.agent.command), which can't be started again in the middle"
    if rollout.attachments:
        return f"has {KIND}, which the agent loop does not read"
    if rollout.first_turn:
        return f"begins with turn {rollout.first_turn}: the sequences before it are in another group"
    return None


def _with_sampling(trace: Trace, rollout: ScoredRollout) -> Trace:
    """Return the trace with the distribution of each turn, where it is recorded."""
    distributions = dict(rollout.turn_distributions)
    turns = (replace(turn, sampling=distributions.get((turn.start, turn.end))) for turn in trace.turns)
    return replace(trace, turns=tuple(turns))
