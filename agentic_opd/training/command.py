"""`agentic-opd train`: the command line of the reference trainer. torch is imported after the settings are checked."""

import asyncio
import logging
import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentic_opd.core.console import set_up_logging
from agentic_opd.core.errors import ConfigError
from agentic_opd.core.exit_codes import EXIT_OK, TRAINING_EXIT_CODES, exit_code
from agentic_opd.settings.flags import SettingsParser, add_settings, parse
from agentic_opd.training.config import DEFAULTS, TrainerConfig, read_config

if TYPE_CHECKING:
    from agentic_opd.training.learners import LearnersTrainer
    from agentic_opd.training.trainer import Trainer


_INTERRUPTED = (
    "interrupted; a later run with --resume (with learners.folder: the same command) goes on from the last checkpoint"
)


def build_parser() -> SettingsParser:
    parser = SettingsParser(
        prog="agentic-opd train",
        description="Train on scored groups: those that environments send to the trajectory API (api_url), or with "
        "--groups those of files that process, distill and the gateway wrote, which needs no server. "
        "--resume continues either kind of run.",
        allow_abbrev=False,
        add_help=False,
    )
    add_settings(parser, DEFAULTS)
    parser.footer = TRAINING_EXIT_CODES
    return parser


def read_arguments(argv: Sequence[str]) -> TrainerConfig:
    """Return what the trainer reads from its command line; ConfigError lists every wrong setting."""
    return read_config(parse(build_parser(), argv))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trainer.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong settings, 3 rolled back by the brake, 130 interrupted.
    """
    arguments = parse(build_parser(), argv)
    set_up_logging(verbose=arguments.verbose)
    if os.environ.get("RANK", "0") != "0":  # Only the first of torchrun's processes logs.
        logging.disable(logging.WARNING)

    def train() -> int:
        config = read_config(arguments)
        try:
            from agentic_opd.training.learners import open_learners
            from agentic_opd.training.trainer import open_trainer
        except ModuleNotFoundError as error:
            raise ConfigError(f"{error}. The trainer needs the extra: pip install 'agentic-opd[train]'") from error

        asyncio.run(_run(open_trainer(config) if config.learners.folder is None else open_learners(config)))
        return EXIT_OK

    return exit_code(train, interrupted=_INTERRUPTED)


async def _run(trainer: "Trainer | LearnersTrainer") -> None:
    running = asyncio.create_task(trainer.run())
    await asyncio.sleep(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, trainer.stop)
    await running
