"""Command line of an environment: `serve`, `process` and `evaluate`, with settings from YAML, then flags.

The command line is parsed and validated before heavy imports, so that help and errors appear immediately.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from inspect import getdoc
from typing import Any

from pydantic import BaseModel

from agentic_opd.core.concurrency import cancel_on, rare_collections
from agentic_opd.core.console import set_up_logging
from agentic_opd.core.exit_codes import EXIT_CODES, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, exit_code
from agentic_opd.core.http import JsonClient
from agentic_opd.env.config import default_settings
from agentic_opd.plugin.info import check_model, fetch_info, fetch_model_path
from agentic_opd.settings.atropos import UNNAMED_MODEL
from agentic_opd.settings.fields import Mode
from agentic_opd.settings.flags import SettingsParser, add_settings, parse
from agentic_opd.settings.help import HelpFormatter
from agentic_opd.settings.read import Settings, read_settings

logger = logging.getLogger(__name__)

MODES: dict[Mode, str] = {
    "serve": "roll out for a trainer: registers with the trajectory API (run-api) and sends it scored groups",
    "process": "make a number of scored groups and write them to a JSONL file",
    "evaluate": "measure the policy on the held-out tasks, without training data",
}

_DESCRIPTION = "Coding agents on vLLM, distilled token by token from hindsight hints."
_EPILOG = """\
{program} MODE --help lists the settings. A first run, with a vLLM server at its default address:
  {program} process --openai.base_url http://127.0.0.1:8000/v1 --env.total_steps 8
For live conversations instead of tasks: agentic-opd gateway, or python -m agentic_opd.env live
{exit_codes}"""


def build_parser(program: str, description: str, models: Mapping[str, BaseModel]) -> SettingsParser:
    """Return a parser with a sub-command per mode and a flag per field of `models` (prefix -> defaults)."""
    parser = SettingsParser(
        prog=program,
        description=description,
        epilog=_EPILOG.format(program=program, exit_codes=EXIT_CODES),
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    modes = parser.add_subparsers(dest="mode", required=True, metavar="MODE", title="modes")
    for mode, text in MODES.items():
        sub = modes.add_parser(
            mode, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False, add_help=False
        )
        add_settings(sub, models, mode)
    return parser


def read_arguments(argv: Sequence[str]) -> Settings:
    """Return what a mode of `AgenticOPDEnv` reads from its command line.

    Raises:
        ConfigError: lists every wrong setting.
    """
    env, servers = default_settings()
    parser = build_parser("agentic-opd", _DESCRIPTION, {"env": env, "openai": servers[0]})
    return read_settings(parse(parser, argv), env, servers)


def main(env_class: Any = None, argv: Sequence[str] | None = None, program: str | None = None) -> int:
    """Run one mode of `env_class`; None: of `AgenticOPDEnv`, imported after the settings are validated.

    Returns:
        The exit code: 0 done, 1 not all done, 2 wrong settings, 130 interrupted.
    """
    env_defaults, server_defaults = env_class.config_init() if env_class else default_settings()
    description = (getdoc(env_class) or "").partition("\n")[0] if env_class else _DESCRIPTION
    parser = build_parser(program or _program(), description, {"env": env_defaults, "openai": server_defaults[0]})
    arguments = parse(parser, argv)
    set_up_logging(verbose=arguments.verbose)

    def run() -> int:
        settings = read_settings(arguments, env_defaults, server_defaults)
        for name in settings.without_effect:
            logger.warning("%s is a setting of Atropos that has no effect here", name)
        from agentic_opd.env import AgenticOPDEnv

        return asyncio.run(_run(env_class or AgenticOPDEnv, settings, arguments.mode))

    return exit_code(run)


async def name_models(servers: list[Any], retry_s: float) -> list[Any]:
    """Ask each server for its model: set it where none is configured, and check a configured name.

    The name is checked here because the environment loads its tokenizer, possibly from a hub, before it connects.

    Raises:
        ServerMismatchError: a server serves other models than the configured one.
        ServerRequestError, ServerUnreachableError: a server refuses the key, or none answers.
    """
    for server in servers:
        async with JsonClient(server.base_url, server.api_key, retry_s=retry_s) as client:
            if server.model_name == UNNAMED_MODEL:
                server.model_name = await fetch_model_path(client)
            else:
                await check_model(client, await fetch_info(client), server.model_name, "openai.model_name")
    return servers


async def _run(env_class: Any, settings: Settings, mode: Mode) -> int:
    from agentic_opd.runs.process import output_path
    from agentic_opd.wire.files import check_place
    from agentic_opd.worlds.choose import make_world

    cancel_on(signal.SIGTERM)
    config = settings.env
    make_world(config)  # So that wrong settings of a world are reported before the run waits for a server.
    if mode == "process" or (mode == "serve" and config.data_path_to_save_groups):
        check_place(output_path(config), resume=config.resume, overwrite=config.overwrite)
    env = env_class(settings.env, await name_models(settings.servers, settings.env.server_retry_s))
    with rare_collections():
        return await _run_mode(env, mode)


async def _run_mode(env: Any, mode: Mode) -> int:
    if mode == "serve":
        counts = await env.env_manager()
        return EXIT_OK if counts.unsent == 0 else EXIT_FAILED
    if mode == "evaluate":
        await env.evaluate_manager()
        return EXIT_OK
    summary = await env.process_manager()
    if isinstance(summary.stopped, asyncio.CancelledError):
        return EXIT_INTERRUPTED
    return EXIT_OK if summary.complete else EXIT_FAILED


def _program() -> str:
    """Return the command that started this process, as typed in a shell."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else f"python {sys.argv[0]}"
