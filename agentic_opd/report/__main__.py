"""`python -m agentic_opd.report`."""

import sys

from agentic_opd.report.command import main

if __name__ == "__main__":
    sys.exit(main())
