"""The trainer's parts without servers: a step that learns, checkpoints that resume exactly."""

import asyncio
import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from demo_policy import POLICY_DIR

from agentic_opd.core.errors import ConfigError, OutputError, TrainingError
from agentic_opd.core.types import DistillArrays, TurnOutcome
from agentic_opd.training import step as step_module
from agentic_opd.training.checkpoint import Resumed, load_checkpoint, save_checkpoint
from agentic_opd.training.distributed import DistContext
from agentic_opd.training.losses import LossInputs, combined_loss
from agentic_opd.training.model import MovingAverage, load_model, save_adapter, save_weights
from agentic_opd.training.policy import TrainedPolicy, load_policy
from agentic_opd.training.push import Probe, WeightPusher
from agentic_opd.training.step import train_step
from agentic_opd.training.trainer import open_trainer
from agentic_opd.wire.group import ControlReading, TurnRecord
from tests.support.training import ScriptedClient, make_config, make_group, make_rollout, own_logprobs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jensen_shannon", "token_advantage"])
def test_steps_move_the_student_to_the_teacher(kind: str, precision: str) -> None:
    config = make_config(loss={kind: 1.0}, precision=precision, lr=1e-4)
    model = load_model(config, "cpu")
    batch = make_rollout(model)
    before = own_logprobs(model, batch.tokens_BT[1].tolist())[9]
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    steps = [
        train_step(TrainedPolicy(model, precision), optimizer, batch, config, DistContext("cpu")) for _ in range(4)
    ]
    after = own_logprobs(model, batch.tokens_BT[1].tolist())[9]
    sampled, other = batch.teacher_ids_BTK[1, 10].tolist()
    assert after[sampled] < before[sampled]
    if kind != "token_advantage":
        assert steps[-1]["loss"] < steps[0]["loss"]
        assert after[other] > before[other]
    assert steps[0]["scored_tokens"] == 2
    assert steps[0]["logprob_drift"] < (1e-4 if precision == "fp32" else 0.2)


@pytest.mark.parametrize("control", [(-8.0, -0.01), (-0.2, -2.0)], ids=["says the same", "says something else"])
def test_a_run_with_contrast_learns_only_what_the_control_does_not_say(
    control: tuple[float, float], tmp_path: Path
) -> None:
    """The hint's reading of the row at 10 is (-8, -0.01). All updates of a batch, with AdamW, from one run's loop."""
    config = make_config(
        output_dir=tmp_path, vllm_urls=[], total_steps=1, lr=1e-4, loss={"forward_kl": 1.0, "contrast": True}
    )
    trainer = open_trainer(config)
    group = make_group(trainer.learner.model)
    hint = {"hint": "Write another token.", "hint_token_ids": (7,), "insert_at": 9}
    reading = ControlReading("neutral", "Take your time.", (8,), (control,))
    record = TurnRecord((10, 11), TurnOutcome.SCORED, "tool", control=reading, **hint)

    def turns(length: int) -> tuple[TurnRecord, ...]:
        before, behind = (TurnRecord(span, TurnOutcome.VOTE_FAILED, "tool") for span in ((8, 10), (11, length)))
        return before, record, behind

    rollouts = (replace(rollout, turns=turns(len(rollout.tokens_T))) for rollout in group.rollouts)
    group = replace(group, rollouts=tuple(rollouts))
    trainer.source = ScriptedClient(config, [[group]])
    tokens = list(group.rollouts[1].tokens_T)
    before = own_logprobs(trainer.learner.model, tokens)[9]
    asyncio.run(trainer.run())
    moved = (own_logprobs(trainer.learner.model, tokens)[9] - before)[tokens[10]]
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["contrast_mean"] == pytest.approx(-8.0 - control[0])
    if control[0] == -8.0:
        assert abs(moved) < 1e-3
    else:
        assert moved < -0.1


def test_a_run_ends_after_a_few_steps_without_a_finite_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken, whole, and then broken three times: what is whole is learned, what is not changes and saves nothing.

    Groups with rows that are no numbers are refused before a step, so the loss itself is broken.
    """
    config = make_config(output_dir=tmp_path, vllm_urls=[], total_steps=9, minibatches=1, save_every=2)
    trainer = open_trainer(config)
    whole = make_group(trainer.learner.model)
    assert whole.rollouts[0].rows is not None
    rows = [[-7.0, -0.01] if row else [] for row in whole.rollouts[0].rows.logprobs_TK]
    rows = DistillArrays(whole.rollouts[0].rows.token_ids_TK, rows)
    broken = replace(whole, rollouts=(replace(whole.rollouts[0], rows=rows), *whole.rollouts[1:]))

    def loss(inputs: LossInputs, *args: Any) -> Any:
        total, parts = combined_loss(inputs, *args)
        return total * (float("nan") if (inputs.teacher_BTK == -7.0).any() else 1.0), parts

    monkeypatch.setattr(step_module, "combined_loss", loss)
    trainer.source = ScriptedClient(config, [[group] for group in (broken, whole, broken, broken, broken, whole)])
    weights = {name: one.clone() for name, one in trainer.learner.model.state_dict().items()}
    with pytest.raises(TrainingError, match="step 5: no update of the last 3 steps"):
        asyncio.run(trainer.run())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped_updates"] for line in lines] == [4.0, 0.0, 4.0, 4.0, 4.0]
    assert ["loss" in line for line in lines] == [False, True, False, False, False]
    changed = [name for name, one in trainer.learner.model.state_dict().items() if not torch.equal(one, weights[name])]
    assert changed
    assert all(one.isfinite().all() for one in trainer.learner.model.state_dict().values())


def test_parts_make_the_same_gradient_as_the_whole() -> None:
    grads = []
    for micro in (1, 1000):
        config = make_config(micro_tokens=micro, loss={"forward_kl": 1.0, "grpo": 1.0}, max_grad_norm=1e9)
        policy = load_policy(config, DistContext("cpu"))
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
        train_step(policy, optimizer, make_rollout(policy.model), config, DistContext("cpu"))
        grads.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    torch.testing.assert_close(grads[0], grads[1], atol=1e-5, rtol=1e-3)


def test_a_checkpoint_resumes_exactly(tmp_path: Path) -> None:
    config = make_config(loss={"forward_kl": 1.0})

    def fresh() -> tuple[Any, torch.optim.Optimizer, dict[str, Any]]:
        model = load_model(config, "cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
        return model, optimizer, {"model": model, "optimizer": optimizer}

    model, optimizer, parts = fresh()
    batch = make_rollout(model)
    for _ in range(2):
        train_step(TrainedPolicy(model), optimizer, batch, config, DistContext("cpu"))
    at = Resumed(2, 9, config.recipe, {"files": [["a.jsonl", "00"]], "seed": 3})
    save_checkpoint(tmp_path, at, parts, DistContext("cpu"))
    straight = train_step(TrainedPolicy(model), optimizer, batch, config, DistContext("cpu"))
    resumed_model, resumed_optimizer, resumed_parts = fresh()
    assert load_checkpoint(tmp_path, resumed_parts, DistContext("cpu")) == at
    assert train_step(TrainedPolicy(resumed_model), resumed_optimizer, batch, config, DistContext("cpu")) == straight
    for a, b in zip(model.parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("waits_for_batch", "pause_s", "stops", "saved"), [(0, 0.0, 1, 1), (0, 0.1, 1, 1), (0, 0.1, 2, 0), (1, 0.1, 1, 1)]
)
def test_a_stopped_trainer_finishes_its_step_and_saves(
    waits_for_batch: int, pause_s: float, stops: int, saved: int, tmp_path: Path
) -> None:
    """In a step, which begins when a batch is there: after it. Stopped again in it: at once, and weights between two
    steps are no checkpoint.
    """
    passes = 20 if saved else 10_000
    config = make_config(output_dir=tmp_path, vllm_urls=[], total_steps=9, save_every=50, epochs_per_batch=passes)
    trainer = open_trainer(config)
    client = ScriptedClient(trainer.config, [[make_group(trainer.learner.model)]])
    trainer.source = client

    async def run() -> None:
        running = asyncio.create_task(trainer.run())
        await client.asked[waits_for_batch].wait()
        if pause_s:
            await asyncio.sleep(pause_s)
        for _ in range(stops):
            trainer.stop()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(run())
    assert trainer.state.step == saved
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("*")) == ["step-000001"] * saved


def test_without_a_checkpoint_resuming_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no checkpoint"):
        load_checkpoint(tmp_path, {}, DistContext("cpu"))


def test_saved_weights_come_back_with_what_vllm_needs(tmp_path: Path) -> None:
    config = make_config()
    model = load_model(config, "cpu")
    save_weights(model, str(POLICY_DIR), tmp_path / "saved")
    assert {path.name for path in POLICY_DIR.iterdir()} <= {path.name for path in (tmp_path / "saved").iterdir()}
    again = load_model(make_config(model=str(tmp_path / "saved")), "cpu")
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_no_other_weights_are_copied_along(tmp_path: Path) -> None:
    """An index beside the one file that is written now would name files that are not there."""
    source = tmp_path / "source"
    shutil.copytree(POLICY_DIR, source)
    old = ("model.safetensors.index.json", "model-00001-of-00002.safetensors", "pytorch_model.bin", "extra.gguf")
    for name in old:
        (source / name).write_text("{}")
    save_weights(load_model(make_config(), "cpu"), str(source), tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {path.name for path in POLICY_DIR.iterdir()}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk_is_said(tmp_path: Path) -> None:
    model = load_model(make_config(), "cpu")
    parts = {"model": model}
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=True)
    try:
        with pytest.raises(OutputError, match="cannot write"):
            save_checkpoint(tmp_path, Resumed(1, 1, {}), parts, DistContext("cpu"))
        with pytest.raises(OutputError, match="cannot write"):
            save_weights(model, str(POLICY_DIR), tmp_path / "weights")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_two_runs_do_not_mix_in_one_folder(tmp_path: Path) -> None:
    config = {"output_dir": str(tmp_path), "vllm_urls": []}
    open_trainer(make_config(**config))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    first = open_trainer(make_config(**config, overwrite=True))
    save_checkpoint(tmp_path / "checkpoints", Resumed(70, 100, first.config.recipe), first.learner.parts, first.world)
    with pytest.raises(OutputError, match="holds an earlier run"):
        open_trainer(make_config(**config))
    assert open_trainer(make_config(**config, resume=True, overwrite=True)).state.step == 70
    with pytest.raises(ConfigError, match="can't be loaded"):
        open_trainer(make_config(**config, overwrite=True, model=str(tmp_path / "none")))
    assert (tmp_path / "checkpoints" / "step-000070").exists()
    assert open_trainer(make_config(**config, overwrite=True)).state.step == 0
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_another_loss_is_resumed_only_if_the_settings_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"output_dir": str(tmp_path), "vllm_urls": []}
    first = open_trainer(make_config(**config, loss={"grpo": 1.0}))
    save_checkpoint(tmp_path / "checkpoints", Resumed(70, 100, first.config.recipe), first.learner.parts, first.world)
    with pytest.raises(ConfigError, match=r"loss.grpo was 1.0 and would be 0.0. Name loss in the settings"):
        open_trainer(make_config(**config, resume=True))
    assert open_trainer(make_config(**config, resume=True, loss={"grpo": 1.0})).state.step == 70
    assert own_messages(caplog) == []
    assert open_trainer(make_config(**config, resume=True, loss={"grpo": 2.0})).state.step == 70
    assert own_messages(caplog) == ["resumed with other settings: loss.grpo was 1.0 and is 2.0 now"]
    ending = {"grpo": 1.0, "schedules": {"grpo": {"until": 0.9}}}
    assert open_trainer(make_config(**config, resume=True, loss=ending)).state.step == 70


def test_a_resumed_run_updates_with_the_settings_that_it_logs(tmp_path: Path) -> None:
    config = {"output_dir": str(tmp_path), "vllm_urls": [], "total_steps": 2, "minibatches": 1, "epochs_per_batch": 1}
    first = open_trainer(make_config(**config))
    batches = [[make_group(first.learner.model)]] * 2
    save_checkpoint(tmp_path / "checkpoints", Resumed(1, 2, first.config.recipe), first.learner.parts, first.world)
    trainer = open_trainer(make_config(**config, resume=True, weight_decay=0.1, adam_betas=(0.8, 0.9)))
    trainer.source = ScriptedClient(trainer.config, batches)
    asyncio.run(trainer.run())
    (used,) = trainer.learner.optimizer.param_groups
    assert (used["weight_decay"], used["betas"]) == (0.1, (0.8, 0.9))


def test_pushes_of_another_run_do_not_push_todays_out(tmp_path: Path) -> None:
    pusher = WeightPusher(make_config(weights_dir=str(tmp_path), vllm_urls=["http://127.0.0.1:1"]), DistContext("cpu"))
    for step in (1, 2, 3, 90):
        (tmp_path / f"step-{step:06d}").mkdir()
    pusher._forget_old(tmp_path / "step-000003")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003", "step-000090"]


def test_adapters_are_merged_into_what_is_saved(tmp_path: Path) -> None:
    config = make_config(lora_rank=4, loss={"forward_kl": 1.0}, lr=1e-2)
    model = load_model(config, "cpu")
    batch = make_rollout(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) < 0.2 * sum(p.numel() for p in model.parameters())
    train_step(TrainedPolicy(model), torch.optim.AdamW(trained, lr=config.lr), batch, config, DistContext("cpu"))
    model.eval()
    tokens = batch.tokens_BT[1].tolist()
    adapted = own_logprobs(model, tokens)
    save_weights(model, str(POLICY_DIR), tmp_path / "merged")
    plain = load_model(make_config(model=str(tmp_path / "merged")), "cpu")
    torch.testing.assert_close(own_logprobs(plain, tokens), adapted, atol=1e-4, rtol=1e-4)
    assert set(plain.state_dict()) == set(load_model(make_config(), "cpu").state_dict())


def test_the_probe_is_the_longest_sequence_without_its_padding() -> None:
    model = load_model(make_config(), "cpu")
    probe = Probe.of(make_rollout(model))
    assert len(probe.token_ids) == 30
    rows = own_logprobs(model, list(probe.token_ids))
    own = probe.own_logprobs(TrainedPolicy(model), "cpu")
    assert own == pytest.approx([float(rows[p - 1, probe.token_ids[p]]) for p in range(1, 30)], abs=1e-4)


def test_a_model_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be loaded"):
        load_model(make_config(model=str(tmp_path)), "cpu")
    shutil.copytree(POLICY_DIR, tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "model.safetensors", 2000)
    with pytest.raises(ConfigError, match="can't be loaded"):
        load_model(make_config(model=str(tmp_path / "cut")), "cpu")


def test_an_average_is_one_of_factors_and_is_saved_as_an_adapter(tmp_path: Path) -> None:
    """Of factors, not of products: both are computed here, and they differ."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = load_model(make_config(lora_rank=2), "cpu")
    average = MovingAverage(model, decay=0.75)
    factors = {name: p for name, p in model.named_parameters() if p.requires_grad}
    b_name = next(name for name in factors if "lora_B" in name)
    a_name = b_name.replace("lora_B", "lora_A")
    torch.manual_seed(0)
    expected = {name: p.detach().clone() for name, p in factors.items()}
    products = expected[b_name] @ expected[a_name]
    for _ in range(3):
        for name, parameter in factors.items():
            parameter.data.normal_()
            expected[name] = 0.75 * expected[name] + 0.25 * parameter.detach()
        products = 0.75 * products + 0.25 * (factors[b_name] @ factors[a_name]).detach()
        average.update()
    state = average.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value)
    assert (state[b_name] @ state[a_name] - products).abs().max() > 0.1

    save_adapter(model, tmp_path / "mean", state)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(POLICY_DIR), tmp_path / "mean")
    read = dict(loaded.named_parameters())
    for name, value in expected.items():
        torch.testing.assert_close(read[name].detach(), value)
    again = MovingAverage(model, decay=0.75)
    again.load_state_dict(state)
    torch.testing.assert_close(again.state_dict(), state)
    with pytest.raises(ValueError, match="other parameters"):
        again.load_state_dict({})


def test_a_checkpoint_names_the_precision_in_which_it_is_written(tmp_path: Path) -> None:
    """Half the bytes of the same model in float32; what a run ends with is in float32, whatever it started from."""
    model, source = load_model(make_config(), "cpu"), tmp_path / "source"
    save_weights(model, str(POLICY_DIR), source, torch.bfloat16)
    copy = load_model(make_config(model=str(source)), "cpu")
    assert next(copy.parameters()).dtype == torch.float32
    config = make_config(model=str(source), output_dir=tmp_path / "run", vllm_urls=[], total_steps=1, lr=1e-6)
    trainer = open_trainer(config)
    trainer.source = ScriptedClient(config, [[make_group(trainer.learner.model)]])
    asyncio.run(trainer.run())
    folders = {"bfloat16": source, "float32": tmp_path / "run" / "final"}
    for name, folder in folders.items():
        assert json.loads((folder / "config.json").read_text())["dtype"] == name
    sizes = [(folder / "model.safetensors").stat().st_size for folder in folders.values()]
    assert sizes[0] <= 0.51 * sizes[1]
    for name, value in load_model(make_config(model=str(folders["float32"])), "cpu").state_dict().items():
        assert torch.equal(value, trainer.learner.model.state_dict()[name]), name


def own_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("agentic_opd")]
