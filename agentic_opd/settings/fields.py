"""Types shared by settings of several subpackages, and field marks: `Annotated[int, MOST_USED] = Field(...)`.

A `SettingGroup` places the setting in --help and docs/configuration.md. `RUN_ONLY` means that no written line
depends on it. A model's `setting_group` applies to the fields that it declares without a mark.
"""

from dataclasses import dataclass
from functools import cache
from inspect import get_annotations
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field

Url = Annotated[str, Field(pattern=r"^https?://[^\s]+$")]

Mode = Literal["serve", "process", "evaluate", "doctor", "gateway"]


@dataclass(frozen=True, slots=True)
class SettingGroup:
    """A group of settings in the help. Every mode accepts every setting, including those its help omits."""

    place: int
    """Position of the group among the others."""
    title: str
    modes: tuple[Mode, ...] = get_args(Mode)
    """Modes whose help shows the group."""


RUN_ONLY = "run only"
"""Mark of a setting that affects only the execution of a run, not its results."""

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
"""Group of a subclass's settings without a mark."""
NO_EFFECT = SettingGroup(16, "Without effect", ())
"""Settings of Atropos that are accepted, so that its YAML files load, but have no effect."""


def group_of(model: type[BaseModel], name: str) -> SettingGroup:
    """Return the group of a setting. An override without a mark stays in the overridden setting's group."""
    for base in declared_by(model, name):
        marks = (mark for mark in base.model_fields[name].metadata if isinstance(mark, SettingGroup))
        if group := next(marks, None) or vars(base).get("setting_group"):
            return group
    return OWN


def is_run_only(model: type[BaseModel], name: str) -> bool:
    """Return whether no written line depends on the setting."""
    return any(RUN_ONLY in base.model_fields[name].metadata for base in declared_by(model, name))


@cache
def declared_by(model: type[BaseModel], name: str) -> tuple[type[BaseModel], ...]:
    """Return the classes that declare a field: the effective one first, then those it overrides."""
    bases = [base for base in model.__mro__ if issubclass(base, BaseModel)]
    return tuple(base for base in bases if name in get_annotations(base))


def line_settings(config: BaseModel) -> dict[str, Any]:
    """Return the settings that a written line depends on, without secrets and without `RUN_ONLY` settings."""
    dumped = config.model_dump(mode="json")
    left_out = {name for name in dumped if name.endswith("_key") or is_run_only(type(config), name)}
    return {name: value for name, value in dumped.items() if name not in left_out}
