"""The trainer's settings: from a file and flags, every wrong one named, each described. Without torch."""

import json
import sys
from pathlib import Path

import pytest

from agentic_opd.core.errors import ConfigError
from agentic_opd.settings.flags import parse
from agentic_opd.training.command import build_parser, main
from agentic_opd.training.config import LossConfig, TrainerConfig, read_config

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_the_rate_rises_over_the_warm_up_and_then_does_what_the_schedule_says(
    schedule: str, expected: list[float]
) -> None:
    config = TrainerConfig.model_validate(
        {"model": "m", "lr": 2.0, "warmup_steps": 3, "total_steps": 7, "lr_schedule": schedule}
    )
    assert [config.lr_at(step) / 2.0 for step in range(7)] == pytest.approx(expected, abs=1e-6)


def read(path: Path, *flags: str) -> TrainerConfig:
    return read_config(parse(build_parser(), ["--config", str(path), *flags]))


PROVED = LossConfig(forward_kl=1.0, grpo=0.0)
"""What docs/learning trained with: the mode opd, four passes of four minibatches, a rate that falls in a line."""


@pytest.mark.parametrize("name", ["train_demo.yaml", "train_qwen3_gpu.yaml"])
def test_the_shipped_configs_train_as_the_learning_result_did(name: str) -> None:
    for config in (read(ROOT / "configs" / name), TrainerConfig(model="m")):
        assert config.loss == PROVED
        assert (config.epochs_per_batch, config.minibatches, config.lr_schedule) == (4, 4, "linear")


def test_settings_come_from_a_file_and_then_from_flags(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("model: m\nlr: 0.1\nloss: {forward_kl: 1.0}\n")
    config = read(path, "--lr", "1e-4", "--loss.grpo=0.5", "--vllm_urls", "[]", "--resume", "--output_dir", "7")
    assert (config.model, config.lr, config.vllm_urls, config.resume) == ("m", 1e-4, [], True)
    assert config.loss == LossConfig(forward_kl=1.0, grpo=0.5)
    assert config.output_dir == Path("7")


@pytest.mark.parametrize("flags", [("a.jsonl", "7.jsonl.gz"), ("[a.jsonl, 7.jsonl.gz]",)])
def test_files_of_groups_need_no_server(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Nor a number of steps, which the warm-up would have to be below."""
    (tmp_path / "train.yaml").write_text("model: m\nwarmup_steps: 500\n")
    config = read(tmp_path / "train.yaml", "--groups", *flags)
    assert config.groups == [Path("a.jsonl"), Path("7.jsonl.gz")]
    assert config.vllm_urls == []
    served = read(tmp_path / "train.yaml", "--groups", *flags, "--vllm_urls", "[http://127.0.0.1:8000]")
    assert served.vllm_urls == ["http://127.0.0.1:8000"]
    with pytest.raises(ConfigError, match="--groups needs a value"):
        read(tmp_path / "train.yaml", "--groups")
    with pytest.raises(ConfigError, match="warmup_steps"):
        read(tmp_path / "train.yaml")


def test_help_explains_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--groups FILE [FILE ...] Files of scored groups to train on, in place of the trajectory API" in text
    assert "with --groups those of files that process, distill and the gateway wrote, which needs no server" in text


def test_a_part_of_the_loss_that_is_set_leaves_the_others_at_0(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("model: m\n")
    assert read(tmp_path / "train.yaml", "--loss.grpo", "2").loss == LossConfig(grpo=2.0)
    assert read(tmp_path / "train.yaml", "--loss", "{reverse_kl: 1}").loss == LossConfig(reverse_kl=1.0)
    assert LossConfig(grpo=2.0).forward_kl == 0.0


def test_a_loss_without_weights_has_the_default_parts(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("model: m\nloss: {gap_clip: 3}\n")
    config = read(tmp_path / "train.yaml", "--loss.contrast")
    assert config.loss == LossConfig(forward_kl=1.0, gap_clip=3.0, contrast=True)
    assert LossConfig() == PROVED


def resumed(saved: TrainerConfig, **settings: object) -> list[str]:
    """What today's settings say to a checkpoint of these, which went through its file."""
    config = TrainerConfig.model_validate({"model": "m", **settings})
    return config.check_recipe(json.loads(json.dumps(saved.recipe)))


def test_a_resumed_run_goes_on_as_it_began_or_says_what_its_settings_change() -> None:
    before = TrainerConfig(model="m", loss=LossConfig(grpo=1.0), minibatches=2)
    assert resumed(before, loss={"grpo": 1.0}, minibatches=2) == []
    differs = r"forward_kl was 0.0 and would be 1.0; loss.grpo was 1.0 and would be 0.0; .*Name loss and minibatches in"
    with pytest.raises(ConfigError, match=differs):
        resumed(before)
    assert resumed(before, loss={"grpo": 1.0}, minibatches=3) == ["minibatches was 2 and is 3 now"]
    assert resumed(TrainerConfig(model="m"), lr=1e-5) == []


def test_a_checkpoint_is_not_compared_with_settings_that_came_later() -> None:
    recipe = TrainerConfig(model="m").recipe
    del recipe["loss.contrast"], recipe["lr"]
    assert TrainerConfig(model="m").check_recipe(recipe) == []


def test_a_checkpoint_with_a_part_that_has_gone_is_resumed_unless_the_part_had_a_weight() -> None:
    recipe = {**TrainerConfig(model="m").recipe, "loss.rlsd": 0.0, "loss.rlsd_clip": 0.2}
    assert TrainerConfig(model="m").check_recipe(recipe) == []
    with pytest.raises(ConfigError, match=r"loss.rlsd was 1.0 and would be None. Name loss in the settings"):
        TrainerConfig(model="m").check_recipe({**recipe, "loss.rlsd": 1.0})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: m\nlearning_rate: 1", "learning_rate is unknown"),
        ("model: m\nlr: -1\nbatch_size: 0", "(?s)batch_size.*lr|lr.*batch_size"),
        ("model: m\nloss: {forward_kl: 0}", "one of the loss weights must be above 0"),
        ("model: m\nwarmup_steps: 100", "must be below total_steps"),
        ("- a list", "must hold the settings of a trainer"),
        ("model: m\nbatch_sice: 4", "did you mean 'batch_size'"),
        ("model: m\nloss: {forward_k: 1}", "loss.forward_k is unknown; did you mean 'loss.forward_kl'"),
        ("model: m\nloss: {grpo: 1, clip_low: 2}", "loss.clip_low: .*got 2"),
        ("model: m\nloss: {rlsd: 1}", r"rlsd: it is an example now: set loss.custom to \{scripts/.*loss_parts.py:rlsd"),
        ("model: m\nloss: {rlsd_clip: 1}", r"rlsd_clip: it is a constant of scripts/.*loss_parts.py now"),
        ("model: m\nloss: {custom: {a.py:b: -1}}", "loss.custom.a.py:b: .* greater than or equal to 0"),
        ("model: m\nloss: {custom: {a.py:b: 0}}", "one of the loss weights must be above 0"),
        ("model: m\nloss: {custom: {a.py:b: 1, c.py:b: 1}}", "a.py:b, c.py:b: each part needs a name that no other"),
        ("model: m\nloss: {custom: {a.py:grpo: 1}}", "a.py:grpo: each part needs a name that no other"),
        ("lr: 1", "model: Field required"),
        ("model: m\nmodel: n", "'model' is set in line 1 and again in line 2"),
    ],
)
def test_wrong_settings_are_named(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read(path)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lr"], "--lr needs a value"),
        (["lr=1"], "'lr=1' belongs to no flag; settings are written --NAME VALUE"),
        (["--lr", "x"], "lr: Input should be a valid number"),
        (["--loss", "{"], "loss holds settings by name, got '{'"),
        (["--total_step", "3"], "did you mean 'total_steps'"),
        (["--loss.gropo=3"], "did you mean 'loss.grpo'"),
        (["--loss.sdar=3"], "loss.sdar: it is an example now"),
        (["--brake.kept=3"], "brake.kept: it is brake.versions_kept now"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(ROOT / "configs" / "train_demo.yaml", *flags)


def test_no_key_is_shown_where_another_setting_is_missing(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("vllm_api_key: s3cret\nlr: 1\n")
    with pytest.raises(ConfigError, match="model: Field required") as caught:
        read(tmp_path / "train.yaml")
    assert "s3cret" not in str(caught.value)


def test_help_says_what_each_setting_is() -> None:
    text = build_parser().format_help()
    assert "--loss.grpo X\n        Weight of GRPO on the groups' scores (default: 0.0)" in text
    assert "This environment's own" not in text
    for model in (TrainerConfig, LossConfig):
        assert [name for name, info in model.model_fields.items() if not info.description] == []


def test_a_trainer_without_its_libraries_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "agentic_opd.training.trainer", None)
    assert main(["--model", "scripts/demo_policy/policy"]) == 2
    assert capsys.readouterr().err.endswith("The trainer needs the extra: pip install 'agentic-opd[train]'\n")
