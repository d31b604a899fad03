"""YAML of files and flags; a key that occurs twice in one mapping is an error."""

from pathlib import Path
from typing import Any, cast

import yaml

from agentic_opd.core.errors import ConfigError
from agentic_opd.core.files import check_regular
from agentic_opd.core.text import well_formed


class _Loader(yaml.SafeLoader):
    """Collects duplicate keys in `twice`; PyYAML by itself silently keeps the last value."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.twice: list[str] = []

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        return well_formed(super().construct_scalar(node))

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line, name = key.start_mark.line + 1, str(key.value)
            if name in lines:
                self.twice.append(f"{name!r} is set in line {lines[name]} and again in line {line}")
            lines.setdefault(name, line)
        return node


def parse_yaml(text: str) -> Any:
    """Return the data of a YAML text.

    Raises:
        yaml.YAMLError: the text is not YAML, or a key occurs twice in one mapping.
    """
    loader = _Loader(text)
    try:
        data = loader.get_single_data()
    except (ValueError, RecursionError) as error:  # Such as a date that no calendar has.
        raise yaml.YAMLError(str(error)) from error
    if loader.twice:
        raise yaml.YAMLError("; ".join(loader.twice))
    return data


def read_yaml(path: Path, holds: str) -> dict[str, Any]:
    """Return the data of a settings file; `holds` describes the expected content in the error.

    Raises:
        ConfigError: the file can't be read, or does not hold names and values.
    """
    try:
        check_regular(path, is_read=True)
        data = parse_yaml(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the file {str(path)!r} can't be read: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"the file {str(path)!r} must hold {holds}, got {type(data).__name__}")
    return cast(dict[str, Any], data)
