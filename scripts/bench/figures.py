"""What all benches do with their figures: a table, and a file of JSON."""

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from rich.table import Table


def add_json(parser: ArgumentParser) -> None:
    """Add `--json FILE`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")


def write_json(path: Path | None, figures: Any) -> None:
    """Write the figures to the file of `--json`, if there is one."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")


def figures_table(*columns: str, title: str | None = None) -> Table:
    """Return a table with a column of names, and columns of figures on the right."""
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table
