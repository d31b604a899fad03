"""vLLM's LoRA kernels for CPUs, without its fault: an adapter that is loaded changed requests that name none.

vLLM marks tokens without an adapter by the index -1, which its kernels for GPUs skip. Those for CPUs take the weights
of the last slot instead, once a batch also holds a request with an adapter (vllm-project/vllm, pull requests 48421 and
49656). Here each slot's tokens are multiplied together, and tokens without an adapter are left as they are.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def skip_tokens_without_adapter() -> None:
    """Replace the three kernels that all others of vLLM's for CPUs call."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for module in (lora_ops, punica_cpu):
        kernels: Any = module
        kernels.bgmv_shrink, kernels.bgmv_expand, kernels.bgmv_expand_slice = shrink, expand, expand_slice


def shrink(inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, scaling: float = 1.0) -> None:
    """Set the first R columns of `output` [N, >= R] to scaling x A^T for each token with an adapter.

    Args:
        inputs: x [N, I].
        weights: A of all slots, [S, R, I] or [S, 1, R, I].
        output: Changed in place.
        slots: The slot of each token [N]; -1: none.
        scaling: Factor.
    """
    for rows, product in _products(inputs, weights, output, slots):
        output[rows, : product.shape[1]] = scaling * product


def expand(inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, add_inputs: bool = True) -> None:
    """Add x B^T to the columns of `output` that both have, or set them to it; arguments as of `shrink`."""
    expand_slice(inputs, weights, output, slots, 0, min(weights.shape[-2], output.shape[1]), add_inputs)


def expand_slice(
    inputs: Tensor,
    weights: Tensor,
    output: Tensor,
    slots: Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """Do as `expand`, to `slice_size` columns from `slice_offset` on."""
    columns = slice(slice_offset, slice_offset + slice_size)
    for rows, product in _products(inputs, weights, output, slots):
        output[rows, columns] = product[:, :slice_size] + (output[rows, columns] if add_inputs else 0)


def _products(inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tokens of each slot in use and their products [n, O], in the type of `output`."""
    slots = slots[: output.shape[0]]
    for slot in slots.unique().tolist():
        if slot >= 0:
            rows = (slots == slot).nonzero()[:, 0]
            weight = weights[slot].reshape(weights.shape[-2:]).to(output.dtype)
            yield rows, inputs[rows].to(output.dtype) @ weight.T
