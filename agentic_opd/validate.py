"""`python -m agentic_opd.validate FILE`: check a file of scored groups."""

import sys

from agentic_opd.cli.validate import main

if __name__ == "__main__":
    sys.exit(main())
