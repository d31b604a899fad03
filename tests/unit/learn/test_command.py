"""The command's settings: where they stand, what it refuses, and a folder with another run."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import ConfigError, PlaceError
from agentic_opd.env.config import default_settings
from agentic_opd.learn.command import build_parser, check_settings, main
from agentic_opd.learn.config import LearnConfig, train_defaults
from agentic_opd.learn.plan import LearnPlan
from agentic_opd.learn.plan import check_settings as check_folder
from agentic_opd.settings.flags import parse
from agentic_opd.settings.read import Settings, read_settings

ARGV = ("logs", "--model", "m", "--out", "runs/mine")


def read(*argv: str) -> Settings:
    arguments = parse(build_parser(), [*ARGV, *argv])
    return read_settings(arguments, *default_settings(), {"train": train_defaults(), "learn": LearnConfig()})


def test_settings_stand_in_sections_of_a_file_and_flags_go_over_them(tmp_path: Path) -> None:
    path = tmp_path / "learn.yaml"
    path.write_text("env: {prm_votes: 5}\ntrain: {lr: 1.0e-3, loss: {start_kl: 0.1}}\nlearn: {guards: {length: 3}}\n")
    settings = read("--config", str(path), "--train.lr", "2e-3", "--learn.min_hints", "7")
    train, learn = settings.sections["train"], settings.sections["learn"]
    assert (settings.env.prm_votes, train.lr, train.lora_rank) == (5, 2e-3, 16)
    assert (train.loss.start_kl, train.loss.forward_kl) == (0.1, 1.0)
    assert (learn.min_hints, learn.guards.length, learn.guards.logprob) == (7, 3, 0.05)


def test_another_loss_replaces_the_default_part() -> None:
    loss = read("--train.loss.reverse_kl", "1").sections["train"].loss
    assert (loss.reverse_kl, loss.forward_kl) == (1.0, 0.0)


def test_every_wrong_setting_is_named(tmp_path: Path) -> None:
    path = tmp_path / "learn.yaml"
    path.write_text("trian: {}\nlearn: {min_hint: 3}\n")
    with pytest.raises(ConfigError) as caught:
        read("--config", str(path), "--train.lr", "fast", "--learn.held_out", "2")
    for text in ("section 'trian'", "did you mean 'train'", "learn.min_hint is unknown", "train.lr", "learn.held_out"):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--train.output_dir", "x"), "train.output_dir: learn sets this by itself"),
        (("--train.push_every", "2", "--train.vllm_urls", "[]"), "train.vllm_urls, train.push_every: learn sets"),
        (("--train.lora_rank", "null"), "learn trains adapters"),
        (("--env.hint.source", "sibling"), "logs have no data for it"),
        (("--env.hint.proof", "replay"), "logs can't be replayed"),
        (("--openai.base_url", "http://a/v1,http://b/v1"), "one policy server"),
    ],
)
def test_settings_that_do_not_go_with_logs_are_refused(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(read(*argv))


def test_without_the_trainers_extra_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentic_opd.learn.command.find_spec", lambda name: None if name == "peft" else name)
    with pytest.raises(ConfigError, match=r"peft can't be imported.*agentic-opd\[train\]"):
        check_settings(read())


def test_a_server_counts_as_named_if_its_address_was_given() -> None:
    assert "base_url" not in read().servers[0].model_fields_set
    assert "base_url" in read("--openai.base_url", "http://127.0.0.1:8000/v1").servers[0].model_fields_set


def plan(folder: Path, **changes: Any) -> LearnPlan:
    env, servers = default_settings()
    values: dict[str, Any] = {"paths": [Path("a")], "model": "m", "train": train_defaults(), "config": LearnConfig()}
    return LearnPlan(folder=folder, env=env, server=servers[0], is_served=False, **{**values, **changes})


def test_a_folder_with_other_settings_is_refused(tmp_path: Path) -> None:
    check_folder(plan(tmp_path))
    check_folder(plan(tmp_path))
    other = plan(tmp_path, paths=[Path("b")], config=LearnConfig(seed=1))
    with pytest.raises(PlaceError, match=r"other settings \(learn\.seed, paths\)"):
        check_folder(other)
    stored = json.loads((tmp_path / "settings.json").read_text())
    assert not [name for name in str(stored).split() if "api_key" in name]


def test_a_finished_run_prints_its_verdict_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs, out = tmp_path / "logs.jsonl", tmp_path / "run"
    logs.write_text(
        json.dumps({"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes."}]})
    )
    argv = [str(logs), "--model", "m", "--out", str(out)]
    assert main(argv) == 3
    result = json.loads((out / "result.json").read_text())
    assert (result["verdict"], result["corrections"], result["guards"]) == ("refused", None, {})
    assert "learn.min_hints is 20" in result["reason"]
    (out / "stages" / "split.json").unlink()
    logs.unlink()
    capsys.readouterr()
    assert main(argv) == 3
    assert "refused: the logs have 0 answers" in capsys.readouterr().err
    assert main([*argv, "--learn.seed", "2"]) == 2
    assert main([*argv, "--overwrite"]) == 2  # There are no logs any more.
    assert not (out / "result.json").exists()


@pytest.mark.parametrize("files", [{"notes.md": "x"}, {"settings.json": '{"editor.tabSize": 4}', "train/a.py": ""}])
def test_a_folder_with_other_files_is_refused_and_left_as_it_is(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine"
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    (tmp_path / "logs.jsonl").write_text("{}")
    for flags in ((), ("--overwrite",)):
        assert main([str(tmp_path / "logs.jsonl"), "--model", "m", "--out", str(out), *flags]) == 2
        assert "holds other files" in capsys.readouterr().err
    assert {name: (out / name).read_text() for name in files} == files


def test_a_missing_model_is_named_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs.jsonl").write_text("{}")
    argv = [str(tmp_path / "logs.jsonl"), "--out", str(tmp_path / "mine"), "--model", str(tmp_path / "nothing")]
    assert main(argv) == 2
    assert f"--model {tmp_path / 'nothing'}: there is no such directory" in " ".join(capsys.readouterr().err.split())


def test_groups_of_rollouts_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [0.0], "group_overrides": {"item_id": "mine"}}
    (tmp_path / "groups.jsonl").write_text(json.dumps(row) + "\n")
    assert main([str(tmp_path / "groups.jsonl"), "--model", "m", "--out", str(tmp_path / "run")]) == 2
    assert "mine is a group of rollouts" in capsys.readouterr().err
