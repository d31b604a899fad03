"""Memory that a loop's parts need on each GPU, computed from the models' shapes before anything is loaded."""

import math
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from agentic_opd.core.errors import ConfigError
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.memory import SPARE, MemoryPart, ModelShape, Recipe, step_parts, total_bytes
from agentic_opd.up.config import ServerConfig, UpConfig
from agentic_opd.up.mismatches import devices_of, memory_share

_ENGINE_BYTES = 2 * 10**9
"""Bytes that vLLM takes beside weights and cache: activations, graphs, the CUDA context."""
_SHORTEST = 2048
"""Tokens of the shortest sequences that are proposed."""
_SHOWN_BYTES = 10**8
"""Parts of fewer bytes are not named."""


class GpuMemory(NamedTuple):
    """Memory that the parts of a loop need on a GPU."""

    gpu: str
    """Index of the GPU."""
    servers: dict[str, float]
    """Share of the memory that each server takes, by name."""
    trainer: list[MemoryPart]
    """Parts of the trainer's memory; empty if it does not use this GPU."""
    shortages: list[str]
    """Servers whose share does not hold what they need at least."""
    total_bytes: int | None
    """Memory of the GPU; None: unknown."""
    remedy: str | None = None
    """What to change so that the parts fit; None if they do."""

    @property
    def needed_bytes(self) -> int | None:
        """Bytes that all parts need; None if there are servers and the GPU's memory is unknown."""
        if self.servers and self.total_bytes is None:
            return None
        return total_bytes(self.trainer) + int(sum(self.servers.values()) * (self.total_bytes or 0))

    @property
    def fits(self) -> bool:
        return not self.shortages and (self.total_bytes is None or (self.needed_bytes or 0) <= self.total_bytes)

    @property
    def has_spare(self) -> bool:
        """Whether `SPARE` of the memory stays free, where a trainer uses it."""
        if self.total_bytes is None or not self.trainer:
            return True
        return (self.needed_bytes or 0) <= (1 - SPARE) * self.total_bytes

    def __str__(self) -> str:
        parts = [f"{name} {_size(share, self.total_bytes)}" for name, share in self.servers.items()]
        if self.trainer:
            named = [part for part in self.trainer if part.size_bytes >= _SHOWN_BYTES]
            listed = ", ".join(f"{part.name} {_gb(part.size_bytes)}" for part in named)
            parts.append(f"trainer {_gb(total_bytes(self.trainer))} ({listed})")
        listed = "; ".join([*parts, *self.shortages])
        if self.total_bytes is None or self.needed_bytes is None:
            return f"GPU {self.gpu}, of unknown size, in GB: {listed}"
        return f"GPU {self.gpu} needs {_gb(self.needed_bytes)} of {_gb(self.total_bytes)} GB: {listed}"


def memory_of(
    config: UpConfig,
    settings: Mapping[str, Any],
    shape_of: Callable[[str], ModelShape | None],
    gpu_bytes: Sequence[int] = (),
) -> list[GpuMemory]:
    """Compute the memory of each GPU that a part uses.

    The trainer's is that of the longest sequence it accepts (`max_token_len`), or of a part of `micro_tokens`. Its
    activations count as recomputed, unless `gradient_checkpointing` is false.

    Args:
        config: The loop.
        settings: What each part's command reads, by the part's name.
        shape_of: Returns the shape of a checkpoint, or None if it is unknown; such a part is left out.
        gpu_bytes: Memory of each GPU of this machine; empty: unknown.
    """
    count = len(gpu_bytes) or 1
    servers = {name: devices_of(server.devices, count) for name, server in config.servers.items()}
    trainer = devices_of(config.trainer.devices, count)
    trainer_parts = _trainer_parts(settings["trainer"], config.trainer.processes, shape_of)
    memory = list[GpuMemory]()
    for index in sorted({*trainer, *(index for indices in servers.values() for index in indices)}):
        total = gpu_bytes[int(index)] if index.isdigit() and int(index) < len(gpu_bytes) else None
        names = [name for name, indices in servers.items() if index in indices]
        shares = {name: memory_share(config.servers[name]) for name in names}
        minimum = {
            name: _server_bytes(config.servers[name], settings[name].max_model_len, shape_of) // len(servers[name])
            for name in names
        }
        gpu = GpuMemory(index, shares, trainer_parts if index in trainer else [], [], total)
        if total is not None:
            short = [name for name in names if minimum[name] > shares[name] * total]
            gpu = gpu._replace(shortages=[f"{name} needs {_gb(minimum[name])} at least" for name in short])
            if not gpu.fits:
                gpu = gpu._replace(remedy=_remedy(gpu, minimum, total, settings["trainer"], config, shape_of))
        memory.append(gpu)
    return memory


def check_fits(memory: Sequence[GpuMemory]) -> None:
    """Refuse a loop whose parts do not fit their GPUs.

    Raises:
        ConfigError: with what each part needs, and what to change.
    """
    short = [gpu for gpu in memory if not gpu.fits]
    if short:
        raise ConfigError("; ".join(f"{gpu}. To fit, {gpu.remedy}" for gpu in short))


def _trainer_parts(
    config: TrainerConfig, processes: int, shape_of: Callable[[str], ModelShape | None], tokens: int | None = None
) -> list[MemoryPart]:
    """Return the trainer's memory for sequences of `tokens`, or for the longest that it accepts."""
    if (shape := shape_of(config.model)) is None:
        return []
    tokens = tokens or max(config.max_token_len, config.micro_tokens or 0)
    is_recomputed = config.gradient_checkpointing is not False
    return step_parts(shape, Recipe.of(config, processes), tokens, is_recomputed=is_recomputed)


def _remedy(
    gpu: GpuMemory,
    minimum: Mapping[str, int],
    total: int,
    trainer: TrainerConfig,
    config: UpConfig,
    shape_of: Callable[[str], ModelShape | None],
) -> str:
    """Return the smallest change of settings with which the parts fit; `minimum` has each server's bytes."""

    def needed(tokens: int | None = None, **changes: Any) -> int:
        changed = trainer.model_copy(update=changes)
        return total_bytes(_trainer_parts(changed, config.trainer.processes, shape_of, tokens)) if gpu.trainer else 0

    shares = sum(max(gpu.servers[name] * total, minimum[name]) for name in gpu.servers)
    room, lowest = total - int(shares), total - sum(minimum.values())
    raises = [
        f"raise --gpu-memory-utilization of {name} to {math.ceil(100 * minimum[name] / total) / 100:g}"
        for name in gpu.servers
        if minimum[name] > gpu.servers[name] * total
    ]
    if needed() <= room:
        return " and ".join(raises)
    if needed(gradient_checkpointing=None) <= room:
        return "leave gradient_checkpointing unset: layers are recomputed where they have to be"
    adapters: dict[str, Any] = {"lora_rank": 32, "gradient_checkpointing": None, "precision": "bf16"}
    if trainer.lora_rank is None and needed(**adapters) <= room:
        return f"train adapters (lora_rank 32, precision bf16): the trainer then needs {_gb(needed(**adapters))} GB"
    tokens = _SHORTEST
    while needed(2 * tokens) <= room:
        tokens *= 2
    if needed(tokens) <= room:
        return " and ".join([*raises, f"lower max_token_len (and micro_tokens, if it is set) to {tokens}"])
    if needed() <= lowest and len(gpu.servers) == 1:
        (name,) = gpu.servers
        return f"lower --gpu-memory-utilization of {name} to {math.floor(100 * (1 - needed() / total)) / 100:g}"
    return f"give the parts `devices` of their own, or take a GPU of {_gb(sum(minimum.values()) + needed())} GB or more"


def _server_bytes(server: ServerConfig, context: int | None, shape_of: Callable[[str], ModelShape | None]) -> int:
    """Return the bytes of a server's weights in bfloat16, and of the cache of one request of the longest context."""
    if (shape := shape_of(server.model)) is None:
        return 0
    return 2 * shape.parameters + (context or 0) * shape.layers * shape.key * 2 * 2 + _ENGINE_BYTES


def gpu_sizes() -> list[int]:
    """Return the memory in bytes of each GPU that nvidia-smi lists; empty without one."""
    command = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        return [int(line) * 2**20 for line in listed.split()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def _size(share: float, total: int | None) -> str:
    return f"{share:.0%} of it" if total is None else _gb(int(share * total))


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f}"
