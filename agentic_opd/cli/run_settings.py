"""The settings of the run that made a file, from the `.run.json` beside it (I/O)."""

from pathlib import Path

from pydantic import ValidationError

from agentic_opd.core.errors import ConfigError
from agentic_opd.env.config import AgenticOPDEnvConfig

_NOT_OF_THE_FILE = frozenset({"tokenizer_name", "custom_thinking_prompt"})
"""Settings of the run that are not taken from the file: the tokenizer is that of the server's model."""


def settings_of_run(defaults: AgenticOPDEnvConfig, file: Path) -> AgenticOPDEnvConfig:
    """The defaults, with the settings that the file's run had."""
    from agentic_opd.report.read import read_settings, settings_path  # It imports numpy, which `--help` need not.

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
