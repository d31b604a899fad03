"""Groups as a file has them -> the episodes that were recorded."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from agentic_opd.core.types import ProgramRun, Task
from agentic_opd.rollout.replay import ReplayError, ReplayOutcome
from agentic_opd.runs.recorded import RecordedEpisode, recorded_episodes
from agentic_opd.wire.group import ScoredGroup, ScoredRollout
from tests.unit.rollout.test_loop import call
from tests.unit.rollout.test_replay import LINES, TASK, ReadingPolicy, Scene

THOUGHTS = (
    "<think>\nOne.\n</think>\n\n" + call("add", number=2),
    "<think>\nTwo.\n</think>\n\nIs it this?",
    "<think>\nThree.\n</think>\n\nIt is.",
)


def written(*episodes: Any, **fields: Any) -> ScoredGroup:
    """A group of a file with these episodes."""
    rollouts = tuple(
        ScoredRollout.of(episode, trace, include_messages=True, session_id=str(number))
        for number, episode in enumerate(episodes)
        for trace in episode.traces
    )
    group = ScoredGroup(rollouts, item_id="sum#0", task_id=TASK.task_id)
    return ScoredGroup.from_wire(json.loads(json.dumps(replace(group, **fields).to_wire())))


def read(group: ScoredGroup, scene: Scene, task: Task = TASK) -> list[RecordedEpisode | ReplayError]:
    return recorded_episodes(group, {task.task_id: task}, scene.world, scene.chat)


def test_what_is_read_from_a_group_is_replayed_as_what_was_recorded(tokenizer: Any) -> None:
    scene = Scene(tokenizer)
    first, second = scene.recorded(*LINES), scene.recorded("Done.", "Done.")
    episodes = read(written(first, second), scene)
    assert all(isinstance(episode, RecordedEpisode) for episode in episodes)
    for episode, (index, recorded) in zip(episodes, enumerate((first, second)), strict=True):
        assert isinstance(episode, RecordedEpisode)
        assert (episode.sequences, episode.recording.task) == ((index,), TASK)
        assert [(trace.tokens_T, trace.masks_T) for trace in episode.recording.traces] == [
            (trace.tokens_T, trace.masks_T) for trace in recorded.traces
        ]
        continuation = asyncio.run(scene.replay.continued(episode.recording, 1, ReadingPolicy(tokenizer, *LINES[1:])))
        assert continuation.outcome is ReplayOutcome.PLAYED


def test_the_branches_of_a_rollout_are_one_recording(tokenizer: Any) -> None:
    scene = Scene(tokenizer, thinks=True)
    plain, branched = scene.recorded("Done.", "Done."), scene.recorded(*THOUGHTS)
    _, episode = read(written(plain, branched), scene)
    assert isinstance(episode, RecordedEpisode)
    assert episode.sequences == (1, 2)
    assert [episode.position(turn) for turn in range(3)] == [(1, 0), (1, 1), (2, 0)]
    for turn_index in range(3):
        policy = ReadingPolicy(tokenizer, *THOUGHTS[turn_index:])
        continuation = asyncio.run(scene.replay.continued(episode.recording, turn_index, policy))
        assert continuation.outcome is ReplayOutcome.PLAYED
        assert [list(trace.tokens_T) for trace in continuation.episode.traces] == [  # type: ignore[union-attr]
            list(trace.tokens_T) for trace in branched.traces
        ]


@pytest.mark.parametrize(
    ("task", "outcome", "text"),
    [
        (Task("other", "Count to three."), ReplayOutcome.TASK_MISSING, "names the task 'sum', which is not in it"),
        (Task("sum", "Count to four."), ReplayOutcome.TASK_CHANGED, "are not those of the world's task"),
    ],
)
def test_a_task_that_is_not_the_worlds_is_an_error(tokenizer: Any, task: Task, outcome: str, text: str) -> None:
    scene = Scene(tokenizer)
    (error,) = read(written(scene.recorded("Done.", "Done.")), scene, task)
    assert isinstance(error, ReplayError)
    assert error.outcome == outcome
    assert text in str(error)


def test_a_group_without_a_task_is_an_error(tokenizer: Any) -> None:
    scene = Scene(tokenizer)
    (error,) = read(written(scene.recorded("Done.", "Done."), task_id=None), scene)
    assert isinstance(error, ReplayError)
    assert "the group names no task" in str(error)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"messages": None}, "has no messages: record it with env.include_messages"),
        ({"program": ProgramRun(0, None, "")}, "was held by a program"),
        ({"first_turn": 2}, "begins with turn 2"),
        ({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}, "can't be read"),
    ],
)
def test_a_rollout_that_can_not_be_replayed_is_named(tokenizer: Any, fields: dict[str, Any], text: str) -> None:
    scene = Scene(tokenizer)
    group = written(scene.recorded("Done.", "Done."))
    (error,) = read(replace(group, rollouts=(replace(group.rollouts[0], **fields),)), scene)
    assert isinstance(error, ReplayError)
    assert (error.outcome, text in str(error)) == (ReplayOutcome.UNREADABLE, True)
