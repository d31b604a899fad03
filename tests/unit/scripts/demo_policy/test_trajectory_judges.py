"""The committed adapters that judge whole rollouts: small, and of the shape that a server of their policy takes."""

import json

import pytest
from demo_policy import POLICY_DIR, SQL_POLICY_DIR, TRAJECTORY_JUDGES
from safetensors import safe_open

from agentic_opd.serving.launch import ADAPTED_MODULES

pytestmark = pytest.mark.slow
POLICIES = {"coding": POLICY_DIR, "sql": SQL_POLICY_DIR}


@pytest.mark.parametrize("world", [*TRAJECTORY_JUDGES])
def test_an_adapter_changes_what_its_policys_server_takes(world: str) -> None:
    folder, policy = TRAJECTORY_JUDGES[world].adapter, json.loads((POLICIES[world] / "config.json").read_text())
    assert sum(path.stat().st_size for path in folder.iterdir()) < 6e6
    config = json.loads((folder / "adapter_config.json").read_text())
    assert {*config["target_modules"]} == {*ADAPTED_MODULES}
    with safe_open(folder / "adapter_model.safetensors", framework="numpy") as weights:
        names = list(weights.keys())
        first = weights.get_slice("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight").get_shape()
    assert len(names) == 2 * len(ADAPTED_MODULES) * policy["num_hidden_layers"]
    assert first == [config["r"], policy["hidden_size"]]
