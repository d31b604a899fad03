"""`scripts/bench/scale` at a small size: every episode arrives, and what it measures is there."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.places import ROOT


@pytest.mark.all
@pytest.mark.parametrize("flags", [(), ("--real-api",)])
def test_environments_beside_a_simulated_engine(tmp_path: Path, flags: tuple[str, ...]) -> None:
    sizes = ["--episodes", "8", "--processes", "2", "--rounds", "4", "--least", "80", "--tokens", "60", "--api-s", "3"]
    command = [str(ROOT / "scripts/bench/scale"), *sizes, *flags, "--json", str(tmp_path / "out.json")]
    done = subprocess.run([*command, "--", "--env.packed_rows", "true"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    (row,) = found["rows"]
    assert row["arrived"] >= 80
    assert row["per_s"] > 0
    assert row["gpus_per_core"] > 0
    assert row["requests"]["judged"] > 200
    assert found["api"]["posted_per_s"] > 0
    assert found["api"]["fetched_per_s"] > 0
