"""`python -m agentic_opd.report groups.jsonl [-o report.html]`, and the report at the end of a `process` run (I/O)."""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentic_opd.core.console import Console, LiveBar, log_console, reading_bar
from agentic_opd.core.errors import OutputError
from agentic_opd.core.exit_codes import EXIT_OK, EXIT_USAGE, exit_code
from agentic_opd.report.page import choose_tokenizer, write_report
from agentic_opd.report.read import read_run, report_path

logger = logging.getLogger(__name__)


def report_run(path: Path, tokenizer: Any) -> None:
    """Write the report of the groups in `path` beside them; where that fails, say so: the run itself is on disk."""
    output = report_path(path)
    try:
        write_report(read_run(path), output, tokenizer)
    except OutputError as error:
        logger.error(
            "the report was not written: %s. The groups are safe; try again with: python -m agentic_opd.report %s",
            error,
            path,
        )
        return
    log_console().print(f"report: {output} (open it in a browser)", markup=False, highlight=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    args = _parser().parse_args(argv)

    def run() -> int:
        make_report(args.file, args.output or report_path(args.file), args.tokenizer, log_console())
        return EXIT_OK

    return exit_code(run, interrupted="interrupted: no report was written", on_error=EXIT_USAGE)


def make_report(file: Path, output: Path, tokenizer_name: str | None, console: Console) -> None:
    """Read `file`, write its report to `output`, and say what became of it.

    Raises:
        OutputError: one of them can't be read or written.
        ConfigError: `tokenizer_name` can't be loaded.
    """
    with reading_bar(console) as wrap:
        run = read_run(file, wrap)
    tokenizer, notes = choose_tokenizer(run, tokenizer_name)
    with LiveBar("rollouts packed", len(run.rollouts), console=console) as bar:
        size = write_report(run, output, tokenizer, notes, lambda count: bar.show(count, ""))
    for line in (*run.left_out, *notes):
        console.print(f"warning: {line}", markup=False, highlight=False, soft_wrap=True)
    groups = len({rollout.line for rollout in run.rollouts})
    what = f"{groups} group{'s' * (groups != 1)}, {len(run.rollouts)} rollouts"
    console.print(
        f"{what}: {output} ({size / 1e6:.1f} MB). Open it in a browser.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m agentic_opd.report",
        description="Make an HTML report of a file of scored groups: which turns got a hint, what the judge said, and "
        "which tokens the hint moves. One file that needs no network; open it in a browser.",
        epilog="Exit code 0: the report is written; 2: the file can't be read, or the report can't be written. Lines "
        "that break the wire format are left out, and the report says which. docs/report.md explains what is shown.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="JSONL that `process` wrote; .gz is unpacked")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="where to write it (default: beside FILE, as .html)"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="the policy's tokenizer, a hub name or a folder (default: what the .run.json beside FILE names; without "
        "one, tokens are shown as ids)",
    )
    return parser
