"""`agentic-opd doctor`: the command line. Imports for the checks happen only after the settings are validated."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from agentic_opd.core.console import set_up_logging
from agentic_opd.core.exit_codes import exit_code
from agentic_opd.core.light import keep_torch_out
from agentic_opd.env.config import default_settings
from agentic_opd.settings.flags import SettingsParser, add_settings, parse
from agentic_opd.settings.read import read_settings


def build_parser() -> SettingsParser:
    """Return a parser with the settings of the modes and this command's own flags."""
    env, servers = default_settings()
    parser = SettingsParser(
        prog="agentic-opd doctor",
        description="Check a set-up with the settings of a run, in seconds. Each check prints one line: ok, "
        "warning, failed (with what to do), or skipped. The exit code is 1 if a check failed.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--serve", action="store_true", help="check a set-up for serve, which needs the trajectory API")
    parser.add_argument(
        "--up",
        metavar="FILE",
        type=Path,
        help="check a file of `agentic-opd up` in place of these settings: whether its parts fit each other, and each "
        "environment's tasks and world",
    )
    add_settings(parser, {"env": env, "openai": servers[0]}, "doctor")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks; return 0 if none failed, 1 if one did, 2 for wrong settings."""
    arguments = parse(build_parser(), argv)
    set_up_logging(verbose=arguments.verbose)

    def run() -> int:
        if arguments.up is not None:
            keep_torch_out()
            from agentic_opd.cli.doctor.diagnose import diagnose_loop

            return asyncio.run(diagnose_loop(arguments.up, as_json=arguments.json))
        settings = read_settings(arguments, *default_settings())
        keep_torch_out()
        from agentic_opd.cli.doctor.diagnose import diagnose

        return asyncio.run(diagnose(settings, is_serve=arguments.serve, as_json=arguments.json))

    return exit_code(run)
