"""`python -m agentic_opd.env serve | process | evaluate`."""

import sys

from agentic_opd.env.command import main

if __name__ == "__main__":
    sys.exit(main())
