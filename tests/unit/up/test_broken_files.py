"""`up --dry-run` refuses a file that can't run, and says in a sentence what to change."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from agentic_opd.up.command import main

from .conftest import POLICY

Loop = dict[str, Any]
NOTHING = object()
"""Removes a key."""

BROKEN: dict[str, tuple[Loop, str]] = {
    "no server": ({"servers": {}}, "servers: Dictionary should have at least 1 item"),
    "no environment": ({"environments": NOTHING}, "environments: Field required"),
    "an unknown part": ({"trainers": {"config": "x"}}, "trainers is unknown; did you mean 'trainer'?"),
    "an unknown setting of a part": (
        {"servers": {"policy": {"prot": 8100}}},
        "servers.policy.prot is unknown",
    ),
    "a port used twice": ({"api": {"port": 8100}}, "two parts have the same port: 8100"),
    "a name used twice": ({"environments": {"policy": {}}}, "two parts have the same name: policy"),
    "no policy": ({"servers": {"policy": {"serves": "judge"}}}, "no server serves the policy"),
    "two judges": (
        {
            "servers": {
                name: {"model": POLICY, "port": port, "serves": "judge"} for name, port in (("a", 8102), ("b", 8103))
            }
        },
        "several servers serve the judge, but an environment uses only one",
    ),
    "two models": (
        {"servers": {"second": {"model": "another/model", "port": 8102}}},
        "servers of the policy have different models",
    ),
    "a model's folder that does not exist": (
        {"servers": {"policy": {"model": "runs/models/none"}}},
        "MODEL runs/models/none: there is no such directory",
    ),
    "a settings file that does not exist": (
        {"environments": {"tasks": {"config": "configs/none.yaml"}}},
        "there is no file 'configs/none.yaml'",
    ),
    "a trainer's file as an environment's": (
        {"environments": {"tasks": {"config": "configs/train_demo.yaml"}}},
        "'configs/train_demo.yaml' holds the settings of a trainer",
    ),
    "an environment's file as the trainer's": (
        {"trainer": {"config": "configs/demo.yaml"}},
        "'configs/demo.yaml' holds the settings of an environment or a gateway",
    ),
    "a task file that does not exist": (
        {"environments": {"tasks": {"flags": {"env.world.dataset_name": "none.jsonl"}}}},
        "tasks: dataset 'none.jsonl': there is no such file",
    ),
    "a world that does not exist": (
        {"environments": {"tasks": {"flags": {"env.world": "worlds/none.py:World"}}}},
        "env.world.type: there is no file",
    ),
    "an unknown flag of an environment": (
        {"environments": {"tasks": {"flags": {"env.gruop_size": 4}}}},
        "env.gruop_size is unknown; did you mean 'env.group_size'?",
    ),
    "an unknown flag of the trainer": (
        {"trainer": {"flags": {"lora_rnak": 8}}},
        "lora_rnak is unknown; did you mean 'lora_rank'?",
    ),
    "an unknown flag of a server": (
        {"servers": {"policy": {"flags": {"max_modle_len": 4096}}}},
        "policy: its command line is wrong",
    ),
    "a setting of tasks for a gateway": (
        {"environments": {"tasks": {"mode": "gateway", "config": "configs/demo.yaml"}}},
        "env.max_turns, env.max_token_length, env.max_tokens_per_turn, env.overwrite: known to `agentic-opd process`",
    ),
    "a script that does not exist": (
        {"environments": {"tasks": {"script": "none.py", "config": NOTHING}}},
        "tasks: there is no script 'none.py'",
    ),
    "groups that do not divide a batch": (
        {"environments": {"tasks": {"flags": {"env.group_size": 5}}}},
        "groups of env.group_size 5 do not divide the trainer's batch_size 32",
    ),
    "a context that is too small": (
        {"servers": {"policy": {"flags": {"max_model_len": 512}}}},
        "server policy reads 512 (max_model_len)",
    ),
    "a moving average without adapters": (
        {"environments": {"tasks": {"flags": {"env.teacher.weights": "ema"}}}},
        "env.teacher.weights ema needs a policy that is trained with adapters",
    ),
    "more processes than devices": (
        {"trainer": {"devices": "0", "processes": 2}},
        "2 processes need as many devices, and devices names 1",
    ),
    "a brake whose evaluation is wrong": (
        {"brake": {"config": "configs/demo.yaml", "flags": {"env.evel_samples": 4}}},
        "its evaluation, of the section brake: settings are wrong:\n  - env.evel_samples is unknown",
    ),
    "a loss without parts": (
        {"trainer": {"flags": {"loss.forward_kl": 0}}},
        "one of the loss weights must be above 0",
    ),
}


def changed(settings: Loop, change: Loop) -> Loop:
    """The settings with a change of some keys, at any depth."""
    result = dict(settings)
    for name, value in change.items():
        if value is NOTHING:
            result.pop(name, None)
        elif isinstance(value, dict) and value and isinstance(result.get(name), dict):
            result[name] = changed(result[name], value)
        else:
            result[name] = value
    return result


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_file_is_refused_before_anything_starts(
    fault: str, loop: Loop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, sentence = BROKEN[fault]
    file = tmp_path / "up.yaml"
    file.write_text(yaml.safe_dump(changed(loop, change), sort_keys=False))
    assert main(["--config", str(file), "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.out == ""
    assert len(printed.err.splitlines()) <= 12
