"""`scripts/check_gpu` without a GPU: its parts pass, in float32 and beside the rounding of bfloat16."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.places import MODEL, ROOT


@pytest.mark.all
@pytest.mark.vllm
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_each_part_passes_on_a_cpu(precision: str, tmp_path: Path) -> None:
    command = [str(ROOT / "scripts/check_gpu"), MODEL, "--json", str(tmp_path / "found.json"), "--adapters", "2"]
    flags = ["--", "--dtype", precision]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=600, cwd=ROOT)
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == 0, (found, done.stderr[-3000:])
    assert found["server"]["precision"] == precision
    assert found["adapters"]["adapters_move"] > 0.1
    assert found["weights"]["weights_move"] > 0.1
    assert ("torch_mean" in found["rows"]) == (precision == "bfloat16")
