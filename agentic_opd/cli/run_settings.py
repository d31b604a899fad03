"""The settings of the run that made a file, from the `.run.json` beside it (I/O)."""

from pathlib import Path

from pydantic import ValidationError

from agentic_opd.core.errors import ConfigError
from agentic_opd.env.config import AgenticOPDEnvConfig

_EXCLUDED = frozenset({"tokenizer_name", "custom_thinking_prompt"})
"""Settings that are not taken from the run's file: the tokenizer is the server's model's."""


def settings_of_run(defaults: AgenticOPDEnvConfig, file: Path) -> AgenticOPDEnvConfig:
    """Return the defaults, overridden by the settings of the file's run.

    Raises:
        ConfigError: the run's file holds a value that is invalid in this version.
    """
    from agentic_opd.report.read import read_settings, settings_path  # Imports numpy, which `--help` does not need.

    run = read_settings(settings_path(file))
    settings = {name: run[name] for name in run.keys() & AgenticOPDEnvConfig.model_fields.keys() - _EXCLUDED}
    try:
        return AgenticOPDEnvConfig.model_validate({**defaults.model_dump(), **settings})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{str(settings_path(file))!r} holds a setting that this version refuses ({name}: {first['msg']}); "
            "correct it there, or remove the file and name the settings with --config"
        ) from error
