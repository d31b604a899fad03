"""Distributed training: one process, or those that torchrun started, with the model sharded over them (FSDP2).

    torchrun --nproc-per-node 4 -m agentic_opd.training --config FILE

Each process receives the whole batch and computes its share. Gradients are summed, and each process updates its shard
with the same step. With one process nothing is sharded or communicated.
"""

import asyncio
import os
from collections.abc import Awaitable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist

from agentic_opd.core.errors import TrainingError

Value = TypeVar("Value")

_PATIENCE = timedelta(hours=1)
"""Time limit of collectives: longer than loading a model, a step or a push. torchrun only notices dead processes."""
_BEAT_S = 60.0
"""Seconds between two broadcasts of a first process that waits for something outside (`DistContext.share_when`)."""


@dataclass(frozen=True, slots=True)
class DistContext:
    """This process's rank and device, and the collectives over all training processes."""

    device: str
    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process talks to the trajectory API and the servers, and writes files."""
        return self.rank == 0

    def share(self, value: Value) -> Value:
        """Broadcast the first process's value to all processes; also serves as a barrier."""
        if self.size == 1:
            return value
        box = [value if self.is_first else None]
        with _collective():
            dist.broadcast_object_list(box, src=0)
        return cast(Value, box[0])

    async def share_when(self, value: Awaitable[Value] | None) -> Value:
        """Await a value in the first process and broadcast it; the others pass None, and wait as long as it takes.

        Meanwhile the first process broadcasts every `_BEAT_S` that it is waiting, so that a process that hangs is found
        within the time limit of collectives. A cancellation is passed on to the value, which may still return.
        """
        if self.size == 1:
            assert value is not None
            return await value
        waiting = None if value is None else asyncio.ensure_future(value)
        while True:
            try:
                if waiting is not None:
                    await asyncio.wait({waiting}, timeout=_BEAT_S)
            except asyncio.CancelledError:
                assert waiting is not None
                waiting.cancel()
                await asyncio.wait({waiting})
            box = (waiting.result(),) if waiting is not None and waiting.done() else None
            sharing = asyncio.ensure_future(asyncio.to_thread(self.share, box))
            try:
                shared = await asyncio.shield(sharing)
            except asyncio.CancelledError:
                if waiting is None or waiting.done():
                    raise
                waiting.cancel()
                shared = await sharing
            if shared is not None:
                return shared[0]

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sum values by name over all processes; all must pass the same names in the same order."""
        if self.size == 1:
            return dict(values)
        total = torch.tensor([*values.values()], dtype=torch.float64, device=self.device)
        with _collective():
            dist.all_reduce(total)
        return dict(zip(values, total.tolist(), strict=True))

    def sum_tensor(self, value: Tensor) -> Tensor:
        """Sum a CPU tensor over all processes."""
        if self.size > 1:
            on_device = value.to(self.device)
            with _collective():
                dist.all_reduce(on_device)
            value = on_device.cpu()
        return value

    def shard(self, module: Any, precision: str) -> Any:
        """Shard the float32 parameters of a module over all processes; gradients are summed.

        The first process's values are distributed one tensor at a time. The module of the others may be on torch's
        device "meta". With bf16, parameters are gathered in bfloat16 and gradients are reduced in float32.
        """
        if self.size == 1:
            return module
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        values = {name: tensor.detach() for name, tensor in _tensors(module)} if self.is_first else {}
        mesh = init_device_mesh(self.device.partition(":")[0], (self.size,))
        param_dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        for layer in _layers(module):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        if not self.is_first:
            module.to_empty(device=self.device)
        with torch.no_grad():
            for name, tensor in _tensors(module):
                self.overwrite(tensor, values.pop(name) if self.is_first else None)
        for layer in module.modules():
            if isinstance(layer, FSDPModule):
                layer.set_gradient_divide_factor(1.0)
                layer.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction.
        return module

    def overwrite(self, tensor: Tensor, value: Tensor | None) -> None:
        """Overwrite a tensor, or this process's shard of it, with the first process's value; the others pass None."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        if value is not None:
            value = value.to(tensor.device, tensor.dtype)
        if self.size == 1:
            assert value is not None
            tensor.copy_(value)
            return
        # An uninitialised tensor that is never written takes no physical memory.
        source = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device) if value is None else value
        if isinstance(tensor, DTensor):
            part = distribute_tensor(source, tensor.device_mesh, tensor.placements)
            tensor.to_local().copy_(part.to_local())
        else:
            dist.broadcast(source, src=0)
            tensor.copy_(source)

    def parts_of(self, module: nn.Module) -> dict[str, Tensor]:
        """Reshard the module, and return this process's shard of each parameter as a view of its memory."""
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        for layer in module.modules():
            if isinstance(layer, FSDPModule):
                layer.reshard()
        detached = {name: parameter.detach() for name, parameter in module.named_parameters()}
        return {name: part.to_local() if isinstance(part, DTensor) else part for name, part in detached.items()}

    def gather(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather the tensors of a state dict, one at a time, to the first process's CPU; the others return {}.

        With one process, return the tensors as they are, without copying.
        """
        if self.size == 1:
            return dict(state)
        tensors: dict[str, Tensor] = {}
        for name, value in state.items():
            gathered = unsharded(value)
            if self.is_first:
                tensors[name] = gathered.cpu()
        return tensors


def join_processes(device: str) -> DistContext:
    """Join the process group of torchrun, where cuda becomes the device of LOCAL_RANK; else return one process."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return DistContext(device)
    rank = int(os.environ["RANK"])
    if device.startswith("cuda"):
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=_PATIENCE)
    return DistContext(device, rank, size)


@contextmanager
def _collective() -> Generator[None]:
    """Turn a failure of a collective into an error that says what to do.

    Raises:
        TrainingError: a process died, hangs or was stopped.
    """
    try:
        yield
    except RuntimeError as error:
        raise TrainingError(
            f"another training process did not take part within {_PATIENCE.total_seconds():g} s, or has died: end all "
            f"of them, and start again with --resume ({error})"
        ) from error


def unsharded(value: Tensor) -> Tensor:
    """Gather a sharded tensor; all processes must call this."""
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Iterate over parameters and buffers, each once."""
    return chain(module.named_parameters(), module.named_buffers())


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the transformer blocks, which are gathered one at a time."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in names]
