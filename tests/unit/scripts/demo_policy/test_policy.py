"""The committed policy: small, whole, and what scripts/demo_policy/train would write today."""

import json
from math import prod
from typing import Any

import pytest
from demo_policy import POLICY_DIR
from demo_policy.tokenizer import CHAT_TEMPLATE
from safetensors import safe_open
from transformers import AutoTokenizer

from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.renderer import check_round_trip, load_renderer
from agentic_opd.worlds.coding.tools import TOOL_SPECS

pytestmark = pytest.mark.slow


def load(name: str) -> Any:
    return json.loads((POLICY_DIR / name).read_text(encoding="utf-8"))


def test_it_stays_under_20_mb():
    assert sum(path.stat().st_size for path in POLICY_DIR.rglob("*") if path.is_file()) < 20e6


def test_weights_fit_the_config():
    config = load("config.json")
    with safe_open(POLICY_DIR / "model.safetensors", framework="numpy") as weights:
        shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        dtypes = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    assert dtypes == {"F32"}
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"] is False
    assert config["max_position_embeddings"] >= 8192
    size, vocab = config["hidden_size"], config["vocab_size"]
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (vocab, size)
    layers = config["num_hidden_layers"]
    assert len(shapes) == 3 + 11 * layers
    assert shapes[f"model.layers.{layers - 1}.mlp.down_proj.weight"] == (size, config["intermediate_size"])
    assert 1e6 < sum(prod(shape) for shape in shapes.values()) < 5e6


def test_its_tokenizer_drives_the_agent_loop():
    tokenizer = AutoTokenizer.from_pretrained(POLICY_DIR)
    assert len(tokenizer) == load("config.json")["vocab_size"]
    assert tokenizer.chat_template == CHAT_TEMPLATE
    chat = ChatFormat(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer, TOOL_SPECS)
    check_round_trip(chat)
    assert load("generation_config.json")["eos_token_id"] == chat.stop_token_ids
    assert tokenizer.decode(tokenizer.encode("größer ✓ 漢字 🙂")) == "größer ✓ 漢字 🙂"
