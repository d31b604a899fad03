"""Log-probabilities of chosen tokens, without storing all logits or a log-softmax over the vocabulary.

Dimensions: B sequences, T positions, W chosen positions, D hidden size, V vocabulary, K chosen tokens a position.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from agentic_opd.training import memory

CHUNK_VALUES = memory.CHUNK_VALUES
"""Number of logits upcast and normalised at a time; bounds the extra memory to a few float32 chunks."""


def selected_logprobs(logits_BTV: Tensor, ids_BTK: Tensor) -> Tensor:
    """Compute the logprobs (nats) [B, T, K] of the tokens `ids_BTK[:, p]` at p from the logits of position p - 1.

    Row 0 has no preceding logits and is 0. The result is float64 for float64 logits, else float32. Beyond the logits
    and their gradient, memory grows with K: the normaliser is computed chunk by chunk in the forward pass, and the
    softmax is recomputed in the backward pass. Rows that the caller ignores may hold any id.

    Raises:
        ValueError: the shapes disagree.
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


def head_logprobs(hidden_WD: Tensor, weight_VD: Tensor, ids_WK: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """Compute the logprobs (nats) [W, K] of `ids_WK` from hidden states and an output head.

    At most `CHUNK_VALUES // V` positions (at least one) have their logits in memory at a time. The backward pass
    recomputes the logits. Products have the precision of the hidden states, or that of autocast; sums are in float32.

    The gradient of `weight_VD` is computed only if it is trained.
    """
    dtype = hidden_WD.dtype
    if torch.is_autocast_enabled(hidden_WD.device.type):
        dtype = torch.get_autocast_dtype(hidden_WD.device.type)
    return _HeadLogprobs.apply(hidden_WD, weight_VD, bias_V, ids_WK, dtype)


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, dtype: torch.dtype
    ) -> Tensor:
        rows, cast = max(1, CHUNK_VALUES // len(weight)), weight.to(dtype)
        chosen, norms = list[Tensor](), list[Tensor]()
        for states, index in zip(hidden.split(rows), ids.split(rows), strict=True):
            logits = _logits(states.to(dtype), cast, bias)
            norms.append(logits.logsumexp(-1))
            chosen.append(logits.gather(-1, index) - norms[-1][:, None])
        norm = torch.cat(norms) if norms else wide(hidden.new_zeros(0))
        ctx.save_for_backward(hidden, weight, ids, norm, *(() if bias is None else (bias,)))
        ctx.dtype = dtype
        return torch.cat(chosen) if chosen else wide(hidden.new_zeros(ids.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        hidden, weight, ids, norms, *rest = ctx.saved_tensors
        (grad,), bias = grads, (rest[0] if rest else None)
        rows, cast = max(1, CHUNK_VALUES // len(weight)), weight.to(ctx.dtype)
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        to_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        parts = (part.split(rows) for part in (hidden, ids, norms, grad, to_hidden))
        for states, index, norm, upstream, target in zip(*parts, strict=True):
            states = states.to(ctx.dtype)
            dense = (_logits(states, cast, bias) - norm[:, None]).exp_().mul_(-upstream.sum(-1, keepdim=True))
            dense.scatter_add_(-1, index, upstream)
            if to_bias is not None:
                to_bias += dense.sum(0).to(to_bias.dtype)
            narrow = dense.to(ctx.dtype)
            target.copy_(narrow @ cast)
            if to_weight is not None:
                if narrow.dtype == to_weight.dtype:
                    to_weight.addmm_(narrow.T, states)
                else:
                    to_weight += narrow.T @ states
        return to_hidden, to_weight, to_bias, None, None


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return wide(F.linear(states, weight, None if bias is None else bias.to(weight.dtype)))


def wide(values: Tensor) -> Tensor:
    """Upcast to float32, the precision that sums over a vocabulary need; float64 is kept."""
    return values if values.dtype == torch.float64 else values.float()


def _rows(logits: Tensor) -> int:
    return max(1, CHUNK_VALUES // logits.shape[-1])
