"""What a field of a model of settings can be marked with, beside its type: `Annotated[int, MOST_USED] = Field(...)`.

A `SettingGroup` says where --help and docs/configuration.md show the setting; `RUN_ONLY` that no written line depends
on it. A field of a subclass keeps the marks of the field that it overrides, unless it has its own. A model's
`setting_group` is that of its fields without one.
"""

from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from pydantic import BaseModel

Mode = Literal["serve", "process", "evaluate", "doctor"]


@dataclass(frozen=True, slots=True)
class SettingGroup:
    """Settings that are shown together. Every mode takes every setting, whatever its help shows."""

    place: int
    """Groups are shown in this order."""
    title: str
    modes: tuple[Mode, ...] = get_args(Mode)
    """The modes in whose help the group is shown."""


@dataclass(frozen=True, slots=True)
class RunOnly:
    """Marks a setting that only says how a run is run: no written line depends on it."""


RUN_ONLY = RunOnly()

_TRAINING: tuple[Mode, ...] = ("serve", "process", "doctor")

MOST_USED = SettingGroup(0, "Most used")
POLICY_SERVER = SettingGroup(1, "Policy server")
POLICY_SERVER_LIMITS = SettingGroup(2, "Policy server: limits")
DISTILLATION = SettingGroup(3, "Distillation", _TRAINING)
JUDGE = SettingGroup(4, "Judge: who writes the hints", _TRAINING)
TEACHER = SettingGroup(5, "Teacher: who scores the turns", _TRAINING)
TRAINER = SettingGroup(6, "Trainer", ("serve", "doctor"))
EVALUATION = SettingGroup(7, "Evaluation", ("serve", "evaluate"))
TASKS = SettingGroup(8, "Tasks")
AGENT = SettingGroup(9, "Agent")
REWARD = SettingGroup(10, "Hidden tests and reward")
SANDBOX = SettingGroup(11, "Sandbox")
CONCURRENCY = SettingGroup(12, "How much at once")
LOGGING = SettingGroup(13, "What is logged and sent", _TRAINING)
OWN = SettingGroup(14, "This environment's own")
"""What a subclass adds without a group."""
NO_EFFECT = SettingGroup(15, "Without effect", ())
"""Settings of Atropos that this package takes, so that its YAML files load, and does nothing with."""

MarkT = TypeVar("MarkT", SettingGroup, RunOnly)


def mark_of(model: type[BaseModel], name: str, kind: type[MarkT]) -> MarkT | None:
    """The mark of this kind that the field `name` has, or that of the field that it overrides."""
    fields = [base.model_fields[name] for base in model.__mro__ if name in getattr(base, "model_fields", {})]
    return next((mark for field in fields for mark in field.metadata if isinstance(mark, kind)), None)
