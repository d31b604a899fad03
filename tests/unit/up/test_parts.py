"""`agentic-opd up`: from a file to the commands of its parts."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentic_opd.core.errors import ConfigError
from agentic_opd.up import parts as up_parts
from agentic_opd.up.command import main, read
from agentic_opd.up.parts import LoopPart, Start, parts_of

from .conftest import POLICY


def parts(loop: dict[str, Any], folder: Path, start: Start = "new") -> dict[str, LoopPart]:
    file = folder / "up.yaml"
    file.write_text(yaml.safe_dump(loop, sort_keys=False))
    return {part.name: part for part in parts_of(read(file), start)}


def value(part: LoopPart, flag: str) -> str:
    """What the last of the flag's values is, which wins."""
    argv = part.arguments
    return argv[max(i for i, text in enumerate(argv) if text == flag) + 1]


def test_the_parts_find_each_other(loop: dict[str, Any], tmp_path: Path) -> None:
    loop["servers"] |= {
        "second": {"model": POLICY, "port": 8101, "devices": "1"},
        "critic": {"model": POLICY, "port": 8102, "serves": "judge"},
    }
    loop["api"] = {"port": 8103}
    made = parts(loop, tmp_path)
    assert [(part.name, part.role) for part in made.values()] == [
        *(("policy", "server"), ("second", "server"), ("critic", "server")),
        *(("api", "api"), ("tasks", "environment"), ("trainer", "trainer")),
    ]
    tasks, trainer = made["tasks"], made["trainer"]
    assert value(tasks, "--openai.base_url") == "http://127.0.0.1:8100/v1,http://127.0.0.1:8101/v1"
    assert value(tasks, "--openai.model_name") == POLICY
    assert value(tasks, "--env.judge.base_url") == "http://127.0.0.1:8102/v1"
    assert value(tasks, "--env.rollout_server_url") == value(trainer, "--api_url") == "http://127.0.0.1:8103"
    assert value(trainer, "--vllm_urls") == '["http://127.0.0.1:8100", "http://127.0.0.1:8101"]'
    weights = value(trainer, "--weights_dir")
    assert value(made["policy"], "--weights-root") == value(made["second"], "--weights-root") == weights
    assert "--weights-root" not in made["critic"].arguments
    assert made["second"].variables == {"CUDA_VISIBLE_DEVICES": "1"}
    assert made["critic"].ready_url == "http://127.0.0.1:8102/health"


def test_flags_win(loop: dict[str, Any], tmp_path: Path) -> None:
    loop["servers"]["policy"] |= {"flags": {"max_model_len": 4096}, "vllm_args": ["--seed", "1"]}
    loop["environments"]["tasks"]["flags"] = {"env.group_size": 2, "env.data_path_to_save_groups": None}
    loop["trainer"]["flags"] = {"loss": {"forward_kl": 1, "grpo": 0.5}, "total_steps": 3}
    made = parts(loop, tmp_path)
    assert value(made["policy"], "--max-model-len") == "4096"
    assert made["policy"].arguments[-3:] == ("--", "--seed", "1")
    assert value(made["tasks"], "--env.data_path_to_save_groups") == "null"
    assert value(made["trainer"], "--loss") == '{"forward_kl": 1, "grpo": 0.5}'


@pytest.mark.parametrize("spelling", ["served_model_name", "served-model-name"])
def test_environments_ask_for_the_served_name(spelling: str, loop: dict[str, Any], tmp_path: Path) -> None:
    loop["servers"]["policy"]["flags"] = {spelling: "policy"}
    assert value(parts(loop, tmp_path)["tasks"], "--openai.model_name") == "policy"


def test_each_command_line_is_read_once(loop: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop["environments"]["talk"] = {"mode": "gateway"}
    loop["brake"] = {"config": "configs/demo.yaml"}
    loop["trainer"]["flags"] = {"brake.every": 4, "lora_rank": 8}
    reads: list[str] = []

    def count(name: str) -> None:
        read = getattr(up_parts, name)

        def counted(argv: Any) -> Any:
            reads.append(name)
            return read(argv)

        monkeypatch.setattr(up_parts, name, counted)

    for name in ("read_server", "read_environment", "read_gateway", "read_trainer"):
        count(name)
    made = parts(loop, tmp_path)
    assert sorted(reads) == ["read_environment"] * 2 + ["read_gateway", "read_server", "read_trainer"]
    assert made["trainer"].settings.lora_rank == 8
    assert [name for name, part in made.items() if part.settings is None] == ["api"]


def test_a_gateway_is_ready_when_it_answers(loop: dict[str, Any], tmp_path: Path) -> None:
    loop["environments"] = {"talk": {"mode": "gateway", "flags": {"env.port": 8104}}}
    part = parts(loop, tmp_path)["talk"]
    assert part.ready_url == "http://127.0.0.1:8104/health"
    assert part.program[-1] == "gateway"


def test_the_brake_evaluates_with_the_loops_servers(loop: dict[str, Any], tmp_path: Path) -> None:
    loop["servers"]["critic"] = {"model": POLICY, "port": 8102, "serves": "judge"}
    loop["brake"] = {"config": "configs/demo.yaml", "flags": {"env.eval.fraction": 0.5}}
    loop["trainer"]["flags"] = {"brake.every": 4}
    trainer = parts(loop, tmp_path)["trainer"]
    assert value(trainer, "--brake.every") == "4"
    command = shlex.split(value(trainer, "--brake.command"))
    assert command[1:6] == ["-m", "agentic_opd", "evaluate", "--config", "configs/demo.yaml"]
    assert command[command.index("--env.judge.base_url") + 1] == "http://127.0.0.1:8102/v1"
    assert command[-2:] == ["--env.eval.fraction", "0.5"]
    loop["brake"]["flags"] = {"env.no_such": 1}
    with pytest.raises(ConfigError, match=r"(?s)section brake: .*env.no_such is unknown"):
        parts(loop, tmp_path)


def test_what_an_earlier_run_left(loop: dict[str, Any], tmp_path: Path) -> None:
    for start, flag in (("resume", "--resume"), ("overwrite", "--overwrite")):
        made = parts(loop, tmp_path, start)
        assert made["trainer"].arguments[-2:] == (flag, "true")
        assert made["tasks"].arguments[-2:] == (flag.replace("--", "--env."), "true")
    assert not {"--resume", "--overwrite"} & {*parts(loop, tmp_path)["trainer"].arguments}


def test_every_part_that_is_wrong_is_named_before_anything_starts(loop: dict[str, Any], tmp_path: Path) -> None:
    loop["servers"]["policy"]["flags"] = {"max_modle_len": 1}
    loop["environments"]["tasks"]["flags"] = {"env.group_sise": 2}
    loop["environments"]["mine"] = {"script": "environments/none.py"}
    loop["trainer"]["flags"] = {"total_steps": 0}
    with pytest.raises(ConfigError) as error:
        parts(loop, tmp_path)
    said = str(error.value)
    for text in (
        "policy: its command line",
        "did you mean 'env.group_size'",
        "mine: there is no script",
        "total_steps",
    ):
        assert text in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"servers": {}}, "at least 1"),
        ({"servers": {"a": {"model": POLICY, "serves": "judge"}}}, "no server serves the policy"),
        ({"servers": {"a": {"model": POLICY}, "b": {"model": "other/one", "port": 9}}}, "different models"),
        ({"api": {"port": 8100}}, "two parts have the same port: 8100"),
        ({"environments": {"policy": {}}}, "two parts have the same name: policy"),
        ({"environments": {"../x": {}}}, "should match pattern"),
        ({"environments": {"a": {"mode": "gateway", "script": "x.py"}}}, "needs mode serve"),
        ({"trainre": {}}, "trainre is unknown; did you mean 'trainer'?"),
        (
            {
                "servers": {
                    "policy": {"model": POLICY},
                    "a": {"model": POLICY, "port": 1, "serves": "judge"},
                    "b": {"model": POLICY, "port": 2, "serves": "judge"},
                }
            },
            "several servers serve the judge",
        ),
    ],
)
def test_wrong_loops(loop: dict[str, Any], tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parts(loop | change, tmp_path)


def test_dry_run_prints_the_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(Path("runs").glob("*"))
    assert main(["--config", "configs/up_demo.yaml", "--dry-run"]) == 0
    assert sorted(Path("runs").glob("*")) == before
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" -m ")[1].split()[:2] for line in lines] == [
        ["agentic_opd", "serve-vllm"],
        ["atroposlib.cli.run_api", "--host"],
        ["agentic_opd", "serve"],
        ["agentic_opd", "train"],
    ]


@pytest.mark.parametrize(
    ("flags", "said"), [((), "holds an earlier run"), (("--resume",), "no checkpoint to resume from")]
)
def test_an_earlier_run_is_seen_at_once(
    loop: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    parts(loop, tmp_path)
    (tmp_path / "up").mkdir()
    (tmp_path / "up/metrics.jsonl").touch()
    assert main(["--config", str(tmp_path / "up.yaml"), *flags]) == 2
    assert said in capsys.readouterr().err


def test_several_processes_train_by_torchrun(loop: dict[str, Any], tmp_path: Path) -> None:
    loop["trainer"] |= {"processes": 2, "flags": {"total_steps": 3}}
    program = parts(loop, tmp_path)["trainer"].program
    assert program[1:] == (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "agentic_opd.training",
    )
    loop["trainer"]["flags"] = {"total_stesp": 3}
    with pytest.raises(ConfigError, match="did you mean 'total_steps'"):
        parts(loop, tmp_path)
