import argparse
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
from pydantic import SecretStr

from agentic_opd.settings.fields import Url
from agentic_opd.settings.flags import FlagText
from agentic_opd.settings.help import HelpFormatter
from agentic_opd.settings.listing import value_kind


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@pytest.mark.parametrize(
    ("annotation", "kind"),
    [
        (int, "N"),
        (Optional[float], "X"),  # noqa: UP045  # As Atropos writes it.
        (Union[str, int], "TEXT"),  # noqa: UP007
        (Literal["a", "b"] | None, "{a,b}"),
        (Colour, "{red,blue}"),
        (Url | None, "URL"),
        (list[Url], "[URL, ...]"),
        (Sequence[str], "[TEXT, ...]"),
        (frozenset[int] | None, "[N, ...]"),
        (Mapping[str, int], "{KEY: VALUE}"),
        (dict[str, Any] | None, "{KEY: VALUE}"),
        (SecretStr | None, "KEY"),
        (Path, "TEXT"),
        (Any, "TEXT"),
    ],
)
def test_help_says_what_a_value_looks_like(annotation: Any, kind: str) -> None:
    assert value_kind(annotation) == kind


@pytest.mark.parametrize(
    "annotation", [list[str], tuple[str, ...], Sequence[str], frozenset[str], Sequence[str] | None, Mapping[str, str]]
)
def test_the_value_of_a_container_of_texts_is_yaml(annotation: Any) -> None:
    text = "{a: b}" if annotation == Mapping[str, str] else "[a, b]"
    assert FlagText("names", (text,)).value(annotation) in (["a", "b"], {"a": "b"})


@pytest.mark.parametrize("annotation", [str, str | None, Path, SecretStr | None])
def test_the_value_of_a_text_is_the_text(annotation: Any) -> None:
    assert FlagText("name", ("[a, b]",)).value(annotation) == "[a, b]"


@pytest.mark.parametrize("annotation", [str | Sequence[str], str | list[str] | None])
def test_a_field_of_a_text_or_a_list_takes_both(annotation: Any) -> None:
    assert FlagText("name", ("['a', 'b']",)).value(annotation) == ["a", "b"]
    assert FlagText("name", ("12",)).value(annotation) == "12"


def test_help_folds_long_lines_and_keeps_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    parser = argparse.ArgumentParser(description=f"{'word ' * 20}\nA line.", formatter_class=HelpFormatter)
    shown = parser.format_help().splitlines()
    assert "A line." in shown
    assert max(map(len, shown)) <= 60
