"""Traffic of all protocols leaves the same replies, requests, turns and groups behind as when it was recorded.

After a change that is meant, AGENTIC_OPD_RECORD=1 writes `recorded_traffic.jsonl` anew.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from .traffic import recording

RECORDED = Path(__file__).with_name("recorded_traffic.jsonl")


@pytest.mark.slow
def test_traffic_leaves_the_recorded_turns_behind(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = recording(tokenizer, tmp_path, monkeypatch)
    if os.environ.get("AGENTIC_OPD_RECORD"):
        RECORDED.write_text("".join(f"{line}\n" for line in lines))
    assert lines == RECORDED.read_text().splitlines()
