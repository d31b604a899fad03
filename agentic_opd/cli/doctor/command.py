"""`agentic-opd doctor`: the command line, and what a person or a program reads."""

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from agentic_opd.cli.doctor.diagnosis import Check, Diagnosis, Setup, Status, run_checks
from agentic_opd.cli.doctor.distilling import check_judge, check_noise, check_teacher, check_trajectories
from agentic_opd.cli.doctor.machine import (
    check_disk,
    check_isolation,
    check_packages,
    check_python,
    check_tasks,
    check_wandb,
)
from agentic_opd.cli.doctor.servers import (
    check_context,
    check_logprobs,
    check_renderer,
    check_server,
    check_tokens,
    check_versions,
)
from agentic_opd.core.console import set_up_logging
from agentic_opd.core.exit_codes import EXIT_FAILED, EXIT_OK, exit_code
from agentic_opd.env.opd import AgenticOPDEnv
from agentic_opd.settings.flags import add_settings, misunderstood
from agentic_opd.settings.read import read_settings

CHECKS: tuple[Check, ...] = (
    Check("python", check_python),
    Check("packages", check_packages),
    Check("disk", check_disk),
    Check("tasks", check_tasks),
    Check("sandbox", check_isolation),
    Check("W&B", check_wandb),
    Check("server", check_server),
    Check("versions", check_versions, ("server",)),
    Check("context", check_context, ("server",)),
    Check("logprobs", check_logprobs, ("server",)),
    Check("tokenizer", check_tokens, ("server",)),
    Check("renderer", check_renderer, ("server", "tokenizer")),
    Check("judge", check_judge),
    Check("teacher", check_teacher, ("server", "tokenizer")),
    Check("noise floor", check_noise, ("server", "tokenizer", "renderer")),
    Check("run-api", check_trajectories),
)

_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "red", Status.SKIPPED: "dim"}


def build_parser() -> argparse.ArgumentParser:
    """The settings of the modes, and what only this command knows."""
    env, servers = AgenticOPDEnv.config_init()
    parser = argparse.ArgumentParser(
        prog="agentic-opd doctor",
        description="Check a set-up, with the settings of a run, in seconds. One line a check: ok, warning, failed "
        "(with what to do), or skipped. The exit code is 1 where a check failed.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--serve", action="store_true", help="the set-up is for serve: it needs the trajectory API")
    add_settings(parser, {"env": env, "openai": servers[0]}, "doctor")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks; returns 0 where none failed, 1 where one did, 2 for wrong settings."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    set_up_logging(verbose=arguments.verbose)

    async def run() -> int:
        settings = read_settings(arguments, *AgenticOPDEnv.config_init(), misunderstood(unknown, parser))
        setup = Setup(settings.env, settings.servers, arguments.serve)
        console, diagnoses = Console(), list[Diagnosis]()
        try:
            async for diagnosis in run_checks(CHECKS, setup):
                diagnoses.append(diagnosis)
                if not arguments.json:
                    console.print(line(diagnosis), soft_wrap=True)
        finally:
            await setup.close()
        counts = Counter(diagnosis.status for diagnosis in diagnoses)
        if arguments.json:
            print(
                json.dumps(
                    [{"name": one.name, "status": one.status.value, "text": one.text} for one in diagnoses], indent=2
                )
            )
        else:
            console.print(", ".join(f"{counts[status]} {status.value}" for status in Status), highlight=False)
        return EXIT_FAILED if counts[Status.FAILED] else EXIT_OK

    return exit_code(lambda: asyncio.run(run()))


def line(diagnosis: Diagnosis) -> Text:
    """`ok       server       ...`."""
    return Text.assemble(
        (f"{diagnosis.status.value:<8}", _STYLES[diagnosis.status]),
        f" {diagnosis.name:<{max(len(check.name) for check in CHECKS)}}  {diagnosis.text}",
    )
