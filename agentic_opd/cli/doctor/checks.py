"""All checks of `agentic-opd doctor`, and their output as text or JSON."""

import json
from collections import Counter

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
    check_prompts,
    check_renderer,
    check_server,
    check_tokens,
    check_versions,
)
from agentic_opd.core.console import PrintableConsole
from agentic_opd.core.exit_codes import EXIT_FAILED, EXIT_OK
from agentic_opd.settings.read import Settings

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
    Check("prompts", check_prompts, ("tasks", "renderer")),
    Check("judge", check_judge),
    Check("teacher", check_teacher, ("server", "tokenizer")),
    Check("noise floor", check_noise, ("server", "tokenizer", "renderer")),
    Check("run-api", check_trajectories),
)

_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "red", Status.SKIPPED: "dim"}


async def diagnose(settings: Settings, *, is_serve: bool, as_json: bool) -> int:
    """Run all checks and print their diagnoses; return the exit code."""
    setup = Setup(settings.env, settings.servers, is_serve)
    console, diagnoses = PrintableConsole(), list[Diagnosis]()
    try:
        async for diagnosis in run_checks(CHECKS, setup):
            diagnoses.append(diagnosis)
            if not as_json:
                console.print(line(diagnosis), soft_wrap=True)
    finally:
        await setup.close()
    counts = Counter(diagnosis.status for diagnosis in diagnoses)
    if as_json:
        print(json.dumps([{"name": f.name, "status": f.status.value, "text": f.text} for f in diagnoses], indent=2))
    else:
        console.print(", ".join(f"{counts[status]} {status.value}" for status in Status), highlight=False)
    return EXIT_FAILED if counts[Status.FAILED] else EXIT_OK


def line(diagnosis: Diagnosis) -> Text:
    """Return the diagnosis as a line: `ok       server       ...`."""
    return Text.assemble(
        (f"{diagnosis.status.value:<8}", _STYLES[diagnosis.status]),
        f" {diagnosis.name:<{max(len(check.name) for check in CHECKS)}}  {diagnosis.text}",
    )
