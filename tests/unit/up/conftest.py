from pathlib import Path
from typing import Any

import pytest

POLICY = "scripts/demo_policy/policy"


@pytest.fixture
def loop(tmp_path: Path) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path / "up"),
        "servers": {"policy": {"model": POLICY, "port": 8100}},
        "environments": {"tasks": {"config": "configs/demo.yaml"}},
        "trainer": {"config": "configs/train_demo.yaml"},
    }
