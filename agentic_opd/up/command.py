"""`agentic-opd up`: command line of a whole loop."""

import argparse
import asyncio
import signal
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from agentic_opd.core.concurrency import cancel_on
from agentic_opd.core.console import set_up_logging
from agentic_opd.core.errors import ConfigError, OPDError, PlaceError
from agentic_opd.core.exit_codes import EXIT_OK, TRAINING_EXIT_CODES, CommandParser, exit_code
from agentic_opd.env.config import AgentEnvConfig
from agentic_opd.settings.files import read_yaml
from agentic_opd.settings.read import refuse, validated
from agentic_opd.training.config import check_new
from agentic_opd.up.config import UpConfig
from agentic_opd.up.parts import LoopPart, Start, parts_of

_DESCRIPTION = """\
Start all parts of a training loop from one file: vLLM servers, the trajectory API, environments or a gateway, and the
trainer. Each part starts when the parts that it needs answer. When the trainer ends, or a part dies, all parts are
stopped; --resume continues from the last checkpoint."""
_EPILOG = f"""\
  agentic-opd up --config configs/up_demo.yaml

docs/closing_the_loop.md describes the file. Ctrl-C stops all parts: the trainer after its step, with a checkpoint.
{TRAINING_EXIT_CODES}"""


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="agentic-opd up",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", type=Path, required=True, help="YAML file that names the parts")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check settings, memory of the GPUs, tasks and worlds, and print the commands without starting anything",
    )
    handling = parser.add_mutually_exclusive_group()
    handling.add_argument("--resume", action="store_true", help="resume an earlier run in output_dir")
    handling.add_argument("--overwrite", action="store_true", help="replace the files of an earlier run in output_dir")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the loop.

    Returns:
        The exit code: 0 done, 1 a part failed, 2 wrong settings, 3 rolled back by the brake, 130 interrupted.
    """
    arguments = build_parser().parse_args(argv)
    set_up_logging(verbose=False)

    def up() -> int:
        config = read(arguments.config)
        start: Start = "resume" if arguments.resume else "overwrite" if arguments.overwrite else "new"
        parts = parts_of(config, start)
        _check_memory(parts, config)
        asyncio.run(_check_worlds(parts))
        if arguments.dry_run:
            print("\n".join(part.written() for part in parts))
            return EXIT_OK
        # Refuse an unusable output folder before the servers start, as the trainer would later.
        if start == "new":
            check_new(config.output_dir)
        if start == "resume" and not any((config.output_dir / "checkpoints").glob("step-??????")):
            raise PlaceError(f"{str(config.output_dir)!r} holds no checkpoint to resume from: start without --resume")
        from agentic_opd.wire.files import FileLock

        lock = FileLock(config.output_dir / "up", "output_dir")
        try:
            asyncio.run(_run(parts, config))
        finally:
            lock.release()
        return EXIT_OK

    return exit_code(up, interrupted="interrupted; a later run with --resume continues from the last checkpoint")


def read(path: Path) -> UpConfig:
    """Read a file of `up`.

    Raises:
        ConfigError: the file can't be read, or has wrong settings; the message has all of them.
    """
    wrong: list[str] = []
    config = validated(UpConfig, "", [[read_yaml(path, "loop")]], wrong)
    refuse(wrong)
    return config


def _check_memory(parts: Sequence[LoopPart], config: UpConfig) -> None:
    """Refuse a loop that this machine's GPUs can't hold, before anything is loaded; see `memory.check_fits`."""
    from agentic_opd.training.memory import shape_of_checkpoint
    from agentic_opd.up.memory import check_fits, gpu_sizes, memory_of

    if sizes := gpu_sizes():
        settings = {part.name: part.settings for part in parts}
        check_fits(memory_of(config, settings, cache(shape_of_checkpoint), sizes))


async def _check_worlds(parts: Sequence[LoopPart]) -> None:
    """Load each environment's tasks and open a session of its world, as it would once the servers have been loaded.

    Raises:
        ConfigError: a world does not work; the message names the environment.
    """
    from agentic_opd.env.setup import WORLD_CHECKS, Setup, meet

    for part in parts:
        if isinstance(part.settings, AgentEnvConfig):  # A gateway has no tasks.
            try:
                await meet(WORLD_CHECKS, Setup(part.settings, (), None))
            except OPDError as error:
                raise ConfigError(f"{part.name}: {error}") from error


async def _run(parts: Sequence[LoopPart], config: UpConfig) -> None:
    from agentic_opd.up.supervisor import Supervisor

    cancel_on(signal.SIGINT, signal.SIGTERM)
    await Supervisor(parts, config).run()
