#!/usr/bin/env python3
"""The environment of `scripts/learn`: the built-in tasks, with the two controls of the experiment as a setting.

`--env.hint_control wrong` gives each judged turn a hint that the judge wrote for a turn of another task; `none` lets
the teacher read no hint at all, so that all it can add is the engine's noise.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

from pydantic import Field

from agentic_opd.core.server_info import ServerInfo
from agentic_opd.core.types import Episode, Message, TeacherRequest, Vote
from agentic_opd.distill.connect import DistillServers
from agentic_opd.distill.distiller import Distiller
from agentic_opd.distill.judge import Judge, JudgeReply
from agentic_opd.distill.teacher import TeacherClient, TeacherReply
from agentic_opd.env.opd import AgenticOPDEnv, AgenticOPDEnvConfig

KEPT_HINTS = 64
"""Hints that are remembered of each task: the latest."""


class LearnConfig(AgenticOPDEnvConfig):
    """The environment's settings and the experiment's."""

    hint_control: Literal["own", "wrong", "none"] = Field(
        default="own", description="What the teacher reads: the turn's own hint, one of another task, or none."
    )


@dataclass
class HintPool:
    """Hints by the task of the turn that they were written for."""

    rng: Random
    by_task: defaultdict[str, deque[str]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=KEPT_HINTS)))

    def other(self, task_id: str) -> str | None:
        """A hint of another task, each task as likely; None before there is one."""
        tasks = sorted(task for task, hints in self.by_task.items() if hints and task != task_id)
        return self.rng.choice(self.by_task[self.rng.choice(tasks)]) if tasks else None


@dataclass(frozen=True, slots=True)
class WrongHintJudge:
    """Votes as `judge` does, with each hint put into the pool and one of another task in its place.

    All hints of one turn become the same. While no other task has one yet, a turn keeps none.
    """

    judge: Judge
    task_id: str
    pool: HintPool

    async def ask(self, messages: Sequence[Message], num_votes: int) -> JudgeReply:
        """See `Judge.ask`."""
        reply = await self.judge.ask(messages, num_votes)
        wrong = self.pool.other(self.task_id)
        self.pool.by_task[self.task_id] += [vote.hint for vote in reply.votes if vote.hint is not None]
        return reply._replace(votes=tuple(self._swapped(vote, wrong) for vote in reply.votes))

    async def close(self) -> None:
        """See `Judge.close`."""
        await self.judge.close()

    @staticmethod
    def _swapped(vote: Vote, wrong: str | None) -> Vote:
        if vote.hint is None:
            return vote
        return replace(vote, hint=wrong) if wrong is not None else replace(vote, decision=-1, hint=None)


@dataclass(frozen=True, slots=True)
class NoHintTeacher:
    """Scores as `teacher` does, after the hint was taken out of what it reads."""

    teacher: TeacherClient

    @property
    def info(self) -> ServerInfo:
        """See `TeacherClient.info`."""
        return self.teacher.info

    async def score(self, request: TeacherRequest, top_k: int) -> TeacherReply:
        """See `TeacherClient.score`."""
        hint_end = request.insert_at + len(request.hint_token_ids)
        ids = request.token_ids[: request.insert_at] + request.token_ids[hint_end:]
        return await self.teacher.score(replace(request, token_ids=ids, hint_token_ids=()), top_k)

    async def close(self) -> None:
        """See `TeacherClient.close`."""
        await self.teacher.close()


class ControlledDistiller(Distiller):
    """Puts the control between the turns and who judges or scores them."""

    config: LearnConfig

    def __init__(self, config: LearnConfig, *, max_token_length: int, retry_s: float) -> None:
        """See `Distiller`."""
        super().__init__(config, max_token_length=max_token_length, retry_s=retry_s)
        self.pool = HintPool(Random(config.seed))

    def servers_of(self, episode: Episode, policy_url: str) -> DistillServers:
        """The same connections behind the control."""
        servers = super().servers_of(episode, policy_url)
        if self.config.hint_control == "none":
            return replace(servers, teacher=NoHintTeacher(servers.teacher))
        if self.config.hint_control == "wrong":
            return replace(servers, judge=WrongHintJudge(servers.judge, episode.task.task_id, self.pool))
        return servers


class LearnEnv(AgenticOPDEnv):
    """The eight built-in tasks, with controlled hints."""

    name = "learn"
    env_config_cls = LearnConfig  # type: ignore[assignment]
    config: LearnConfig  # type: ignore[assignment]

    @classmethod
    def config_init(cls):
        """Default settings."""
        _, servers = super().config_init()
        return LearnConfig(), servers

    def make_distiller(self) -> Distiller | None:
        """Distills with the judge and the teacher that the setting asks for."""
        config = self.config
        if not config.opd_enabled:
            return None
        return ControlledDistiller(config, max_token_length=config.max_token_length, retry_s=config.server_retry_s)


if __name__ == "__main__":
    LearnEnv.cli()
