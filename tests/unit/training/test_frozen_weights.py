"""Frozen weights in the compute precision, and activations that are recomputed: the same numbers in less memory."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.distributed import DistContext
from agentic_opd.training.learner import load_learner
from agentic_opd.training.memory import PartPlan
from agentic_opd.training.model import in_float32, load_model, recompute_cheap_parts
from agentic_opd.training.policy import TrainedPolicy, Ways, fit_memory, load_policy
from tests.support.tiny_model import save_tiny_model

from .test_policy import make_model

WORLD = DistContext("cpu")


def settings(folder: Path, **changes: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"model": str(save_tiny_model(folder / "tiny")), **changes})


def read(policy: TrainedPolicy, seed: int = 0) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(seed)
    tokens_BT = torch.randint(64, (2, 24), generator=drawn)
    attended_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    return policy(tokens_BT, attended_BT, tokens_BT[..., None], attended_BT).chosen_BTK


def gradients(policy: TrainedPolicy) -> dict[str, torch.Tensor]:
    policy.zero_grad()
    read(policy).sum().backward()
    return {name: value.grad for name, value in policy.named_parameters() if value.grad is not None}


def kept_bytes(policy: TrainedPolicy) -> int:
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*policy.parameters(), *policy.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (address := tensor.untyped_storage().data_ptr()) not in weights:
            kept[address] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chosen_BTK = read(policy)
    del chosen_BTK
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.slow
def test_with_adapters_the_base_is_kept_once_in_the_compute_precision(tmp_path: Path) -> None:
    config = settings(tmp_path, precision="bf16", lora_rank=4)
    narrow = load_policy(config, WORLD)
    wide = load_policy(config.model_copy(update={"precision": "fp32"}), WORLD)
    dtypes = {".lora_" in name: value.dtype for name, value in narrow.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    assert {value.dtype for value in wide.parameters()} == {torch.float32}
    assert narrow.ways == wide.ways == Ways()
    with torch.no_grad():
        noise = (read(narrow) - read(wide)).abs()
    assert noise.mean() < 0.05
    assert 0 < noise.max() < 0.3
    assert {value.dtype for value in gradients(narrow).values()} == {torch.float32}
    assert kept_bytes(narrow) < 0.6 * kept_bytes(wide)


def test_a_frozen_copy_has_rounded_matrices_and_the_same_logprobs(tmp_path: Path) -> None:
    config = settings(tmp_path, precision="bf16")
    trained, frozen = load_policy(config, WORLD), load_policy(config, WORLD, is_frozen=True)
    with torch.no_grad():
        assert torch.equal(read(trained), read(frozen))
    dtypes = {
        name.removesuffix(".weight").replace(".", "_").rpartition("_")[2]: value.dtype
        for name, value in frozen.named_parameters()
    }
    assert dtypes["proj"] == torch.bfloat16
    assert dtypes["tokens"] == dtypes["norm"] == torch.float32
    assert not any(value.requires_grad for value in frozen.parameters())
    learner = load_learner(config.model_copy(update={"measure_start": True}), WORLD)
    assert learner.start is not None
    with learner.start.reading() as start:
        assert any(value.dtype == torch.bfloat16 for value in start.parameters())


def test_weights_are_upcast_inside_the_block_only(tmp_path: Path) -> None:
    model = load_model(settings(tmp_path, precision="bf16", lora_rank=4), "cpu")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = torch.arange(8)[None]
    with torch.no_grad(), in_float32(model):
        upcast = model(input_ids=tokens).logits
    assert upcast.dtype == torch.float32
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) and value.dtype == after[name].dtype for name, value in before.items())
    with torch.no_grad():
        torch.testing.assert_close(upcast, model.float()(input_ids=tokens).logits)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["Qwen3", "Llama", "Qwen2", "Gemma2"])
def test_what_is_recomputed_changes_no_number(kind: str, precision: str) -> None:
    plain = TrainedPolicy(make_model(kind).train(), precision)
    cheap = TrainedPolicy(make_model(kind).train(), precision)
    recompute_cheap_parts(cheap.model)
    whole = TrainedPolicy(make_model(kind).train(), precision)
    whole.plan = PartPlan(100, 10)
    expected, loss = gradients(plain), read(plain)
    for policy in (cheap, whole):
        assert torch.equal(read(policy), loss)
        found = gradients(policy)
        assert found.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert kept_bytes(whole) < kept_bytes(cheap) < 0.9 * kept_bytes(plain)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adapters_have_the_same_numbers_where_the_product_of_the_mlp_is_recomputed(precision: str) -> None:
    def adapted(*, is_cheap: bool) -> TrainedPolicy:
        model = make_model("Qwen3")
        if is_cheap:
            recompute_cheap_parts(model)
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
        torch.manual_seed(1)
        for name, value in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(value, std=0.1)
        return TrainedPolicy(model.train(), precision)

    plain, cheap, whole = adapted(is_cheap=False), adapted(is_cheap=True), adapted(is_cheap=True)
    whole.plan = PartPlan(100, 10)
    expected = gradients(plain)
    for policy in (cheap, whole):
        assert torch.equal(read(policy), read(plain))
        found = gradients(policy)
        assert found.keys() == expected.keys()
        assert sum(".down_proj.lora_" in name for name in found) == 2 * plain.model.config.num_hidden_layers
        for name, value in found.items():
            apart = float((value - expected[name]).norm() / expected[name].norm())
            assert apart < (1e-6 if precision == "fp32" else 0.02), name
    assert whole.model.is_gradient_checkpointing
    assert kept_bytes(whole) < kept_bytes(cheap) < 0.85 * kept_bytes(plain)
    with torch.no_grad(), plain.model.disable_adapter(), cheap.model.disable_adapter():
        assert torch.equal(read(cheap), read(plain))
    assert not torch.equal(read(cheap), read(TrainedPolicy(make_model("Qwen3").train(), precision)))


def test_only_parts_that_do_not_fit_are_recomputed() -> None:
    policy = TrainedPolicy(make_model("Qwen3").train())
    for kept, is_recomputed in ((47, True), (48, False), (0, True), (None, False)):
        policy.plan = PartPlan(100, kept)
        read(policy)
        assert policy.model.is_gradient_checkpointing == is_recomputed
    policy.plan = PartPlan(100, 0)
    with torch.no_grad():
        read(policy)
    assert not policy.model.is_gradient_checkpointing, "nothing is kept anyway"


def test_parts_are_chosen_from_the_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(tmp_path, precision="bf16", lora_rank=4, max_token_len=4096)
    policy = load_policy(config, WORLD)
    assert fit_memory(policy, config, WORLD) is config
    assert policy.plan == PartPlan(16_384, None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 3 * 10**6)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2 * 10**6)
    caplog.set_level(logging.INFO)
    for free, size in ((2 * 10**9, 32_768), (241 * 10**6, None)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 10**6))
        fitted = fit_memory(policy, config, DistContext("cuda"))
        assert policy.plan.longest is not None
        assert fitted.micro_tokens == policy.plan.micro_tokens
        assert size in (None, fitted.micro_tokens)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("agentic_opd")]
    assert "GB are free for activations: parts of 32768 tokens" in messages[0]
    assert "and max_token_len is 4096: lower it" in messages[-1]


def test_several_processes_recompute_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(tmp_path, max_token_len=2000)
    policy = load_policy(config, WORLD)
    monkeypatch.setattr(DistContext, "share", lambda _, value: value)
    for is_on, plan in ((True, PartPlan(16_384, 0)), (None, PartPlan(16_384, None)), (False, PartPlan(16_384, None))):
        fit_memory(policy, config.model_copy(update={"gradient_checkpointing": is_on}), DistContext("cpu", size=2))
        assert policy.plan == plan
