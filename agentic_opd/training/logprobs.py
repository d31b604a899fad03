"""Log-probabilities of chosen tokens, without storing all logits or a log-softmax over the vocabulary.

Dimensions: B sequences, T positions, W chosen positions, D hidden size, V vocabulary, K chosen tokens a position.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from agentic_opd.training import memory

CHUNK_VALUES = memory.CHUNK_VALUES
"""Number of logits upcast and normalised at a time; bounds the extra memory to a few float32 chunks."""


def selected_logprobs(logits_BTV: Tensor, ids_BTK: Tensor, temperatures_BT: Tensor | None = None) -> Tensor:
    """Compute the logprobs (nats) [B, T, K] of the tokens `ids_BTK[:, p]` at p from the logits of position p - 1.

    With temperatures there is one more column [B, T, K + 1]: the logprob of the first id under logits / temperature.

    Row 0 has no preceding logits and is 0. The result is float64 for float64 logits, else float32. Beyond the logits
    and their gradient, memory grows with K: the normaliser is computed chunk by chunk in the forward pass, and the
    softmax is recomputed in the backward pass. Rows that the caller ignores may hold any id.

    Raises:
        ValueError: the shapes disagree.
    """
    if logits_BTV.ndim != 3 or ids_BTK.ndim != 3 or logits_BTV.shape[:2] != ids_BTK.shape[:2]:
        raise ValueError(f"expected logits [B, T, V] and ids [B, T, K], got {logits_BTV.shape} and {ids_BTK.shape}")
    if temperatures_BT is not None and temperatures_BT.shape != ids_BTK.shape[:2]:
        raise ValueError(f"expected temperatures {list(ids_BTK.shape[:2])}, got {list(temperatures_BT.shape)}")
    B, T, V = logits_BTV.shape
    temperatures = None if temperatures_BT is None else temperatures_BT.roll(-1, 1).reshape(B * T)
    ids = ids_BTK.roll(-1, 1).reshape(B * T, -1)
    chosen = _Selected.apply(logits_BTV.reshape(B * T, V), ids, temperatures).view(B, T, -1)
    return torch.cat((torch.zeros_like(chosen[:, :1]), chosen[:, :-1]), 1)


class _Selected(torch.autograd.Function):
    """logits [N, V], ids [N, K] -> logits at ids minus the row's logsumexp, [N, K] in `wide` precision.

    With temperatures [N], one more column: that of the first id for logits / temperature.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperatures: Tensor | None) -> Tensor:
        rows = _rows(logits)
        temperatures_N = _column(temperatures, logits)
        parts = zip(logits.split(rows), ids.split(rows), _split(temperatures_N, rows, len(logits)), strict=True)
        pairs = [_chosen(wide(chunk), index, divisors) for chunk, index, divisors in parts]
        chosen, norms = ([pair[i] for pair in pairs] for i in range(2))
        ctx.save_for_backward(logits, ids, torch.cat(norms), temperatures_N)
        return torch.cat(chosen)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, ids, norms, temperatures = ctx.saved_tensors
        (grad,) = grads
        out = torch.empty_like(logits)
        rows = _rows(logits)
        parts = [part.split(rows) for part in (logits, ids, norms, grad, out)]
        for chunk, index, norm, upstream, target, divisors in zip(
            *parts, _split(temperatures, rows, len(logits)), strict=True
        ):
            target.copy_(_to_logits(wide(chunk), index, norm, upstream, divisors))
        return out, None, None


def head_logprobs(
    hidden_WD: Tensor,
    weight_VD: Tensor,
    ids_WK: Tensor,
    bias_V: Tensor | None = None,
    temperatures_W: Tensor | None = None,
) -> Tensor:
    """Compute the logprobs (nats) [W, K] of `ids_WK` from hidden states and an output head.

    With temperatures there is one more column [W, K + 1]: the logprob of the first id under logits / temperature.

    At most `CHUNK_VALUES // V` positions (at least one) have their logits in memory at a time. The backward pass
    recomputes the logits. Products have the precision of the hidden states, or that of autocast; sums are in float32.

    The gradient of `weight_VD` is computed only if it is trained.
    """
    dtype = hidden_WD.dtype
    if torch.is_autocast_enabled(hidden_WD.device.type):
        dtype = torch.get_autocast_dtype(hidden_WD.device.type)
    return _HeadLogprobs.apply(hidden_WD, weight_VD, bias_V, ids_WK, temperatures_W, dtype)


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temperatures: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        rows, cast = max(1, CHUNK_VALUES // len(weight)), weight.to(dtype)
        temperatures_W = _column(temperatures, hidden)
        chosen, norms = list[Tensor](), list[Tensor]()
        parts = (hidden.split(rows), ids.split(rows), _split(temperatures_W, rows, len(hidden)))
        for states, index, divisors in zip(*parts, strict=True):
            chunk, norm = _chosen(_logits(states.to(dtype), cast, bias), index, divisors)
            chosen.append(chunk)
            norms.append(norm)
        ctx.save_for_backward(hidden, weight, ids, torch.cat(norms), bias, temperatures_W)
        ctx.dtype = dtype
        return torch.cat(chosen)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, ids, norms, bias, temperatures = ctx.saved_tensors
        (grad,) = grads
        rows, cast = max(1, CHUNK_VALUES // len(weight)), weight.to(ctx.dtype)
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        to_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        parts = [part.split(rows) for part in (hidden, ids, norms, grad, to_hidden)]
        for states, index, norm, upstream, target, divisors in zip(
            *parts, _split(temperatures, rows, len(hidden)), strict=True
        ):
            states = states.to(ctx.dtype)
            dense = _to_logits(_logits(states, cast, bias), index, norm, upstream, divisors)
            if to_bias is not None:
                to_bias += dense.sum(0).to(to_bias.dtype)
            narrow = dense.to(ctx.dtype)
            target.copy_(narrow @ cast)
            if to_weight is not None:
                if narrow.dtype == to_weight.dtype:
                    to_weight.addmm_(narrow.T, states)
                else:
                    to_weight += narrow.T @ states
        return to_hidden, to_weight, to_bias, None, None, None


def _chosen(logits_NV: Tensor, ids_NK: Tensor, temperatures_N1: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the logprobs [N, K], with temperatures [N, K + 1], and the normalisers, [N, 1] or [N, 2]."""
    norms_N1 = logits_NV.logsumexp(-1)[:, None]
    chosen_NK = logits_NV.gather(-1, ids_NK)
    if temperatures_N1 is None:
        return chosen_NK - norms_N1, norms_N1
    tempered_norms_N1 = (logits_NV / temperatures_N1).logsumexp(-1, keepdim=True)
    tempered_N1 = chosen_NK[:, :1] / temperatures_N1 - tempered_norms_N1
    return torch.cat((chosen_NK - norms_N1, tempered_N1), 1), torch.cat((norms_N1, tempered_norms_N1), 1)


def _to_logits(
    logits_NV: Tensor, ids_NK: Tensor, norms_N: Tensor, grad_NK: Tensor, temperatures_N1: Tensor | None
) -> Tensor:
    """Return the gradient of the logits [N, V] from that of `_chosen`."""
    if temperatures_N1 is None:
        dense_NV = (logits_NV - norms_N).exp_().mul_(-grad_NK.sum(-1, keepdim=True))
        return dense_NV.scatter_add_(-1, ids_NK, grad_NK)
    plain_NK, tempered_N1 = grad_NK[:, :-1], grad_NK[:, -1:] / temperatures_N1
    dense_NV = _to_logits(logits_NV, ids_NK, norms_N[:, :1], plain_NK, None)
    dense_NV -= (logits_NV / temperatures_N1 - norms_N[:, 1:]).exp_().mul_(tempered_N1)
    return dense_NV.scatter_add_(-1, ids_NK[:, :1], tempered_N1)


def _column(temperatures_N: Tensor | None, values: Tensor) -> Tensor | None:
    """Return the temperatures as a column [N, 1] in the precision of the logits."""
    return None if temperatures_N is None else temperatures_N[:, None].to(wide(values[:0]).dtype)


def _split(column_N1: Tensor | None, rows: int, length: int) -> Sequence[Tensor | None]:
    """Split a column as `length` rows are split; None for each part without a column."""
    return [None] * max(1, -(-length // rows)) if column_N1 is None else column_N1.split(rows)


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return wide(F.linear(states, weight, None if bias is None else bias.to(weight.dtype)))


def wide(values: Tensor) -> Tensor:
    """Upcast to float32, the precision that sums over a vocabulary need; float64 is kept."""
    return values if values.dtype == torch.float64 else values.float()


def _rows(logits: Tensor) -> int:
    return max(1, CHUNK_VALUES // logits.shape[-1])
