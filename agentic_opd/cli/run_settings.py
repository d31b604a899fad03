"""The settings of the run that made a file, from the `.run.json` beside it (I/O)."""

from pathlib import Path

from agentic_opd.core.errors import ConfigError
from agentic_opd.env.config import AgenticOPDEnvConfig
from agentic_opd.settings.layers import nested_layer, set_values
from agentic_opd.settings.read import validated

_EXCLUDED = frozenset({"tokenizer_name", "custom_thinking_prompt"})
"""Settings that are not taken from the run's file: the tokenizer is the server's model's."""


def settings_of_run(defaults: AgenticOPDEnvConfig, file: Path) -> AgenticOPDEnvConfig:
    """Return the defaults, overridden by the settings of the file's run.

    Raises:
        ConfigError: the run's file holds a value that is invalid in this version.
    """
    from agentic_opd.report.read import read_settings, settings_path  # Imports numpy, which `--help` does not need.

    run = read_settings(settings_path(file))
    wrong: list[str] = []
    layers = [[set_values(defaults)], nested_layer(run, AgenticOPDEnvConfig, _EXCLUDED)]
    config = validated(AgenticOPDEnvConfig, "", layers, wrong)
    if wrong:
        raise ConfigError(
            f"{str(settings_path(file))!r} holds a setting that this version refuses ({wrong[0]}); change it there, "
            "or remove the file and name the settings with --config"
        )
    return config
