"""Settings as a list, for help, pages and messages: each by its dotted name, with its group, default and value."""

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from inspect import get_annotations
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from agentic_opd.settings.fields import CUSTOM, FIRST, SettingGroup, group_of, has_mark, kinds_of, section_of

_NEEDED = "needed"


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting with its place in the models."""

    flag: str
    """Dotted name with the prefix of the flags: `env.judge.temperature`."""
    model: type[BaseModel]
    name: str
    """Name of the field in `model`."""
    default: Any
    group: SettingGroup
    type_name: str | None = None
    """Type of the section that has the setting; None: the section has one type, or all have the setting."""
    types: tuple[str, ...] = ()
    """Of the setting `type` of a section: the types that there are."""

    @property
    def info(self) -> FieldInfo:
        return self.model.model_fields[self.name]

    @property
    def is_first(self) -> bool:
        """Whether the short help shows the setting."""
        return has_mark(self.model, self.name, FIRST)

    def placeholder(self) -> str:
        """Return the placeholder for the setting's value."""
        return f"{{{','.join(self.types)}}}" if self.types else value_kind(self.info.annotation)

    def described(self) -> str:
        """Return the description and the default."""
        text = (self.info.description or "").rstrip(".")
        if self.type_name is not None:
            text = f"{self.type_name}: {text}"
        default = self.shown_default()
        if default == _NEEDED:
            return f"{text} (needed)"
        return text if "Unset:" in text and default == "unset" else f"{text} (default: {default})".lstrip()

    def shown_default(self) -> str:
        """Return the default as written on a command line; secrets are hidden."""
        default = self.default
        if self.info.is_required() and not default:
            return _NEEDED
        if isinstance(default, SecretStr):
            return "hidden"
        if isinstance(default, Enum):
            default = default.value
        if isinstance(default, bool):
            return str(default).lower()
        if isinstance(default, tuple):
            return f"[{', '.join(map(str, default))}]"
        return "unset" if default in (None, "") else str(default)


def settings_in(models: Mapping[str, BaseModel], *, all_types: bool = True) -> list[Setting]:
    """Return every setting of `models` (prefix of the flags -> defaults), by group, the most used group first.

    In a group, a subclass's own settings come before inherited ones. Sections with types have the settings of all
    types, or with `all_types` off those of their default type.
    """
    rows = [row for prefix, defaults in models.items() for row in _rows(prefix, type(defaults), defaults, all_types)]
    return sorted(rows, key=lambda row: row.group.rank)


def _rows(
    prefix: str,
    model: type[BaseModel],
    defaults: BaseModel | None,
    all_types: bool,
    outer: SettingGroup = CUSTOM,
    type_name: str | None = None,
    types: tuple[str, ...] = (),
) -> Iterator[Setting]:
    declared = dict.fromkeys(name for base in model.__mro__ for name in get_annotations(base))
    for name in filter(model.model_fields.__contains__, declared):
        info, group = model.model_fields[name], group_of(model, name, outer)
        default: Any = getattr(defaults, name) if defaults is not None else None
        if defaults is None and not info.is_required():
            default = info.get_default(call_default_factory=True)
        section, kinds = section_of(info), kinds_of(info)
        if section is None:
            yield Setting(dotted(prefix, name), model, name, default, group, type_name, types if name == "type" else ())
            continue
        group = getattr(section, "setting_group", group)  # Models of single types inherit it.
        if kinds is None:
            yield from _rows(dotted(prefix, name), type(default), default, all_types, group)
            continue
        yield from _rows(dotted(prefix, name), section, default, all_types, group, types=tuple(kinds.names()))
        for kind in kinds.names() if all_types else (default.type,):
            type_model = kinds.model_of(kind)
            of_kind = default if isinstance(default, type_model) else None
            for row in _rows(dotted(prefix, name), type_model, of_kind, all_types, group, kind):
                if row.name not in section.model_fields:
                    yield row


def dotted(*parts: str) -> str:
    """Return the parts of a name with dots between them, without empty parts."""
    return ".".join(filter(None, parts))


def names_of(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    """Yield the dotted names of a model's settings and sections, without those of single types."""
    for name, info in model.model_fields.items():
        yield dotted(prefix, name)
        if (section := section_of(info)) is not None:
            yield from names_of(dotted(prefix, name), section)


def nearest(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Return `; did you mean 'env.group_size'?` if one of the names is close, else an empty text.

    Neither `name` nor `names` begin with `prefix`, which is added to the answer.
    """
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {dotted(prefix, close[0])!r}?" if close else ""


def value_kind(annotation: Any) -> str:
    """Return the placeholder for a setting's value in help."""
    origin, kinds = get_origin(annotation), [kind for kind in get_args(annotation) if kind is not NoneType]
    if origin in (Union, UnionType):
        is_named_value = get_origin(kinds[0]) is Literal
        return "|".join(map(value_kind, kinds)) if is_named_value else value_kind(kinds[0])
    if origin is Annotated:
        return "URL" if kinds[0] is str else value_kind(kinds[0])
    if origin is Literal:
        return "{" + ",".join(map(str, kinds)) + "}"
    if annotation == list[Path]:
        return "FILE"
    container = origin if isinstance(origin, type) else annotation
    if isinstance(container, type) and issubclass(container, Mapping | BaseModel):
        return "{KEY: VALUE}"
    if kinds and isinstance(origin, type) and issubclass(origin, Collection):
        return f"[{value_kind(kinds[0])}, ...]"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "{" + ",".join(str(member.value) for member in annotation) + "}"
    kind = getattr(annotation, "__name__", "")
    return {"int": "N", "float": "X", "bool": "true|false", "SecretStr": "KEY"}.get(kind, "TEXT")
