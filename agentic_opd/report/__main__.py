"""`python -m agentic_opd.report`."""

import sys

from agentic_opd.report.cli import main

if __name__ == "__main__":
    sys.exit(main())
