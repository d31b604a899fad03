"""A recording gateway starts within a second: what reads and renders conversations is imported later, or never."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "renderers", "openai", "datasets", "vllm")


@pytest.mark.slow
def test_a_recording_gateway_starts_without_heavy_libraries() -> None:
    program = f"import sys, agentic_opd.gateway.serve\nprint(*({{*{HEAVY!r}}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
