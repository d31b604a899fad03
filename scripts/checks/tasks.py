"""`scripts/checks/tasks`: run solutions of tasks through the verifier used in training (I/O).

The tasks are of a dataset, or with `--format harbor` of a folder in Harbor's format.

Exit code 0: all passed; 1: some failed, a given solution belongs to no task, or a Harbor task passes without any work;
2: the dataset, the solutions or the settings are wrong, or the sandbox does not work; 130: interrupted.
"""

import argparse
import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Container, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast, get_args

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.console import LiveBar, PrintableConsole, set_up_logging
from agentic_opd.core.errors import ConfigError, DatasetError, OutputError, SandboxError, WorldError
from agentic_opd.core.exit_codes import EXIT_FAILED, EXIT_OK, EXIT_USAGE, exit_code
from agentic_opd.core.text import printable_line, text_lines
from agentic_opd.core.types import Task, Verification, VerifyOutcome
from agentic_opd.sandboxes.config import SANDBOX_KINDS
from agentic_opd.sandboxes.factory import check_sandbox, sandbox_factory
from agentic_opd.settings.read import refuse, validated
from agentic_opd.wire.files import JsonLines
from agentic_opd.worlds.coding.config import CodingSettings
from agentic_opd.worlds.coding.tasks.load import load_tasks
from agentic_opd.worlds.coding.tasks.rows import FILE_SUFFIXES, Row, is_data_file, read_file
from agentic_opd.worlds.coding.verifier.verify import SOLUTION_FILE, verify
from agentic_opd.worlds.config import DatasetFormat, WorldConfig
from agentic_opd_environments.harbor.world import HarborWorld

_LISTED_IDS = 20
_EXCERPT_LINES, _EXCERPT_LINES_OF_HARBOR = 4, 24
_LINE_LIMIT = 600


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = _parser().parse_args(argv)
    set_up_logging(verbose=False)
    note = "interrupted: the lines of what was checked before are written"
    return exit_code(lambda: asyncio.run(_run(arguments)), interrupted=note, on_error=EXIT_USAGE)


_FLAGS = {
    "world.skip_broken": "--skip-broken",
    "world.limit": "--limit",
    "world.dataset_fields": "--fields",
    "world.dataset_format": "--format",
    "world.dataset_split": "--split",
    "world.dataset_name": "FILE",
    "world.folder": "FILE",
    "world.network": "--network",
    "world.variables": "--variables",
    "sandbox.type": "--sandbox",
    "sandbox.container_command": "--engine",
    "world.verify_timeout_s": "--timeout",
}
"""Settings of the package -> this command's names for them."""
_SETTING = re.compile(rf"(?<![\w./-])(?:--)?(?:env\.)?({'|'.join(map(re.escape, _FLAGS))})\b")
_OF_VARIABLE = re.compile(r"set --variables to \{(\w+): \.\.\.\}")


def in_flags(message: str) -> str:
    """Return a message of the package with this command's flags in place of the settings that they set."""
    message = _SETTING.sub(lambda match: _FLAGS[match[1]], message)
    return _OF_VARIABLE.sub(r"give one with --variables \1=VALUE", message)


async def _run(arguments: argparse.Namespace) -> int:
    try:
        return await _check(arguments)
    except (ConfigError, DatasetError, SandboxError, WorldError) as error:
        raise type(error)(in_flags(str(error))) from error


async def _check(arguments: argparse.Namespace) -> int:
    main_task = asyncio.current_task()
    assert main_task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main_task.cancel)
    _check_out(arguments)
    if arguments.format == "harbor":
        return await _run_harbor(arguments, _harbor_world(arguments))
    (settings, config), solutions_file = _settings(arguments), cast(Path | None, arguments.solutions)
    all_tasks = load_tasks(settings)
    tasks = all_tasks[: arguments.limit]
    if solutions_file is None:
        solutions, unknown = _reference_solutions(tasks), list[str]()
    else:
        solutions, unknown = read_solutions(solutions_file, {task.task_id for task in all_tasks})
    new_sandbox = sandbox_factory(config.sandbox)

    async def checked(task: Task) -> CheckedTask:
        start = time.perf_counter()
        verdict = await verify(task, new_sandbox, solutions.get(task.task_id, {}), settings.verify_timeout_s)
        return CheckedTask(task.task_id, verdict, time.perf_counter() - start)

    with CheckResults(arguments.out, len(tasks)) as results:
        for warning in unknown[:_LISTED_IDS]:
            results.say(f"warning: {warning}")
        await check_sandbox(new_sandbox)
        await _check_all(tasks, checked, arguments.workers, results)
    missing = [printable_line(task.task_id) for task in tasks if task.task_id not in solutions]
    if missing:
        unlisted = len(missing) - _LISTED_IDS
        ids = ", ".join(missing[:_LISTED_IDS]) + (f" and {unlisted} more" if unlisted > 0 else "")
        remedy = (
            "give one with --solutions FILE" if solutions_file is None else f"{str(solutions_file)!r} has none for them"
        )
        results.say(f"{len(missing)} tasks have no solution, which counts as failed ({remedy}): {ids}")
    if unknown:
        results.say(f"{len(unknown)} solutions in {str(solutions_file)!r} belong to no task, and were not checked")
    print(results.counts, flush=True)
    return EXIT_FAILED if results.failed or unknown else EXIT_OK


async def _run_harbor(arguments: argparse.Namespace, world: HarborWorld) -> int:
    """Run each task's tests without any work, and after its solve.sh; this builds and keeps the missing images."""
    tasks = await world.read_tasks()
    await world.check_engine()

    async def verdict(run: Awaitable[Verification]) -> Verification:
        try:
            return await run
        except (WorldError, SandboxError) as error:
            return Verification(VerifyOutcome.CRASHED, 0, 1, in_flags(str(error)), "")

    async def checked(task: Task) -> CheckedTask:
        start = time.perf_counter()
        without_work = await verdict(world.untouched(task))
        solved = await verdict(world.solved(task))
        return CheckedTask(task.task_id, solved, time.perf_counter() - start, without_work)

    with CheckResults(arguments.out, len(tasks)) as results:
        await _check_all(tasks, checked, arguments.workers, results)
    print(results.counts, flush=True)
    return EXIT_FAILED if results.failed else EXIT_OK


async def _check_all(
    tasks: Sequence[Task],
    checked: Callable[[Task], Awaitable["CheckedTask"]],
    workers: int,
    results: "CheckResults",
) -> None:
    slots = asyncio.Semaphore(workers)

    async def check(number: int, task: Task) -> None:
        async with slots:
            results.add(number, await checked(task))

    await gather_all(check(number, task) for number, task in enumerate(tasks))


# ------------------------------------------------------------------------------------------------------- command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/checks/tasks",
        description="Run each task's reference solution, or the given solutions, through the verifier of training. "
        "Print one JSON line per task (id, correctness, passed, total, outcome, seconds; of a Harbor task also "
        "reward_without_work, the reward of doing nothing), then 'N passed, M failed'.",
        epilog="Exit code 0: all passed; 1: some failed, a given solution belongs to no task, or a Harbor task passes "
        "without any work; 2: the dataset, the solutions or the settings are wrong, or the sandbox does not work.",
        allow_abbrev=False,
    )
    settings = CodingSettings.model_fields
    add = parser.add_argument
    add(
        "dataset",
        metavar="FILE",
        help="file, folder or name on the hub, as env.world.dataset_name; or Harbor tasks",
    )
    formats = (*get_args(DatasetFormat), "harbor")
    add("--format", choices=formats, default="generic", help="preset of the dataset's fields, or harbor")
    add("--solutions", type=Path, metavar="FILE", help="JSONL of {id, files: {solution.py: ...}}")
    add("--out", type=Path, metavar="FILE", help="output file of the JSON lines (default: standard output)")
    names = "fields with other names than the preset's"
    add("--fields", nargs="+", action="extend", default=[], metavar="NAME=FIELD", help=names)
    add("--split", default=settings["dataset_split"].default, help="split of the dataset, if it has splits")
    add(
        "--skip-broken",
        action="store_true",
        help="skip rows that cannot become tasks, or Harbor tasks that cannot be run",
    )
    add("--limit", type=_count, metavar="N", help="only the first N tasks")
    cores = len(os.sched_getaffinity(0))
    add("--workers", type=_count, metavar="N", default=cores, help="number of tasks checked at the same time")
    limit = "processor seconds for the tests of one task (default: %(default)g)"
    add("--timeout", type=float, metavar="SECONDS", default=settings["verify_timeout_s"].default, help=limit)
    of_harbor = "docker with --format harbor"
    add("--sandbox", metavar="TYPE", help=f"env.sandbox.type (default: {SANDBOX_KINDS.default}; {of_harbor})")
    add("--engine", metavar="COMMAND", help="env.sandbox.container_command (default: docker)")
    add("--network", action="store_true", help="harbor: network of tasks that do not mention it")
    values = "harbor: values of ${NAME} in task.toml"
    add("--variables", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help=values)
    return parser


def _count(text: str) -> int:
    """Parse a number of the command line that must be at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number, at least 1; got {text!r}")
    return int(text)


def _pairs(pairs: Sequence[str], form: str) -> dict[str, str]:
    """Return `NAME=VALUE` texts as a dict; `form` describes them in an error."""
    field_names: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{form}; got {pair!r}")
        field_names[name] = value
    return field_names


def _harbor_world(arguments: argparse.Namespace) -> HarborWorld:
    of_files = ("solutions", "fields")
    if without := [f"--{name}" for name in of_files if getattr(arguments, name)]:
        raise ConfigError(
            f"{' and '.join(without)} do not apply to --format harbor: a task's solution is in its folder"
        )
    variables = _pairs(arguments.variables, "--variables takes NAME=VALUE")
    wrong: list[str] = []
    config = validated(WorldConfig, "", [[{"sandbox": _sandbox(arguments, "docker")}]], wrong)
    refuse(wrong)
    return HarborWorld(
        config,
        Path(arguments.dataset),
        network=arguments.network,
        variables=variables,
        limit=arguments.limit,
        skip_broken=arguments.skip_broken,
    )


def _sandbox(arguments: argparse.Namespace, default: str) -> dict[str, str]:
    engine = {} if arguments.engine is None else {"container_command": arguments.engine}
    return {"type": arguments.sandbox or default, **engine}


def _settings(arguments: argparse.Namespace) -> tuple[CodingSettings, WorldConfig]:
    settings: dict[str, Any] = {
        "dataset_name": arguments.dataset,
        "dataset_split": arguments.split,
        "dataset_format": arguments.format,
        "dataset_fields": _pairs(arguments.fields, "--fields takes NAME=FIELD, for example prompt=question"),
        "skip_broken": arguments.skip_broken,
        # Solutions may refer to tasks beyond the limit, so all ids are loaded.
        "limit": arguments.limit if arguments.solutions is None else None,
        "verify_timeout_s": arguments.timeout,
    }
    wrong: list[str] = []
    coding = validated(CodingSettings, "world", [[settings]], wrong)
    config = validated(WorldConfig, "", [[{"sandbox": _sandbox(arguments, SANDBOX_KINDS.default)}]], wrong)
    refuse(wrong)
    return coding, config


def _check_out(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if the output would replace an input file."""
    out: Path | None = arguments.out
    for read in (Path(arguments.dataset), arguments.solutions):
        if out is not None and read is not None and out.exists() and read.exists() and out.samefile(read):
            raise ConfigError(f"--out {str(out)!r} is an input file; choose another")


# ---------------------------------------------------------------------------------------------------------- solutions

Files = dict[str, bytes]
"""Relative path -> content."""

_MAX_ID_BITS = 1000
_MAX_NAME_BYTES = 255


def _reference_solutions(tasks: Sequence[Task]) -> dict[str, Files]:
    return {
        task.task_id: {SOLUTION_FILE: task.reference_solution.encode("utf-8", "surrogatepass")}
        for task in tasks
        if task.reference_solution is not None
    }


def read_solutions(path: Path, task_ids: Container[str]) -> tuple[dict[str, Files], list[str]]:
    """Return the solutions (task id -> files) in a .jsonl, .jsonl.gz or .parquet file, and lines about unknown ids.

    A row is `{"id": ..., "files": {"solution.py": ...}}`.

    Raises:
        DatasetError: the file cannot be read, a row has another form, or an id is repeated; the message names the line.
    """
    if not is_data_file(path):
        raise DatasetError(f"solutions {str(path)!r}: expected a file that ends in {', '.join(FILE_SUFFIXES)}")
    files: dict[str, Files] = {}
    lines_by_id: dict[str, str] = {}
    unknown: list[str] = []
    for row in read_file(path):
        row_id, row_files = _row_id(row), _row_files(row)
        if row_id in lines_by_id:
            raise DatasetError(f"{row.location}: the id {row_id!r} is already that of {lines_by_id[row_id]}")
        lines_by_id[row_id] = row.location
        if row_id in task_ids:
            files[row_id] = row_files
        else:
            unknown.append(f"{row.location}: no task has the id {row_id!r}")
    return files, unknown


def _row_id(row: Row) -> str:
    for name in ("id", "task_id"):
        value = row.fields.get(name)
        if type(value) is int and value.bit_length() > _MAX_ID_BITS:
            raise DatasetError(f"{row.location}: the id {name} is an integer of over {_MAX_ID_BITS} bits; write a text")
        if type(value) is int or (isinstance(value, str) and value):
            return str(value)
    raise DatasetError(f"{row.location}: no id, a text or an integer; there is {', '.join(row.fields) or 'nothing'}")


def _row_files(row: Row) -> Files:
    content_of = row.fields.get("files")
    if not isinstance(content_of, dict) or not content_of:
        kind = "an empty one" if isinstance(content_of, dict) else type(content_of).__name__
        expected = "an object such as {'solution.py': 'def f(): ...'}"
        raise DatasetError(f"{row.location}: files must be {expected}, got {kind}")
    files: Files = {}
    for path, text in cast(dict[str, Any], content_of).items():
        # In a Parquet file every row has the names of all rows, with null for missing files.
        if text is None:
            continue
        if not isinstance(text, str):
            raise DatasetError(f"{row.location}: files[{path!r}] must be a text, got {type(text).__name__}")
        if not path or path.startswith("/") or ".." in PurePosixPath(path).parts:
            raise DatasetError(f"{row.location}: files[{path!r}] must be a relative path without '..'")
        if "\0" in path or any(len(os.fsencode(part)) > _MAX_NAME_BYTES for part in PurePosixPath(path).parts):
            raise DatasetError(
                f"{row.location}: files[{path[:100]!r}] is no path of a file: a name has at most {_MAX_NAME_BYTES} "
                "bytes, and no NUL"
            )
        files[path] = text.encode("utf-8", "surrogatepass")
    return files


# ------------------------------------------------------------------------------------------------------------ results


class CheckedTask(NamedTuple):
    """A task's verdict, and the duration of its verification in seconds."""

    task_id: str
    verification: Verification
    seconds: float
    without_work: Verification | None = None
    """The verdict on a machine on which nothing was done; None: not tried."""

    @property
    def is_passed(self) -> bool:
        """Whether all tests passed with the solution, and not all without any work."""
        return _has_passed(self.verification) and not self.passes_without_work

    @property
    def passes_without_work(self) -> bool:
        """Whether all tests pass although nothing was done: such a task teaches nothing."""
        return self.without_work is not None and _has_passed(self.without_work)

    @property
    def outcome(self) -> str:
        """Outcome of the tests, with its cause: `ran`, `ran, in_process`, or for example `no_verdict, timeout`."""
        return _outcome(self.verification)

    def to_row(self) -> dict[str, Any]:
        """Return the JSON line's object."""
        return {
            "id": self.task_id,
            "correctness": self.verification.correctness,
            "passed": self.verification.passed,
            "total": self.verification.total,
            "outcome": self.outcome,
            "seconds": round(self.seconds, 3),
            **({} if self.without_work is None else {"reward_without_work": _reward(self.without_work)}),
        }

    def to_text(self) -> str:
        """Return the result as text; a failure with the first lines of its report."""
        verdict, without_work = self.verification, self.without_work
        counts = f"{verdict.passed} of {verdict.total} passed ({self.seconds:.1f} s)"
        text = f"{printable_line(self.task_id)}: {counts}, {self.outcome}"
        if without_work is not None:
            reward = _reward(without_work)
            first_line = without_work.report.partition("\n")[0][:_LINE_LIMIT]
            reason = "" if without_work.report == verdict.report else f": {first_line}"
            none = f"no reward ({_outcome(without_work)}{reason})"
            text += f"; {none if reward is None else f'a reward of {reward:.15g}'} for doing nothing"
        if self.is_passed:
            return text
        if _has_passed(verdict):
            return f"FAIL {text}\n    The tests pass without any work: let them test what the task asks for."
        # The first line of other worlds' reports repeats the counts.
        lines = text_lines(verdict.report)
        excerpt = lines[1 : 1 + _EXCERPT_LINES] if without_work is None else lines[:_EXCERPT_LINES_OF_HARBOR]
        return f"FAIL {text}" + "".join(f"\n    {line[:_LINE_LIMIT]}" for line in excerpt)


def _has_passed(verdict: Verification) -> bool:
    return verdict.outcome == VerifyOutcome.RAN and verdict.all_passed


def _reward(verdict: Verification) -> float | None:
    """Return the reward of a verdict; None if the tests gave none."""
    return verdict.correctness if verdict.outcome == VerifyOutcome.RAN else None


def _outcome(verdict: Verification) -> str:
    cause = verdict.no_verdict
    parts = [verdict.outcome.value, *(["in_process"] if verdict.in_process else [])]
    return ", ".join([*parts, *([cause.value] if cause is not None else [])])


class CheckResults(LiveBar):
    """The output: a JSON line per task, and a live bar in a terminal, with failures above it, or elsewhere plain lines.

    The JSON lines are in the order of the tasks. Each is written once the lines of all earlier tasks are; the end of
    the `with` block writes the remaining ones.
    """

    def __init__(self, path: Path | None, total: int) -> None:
        """Open `path`, replacing an existing file; None is standard output.

        Raises:
            PlaceError: the file cannot be written.
        """
        super().__init__("tasks", total, console=PrintableConsole(stderr=True, highlight=False))
        self._lines, self._total = JsonLines(path, hint="Choose another --out."), total
        self._waiting: dict[int, CheckedTask] = {}
        self._next = self.passed = self.failed = self.without_work = 0

    @property
    def counts(self) -> str:
        """Text with the numbers of passed and failed tasks so far."""
        free = f" ({self.without_work} of them pass without any work)" if self.without_work else ""
        return f"{self.passed} passed, {self.failed} failed{free}"

    def add(self, number: int, checked: CheckedTask) -> None:
        """Count, write and show the result of the task at index `number`.

        Raises:
            OutputError: the line cannot be written to the disk or to standard output.
        """
        self.passed += checked.is_passed
        self.failed += not checked.is_passed
        self.without_work += checked.passes_without_work
        if not self.is_live:
            self.say(f"{self.passed + self.failed}/{self._total} {checked.to_text()}")
        elif not checked.is_passed:
            self.say(checked.to_text())
        self.show(self.passed + self.failed, self.counts)
        self._waiting[number] = checked
        while self._next in self._waiting:
            self._write(self._next)
            self._next += 1

    def __exit__(self, *error: Any) -> None:
        """Stop the bar, write the remaining lines in order, and close the file."""
        super().__exit__(*error)
        for number in sorted(self._waiting):
            self._write(number)
        self._lines.close()

    def _write(self, number: int) -> None:
        try:
            self._lines.write(self._waiting.pop(number).to_row())
        except OutputError:
            self._waiting.clear()
            raise


if __name__ == "__main__":
    sys.exit(main())
