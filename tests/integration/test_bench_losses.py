"""`scripts/bench/losses` at a sixteenth of its size: no loss needs the memory of cross-entropy; the limit counts."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.places import ROOT

TOKENS, VOCAB = 256, 152_064
LOGITS = TOKENS * VOCAB * 4


@pytest.mark.all
def test_losses_need_less_memory_than_cross_entropy(tmp_path: Path) -> None:
    losses = ["token_advantage", "forward_kl", "all"]  # One of chosen ids, one of whole rows, and all.
    sizes = ["--tokens", str(TOKENS), "--vocab", str(VOCAB), "--limit", "0.2", "--losses", *losses]
    sizes += ["--json", str(tmp_path / "out.json")]
    done = subprocess.run(
        [str(ROOT / "scripts" / "bench" / "losses"), *sizes], capture_output=True, text=True, timeout=300
    )
    peaks = {name: one["peak_bytes"] for name, one in json.loads((tmp_path / "out.json").read_text()).items()}
    plain = peaks.pop("cross_entropy")
    assert set(peaks) == {*losses}
    # Cross-entropy holds its log-softmax beside two gradients; ours the gradient of the logits and a few chunks.
    assert 2.5 * LOGITS < plain < 4 * LOGITS
    assert all(0.95 * LOGITS < peak < 0.7 * plain for peak in peaks.values()), peaks
    assert done.returncode == 1
    assert "more than 0.2 times the memory of cross-entropy: token_advantage" in done.stderr
