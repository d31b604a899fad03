"""Round trained weights to the servers' precision for a push, and measure the share of the update that rounding loses.

`as_sent` lets the policy compute with the rounded weights, for the probe.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from agentic_opd.training.model import base_of, with_delta
from agentic_opd.training.policy import TrainedPolicy

MUCH = 0.5
"""Share of an update lost to rounding above which the trainer warns."""


_SAMPLE = 2**16
"""Largest number of a tensor's elements that `Rounding` compares and keeps; larger tensors are sampled evenly."""
_SAMPLED_ROWS = 256
"""Largest number of rows of an adapter's product B A that `Rounding` compares."""


@dataclass
class Rounding:
    """Rounds the weights of successive pushes, and compares each push with the previous one.

    Of each tensor only a sample is kept, on the tensor's device, so that no push copies the weights of the last one.
    """

    share: float = 0.0
    """Share of the update since the last push that the last rounding withheld from the servers:
    sum |trained - sent| / sum |trained - sent before|. 0 for the first push."""
    _before: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Samples of the last push: elements of whole weights, rows of the adapters' products."""

    def weights(self, trained: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights, given as (name, value) pairs, rounded one at a time; `share` is set at the end."""
        self.share, withheld, updated = 0.0, 0.0, 0.0
        for name, value in trained:
            sent = value.to(dtype) if value.is_floating_point() else value
            yield name, sent
            if sent.dtype == value.dtype:
                continue
            step = -(-value.numel() // _SAMPLE)
            sample, sent_sample = value.flatten()[::step], sent.flatten()[::step]
            if (before := self._before.get(name)) is not None:
                withheld += step * _distance(sample, sent_sample)
                updated += step * _distance(sample, before)
            self._before[name] = sent_sample.clone()  # A view would keep the whole tensor.
        self.share = withheld / updated if updated else 0.0

    def adapters(self, factors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Round the adapters' factors; `share` compares the products B A, which are added to the weights."""
        sent, withheld, updated = {name: value.to(dtype) for name, value in factors.items()}, 0.0, 0.0
        self.share = 0.0
        if dtype == torch.float32:
            return sent
        for a in factors:
            b = a.replace(".lora_A.", ".lora_B.")
            if a == b:
                continue
            step = -(-len(factors[b]) // _SAMPLED_ROWS)
            trained, rounded = (state[b][::step].float() @ state[a].float() for state in (factors, sent))
            if (before := self._before.get(a)) is not None:
                withheld += step * _distance(trained, rounded)
                updated += step * _distance(trained, before)
            self._before[a] = rounded.to(dtype)
        self.share = withheld / updated if updated else 0.0
        return sent


def _distance(a: Tensor, b: Tensor) -> float:
    """Return sum |a - b|."""
    return float((a.detach().float() - b.to(a.device).float()).abs().sum(dtype=torch.float64))


def common_dtype(names: Iterable[str | None]) -> torch.dtype:
    """Return the dtype of all servers by torch's name; float32 if they differ or a server does not report it."""
    distinct = set(names)
    dtype = getattr(torch, distinct.pop() or "", None) if len(distinct) == 1 else None
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


@contextmanager
def as_sent(policy: TrainedPolicy, dtype: torch.dtype, *, is_whole: bool) -> Generator[None]:
    """Let the policy compute with the weights that the servers receive, inside the block.

    Each module's weights are rounded for the time of its forward pass, on its device, and thrown away afterwards: the
    trained weights are neither changed nor copied. With float32 nothing is rounded.

    `is_whole` are whole weights, with adapters merged in; else base weights and adapters are rounded by themselves.
    """
    if dtype == torch.float32:
        yield
        return
    base, head = base_of(policy.model), base_of(policy.model).get_output_embeddings()
    merges = is_whole and base is not policy.model
    adapted = {module.base_layer: module for module in base.modules() if hasattr(module, "get_delta_weight")}
    handles = list[RemovableHandle]()
    for module in base.modules():
        if not any(parameter.is_floating_point() for parameter in module.parameters(recurse=False)):
            continue
        lora = adapted.get(module) if merges else None
        # The policy multiplies by the head's weight itself, so the head is rounded for the whole forward pass.
        caller = policy if module is head else module
        swap = _Swap(module, lora, dtype)
        # FSDP's own hooks gather before `swap.begin`, and free after `swap.end`.
        handles += [caller.register_forward_pre_hook(swap.begin), caller.register_forward_hook(swap.end, prepend=True)]
    try:
        with policy.model.disable_adapter() if merges else nullcontext():
            yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(slots=True, eq=False)
class _Swap:
    """Replaces a module's parameters by rounded ones during a forward pass."""

    module: Any
    lora: Any
    """The adapter whose product is added to the module's weight; None without one."""
    dtype: torch.dtype
    trained: dict[str, Tensor | None] = field(default_factory=dict[str, Tensor | None])

    def begin(self, *_: object) -> None:
        self.trained = dict(self.module._parameters)
        for name, value in self.trained.items():
            if value is None or not value.is_floating_point():
                continue
            weight = value.detach()
            if self.lora is not None and name == "weight":
                a, b = (factors["default"].weight for factors in (self.lora.lora_A, self.lora.lora_B))
                weight = with_delta(weight, self.lora, a, b)
            self.module._parameters[name] = weight.to(self.dtype).to(value.dtype)

    def end(self, *_: object) -> None:
        self.module._parameters.update(self.trained)
        self.trained = {}
