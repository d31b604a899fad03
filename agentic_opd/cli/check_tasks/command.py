"""`scripts/check_tasks`: run solutions of a dataset's tasks through the verifier used in training (I/O).

Exit code 0: all passed; 1: some failed, or a given solution belongs to no task; 2: the dataset, the solutions or the
settings are wrong, or the sandbox does not work; 130: interrupted.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from agentic_opd.cli.check_tasks.results import CheckedTask, CheckProgress, ResultLines
from agentic_opd.cli.check_tasks.solutions import Files, GivenSolutions, read_solutions
from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.console import set_up_logging
from agentic_opd.core.errors import ConfigError
from agentic_opd.core.exit_codes import EXIT_FAILED, EXIT_OK, EXIT_USAGE, exit_code
from agentic_opd.core.text import printable_line
from agentic_opd.core.types import Task
from agentic_opd.sandboxes.factory import check_sandbox, sandbox_factory
from agentic_opd.sandboxes.protocol import SandboxFactory
from agentic_opd.settings.read import refuse, validated
from agentic_opd.worlds.coding.config import CodingConfig, DatasetFormat
from agentic_opd.worlds.coding.hidden_tests.checks import checks_of
from agentic_opd.worlds.coding.tasks.load import load_tasks
from agentic_opd.worlds.coding.verifier.verify import SOLUTION_FILE, verify

_SHOWN = 20


async def check_tasks(
    tasks: Sequence[Task],
    solutions: Mapping[str, Files],
    new_sandbox: SandboxFactory,
    done: Callable[[int, CheckedTask], None],
    *,
    timeout_s: float,
    workers: int,
) -> None:
    """Verify one solution of each task.

    Args:
        tasks: Tasks to check.
        solutions: Task id -> files; a task without an entry ends as `no_solution`.
        new_sandbox: Creates the sandboxes.
        done: Called with each verdict and the task's index in `tasks`, in the order of completion.
        timeout_s: Processor time for the tests of one task, in seconds.
        workers: Number of concurrent verifications.

    Raises:
        DatasetError: the hidden tests of a task check nothing.
        SandboxError: the sandbox does not work.
    """
    for task in tasks:
        checks_of(task)
    await check_sandbox(new_sandbox)
    slots = asyncio.Semaphore(workers)

    async def check(number: int, task: Task) -> None:
        async with slots:
            start = time.perf_counter()
            verification = await verify(task, new_sandbox, solutions.get(task.task_id, {}), timeout_s)
            done(number, CheckedTask(task.task_id, verification, time.perf_counter() - start))

    await gather_all(check(number, task) for number, task in enumerate(tasks))


def reference_solutions(tasks: Sequence[Task]) -> GivenSolutions:
    """Return the tasks' reference solutions."""
    files = {
        task.task_id: {SOLUTION_FILE: task.reference_solution.encode("utf-8", "surrogatepass")}
        for task in tasks
        if task.reference_solution is not None
    }
    return GivenSolutions(files, [])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = _parser().parse_args(argv)
    set_up_logging(verbose=False)
    said = "interrupted: the lines of what was checked before are written"
    return exit_code(lambda: asyncio.run(_run(arguments)), interrupted=said, on_error=EXIT_USAGE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/check_tasks",
        description="Run each task's reference solution, or the given solutions, through the verifier of training. "
        "Print one JSON line per task (id, correctness, passed, total, outcome, seconds), then 'N passed, M failed'.",
        epilog="Exit code 0: all passed; 1: some failed, or a given solution belongs to no task; 2: the dataset, the "
        "solutions or the settings are wrong, or the sandbox does not work.",
        allow_abbrev=False,
    )
    settings = CodingConfig.model_fields
    parser.add_argument("dataset", metavar="FILE", help="file, folder or name on the hub, in the form of dataset_name")
    parser.add_argument(
        "--format", choices=get_args(DatasetFormat), default="generic", help="preset of the dataset's fields"
    )
    parser.add_argument("--solutions", type=Path, metavar="FILE", help="JSONL of {id, files: {solution.py: ...}}")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="output file of the JSON lines (default: standard output)"
    )
    parser.add_argument(
        "--fields",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=FIELD",
        help="fields with other names than the preset's",
    )
    parser.add_argument(
        "--split", default=settings["dataset_split"].default, help="split of the dataset, if it has splits"
    )
    parser.add_argument("--skip-broken", action="store_true", help="skip rows that cannot become tasks")
    parser.add_argument("--limit", type=_count, metavar="N", help="only the first N tasks")
    parser.add_argument(
        "--workers",
        type=_count,
        metavar="N",
        default=len(os.sched_getaffinity(0)),
        help="number of tasks checked at the same time",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        default=settings["verify_timeout_s"].default,
        help="processor seconds for the tests of one task (default: %(default)g)",
    )
    parser.add_argument(
        "--sandbox",
        metavar="BACKEND",
        default=settings["sandbox_backend"].default,
        help="backend of the sandbox, as in sandbox_backend",
    )
    return parser


def _count(text: str) -> int:
    """Parse a number of the command line that must be at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number, at least 1; got {text!r}")
    return int(text)


async def _run(arguments: argparse.Namespace) -> int:
    main_task = asyncio.current_task()
    assert main_task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main_task.cancel)
    config = _config(arguments)
    _check_out(arguments)
    all_tasks = load_tasks(config)
    tasks = all_tasks[: arguments.limit]
    solutions = reference_solutions(tasks)
    if arguments.solutions is not None:
        solutions = read_solutions(arguments.solutions, {task.task_id for task in all_tasks})
    lines = ResultLines(arguments.out)
    try:
        with CheckProgress(len(tasks)) as progress:
            for unknown in solutions.unknown[:_SHOWN]:
                progress.say(f"warning: {unknown}")

            def done(number: int, checked: CheckedTask) -> None:
                lines.add(number, checked)
                progress.done(checked)

            await check_tasks(
                tasks,
                solutions.files,
                sandbox_factory(config),
                done,
                timeout_s=config.verify_timeout_s,
                workers=arguments.workers,
            )
    finally:
        lines.close()
    _say_what_is_missing(tasks, solutions, arguments.solutions, progress)
    print(progress.counts, flush=True)
    return EXIT_FAILED if progress.failed or solutions.unknown else EXIT_OK


def _config(arguments: argparse.Namespace) -> CodingConfig:
    fields: dict[str, str] = {}
    for pair in arguments.fields:
        name, equals, field = pair.partition("=")
        if not (name and equals and field):
            raise ConfigError(f"--fields takes NAME=FIELD, for example prompt=question; got {pair!r}")
        fields[name] = field
    settings: dict[str, Any] = {
        "dataset_name": arguments.dataset,
        "dataset_split": arguments.split,
        "dataset_format": arguments.format,
        "dataset_fields": fields,
        "dataset_skip_broken": arguments.skip_broken,
        # Solutions may refer to tasks beyond the limit, so all ids are loaded.
        "dataset_limit": arguments.limit if arguments.solutions is None else None,
        "verify_timeout_s": arguments.timeout,
        "sandbox_backend": arguments.sandbox,
    }
    wrong: list[str] = []
    config = validated(CodingConfig, "", settings, wrong)
    refuse(wrong)
    return config


def _check_out(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if the output would replace an input file."""
    out: Path | None = arguments.out
    for read in (Path(arguments.dataset), arguments.solutions):
        if out is not None and read is not None and out.exists() and read.exists() and out.samefile(read):
            raise ConfigError(f"--out {str(out)!r} is the file that is read; choose another")


def _say_what_is_missing(
    tasks: Sequence[Task], solutions: GivenSolutions, given: Path | None, progress: CheckProgress
) -> None:
    missing = [printable_line(task.task_id) for task in tasks if task.task_id not in solutions.files]
    if missing:
        shown = ", ".join(missing[:_SHOWN]) + (f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "")
        remedy = "give one with --solutions FILE" if given is None else f"{str(given)!r} has none for them"
        progress.say(f"{len(missing)} tasks have no solution, which counts as failed ({remedy}): {shown}")
    if solutions.unknown:
        progress.say(f"{len(solutions.unknown)} solutions in {str(given)!r} belong to no task, and were not checked")


if __name__ == "__main__":
    sys.exit(main())
