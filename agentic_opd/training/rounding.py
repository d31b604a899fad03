"""Trained weights -> what a push sends: rounded to what the servers compute in. Also what that loses, and the policy
with the weights that were sent, for the probe.
"""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from agentic_opd.training.model import base_of, plain_name
from agentic_opd.training.policy import Policy
from agentic_opd.training.world import World

MUCH = 0.5
"""The share of an update from which a run is warned that rounding keeps it back."""


class Rounded(NamedTuple):
    """Weights in the precision of a push."""

    weights: dict[str, Tensor]
    share: float
    """What rounding keeps back, of what the trainer has and the servers had not before this push:
    sum |trained - sent| / sum |trained - sent before|. 0 for the first weights that are sent."""


@dataclass
class Rounding:
    """Rounds push after push, and compares each with the one before."""

    _before: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """What was sent last, on the CPU."""

    def weights(self, trained: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Rounded:
        """Round whole weights."""
        sent, kept, lacking = dict[str, Tensor](), 0.0, 0.0
        for name, value in trained:
            sent[name] = value.to(dtype) if value.is_floating_point() else value
            if sent[name].dtype == value.dtype:
                continue
            if (before := self._before.get(name)) is not None:
                kept += _distance(value, sent[name])
                lacking += _distance(value, before)
            self._before[name] = sent[name].cpu()
        return Rounded(sent, kept / lacking if lacking else 0.0)

    def adapters(self, factors: Mapping[str, Tensor], dtype: torch.dtype) -> Rounded:
        """Round adapters; the update is what the products of their factors add to the weights."""
        sent, kept, lacking = {name: value.to(dtype) for name, value in factors.items()}, 0.0, 0.0
        if dtype == torch.float32:
            return Rounded(sent, 0.0)
        for a in factors:
            b = a.replace(".lora_A.", ".lora_B.")
            if a != b and a in self._before:
                trained, now, before = (one[b].float() @ one[a].float() for one in (factors, sent, self._before))
                kept += _distance(trained, now)
                lacking += _distance(trained, before)
        self._before = {name: value.cpu() for name, value in sent.items()}
        return Rounded(sent, kept / lacking if lacking else 0.0)


def _distance(a: Tensor, b: Tensor) -> float:
    """The sum of all differences' sizes."""
    return float((a.detach().float() - b.to(a.device).float()).abs().sum(dtype=torch.float64))


def common_dtype(names: Iterable[str | None]) -> torch.dtype:
    """What all servers compute in; float32 where they differ, or where one does not say."""
    found = set(names)
    dtype = getattr(torch, found.pop() or "", None) if len(found) == 1 else None
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


@contextmanager
def as_sent(policy: Policy, sent: Mapping[str, Tensor] | None, dtype: torch.dtype, world: World) -> Generator[None]:
    """The policy with the weights that the servers get, while the block runs; then it is as it was, to the last bit.

    All processes call it. What is trained waits on the CPU meanwhile, unless nothing is rounded.

    Args:
        policy: The trained policy.
        sent: Whole weights with adapters merged in, in the first process, and anything else than None in the others.
            None: adapters are pushed by themselves.
        dtype: What they are rounded to, which the servers do to the weights below adapters too.
        world: The processes.
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
                for name, one in base.named_parameters():
                    if ".lora_" not in name:
                        world.put(one, sent[plain_name(name)] if world.is_first else None)
        with policy.model.disable_adapter() if sent is not None and base is not policy.model else nullcontext():
            yield
    finally:
        for name, part in world.parts_of(policy).items():
            part.copy_(trained[name])
