"""Read a dataset's row by this package's names: texts, lists of texts, and JSON. Pure."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, cast

from agentic_opd.core.errors import DatasetError
from agentic_opd.core.text import read_json
from agentic_opd.worlds.coding.hidden_tests.complete import complete_tests
from agentic_opd.worlds.coding.hidden_tests.digits import many_digits
from agentic_opd.worlds.coding.tasks.rows import Row


@dataclass(frozen=True, slots=True)
class FieldMap:
    """The fields of a row that hold the values of this package's names."""

    candidates: Mapping[str, tuple[str, ...]]
    """Our name -> the fields that may hold its value; the first field that is present and not null counts."""
    mapped: frozenset[str] = frozenset()
    """Names that the settings map; their fields must be present."""

    def mapped_by(self, mapping: Mapping[str, str]) -> "FieldMap":
        """Return this map overridden by `mapping` (our name, or a field's usual name -> the row's field).

        Raises:
            DatasetError: A name is unknown, or two names mean the same.
        """
        candidates, mapped = dict(self.candidates), set[str]()
        for key, field in mapping.items():
            name = self._our_name(key)
            if name in mapped:
                raise DatasetError(f"env.world.dataset_fields: {key!r} is named twice: it means {name}")
            candidates[name] = (field,)
            mapped.add(name)
        return FieldMap(candidates, frozenset(mapped))

    def _our_name(self, key: str) -> str:
        if key in self.candidates:
            return key
        for name, fields in self.candidates.items():
            if key in fields:
                return name
        raise DatasetError(
            f"env.world.dataset_fields: unknown name {key!r}: {alternatives(tuple(self.candidates), key)}"
        )


@dataclass(frozen=True, slots=True)
class RowValues:
    """A row by our names. A missing value, or one of another type, raises DatasetError with the row's location."""

    row: Row
    fields: FieldMap

    def has(self, name: str) -> bool:
        """Return whether the row holds a non-empty value under `name`."""
        value = self.raw(name)
        return bool(value.strip() if isinstance(value, str) else value)

    def raw(self, name: str) -> Any:
        """Return the row's value unchanged; None if the row lacks it."""
        field = self._field(name)
        return None if field is None else _value_of(self.row.fields, field)

    def text(self, name: str) -> str | None:
        """Return a text; None if the row lacks it or it is blank.

        An integer task_id becomes a text, and so do the messages of a prompt.
        """
        value = self.raw(name)
        if name == "task_id" and type(value) is int:
            value = self._id_of(value)
        elif name == "prompt":
            value = self._prompt_text(value)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, f"must be a text, got {type(value).__name__}")
        return value if value is not None and value.strip() else None

    def _prompt_text(self, prompt: Any) -> Any:
        """Return the text of a prompt that is messages, as in verl's datasets: a user's, perhaps after a system's."""
        if isinstance(prompt, str) and prompt.lstrip().startswith("[{"):
            with suppress(ValueError, RecursionError):
                stored: Any = read_json(prompt)
                prompt = stored if all("role" in message for message in stored) else prompt
        if not isinstance(prompt, list):
            return prompt
        messages = [cast(Mapping[str, Any], row) for row in cast(list[Any], prompt) if isinstance(row, Mapping)]
        texts = [message.get("content") for message in messages]
        roles = [message.get("role") for message in messages]
        if roles not in (["user"], ["system", "user"]) or not all(isinstance(text, str) for text in texts):
            raise self.wrong(
                "prompt",
                f"must be a text, or the messages of a system and a user with texts, got those of {roles}; write "
                "earlier turns in the field examples",
            )
        return "\n\n".join(cast(list[str], texts))

    def _id_of(self, number: int) -> str:
        try:
            with many_digits():
                return str(number)
        except ValueError as error:
            raise self.wrong("task_id", f"is no id: {error}") from error

    def need(self, name: str) -> str:
        """Return a text that every row must have."""
        if self._field(name) is None:
            raise self.missing(name)
        text = self.text(name)
        if text is None:
            problem = "an empty text" if isinstance(self.raw(name), str) else "NoneType"
            raise self.wrong(name, f"must be a text, got {problem}")
        return text

    def texts(self, name: str) -> list[str]:
        """Return a list of texts, stored as a list or as JSON; empty if the row lacks it."""
        value = self.data(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(text, str) for text in cast(list[Any], value)):
            raise self.wrong(name, f"must be a list of texts, got {shortened(value)!r}")
        return cast(list[str], value)

    def data(self, name: str) -> Any:
        """Return a value of any type; a text is parsed as JSON. None if the row lacks it or it is blank."""
        value = self.raw(name)
        if not isinstance(value, str):
            return value
        if not value.strip():
            return None
        try:
            with many_digits():
                return read_json(value)
        except (ValueError, RecursionError) as error:
            raise self.wrong(name, f"is not valid JSON: {error}") from error

    def hidden_tests(self, test_code: str, entry_point: str | None) -> str:
        """Return the result of `complete_tests`; an error gets the row's location."""
        try:
            return complete_tests(test_code, entry_point)
        except ValueError as error:
            raise self.error(f"the hidden tests {error}") from error

    def wrong(self, name: str, problem: str) -> DatasetError:
        """Return an error about the field of `name`."""
        return self.error(f"field {self._field(name)!r} ({name}) {problem}")

    def error(self, problem: str) -> DatasetError:
        """Return an error with the row's location."""
        return DatasetError(f"{self.row.location}: {problem}")

    def missing(self, *names: str) -> DatasetError:
        """Return the error that the row lacks every field of `names`, or has no value there; it lists its fields."""
        fields = [field for name in names for field in self.fields.candidates[name]]
        if empty := [field for field in fields if _has_field(self.row.fields, field)]:
            return self.error(f"field {empty[0]!r} is empty")
        expected = " or ".join(repr(field) for name in names for field in self.fields.candidates[name])
        present = alternatives((*self.row.fields,), self.fields.candidates[names[0]][0])
        return self.error(
            f"no field {expected} for {' or '.join(names)}; {present}. Name it in env.world.dataset_fields, for "
            f"example {{{names[0]}: FIELD}}."
        )

    def _field(self, name: str) -> str | None:
        present = [field for field in self.fields.candidates[name] if _has_field(self.row.fields, field)]
        if not present and name in self.fields.mapped:
            raise self.missing(name)
        values = (field for field in present if _value_of(self.row.fields, field) is not None)
        return next(values, present[0] if present else None)


def _has_field(fields: Mapping[str, Any], field: str) -> bool:
    """Return whether a row has a field; `a.b` is the field `b` of the object `a`, if there is no field of that name."""
    return field in fields or _holder_of(fields, field) is not None


def _value_of(fields: Mapping[str, Any], field: str) -> Any:
    """Return the value of a field, None without one; pandas writes NaN for a missing value."""
    holder = fields if field in fields else _holder_of(fields, field) or {}
    value = holder.get(field if holder is fields else field.rpartition(".")[2])
    return None if isinstance(value, float) and value != value else value


def _holder_of(fields: Mapping[str, Any], field: str) -> Mapping[str, Any] | None:
    """Return the object, perhaps as JSON text, that has the last of a field's dotted names; None without one."""
    *outer, last = field.split(".")
    holder: Any = fields
    for name in outer:
        holder = cast(Mapping[str, Any], holder).get(name) if isinstance(holder, Mapping) else None
        if isinstance(holder, str):
            try:
                holder = read_json(holder)
            except (ValueError, RecursionError):
                return None
    return cast(Mapping[str, Any], holder) if outer and isinstance(holder, Mapping) and last in holder else None


def shortened(value: Any) -> str:
    """Return the beginning of a value's text, for a message; its type if it has no text of a reasonable length."""
    try:
        return str(value)[:100]
    except (ValueError, RecursionError):  # An integer of very many digits, or lists in lists.
        return type(value).__name__


def alternatives(names: tuple[str, ...], missing: str) -> str:
    """Return `there is a, b, c (did you mean b?)`."""
    close = get_close_matches(missing, names, n=1)
    return f"there is {', '.join(names) or 'nothing'}" + (f" (did you mean {close[0]!r}?)" if close else "")
