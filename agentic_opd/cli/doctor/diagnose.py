"""All checks of `agentic-opd doctor`: a run's requirements and its own; run in order, printed as text or JSON."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from agentic_opd.cli.doctor.machine import check_disk, check_packages, check_python, check_wandb
from agentic_opd.cli.doctor.servers import (
    DoctorSetup,
    check_judge,
    check_noise,
    check_rendering,
    check_teacher,
    check_trajectories,
    check_versions,
)
from agentic_opd.core.console import PrintableConsole
from agentic_opd.core.errors import OPDError
from agentic_opd.core.exit_codes import EXIT_FAILED, EXIT_OK
from agentic_opd.env.config import AgentEnvConfig
from agentic_opd.env.setup import REQUIREMENTS, WORLD_CHECKS, Note, Setup, SetupCheck, Status
from agentic_opd.settings.read import Settings
from agentic_opd.training.memory import shape_of_checkpoint
from agentic_opd.up.command import read
from agentic_opd.up.memory import GpuMemory, check_fits, gpu_sizes, memory_of
from agentic_opd.up.parts import LoopPart, parts_of

PATIENCE_S = 60.0
"""Time limit of one check in seconds, including the download of tasks from the hub."""

CHECKS: tuple[SetupCheck, ...] = (
    SetupCheck("python", check_python),
    SetupCheck("packages", check_packages),
    SetupCheck("disk", check_disk),
    SetupCheck("W&B", check_wandb),
    *WORLD_CHECKS,
    *REQUIREMENTS[2:],
    SetupCheck("versions", check_versions, ("server",)),
    SetupCheck("template", check_rendering, ("renderer",)),
    SetupCheck("judge", check_judge),
    SetupCheck("teacher", check_teacher, ("tokenizer",)),
    SetupCheck("noise floor", check_noise, ("renderer",)),
    SetupCheck("run-api", check_trajectories),
)

_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "red", Status.SKIPPED: "dim"}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    name: str
    status: Status
    text: str

    def line(self) -> Text:
        """Return the diagnosis as a line: `ok       server       ...`."""
        width = max(len(check.name) for check in CHECKS)
        return Text.assemble((f"{self.status.value:<8}", _STYLES[self.status]), f" {self.name:<{width}}  {self.text}")


async def diagnose(settings: Settings, *, is_serve: bool, as_json: bool) -> int:
    """Run all checks and print their diagnoses; return the exit code."""
    setup = DoctorSetup.of(settings.env, settings.servers, is_serve=is_serve)
    try:
        return await _printed(run_checks(CHECKS, setup), as_json=as_json)
    finally:
        await setup.close()


async def diagnose_loop(path: Path, *, as_json: bool) -> int:
    """Check the file of a loop, and the world of each of its environments; return the exit code."""
    parts: list[LoopPart] = []

    async def check_file(_: None) -> Note:
        parts.extend(parts_of(read(path)))
        return Note(f"{len(parts)} parts fit each other: {', '.join(part.name for part in parts)}")

    async def check_memory(_: None) -> Note:
        config, sizes = read(path), gpu_sizes()
        if not sizes and all(part.devices is None for part in (config.trainer, *config.servers.values())):
            return Note("no GPU is found here, and none is named", Status.SKIPPED)
        settings = {part.name: part.settings for part in parts}
        models = {settings["trainer"].model, *(server.model for server in config.servers.values())}
        shapes = {model: await asyncio.to_thread(shape_of_checkpoint, model) for model in models}
        if unknown := [model for model, shape in shapes.items() if shape is None]:
            return Note(f"not computed: config.json of {', '.join(sorted(unknown))} can't be read here", Status.SKIPPED)
        return memory_note(memory_of(config, settings, shapes.get, sizes))

    async def diagnoses() -> AsyncIterator[Diagnosis]:
        checks = (SetupCheck("python", check_python), SetupCheck("packages", check_packages))
        memory_check = SetupCheck("memory", check_memory, ("file",))
        async for diagnosis in run_checks((*checks, SetupCheck("file", check_file), memory_check), None):
            yield diagnosis
        for part in parts:
            if not isinstance(part.settings, AgentEnvConfig):
                continue  # A gateway has no tasks.
            async for diagnosis in run_checks(WORLD_CHECKS, Setup(part.settings, (), None)):
                yield replace(diagnosis, text=f"{part.name}: {diagnosis.text}")

    return await _printed(diagnoses(), as_json=as_json)


def memory_note(memory: Sequence[GpuMemory]) -> Note:
    """Return what the parts of a loop need on each GPU, and whether it fits.

    Raises:
        ConfigError: it does not fit.
    """
    check_fits(memory)
    text = "; ".join(map(str, memory))
    if any(not gpu.has_spare for gpu in memory):
        return Note(f"{text}. Computed, with less than a fifth to spare", Status.WARNING)
    if all(gpu.total_bytes is None for gpu in memory):
        return Note(f"{text}. Computed; no GPU is found here", Status.SKIPPED)
    return Note(f"{text}. Computed")


async def _printed(diagnoses: AsyncIterator[Diagnosis], *, as_json: bool) -> int:
    """Print the diagnoses as they come, or all as JSON; return the exit code."""
    console, diagnosed = PrintableConsole(), list[Diagnosis]()
    async for diagnosis in diagnoses:
        diagnosed.append(diagnosis)
        if not as_json:
            console.print(diagnosis.line(), soft_wrap=True)
    counts = Counter(diagnosis.status for diagnosis in diagnosed)
    if as_json:
        print(json.dumps([{"name": d.name, "status": d.status.value, "text": d.text} for d in diagnosed], indent=2))
    else:
        console.print(", ".join(f"{counts[status]} {status.value}" for status in Status), highlight=False)
    return EXIT_FAILED if counts[Status.FAILED] else EXIT_OK


async def run_checks(checks: Sequence[SetupCheck], setup: Any) -> AsyncIterator[Diagnosis]:
    """Yield the diagnosis of each check, in order. An error is a failure; checks that need a failed one are skipped."""
    missing: set[str] = set()
    for check in checks:
        lacking = [name for name in check.needs if name in missing]
        if lacking:
            diagnosis = Diagnosis(check.name, Status.SKIPPED, f"needs: {', '.join(lacking)}")
        else:
            diagnosis = await _diagnosis(check, setup)
        if lacking or diagnosis.status is Status.FAILED:
            missing.add(check.name)
        yield diagnosis


async def _diagnosis(check: SetupCheck, setup: Any) -> Diagnosis:
    try:
        async with asyncio.timeout(PATIENCE_S):
            note = await check.run(setup)
    except TimeoutError:
        return Diagnosis(check.name, Status.FAILED, f"did not come to an end within {PATIENCE_S:g} s")
    except OPDError as error:
        return Diagnosis(check.name, Status.FAILED, str(error))
    return Diagnosis(check.name, note.status, note.text)
