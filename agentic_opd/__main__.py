"""Run `python -m agentic_opd COMMAND`, the same as `agentic-opd COMMAND`."""

import sys

from agentic_opd.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
