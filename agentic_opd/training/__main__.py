"""`python -m agentic_opd.training`, which torchrun starts too, is `agentic-opd train`."""

import sys

from agentic_opd.training.command import main

sys.exit(main())
