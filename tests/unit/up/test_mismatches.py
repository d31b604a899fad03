"""What would fail after minutes of loading is refused before anything starts."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from agentic_opd.cli.doctor.command import main as doctor
from agentic_opd.core.errors import ConfigError
from agentic_opd.training.config import TrainerConfig
from agentic_opd.up.command import main, read
from agentic_opd.up.config import UpConfig
from agentic_opd.up.mismatches import mismatches, missing_libraries
from agentic_opd.up.parts import parts_of

from .conftest import POLICY
from .test_parts import parts, value

Loop = dict[str, Any]


def refusal(settings: Loop, folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        parts(settings, folder)
    return str(error.value)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"env.group_size": 5}, "tasks: groups of env.group_size 5 do not divide the trainer's batch_size 32: use 30"),
        ({"env.max_token_length": 9000}, "server policy reads 4096 (max_model_len): raise it to 9000 at least"),
        ({"env.max_token_length": 9000}, "the trainer drops sequences above max_token_len 4096"),
        ({"env.teacher.weights": "ema"}, "env.teacher.weights ema needs a policy that is trained with adapters"),
        ({"env.teacher.weights": "frozen"}, "env.teacher.weights frozen needs a policy that is trained with adapters"),
    ],
)
def test_an_environment_that_does_not_fit_the_other_parts(
    flags: Loop,
    problem: str,
    loop: Loop,
    tmp_path: Path,
) -> None:
    loop["servers"]["policy"]["flags"] = {"max_model_len": 4096}
    loop["environments"]["tasks"]["flags"] = flags
    assert problem in refusal(loop, tmp_path)


def test_a_teacher_of_averages_needs_an_average(loop: Loop, tmp_path: Path) -> None:
    loop["environments"]["tasks"]["flags"] = {"env.teacher.weights": "ema"}
    loop["trainer"]["flags"] = {"lora_rank": 8}
    assert "set its ema_decay" in refusal(loop, tmp_path)
    loop["trainer"]["flags"]["ema_decay"] = 0.9
    assert parts(loop, tmp_path)


def test_a_loop_does_not_train_on_files(loop: Loop, tmp_path: Path) -> None:
    loop["trainer"]["flags"] = {"groups": ["a.jsonl", "b.jsonl"]}
    assert "trainer: groups names files, so the trainer would take no batch" in refusal(loop, tmp_path)


def of_devices(
    num_gpus: int, trainer: Loop | None = None, monkeypatch: pytest.MonkeyPatch | None = None, **servers: Loop
) -> list[str]:
    config = UpConfig.model_validate(
        {
            "servers": {
                name: {"model": POLICY, "port": 8100 + number, **server}
                for number, (name, server) in enumerate(servers.items())
            },
            "environments": {"mine": {"script": "mine.py"}},
            "trainer": trainer or {},
        }
    )
    return list(mismatches(config, {"trainer": TrainerConfig(model=POLICY)}, num_gpus))


def test_parts_that_do_not_fit_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert of_devices(0, policy={}) == [], "a machine without a GPU"
    assert of_devices(2, {"devices": "1"}, policy={"devices": "0"}) == []
    (shared,) = of_devices(1, policy={})
    assert shared.startswith("GPU 0 is used by policy (0.9 of the memory) and the trainer")
    utilization = ["--gpu-memory-utilization", "0.4"]
    assert of_devices(1, policy={"vllm_args": utilization}) == []
    (servers,) = of_devices(2, {"devices": "1"}, policy={"devices": "0"}, judge={"devices": "0", "serves": "judge"})
    assert servers.startswith(
        "GPU 0 is used by policy (0.9 of the memory), judge (0.9 of the memory), which do not fit"
    )
    (processes,) = of_devices(8, {"devices": "6,7", "processes": 3}, policy={"devices": "0"})
    assert processes == "trainer: 3 processes need as many devices, and devices names 2 ('6,7')"
    (missing,) = of_devices(2, {"devices": "1"}, policy={"devices": "0,7"})
    assert missing == "policy: devices names GPU 7, and this machine has 2 (from 0)"
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "3")
    (visible,) = of_devices(4, policy={})
    assert visible.startswith("GPU 3 ")


def test_what_follows_from_the_trainer_is_filled_in(loop: Loop, tmp_path: Path) -> None:
    loop["trainer"]["flags"] = {"lora_rank": 24, "ema_decay": 0.9}
    loop["servers"]["critic"] = {"model": POLICY, "port": 8102, "serves": "judge"}
    made = parts(loop, tmp_path)
    assert value(made["policy"], "--max-lora-rank") == "32", "the smallest rank of vLLM that holds it"
    assert "--max-lora-rank" not in made["critic"].arguments
    assert value(made["tasks"], "--env.teacher.weights") == "ema"
    assert value(made["tasks"], "--env.packed_rows") == "true"


def test_what_a_file_or_a_flag_sets_is_kept(loop: Loop, tmp_path: Path) -> None:
    own = tmp_path / "env.yaml"
    own.write_text(
        "env: {renderer: {name: qwen3}, packed_rows: false, teacher: {weights: frozen}, seed: 7, "
        "max_token_length: 4096}\n"
    )
    loop["trainer"]["flags"] = {"lora_rank": 8, "ema_decay": 0.9}
    loop["servers"]["policy"]["flags"] = {"max_lora_rank": 64}
    loop["environments"] = {
        "own": {"config": str(own)},
        "flagged": {"config": "configs/demo.yaml", "flags": {"env.teacher.weights": "live", "env.packed_rows": False}},
        "second": {"config": "configs/demo.yaml", "flags": {"env.teacher.base_url": "http://127.0.0.1:8109/v1"}},
        "talk": {"mode": "gateway"},
    }
    made = parts(loop, tmp_path)
    assert value(made["policy"], "--max-lora-rank") == "64"
    assert not {"--env.teacher.weights", "--env.packed_rows", "--env.seed"} & {*made["own"].arguments}
    assert value(made["flagged"], "--env.seed") == "1", "environments of one file draw other tasks"
    assert value(made["flagged"], "--env.teacher.weights") == "live"
    assert value(made["flagged"], "--env.packed_rows") == "false"
    assert "--env.teacher.weights" not in made["second"].arguments
    assert "--env.packed_rows" not in made["talk"].arguments, "the gateway has no such setting"
    assert value(made["talk"], "--env.teacher.weights") == "ema"


@pytest.mark.sandbox
def test_a_dry_run_and_doctor_load_the_tasks_and_open_a_session(
    loop: Loop,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = tmp_path / "world.py"
    world.write_text(
        "from agentic_opd.worlds.custom import CustomWorld, Task\n"
        "class Broken(CustomWorld):\n"
        "    def tasks(self): return [Task('a', 'Say yes.')]\n"
        "    def start(self, task): raise ValueError('no state')\n"
        "    def verify(self, task, state): return 1.0\n"
    )
    file = tmp_path / "up.yaml"
    for flags, problem in (
        ({"env.world.dataset_name": "nothing.jsonl"}, "tasks: dataset 'nothing.jsonl': there is no such file"),
        ({"env.world": f"{world}:Broken"}, "no state"),
    ):
        loop["environments"]["tasks"]["flags"] = flags
        file.write_text(yaml.safe_dump(loop))
        assert main(["--config", str(file), "--dry-run"]) == 2
        assert problem in capsys.readouterr().err
        assert doctor(["--up", str(file)]) == 1
        assert problem in " ".join(capsys.readouterr().out.split())


def test_doctor_names_the_section_of_the_brake(
    loop: Loop,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loop["brake"] = {"config": "configs/demo.yaml", "flags": {"env.eval.samples": "no"}}
    file = tmp_path / "up.yaml"
    file.write_text(yaml.safe_dump(loop))
    assert doctor(["--up", str(file)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "of the section brake" in printed
    assert "env.eval.samples" in printed


@pytest.mark.parametrize("name", ["up_demo", "up_one_gpu", "up_eight_gpus"])
def test_the_recipes_fit(name: str) -> None:
    config = read(Path(f"configs/{name}.yaml"))
    assert parts_of(config)


def test_parts_whose_libraries_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"starlette", "torch", "peft", "safetensors"}
    monkeypatch.setattr("agentic_opd.up.mismatches.find_spec", lambda name: name if name in installed else None)
    config = UpConfig.model_validate(
        {
            "servers": {"policy": {"model": POLICY}},
            "environments": {"talk": {"mode": "gateway"}, "agent": {}, "tasks": {}},
        }
    )
    environments = {"agent": SimpleNamespace(agent=SimpleNamespace(command="opencode run")), "tasks": SimpleNamespace()}
    assert list(missing_libraries(config, environments)) == [
        "policy: vllm is not installed here: it needs the extra, pip install 'agentic-opd[vllm]'",
        *(
            f"{name}: prometheus_client, uvicorn is not installed here: it needs the extra, pip install "
            "'agentic-opd[gateway]'"
            for name in ("talk", "agent")
        ),
    ]
