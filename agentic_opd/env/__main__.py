"""Run `python -m agentic_opd.env serve | process | evaluate`; `live` runs `agentic-opd gateway`."""

import sys

from agentic_opd.env.command import main
from agentic_opd.gateway.command import main as live

if __name__ == "__main__":
    sys.exit(live(sys.argv[2:]) if sys.argv[1:2] == ["live"] else main())
