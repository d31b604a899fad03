"""YAML of files and flags; a key that occurs twice in one mapping is an error, and so is a file of another command."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import yaml

from agentic_opd.core.errors import ConfigError
from agentic_opd.core.files import check_regular
from agentic_opd.core.text import read_json, well_formed


class FileKind(NamedTuple):
    """A kind of file, known by keys at its top."""

    content: str
    keys: frozenset[str]
    command: str
    """What to do with such a file."""


SettingsKind = Literal["environment", "trainer", "loop"]
SETTINGS_FILES: Mapping[SettingsKind, FileKind] = {
    "environment": FileKind(
        "the settings of an environment or a gateway (sections env and openai)",
        frozenset({"env", "openai"}),
        "`agentic-opd process`, `serve`, `evaluate`, `gateway` and `doctor` take it as --config",
    ),
    "trainer": FileKind(
        "the settings of a trainer",
        # Without those that are usual in files of other programs, such as `model`.
        frozenset(
            {"api_url", "vllm_urls", "weights_dir", "total_steps", "save_every", "push_every", "micro_tokens"}
            | {"max_token_len", "lora_rank", "ema_decay", "teacher_urls", "loss", "lr", "epochs_per_batch"}
        ),
        "`agentic-opd train --config FILE` takes it",
    ),
    "loop": FileKind(
        "the parts of a loop (servers, api, environments, trainer)",
        frozenset({"servers", "environments", "trainer"}),
        "`agentic-opd up --config FILE` takes it",
    ),
}
_OTHER_FILES = (
    FileKind(
        "scored groups",
        frozenset({"tokens", "masks", "scores"}),
        "`agentic-opd report FILE` shows it, and `agentic-opd validate FILE` checks it",
    ),
    FileKind("conversations", frozenset({"messages"}), "`agentic-opd distill PATH` takes it"),
    FileKind(
        "a model's configuration",
        frozenset({"architectures", "model_type"}),
        "the model's folder is named in a settings file, as openai.model_name, or model of a trainer",
    ),
)


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


def read_yaml(path: Path, kind: SettingsKind) -> dict[str, Any]:
    """Return the data of a settings file of this kind.

    Raises:
        ConfigError: the file can't be read, does not hold names and values, or is of another kind; the message names
            the command that takes it.
    """
    try:
        check_regular(path, is_read=True)
        with path.open() as file:
            first = file.readline()
            # A file of groups has megabytes a line, which YAML would take minutes to read.
            row = _json_row(first)
            _check_kind(path, row, kind)
            rest = file.read()
            if row and rest.strip():
                expected = SETTINGS_FILES[kind].content
                raise ConfigError(
                    f"the file {str(path)!r} holds rows of JSON, and this command needs {expected}: "
                    "a file of tasks is named in env.world.dataset_name, and `agentic-opd distill` takes one of logs"
                )
            data = parse_yaml(first + rest) or {}
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {str(path)!r} (the current folder is {Path.cwd()})") from error
    except OSError as error:
        raise ConfigError(f"the file {str(path)!r} can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the file {str(path)!r} can't be read: {error}") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = ", ".join(text for text in (error.context, error.problem) if text)
        problem += "; indent with spaces" if "'\\t'" in problem else ""
        raise ConfigError(f"the file {str(path)!r} is not YAML{line}: {problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"the file {str(path)!r} can't be read: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        expected = SETTINGS_FILES[kind].content
        raise ConfigError(f"the file {str(path)!r} must hold {expected}, got {type(data).__name__}")
    data = cast(dict[str, Any], data)
    _check_kind(path, data, kind)
    return data


def _json_row(line: str) -> dict[str, Any]:
    """Return the line as a row of JSONL; empty if it is not one."""
    with suppress(ValueError, RecursionError):
        row = read_json(line)
        if isinstance(row, dict):
            return cast(dict[str, Any], row)
    return {}


def _check_kind(path: Path, data: Mapping[str, Any], kind: SettingsKind) -> None:
    """Raise ConfigError if the keys of `data` are those of another kind of file, and none is of this kind's."""
    expected = SETTINGS_FILES[kind]
    if expected.keys & data.keys():
        return
    for file in (*SETTINGS_FILES.values(), *_OTHER_FILES):
        if file.keys & data.keys():
            raise ConfigError(
                f"the file {str(path)!r} holds {file.content}, and this command needs {expected.content}: "
                f"{file.command.replace('FILE', str(path))}"
            )
