"""The report at the end of a `process` run (I/O)."""

import logging
from pathlib import Path
from typing import Any

from agentic_opd.errors import OutputError
from agentic_opd.live_bar import log_console
from agentic_opd.report.page import write_report
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
