"""`agentic-opd report FILE [FILE] [-o report.html]`, and the report at the end of a `process` run (I/O)."""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentic_opd.core.console import Console, LiveBar, log_console, reading_bar
from agentic_opd.core.errors import OutputError, PlaceError
from agentic_opd.core.exit_codes import EXIT_OK, EXIT_USAGE, CommandParser, exit_code
from agentic_opd.report.brake import brake_notes
from agentic_opd.report.page import ShownRun, choose_tokenizer, write_report
from agentic_opd.report.read import read_run, report_path
from agentic_opd.wire.brake import BRAKE_FILE

logger = logging.getLogger(__name__)

MAX_FILES = 2


def report_run(path: Path, tokenizer: Any) -> None:
    """Write the report of the groups in `path` beside them; log an `OutputError`, because the run itself is on disk."""
    output = report_path(path)
    try:
        write_report([ShownRun(read_run(path), tokenizer)], output)
    except OutputError as error:
        logger.error(
            "the report was not written: %s. The groups are safe; try again with: agentic-opd report %s",
            error,
            path,
        )
        return
    log_console().print(f"report: {output} (open it in a browser)", markup=False, highlight=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    files: list[Path] = args.files
    if len(files) > MAX_FILES:
        parser.error(f"{len(files)} files: a report is about one, or compares two")

    def run() -> int:
        make_report(files, args.output or default_output(files), args.tokenizer, log_console(), args.brake)
        return EXIT_OK

    return exit_code(run, interrupted="interrupted: no report was written", on_error=EXIT_USAGE)


def default_output(files: Sequence[Path]) -> Path:
    """Return the default path of the report of `files`, beside the last of them."""
    path = report_path(files[-1])
    return path if len(files) == 1 else path.with_name(f"{path.stem}.compared.html")


def make_report(
    files: Sequence[Path], output: Path, tokenizer_name: str | None, console: Console, brake: Path | None = None
) -> None:
    """Write the report of one file, or of two to be compared, to `output`, and print a summary and the warnings.

    `brake` is the trainer's `brake.jsonl`; None: the one beside each file, if any.

    Raises:
        PlaceError: a file, or the verdicts beside it, can't be read, a file holds no valid group, or `output`
            is one of them.
        OutputError: the report can't be written.
        ConfigError: `tokenizer_name` can't be loaded.
    """
    if output.resolve() in {file.resolve() for file in files}:
        raise PlaceError(f"--output {str(output)!r} is an input file; choose another")
    runs: list[ShownRun] = []
    names = [file.name for file in files]
    if len(set(names)) < len(names):
        names = [f"{file.resolve().parent.name}/{file.name}" for file in files]
    for file, name in zip(files, names, strict=True):
        with reading_bar(console) as wrap:
            run = replace(read_run(file, wrap), name=name)
        tokenizer, notes = choose_tokenizer(run, tokenizer_name)
        verdicts = brake or file.with_name(BRAKE_FILE)
        if brake or verdicts.exists():
            notes += brake_notes(verdicts)
        runs.append(ShownRun(run, tokenizer, notes))
    rollouts = [rollout for shown_run in runs for rollout in shown_run.run.rollouts]
    with LiveBar("rollouts packed", len(rollouts), console=console) as bar:
        size = write_report(runs, output, lambda count: bar.show(count, ""))
    for shown_run in runs:
        prefix = f"{shown_run.run.name}: " if len(runs) > 1 else ""
        for line in (*shown_run.run.left_out, *shown_run.notes):
            _say(console, f"warning: {prefix}{line}")
    groups = sum(len({rollout.line for rollout in shown_run.run.rollouts}) for shown_run in runs)
    contents = f"{groups} group{'s' * (groups != 1)}, {len(rollouts)} rollouts"
    _say(console, f"{contents}: {output} ({size / 1e6:.1f} MB). Open it in a browser.")


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="agentic-opd report",
        description="Write an HTML report of a file of scored groups: which turns got a hint, the judge's text, and "
        "which tokens the hint moves. For two files, such as before and after training, write a comparison with the "
        "tasks side by side. The report is one file that needs no network; open it in a browser.",
        epilog="Exit code 0: the report is written; 2: the file can't be read, or the report can't be written. "
        "Lines that break the wire format are left out and listed in the report. docs/report.md explains the report.",
    )
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="one or two JSONL files written by `process` (.gz is unpacked)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="path of the report (default: beside the last FILE, as .html)"
    )
    parser.add_argument(
        "--brake", type=Path, metavar="FILE", help="the trainer's brake.jsonl (default: the one beside FILE, if any)"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="the policy's tokenizer, a hub name or a folder (default: the tokenizer named in the .run.json beside "
        "FILE; without one, tokens are shown as ids)",
    )
    return parser
