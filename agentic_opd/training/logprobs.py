"""Log-probabilities of chosen tokens from logits, without a log-softmax over the vocabulary being kept.

Dimensions: B sequences, T positions, V vocabulary, K chosen tokens a position.
"""

from typing import Any

import torch
from torch import Tensor

CHUNK_VALUES = 2**24
"""Logits that are upcast and normalised at a time; bounds the extra memory to a few chunks of float32."""


def selected_logprobs(logits_BTV: Tensor, ids_BTK: Tensor) -> Tensor:
    """The logprobs (nats) [B, T, K] that position p - 1's logits give to the tokens `ids_BTK[:, p]` at p.

    Row 0 has no logits before it and is 0. Beyond the logits and their gradient, memory grows with K: the normaliser is
    found chunk by chunk in the forward pass, and the softmax again in the backward pass. They are float64 for float64
    logits and else float32.

    Args:
        logits_BTV: [B, T, V] of the positions 0 to T - 1, any float dtype.
        ids_BTK: [B, T, K] token ids in [0, V); rows that do not count may hold anything in that range.

    Raises:
        ValueError: shapes disagree.
    """
    if logits_BTV.ndim != 3 or ids_BTK.ndim != 3 or logits_BTV.shape[:2] != ids_BTK.shape[:2]:
        raise ValueError(f"expected logits [B, T, V] and ids [B, T, K], got {logits_BTV.shape} and {ids_BTK.shape}")
    B, T, V = logits_BTV.shape
    chosen = _Selected.apply(logits_BTV.reshape(B * T, V), ids_BTK.roll(-1, 1).reshape(B * T, -1)).view(B, T, -1)
    return torch.cat((torch.zeros_like(chosen[:, :1]), chosen[:, :-1]), 1)


class _Selected(torch.autograd.Function):
    """logits [N, V], ids [N, K] -> logits at ids minus the row's logsumexp, [N, K] in `wide` precision."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor) -> Tensor:
        norms = torch.cat([wide(chunk).logsumexp(-1) for chunk in logits.split(_rows(logits))])
        ctx.save_for_backward(logits, ids, norms)
        return wide(logits.gather(-1, ids)) - norms[:, None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, ids, norms = ctx.saved_tensors
        (grad,) = grads
        out = torch.empty_like(logits)
        rows = _rows(logits)
        parts = (logits, ids, norms, grad, out)
        for logit, index, norm, upstream, target in zip(*(part.split(rows) for part in parts), strict=True):
            dense = (wide(logit) - norm[:, None]).exp_().mul_(-upstream.sum(-1, keepdim=True))
            target.copy_(dense.scatter_add_(-1, index, upstream))
        return out, None


def wide(values: Tensor) -> Tensor:
    """In the precision that sums over a vocabulary need: float64 stays, anything else becomes float32."""
    return values if values.dtype == torch.float64 else values.float()


def _rows(logits: Tensor) -> int:
    return max(1, CHUNK_VALUES // logits.shape[-1])
