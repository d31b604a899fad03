"""`scripts/bench/training` at a small size: three layouts with one loss, and fewer gigabytes a process."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.places import ROOT


def measured(out: Path, *options: str) -> dict[str, dict[str, Any]]:
    command = [str(ROOT / "scripts/bench/training"), *options, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.mark.all
def test_all_layouts_compute_the_same(tmp_path: Path) -> None:
    found = measured(tmp_path / "out.json", "layouts", "--size", "1", "--repeats", "1")
    padded, by_head, packed = found.values()
    for one in (by_head, packed):
        assert one["loss"] == pytest.approx(padded["loss"], rel=1e-5)
        assert one["gradient_apart"] < 1e-5
    assert packed["computed_tokens"] < 0.7 * padded["computed_tokens"] == 0.7 * by_head["computed_tokens"]


@pytest.mark.all
def test_processes_are_compared(tmp_path: Path) -> None:
    found = measured(tmp_path / "out.json", "memory", "--parameters", "1", "--processes", "1", "2")
    assert found["2"]["loss"] == pytest.approx(found["1"]["loss"], rel=1e-5)
    assert found["2"]["norm"] == pytest.approx(found["1"]["norm"], rel=1e-4)
    assert all(one["training_gb"] > 0.1 for one in found.values())
