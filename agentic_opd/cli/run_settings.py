"""The settings of the run that made a file, from the `.run.json` beside it (I/O)."""

from pathlib import Path

from pydantic import ValidationError

from agentic_opd.core.errors import ConfigError
from agentic_opd.env.config import AgenticOPDEnvConfig

_NOT_OF_THE_FILE = frozenset({"tokenizer_name", "custom_thinking_prompt"})
"""Settings that are not taken from the run's file: the tokenizer is the server's model's."""


def settings_of_run(defaults: AgenticOPDEnvConfig, file: Path) -> AgenticOPDEnvConfig:
    """Return the defaults, overridden by the settings of the file's run.

    Raises:
        ConfigError: the run's file holds a value that is invalid in this version.
    """
    from agentic_opd.report.read import read_settings, settings_path  # Imports numpy, which `--help` does not need.

    run = read_settings(settings_path(file))
    known = {name: run[name] for name in run.keys() & AgenticOPDEnvConfig.model_fields.keys() - _NOT_OF_THE_FILE}
    try:
        return AgenticOPDEnvConfig.model_validate({**defaults.model_dump(), **known})
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"{str(settings_path(file))!r} holds a setting that is none today ({'.'.join(map(str, first['loc']))}: "
            f"{first['msg']}); mend it there, or remove the file and name the settings with --config"
        ) from error
