"""Round trained weights to the servers' precision for a push, and measure the share of the update that rounding loses.

`as_sent` gives the policy the rounded weights temporarily, for the probe.
"""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from agentic_opd.training.distributed import DistContext
from agentic_opd.training.model import base_of, plain_name
from agentic_opd.training.policy import TrainedPolicy

MUCH = 0.5
"""Share of an update lost to rounding above which the trainer warns."""


class Rounded(NamedTuple):
    """Weights rounded for a push."""

    weights: dict[str, Tensor]
    share: float
    """Share of the update since the last push that rounding withholds from the servers:
    sum |trained - sent| / sum |trained - sent before|. 0 for the first push."""


@dataclass
class Rounding:
    """Rounds the weights of successive pushes, and compares each push with the previous one."""

    _before: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The weights of the last push, on the CPU."""

    def weights(self, trained: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Rounded:
        """Round whole weights, given as (name, value) pairs."""
        sent, withheld, updated = dict[str, Tensor](), 0.0, 0.0
        for name, value in trained:
            sent[name] = value.to(dtype) if value.is_floating_point() else value
            if sent[name].dtype == value.dtype:
                continue
            if (before := self._before.get(name)) is not None:
                withheld += _distance(value, sent[name])
                updated += _distance(value, before)
            self._before[name] = sent[name].cpu()
        return Rounded(sent, withheld / updated if updated else 0.0)

    def adapters(self, factors: Mapping[str, Tensor], dtype: torch.dtype) -> Rounded:
        """Round the adapters' factors; `share` compares the products B A, which are added to the weights."""
        sent, withheld, updated = {name: value.to(dtype) for name, value in factors.items()}, 0.0, 0.0
        if dtype == torch.float32:
            return Rounded(sent, 0.0)
        for a in factors:
            b = a.replace(".lora_A.", ".lora_B.")
            if a != b and a in self._before:
                trained, now, before = (state[b].float() @ state[a].float() for state in (factors, sent, self._before))
                withheld += _distance(trained, now)
                updated += _distance(trained, before)
        self._before = {name: value.cpu() for name, value in sent.items()}
        return Rounded(sent, withheld / updated if updated else 0.0)


def _distance(a: Tensor, b: Tensor) -> float:
    """Return sum |a - b|."""
    return float((a.detach().float() - b.to(a.device).float()).abs().sum(dtype=torch.float64))


def common_dtype(names: Iterable[str | None]) -> torch.dtype:
    """Return the dtype of all servers by torch's name; float32 if they differ or a server does not report it."""
    distinct = set(names)
    dtype = getattr(torch, distinct.pop() or "", None) if len(distinct) == 1 else None
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


@contextmanager
def as_sent(
    policy: TrainedPolicy, sent: Mapping[str, Tensor] | None, dtype: torch.dtype, world: DistContext
) -> Generator[None]:
    """Give the policy the weights that the servers receive, inside the block; restore it bit by bit afterwards.

    All processes must call this. The trained weights are kept on the CPU meanwhile. With float32 nothing is rounded and
    the policy stays unchanged.

    `sent` are whole weights with adapters merged in the first process, and any value but None in the others; or None
    in all, if adapters are pushed alone: base weights and adapters are then rounded in place.
    """
    if dtype == torch.float32:
        yield
        return
    base = base_of(policy.model)
    trained = {name: part.to("cpu", copy=True) for name, part in world.parts_of(policy).items()}
    try:
        if sent is None:
            for part in world.parts_of(policy).values():
                part.copy_(part.to(dtype))
        else:
            with torch.no_grad():
                for name, parameter in base.named_parameters():
                    if ".lora_" not in name:
                        world.overwrite(parameter, sent[plain_name(name)] if world.is_first else None)
        with policy.model.disable_adapter() if sent is not None and base is not policy.model else nullcontext():
            yield
    finally:
        for name, part in world.parts_of(policy).items():
            part.copy_(trained[name])
