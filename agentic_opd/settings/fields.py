"""Marks of settings fields, and types that settings of several subpackages share.

A field is marked by annotation: `Annotated[int, FIRST] = Field(...)`. A `SettingGroup` places the setting in --help and
docs/configuration.md; `FIRST` shows it in the short help; `RUN_ONLY` says that no written line depends on it. The
`setting_group` of a model applies to the fields that it declares without a group of their own.

A field whose type is a model is a section: its settings are written `env.judge.temperature`. `Kinds` marks a section
whose model depends on its `type`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import get_annotations
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import core_schema

Url = Annotated[str, Field(pattern=r"^https?://[^\s]+$")]

Mode = Literal["serve", "process", "evaluate", "doctor", "gateway"]

FIRST = "set first"
"""Mark of a setting that the short help shows."""
RUN_ONLY = "run only"
"""Mark of a setting that affects only the execution of a run, not its results."""


@dataclass(frozen=True, slots=True)
class SettingGroup:
    """A group of settings in the help. Every mode accepts every setting, including those its help omits."""

    rank: int
    """Position of the group among the others."""
    name: str
    """Name of the group in `--help NAME`."""
    title: str
    modes: tuple[Mode, ...] = get_args(Mode)
    """Modes whose help lists the group."""


_TRAINING: tuple[Mode, ...] = ("serve", "process", "doctor", "gateway")

RUN = SettingGroup(0, "run", "The run and its output")
POLICY_SERVER = SettingGroup(1, "policy", "Policy server")
DISTILLATION = SettingGroup(2, "distillation", "Distillation", _TRAINING)
HINT = SettingGroup(3, "hint", "Hints: evidence, choice, position", _TRAINING)
JUDGE = SettingGroup(4, "judge", "Judge, which writes the hints", _TRAINING)
TEACHER = SettingGroup(5, "teacher", "Teacher, which scores the turns", _TRAINING)
TRAINER = SettingGroup(6, "trainer", "Trainer", ("serve", "doctor"))
EVALUATION = SettingGroup(7, "eval", "Evaluation")
WORLD = SettingGroup(8, "world", "World and tasks")
AGENT = SettingGroup(9, "agent", "Agent")
RENDERER = SettingGroup(10, "renderer", "Prompt renderer")
REWARD = SettingGroup(11, "reward", "Hidden tests and reward")
SANDBOX = SettingGroup(12, "sandbox", "Sandbox")
CONCURRENCY = SettingGroup(13, "limits", "Concurrency")
LOGGING = SettingGroup(14, "logging", "Logging", _TRAINING)
GATEWAY = SettingGroup(15, "gateway", "Gateway", ("gateway",))
CUSTOM = SettingGroup(16, "custom", "This environment's own")
"""Group of a subclass's settings without a mark."""
NO_EFFECT = SettingGroup(17, "idle", "Without effect", ())
"""Settings of Atropos that are accepted, so that its YAML files load, but have no effect."""


class Section(BaseModel):
    """Settings of one subject, the type of a field of a larger model."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class Kinds:
    """Mark of a section whose model depends on its `type`: `Annotated[SandboxConfig, Kinds(...)]`.

    The annotated class is the base of all models; it declares `type` and the settings that all types share. Input may
    be a model, a mapping, or the name of a type alone.
    """

    default: str
    """Type of a section that names none."""
    names: Callable[[], Sequence[str]]
    """Return the types that help and errors list. Reading them must be fast."""
    model_of: Callable[[str], type[BaseModel]]
    """Return the model of a type; raise ValueError, which says what is allowed, for a type that does not exist."""

    @classmethod
    def of(cls, **models: type[BaseModel]) -> "Kinds":
        """Return the kinds of a closed set of models, by type; the first is the default."""

        def model_of(type_name: str) -> type[BaseModel]:
            if type_name not in models:
                raise ValueError(f"expected {', '.join(models)}, got {type_name!r}")
            return models[type_name]

        return cls(next(iter(models)), lambda: tuple(models), model_of)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        any_model = core_schema.simple_ser_schema("any")  # The settings of the type are dumped, not only the base's.
        return core_schema.no_info_before_validator_function(self._model, handler(source), serialization=any_model)

    def _model(self, section: Any) -> Any:
        """Return a section's input as the model of its type."""
        if isinstance(section, str):
            section = {"type": section}
        if not isinstance(section, Mapping):
            return section
        settings = cast(Mapping[str, Any], section)
        return self.model_of(str(settings.get("type", self.default))).model_validate({"type": self.default, **settings})


def section_of(info: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a field that is a section, the base of its models if it has `Kinds`; None for a setting."""
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def kinds_of(info: FieldInfo) -> Kinds | None:
    """Return the kinds of a section; None if its model is always the same."""
    return next((mark for mark in info.metadata if isinstance(mark, Kinds)), None)


def group_of(model: type[BaseModel], name: str, outer: SettingGroup = CUSTOM) -> SettingGroup:
    """Return the group of a setting, `outer` if neither the field nor its model has one.

    An override without a mark stays in the overridden setting's group.
    """
    for base in declared_by(model, name):
        marks = (mark for mark in base.model_fields[name].metadata if isinstance(mark, SettingGroup))
        if group := next(marks, None) or vars(base).get("setting_group"):
            return group
    return outer


def has_mark(model: type[BaseModel], name: str, mark: str) -> bool:
    """Return whether a field, or one that it overrides, has the mark `FIRST` or `RUN_ONLY`."""
    return any(mark in base.model_fields[name].metadata for base in declared_by(model, name))


@cache
def declared_by(model: type[BaseModel], name: str) -> tuple[type[BaseModel], ...]:
    """Return the classes that declare a field: the effective one first, then those it overrides."""
    bases = [base for base in model.__mro__ if issubclass(base, BaseModel)]
    return tuple(base for base in bases if name in get_annotations(base))


def line_settings(config: BaseModel) -> dict[str, Any]:
    """Return the settings that a written line depends on by dotted name, as JSON data.

    Secrets and `RUN_ONLY` settings are left out.
    """
    return dict(_line_settings(config, config.model_dump(mode="json")))


def _line_settings(config: BaseModel, dumped: Mapping[str, Any], before: str = "") -> Any:
    model = type(config)
    for name, info in model.model_fields.items():
        if name.endswith("_key") or has_mark(model, name, RUN_ONLY):
            continue
        if section_of(info) is not None:
            yield from _line_settings(getattr(config, name), dumped[name], f"{before}{name}.")
        else:
            yield f"{before}{name}", dumped[name]
