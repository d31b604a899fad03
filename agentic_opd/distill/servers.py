"""The connected servers of a policy's distillation."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agentic_opd.distill.hints import JudgedBy
from agentic_opd.distill.insertion import HintEncoder
from agentic_opd.plugin.client import PluginClient


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherServers:
    """The connected servers that read turns."""

    teacher: PluginClient
    teacher_is_policy: bool
    """Whether the teacher without a hint equals the student, so that a noise floor can be measured."""
    student: PluginClient | None = None
    """The policy, if rows hold its most likely tokens (`teacher.support`) and the teacher has other weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillServers(TeacherServers):
    """The judge and the teachers of one policy, and the encoder of hints; call `close` when done."""

    policy_url: str
    judge: JudgedBy
    hint_encoder: HintEncoder
    teachers: Mapping[str, PluginClient] = field(default_factory=dict[str, PluginClient])
    """Teachers by kind of task."""

    def of(self, kind: str | None) -> "DistillServers":
        """Return these servers with the teacher of this kind of task, if there is one."""
        teacher = self.teachers.get(kind) if kind else None
        return self if teacher is None else replace(self, teacher=teacher, teacher_is_policy=False)

    async def close(self) -> None:
        student = () if self.student is None else (self.student,)
        for client in (self.judge.client, self.teacher, *self.teachers.values(), *student):
            await client.close()
