"""`agentic-opd gateway`: the command line. Heavy imports wait until the settings are valid."""

import argparse
import asyncio
import os
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

from pydantic import SecretStr

from agentic_opd.core.console import log_console, set_up_logging
from agentic_opd.core.errors import ConfigError
from agentic_opd.core.exit_codes import EXIT_OK, exit_code
from agentic_opd.core.light import keep_torch_out
from agentic_opd.gateway.config import KEY_VARIABLE, GatewayConfig
from agentic_opd.settings.atropos import PolicyServerConfig
from agentic_opd.settings.flags import SettingsParser, add_settings, parse
from agentic_opd.settings.read import Settings, read_settings

_SWITCH_S = 0.0005
"""Interpreter switch interval (seconds), which bounds how long the journal's thread waits for the interpreter.

An answer ends only after its turn is written."""
_DESCRIPTION = (
    "A server of OpenAI's and Anthropic's protocols in front of the policy that records conversations as scored groups."
)


def build_parser() -> SettingsParser:
    parser = SettingsParser(prog="agentic-opd gateway", description=_DESCRIPTION, allow_abbrev=False, add_help=False)
    add_settings(parser, {"env": default_config(), "openai": PolicyServerConfig()}, "gateway")
    return parser


def default_config() -> GatewayConfig:
    """Return the defaults, with the key from the environment variable if it is set."""
    key = os.environ.get(KEY_VARIABLE)
    return GatewayConfig(api_keys=(SecretStr(key),)) if key else GatewayConfig()


def read_arguments(argv: Sequence[str]) -> Settings:
    """Return what the gateway reads from its command line; ConfigError lists every wrong setting."""
    return _settings(parse(build_parser(), argv))


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM.

    Returns:
        The exit code: 0 success, 1 failure, 2 invalid settings, 130 interrupted.
    """
    arguments = parse(build_parser(), argv)
    set_up_logging(verbose=arguments.verbose)

    def serve() -> int:
        settings = _settings(arguments)
        keep_torch_out()
        _run(_serve(settings))
        return EXIT_OK

    return exit_code(serve)


def _settings(arguments: argparse.Namespace) -> Settings:
    return read_settings(arguments, default_config(), [PolicyServerConfig()])


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` on uvloop where it is installed: it forwards a token in half of asyncio's time."""
    sys.setswitchinterval(_SWITCH_S)
    try:
        from uvloop import new_event_loop
    except ModuleNotFoundError:  # uvloop does not support Windows.
        new_event_loop = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(work)


async def _serve(settings: Settings) -> None:
    """Run `serve.serve`; raises its errors, and ConfigError if the libraries of the gateway are not installed."""
    try:
        from agentic_opd.gateway.serve import serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}. The gateway needs the extra: pip install 'agentic-opd[gateway]'") from error

    def ready(address: str, described: str) -> None:
        log_console().print(f"gateway: {address} {described}", markup=False, highlight=False, soft_wrap=True)

    await serve(settings.env, settings.servers, ready)
