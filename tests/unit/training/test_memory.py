"""Memory of a step computed from a model's shape, and the parts that fit a GPU: literal numbers of a 4B shape."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.memory import (
    ModelShape,
    PartPlan,
    Recipe,
    free_for_activations,
    layer_bytes,
    plan_parts,
    read_shape,
    shape_of_checkpoint,
    step_parts,
    token_bytes,
    total_bytes,
    unallocated_bytes,
)

QWEN3_4B = ModelShape(2560, 9728, 36, query=4096, key=1024, vocab=151_936, is_tied=True)
CONFIG = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
ADAPTERS, WHOLE = Recipe(is_bf16=True, lora_rank=16), Recipe(is_bf16=True)
GB = 10**9


def settings(**changes: object) -> TrainerConfig:
    return TrainerConfig.model_validate({"model": "m", "precision": "bf16", "lora_rank": 16, **changes})


def test_the_shape_of_a_checkpoint(tmp_path: Path) -> None:
    assert read_shape(CONFIG) == read_shape({"text_config": CONFIG}) == QWEN3_4B
    assert QWEN3_4B.parameters == 4_022_272_000
    assert QWEN3_4B.adapter_parameters(16) == 33_030_144
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert shape_of_checkpoint(str(tmp_path)) == QWEN3_4B
    routed = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    assert read_shape({**CONFIG, **routed}) == replace(QWEN3_4B, intermediate=6144, experts=16.0)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    assert shape_of_checkpoint(str(tmp_path)) is None


def test_the_bytes_of_a_token_and_layer_are_those_that_were_counted() -> None:
    """scripts/bench/training activations: 96.3 and 140.1 KiB, of which the adapters' own inner values are 0.3."""
    assert layer_bytes(QWEN3_4B, ADAPTERS) == 96 * 1024
    assert layer_bytes(QWEN3_4B, WHOLE) == 140 * 1024
    assert layer_bytes(QWEN3_4B, replace(ADAPTERS, is_bf16=False)) == 192 * 1024
    assert layer_bytes(replace(QWEN3_4B, experts=16.0), ADAPTERS) == 115 * 1024
    assert token_bytes(QWEN3_4B, ADAPTERS, is_recomputed=True) == 36 * 5120 + 2 * 96 * 1024 + 3 * 5120


@pytest.mark.parametrize(
    ("recipe", "tokens", "is_recomputed", "gb"),
    [
        (ADAPTERS, 8192, False, 38.8),
        (ADAPTERS, 8192, True, 12.1),
        (replace(ADAPTERS, lora_rank=32, has_average=True), 16_384, True, 16.2),
        (WHOLE, 8192, True, 78.3),
        (replace(WHOLE, processes=2), 8192, True, 38.26),
        (replace(WHOLE, has_start=True), 8192, True, 87.1),
    ],
)
def test_the_peak_of_a_step(recipe: Recipe, tokens: int, is_recomputed: bool, gb: float) -> None:
    parts = step_parts(QWEN3_4B, recipe, tokens, is_recomputed=is_recomputed)
    assert total_bytes(parts) / GB == pytest.approx(gb, abs=0.05)


def test_a_part_is_as_large_as_fits_without_recomputation() -> None:
    free = free_for_activations(71 * GB, 80 * GB, unallocated_bytes(QWEN3_4B, ADAPTERS))
    assert free == 54_302_696_960
    plan = plan_parts(settings(), QWEN3_4B, free)
    assert plan == PartPlan(14_866, 14_866, 137_028)
    assert not plan.is_recomputed(14_866)
    assert plan.is_recomputed(14_867)


def test_a_small_card_recomputes_parts_that_fill_it() -> None:
    assert plan_parts(settings(), QWEN3_4B, 10 * GB) == PartPlan(4096, 2737, 25_234)
    assert plan_parts(settings(), QWEN3_4B, GB) == PartPlan(2523, 273, 2523)
    assert plan_parts(settings(), QWEN3_4B, 0) == PartPlan(1, 0, 0)


def test_settings_decide_where_they_are_set() -> None:
    assert plan_parts(settings(micro_tokens=5000), QWEN3_4B, 54 * GB) == PartPlan(5000, 14_783, 136_264)
    assert plan_parts(settings(gradient_checkpointing=True), QWEN3_4B, 54 * GB) == PartPlan(32_768, 0, 136_264)
    assert plan_parts(settings(gradient_checkpointing=False), QWEN3_4B, 54 * GB) == PartPlan(14_783, None, 14_783)
    assert plan_parts(settings(), None, 54 * GB) == plan_parts(settings()) == PartPlan(16_384, None)
    assert plan_parts(settings(gradient_checkpointing=True, micro_tokens=7)) == PartPlan(7, 0)


def test_a_plan_says_what_is_recomputed() -> None:
    assert str(PartPlan(8, None)) == "parts of 8 tokens, with their activations kept"
    assert str(PartPlan(8, 0)) == "parts of 8 tokens, with their activations recomputed"
    assert str(PartPlan(8, 9)) == "parts of 8 tokens; activations are recomputed in parts of more than 9"
