"""A small Qwen3 in plain torch, for training and sampling the demo policy fast on a CPU.

Its parameters have the names of transformers' Qwen3ForCausalLM, so its state dict is that model's checkpoint. It can
attend to a prefix that all sequences of a batch share, which is computed once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [B, kv_heads, T, head_dim]."""


class Shape(NamedTuple):
    """The model's size; `config` is what transformers and vLLM read."""

    vocab_size: int
    hidden: int = 192
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 512
    rope_theta: float = 10000.0
    eps: float = 1e-6

    def config(self, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
        """The contents of config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "initializer_range": 0.02,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
            "dtype": "float32",
        }


class RMSNorm(nn.Module):
    """Root mean square norm with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norm the last dimension."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.q_norm = RMSNorm(s.head_dim, s.eps)
        self.k_norm = RMSNorm(s.head_dim, s.eps)

    def qkv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, each [B, heads, S, head_dim]."""
        heads = (*x.shape[:2], -1, self.shape.head_dim)
        q = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)
        return rotate(q, rope), rotate(k, rope), self.v_proj(x).view(heads).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend, causally if there is no mask; back to [B, S, D]."""
        groups = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.down_proj = nn.Linear(s.intermediate, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """What one layer holds; `DemoModel.forward` says how it is used."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(s)
        self.mlp = MLP(s)
        self.input_layernorm = RMSNorm(s.hidden, s.eps)
        self.post_attention_layernorm = RMSNorm(s.hidden, s.eps)


class Body(nn.Module):
    """Embeddings, layers and the last norm."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab_size, s.hidden)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = RMSNorm(s.hidden, s.eps)


class DemoModel(nn.Module):
    """`forward` gives hidden states [B, S, D]; `lm_head` turns those into logits."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.model = Body(s)
        self.lm_head = nn.Linear(s.hidden, s.vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                scale = (2 * s.layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale if "embed" in name else scale * parameter.shape[1] ** -0.5)

    def forward(self, ids: Tensor, prefix: Cache | None = None) -> tuple[Tensor, Cache]:
        """Read `ids` [B, S] after `prefix` [1, kv_heads, P, head_dim], causally."""
        offset = prefix[0][0].shape[2] if prefix else 0
        length = ids.shape[1]
        rope = rotations(self.shape, torch.arange(offset, offset + length))
        mask = torch.ones(length, offset + length).tril(offset).log() if prefix else None
        x, cache = self.model.embed_tokens(ids), []
        for i, layer in enumerate(self.model.layers):
            q, k, v = layer.self_attn.qkv(layer.input_layernorm(x), rope)
            cache.append((k, v))
            if prefix:
                k = torch.cat((prefix[i][0].expand(len(ids), -1, -1, -1), k), 2)
                v = torch.cat((prefix[i][1].expand(len(ids), -1, -1, -1), v), 2)
            x = x + layer.self_attn.attend(q, k, v, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.norm(x), cache

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int], max_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        """Sample a completion of each prompt, its stop token included."""
        random = torch.Generator().manual_seed(seed)
        stops = torch.tensor(stop_ids)
        positions = torch.tensor([len(prompt) for prompt in prompts])
        width = int(positions.max())
        ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
        rows = torch.arange(len(prompts))
        hidden, prefill = self(ids)
        logits = self.lm_head(hidden[rows, positions - 1])
        cache = [(F.pad(keys, (0, 0, 0, max_tokens)), F.pad(values, (0, 0, 0, max_tokens))) for keys, values in prefill]
        completions: list[list[int]] = [[] for _ in prompts]
        for _ in range(max_tokens):
            sampled = torch.multinomial((logits / temperature).softmax(-1), 1, generator=random)[:, 0]
            for row, token in zip(rows.tolist(), sampled.tolist(), strict=True):
                completions[row].append(token)
            going = ~torch.isin(sampled, stops)
            if not bool(going.all()):
                rows, sampled, positions = rows[going], sampled[going], positions[going]
                cache = [(keys[going], values[going]) for keys, values in cache]
            if not len(rows):
                break
            logits = self._decode(sampled, positions, cache)
            positions = positions + 1
        return completions

    def _decode(self, ids: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """One token a row: ids [B] at positions [B]; `cache` is written in place. Returns logits [B, V]."""
        cosines, sines = rotations(self.shape, positions)
        rope = (cosines[:, None, None], sines[:, None, None])
        rows = torch.arange(len(ids))
        used = int(positions.max()) + 1
        mask = (torch.arange(used) <= positions[:, None])[:, None, None]
        x = self.model.embed_tokens(ids)[:, None]
        for layer, (keys, values) in zip(self.model.layers, cache, strict=True):
            q, k, v = layer.self_attn.qkv(layer.input_layernorm(x), rope)
            keys[rows, :, positions] = k[:, :, 0]
            values[rows, :, positions] = v[:, :, 0]
            x = x + layer.self_attn.attend(q, keys[:, :, :used], values[:, :, :used], mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.lm_head(self.model.norm(x)[:, 0])


def rotations(s: Shape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, [len(positions), head_dim]."""
    inverse = s.rope_theta ** -(torch.arange(0, s.head_dim, 2).float() / s.head_dim)
    angles = torch.outer(positions.float(), inverse).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate [..., S, head_dim] by the angles of its positions."""
    first, second = x.chunk(2, -1)
    return x * rope[0] + torch.cat((-second, first), -1) * rope[1]
