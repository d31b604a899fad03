"""Where things lie."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL = os.environ.get("AGENTIC_OPD_TEST_MODEL", "scripts/demo_policy/policy")
"""What is served; a path relative to the project's root."""
HUMANEVAL = ROOT.parent / "shared" / "data" / "HumanEval.jsonl.gz"
NO_HUMANEVAL = f"{HUMANEVAL} is not there"
