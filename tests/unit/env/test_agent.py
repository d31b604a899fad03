"""The group that an environment makes of its episodes."""

import asyncio
from collections.abc import Sequence

import pytest

from agentic_opd.core.errors import WorldError
from agentic_opd.core.types import (
    Episode,
    NoVerdict,
    Reward,
    StopReason,
    Task,
    Trace,
    Turn,
    Verification,
    VerifyOutcome,
)
from agentic_opd.env.agent import AgentEnv
from agentic_opd.env.config import AgentEnvConfig
from agentic_opd.runs.environment import FinishedGroup
from agentic_opd.runs.metric_log import RunMetrics
from agentic_opd.wire.counts import RunCounts
from agentic_opd.wire.group import ScoredGroup, TaskItem

TASK = Task("t", "Do it.")


def episode(verdict: Verification) -> Episode:
    messages = ({"role": "user", "content": "u"}, {"role": "assistant", "content": "a"})
    trace = Trace(messages, (1, 2), (-100, 2), (1.0, -0.1), (Turn(1, 2, 1, 1, 1),))
    share = verdict.correctness
    reward = None if verdict.no_verdict is not None else Reward(share, share, share, share)
    return Episode(TASK, (trace,), StopReason.FINISHED, verification=verdict, reward=reward)


def unjudged(cause: NoVerdict) -> Episode:
    return episode(Verification(VerifyOutcome.NO_VERDICT, 0, 1, "", "", no_verdict=cause))


class Scripted(AgentEnv):
    """Has its episodes from a list, without servers."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self.config = AgentEnvConfig(group_size=len(episodes))
        self.distiller = None
        self.run_metrics = RunMetrics(self.config, lambda ids: "", list)
        self._episodes = iter(episodes)

    async def _finished_episode(self, task: Task) -> tuple[Episode, None]:
        return next(self._episodes), None


def collected(env: Scripted) -> FinishedGroup:
    return asyncio.run(env.collect(TaskItem(TASK, 0)))


def test_episodes_without_a_verdict_are_left_out_of_their_group_which_counts_them() -> None:
    right, half = Verification.of_score(1.0, "", ""), Verification.of_score(0.9996, "", "")
    finished = collected(
        Scripted([unjudged(NoVerdict.NOT_RUN), episode(right), unjudged(NoVerdict.TIMEOUT), episode(half)])
    )
    assert finished.group.scores == [1.0, 0.9996]
    assert len(finished.episodes) == 4
    line = finished.group.to_wire()
    assert line["group_overrides"]["no_verdicts"] == {"not_run": 1, "timeout": 1}
    assert [one["verification"]["passed"] for one in line["overrides"]] == [1, 0]
    assert [one["reward"]["correctness"] for one in line["overrides"]] == [1.0, 0.9996]
    counts = RunCounts()
    counts.add(ScoredGroup.from_wire(line))
    assert counts.no_verdicts == {"not_run": 1, "timeout": 1}
    assert (counts.total.rollouts, counts.total.passed) == (2, 1)


def test_a_group_with_verdicts_only_says_nothing_about_them() -> None:
    group = collected(Scripted([episode(Verification.of_score(1.0, "", ""))] * 2)).group
    assert "no_verdicts" not in group.to_wire()["group_overrides"]


def test_a_group_without_any_verdict_fails_and_is_counted() -> None:
    env = Scripted([unjudged(NoVerdict.TIMEOUT)] * 3)
    with pytest.raises(WorldError, match="no rollout of t got a verdict from its tests: timeout 3"):
        collected(env)
    assert env.run_metrics.current()["train/no_verdict/timeout"] == 3
