"""Types that settings of several rooms share, and the marks of a field: `Annotated[int, MOST_USED] = Field(...)`.

A `SettingGroup` says where --help and docs/configuration.md show the setting, `RUN_ONLY` that no written line depends
on it. A model's `setting_group` is that of the fields that it declares without one.
"""

from dataclasses import dataclass
from inspect import get_annotations
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field

Url = Annotated[str, Field(pattern=r"^https?://[^\s]+$")]

HintSource = Literal["judge", "feedback", "sibling", "reference", "other_task", "none"]
"""What the teacher reads: the judge's hint, what came after the turn, what a rollout of the group did that passed, the
task's own solution; or, where there is a judge's hint, one of another task in its place, or none."""

Mode = Literal["serve", "process", "evaluate", "doctor", "hints", "gateway"]


@dataclass(frozen=True, slots=True)
class SettingGroup:
    """Settings that are shown together. Every mode takes every setting, whatever its help shows."""

    place: int
    """Groups are shown in this order."""
    title: str
    modes: tuple[Mode, ...] = get_args(Mode)
    """The modes in whose help the group is shown."""


RUN_ONLY = "run only"
"""Marks a setting that only says how a run is run."""

_TRAINING: tuple[Mode, ...] = ("serve", "process", "doctor", "gateway")

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
GATEWAY = SettingGroup(14, "Gateway", ("gateway",))
OWN = SettingGroup(15, "This environment's own")
"""What a subclass adds without a group."""
NO_EFFECT = SettingGroup(16, "Without effect", ())
"""Settings of Atropos that this package takes, so that its YAML files load, and does nothing with."""


def group_of(model: type[BaseModel], name: str) -> SettingGroup:
    """Where a setting is shown. One that is overridden without a mark stays where it was."""
    for base in declared_by(model, name):
        marks = (mark for mark in base.model_fields[name].metadata if isinstance(mark, SettingGroup))
        if group := next(marks, None) or vars(base).get("setting_group"):
            return group
    return OWN


def is_run_only(model: type[BaseModel], name: str) -> bool:
    """Whether no written line depends on a setting."""
    return any(RUN_ONLY in base.model_fields[name].metadata for base in declared_by(model, name))


def declared_by(model: type[BaseModel], name: str) -> list[type[BaseModel]]:
    """The classes that declare a field: the one that counts, then those whose field it overrides."""
    bases = [base for base in model.__mro__ if issubclass(base, BaseModel)]
    return [base for base in bases if name in get_annotations(base)]


def line_settings(config: BaseModel) -> dict[str, Any]:
    """The settings that a written line depends on; secrets and what only says how a run is run are left out."""
    dumped = config.model_dump(mode="json")
    left_out = {name for name in dumped if name.endswith("_key") or is_run_only(type(config), name)}
    return {name: value for name, value in dumped.items() if name not in left_out}
