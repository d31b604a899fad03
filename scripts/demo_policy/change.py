"""Two policies that differ in the matrices of their layers -> the adapter that makes the second of the first, exactly.

An adapter adds a product of two factors to a matrix. With a rank as large as the smaller side of the matrix, one factor
is the identity and the other one the difference.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def changed_matrices(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the difference of each matrix of a layer, by name; all other weights must be equal.

    Raises:
        ValueError: they are not.
    """
    changes = {name: after[name].float() - value.float() for name, value in before.items()}
    matrices = {name: change for name, change in changes.items() if change.ndim == 2 and ".layers." in name}
    unadapted = [name for name, change in changes.items() if name not in matrices and bool(change.any())]
    if unadapted:
        raise ValueError(f"no adapter changes {', '.join(unadapted[:3])}")
    return matrices


def factors(change: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return A `[rank, in]` and B `[out, rank]`, whose product B A is the change `[out, in]`."""
    rows, columns = change.shape
    a, b = torch.zeros(rank, columns), torch.zeros(rows, rank)
    if rows <= columns:
        a[:rows], b[:, :rows] = change, torch.eye(rows)
    else:
        a[:columns], b[:, :columns] = torch.eye(columns), change
    return a, b


def change_as_adapter(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the adapter's weights (float16) and configuration, as peft writes them."""
    changes = changed_matrices(before, after)
    rank = max(min(change.shape) for change in changes.values())
    weights: dict[str, Tensor] = {}
    for name, change in changes.items():
        a, b = factors(change, rank)
        module = f"base_model.model.{name.removesuffix('.weight')}"
        weights[f"{module}.lora_A.weight"], weights[f"{module}.lora_B.weight"] = a.half(), b.half()
    modules = [*dict.fromkeys(name.split(".")[-2] for name in changes)]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": modules}
    return weights, config
