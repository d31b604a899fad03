"""`agentic-opd hints FILE`: list the hints of a file of scored groups, by evidence and by text."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from agentic_opd.core.console import log_console
from agentic_opd.core.exit_codes import EXIT_CODES, EXIT_OK, exit_code
from agentic_opd.core.intervals import Estimate
from agentic_opd.core.text import printable
from agentic_opd.report.hints import HintRow, rows_by_evidence, rows_by_hint
from agentic_opd.report.hints import hinted_turns as rows_of
from agentic_opd.report.read import read_run

HINTS_SHOWN = 20
"""Number of printed rows; the report lists all hints."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="agentic-opd hints",
        description="List the hints of a file of scored groups: how many tokens each hint moved and how far, and, "
        "if scripts/learning/measure_hints has written groups.hints.json, by how many points it changes the pass rate.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="JSONL file written by `process`; .gz is unpacked")
    arguments = parser.parse_args(argv)

    def run() -> int:
        show_hints(arguments.file)
        return EXIT_OK

    return exit_code(run)


def show_hints(file: Path) -> None:
    """Print the hints of a file, by the judge's evidence and by text."""
    turns = rows_of(read_run(file).rollouts)
    if not turns:
        log_console().print("No turn has a hint.")
        return
    for title, rows in (("Hints by evidence", rows_by_evidence(turns)), ("Hints", rows_by_hint(turns))):
        log_console().print(hint_table(title, rows))


def hint_table(title: str, rows: Sequence[HintRow]) -> Table:
    """Return the rows as a table, sorted by lift, largest first, if lifts were measured."""
    is_measured = any(row.lift is not None for row in rows)
    shown = sorted(rows, key=lambda row: -2.0 if row.lift is None else row.lift.lift.value, reverse=True)[:HINTS_SHOWN]
    table = Table(title=title if len(shown) == len(rows) else f"{title}: {len(shown)} of {len(rows)}")
    if is_measured:
        for name in ("lift, points", "with", "without"):
            table.add_column(name, justify="right", no_wrap=True)
    table.add_column("hint")
    for name in ("turns", "tokens moved", "largest |gap|", "mean of moved"):
        table.add_column(name, justify="right")
    for row in shown:
        cells = [
            row.text,
            f"{row.turns}",
            f"{row.moved}",
            *("-" if size is None else f"{size:.2f}" for size in (row.largest, row.mean_moved)),
        ]
        if row.lift is not None:
            cells[:0] = [
                points(row.lift.lift),
                f"{row.lift.with_hint.value:.0%}",
                f"{row.lift.without_hint.value:.0%}",
            ]
        elif is_measured:
            cells[:0] = ["-", "-", "-"]
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def points(lift: Estimate) -> str:
    """Return a difference of pass rates in percentage points, with its interval."""
    return f"{100 * lift.value:+.0f} ({100 * lift.low:+.0f} to {100 * lift.high:+.0f})"
