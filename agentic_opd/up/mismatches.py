"""Parts of a loop that do not fit each other, which would fail after minutes of loading only. Pure."""

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from agentic_opd.training.config import TrainerConfig
from agentic_opd.up.config import ServerConfig, UpConfig

_USUAL_SHARE = 0.9
"""Share of a GPU's memory that vLLM takes without --gpu-memory-utilization."""
_LIBRARIES = {
    "vllm": ("vllm",),
    "train": ("torch", "peft", "safetensors"),
    "gateway": ("prometheus_client", "starlette", "uvicorn"),
}
"""Libraries of each extra that its part imports."""
_GPU_DRIVER = Path("/proc/driver/nvidia/gpus")


def mismatches(config: UpConfig, settings: Mapping[str, Any], num_gpus: int | None = None) -> Iterator[str]:
    """Yield a sentence for each pair of parts that do not fit, with what to do.

    Args:
        config: The loop.
        settings: What each part's command reads, by the part's name (`LoopPart.settings`).
        num_gpus: GPUs of this machine; None: those that the driver lists.
    """
    if num_gpus is None:
        num_gpus = len(list(_GPU_DRIVER.iterdir())) if _GPU_DRIVER.is_dir() else 0
    training: TrainerConfig = settings["trainer"]
    if training.groups:
        yield (
            "trainer: groups names files, so the trainer would take no batch of the environments: leave it out, or "
            "train on the files with `agentic-opd train`, which needs no other part"
        )
    for name in config.environments:
        if name in settings:  # A custom script reads its own.
            readers = [reader for reader, server in config.servers.items() if server.serves != "judge"]
            contexts = {reader: settings[reader].max_model_len for reader in readers}
            problems = _environment_problems(settings[name], training, contexts)
            yield from (f"{name}: {problem}" for problem in problems)
    yield from _device_problems(config, num_gpus)
    yield from missing_libraries(config, settings)


def missing_libraries(config: UpConfig, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each part whose libraries are not installed here."""
    needs = dict.fromkeys(config.servers, "vllm") | {"trainer": "train"}
    for name, environment in config.environments.items():
        if environment.mode == "gateway" or _runs_program(settings.get(name)):
            needs[name] = "gateway"
    for name, extra in needs.items():
        if missing := [library for library in _LIBRARIES[extra] if find_spec(library) is None]:
            yield (
                f"{name}: {', '.join(missing)} is not installed here: it needs the extra, pip install "
                f"'agentic-opd[{extra}]'"
            )


def _runs_program(env: Any) -> bool:
    """Return whether a program of the settings replaces the agent loop, through its own gateway."""
    agent = getattr(env, "agent", None)  # A gateway and a custom script have none.
    return agent is not None and agent.command is not None


def _environment_problems(env: Any, training: TrainerConfig, contexts: Mapping[str, int | None]) -> Iterator[str]:
    """Yield what does not fit an environment; `contexts` are the servers' `max_model_len`, None for the model's own."""
    group_size = env.group_size
    if training.batch_size % group_size:
        yield (
            f"groups of env.group_size {group_size} do not divide the trainer's batch_size {training.batch_size}: use "
            f"{training.batch_size - training.batch_size % group_size or group_size}, or another group size"
        )
    length = getattr(env, "max_token_length", None)
    if length is not None:
        yield from (
            f"episodes have up to env.max_token_length {length} tokens, and server {name} reads {context} "
            f"(max_model_len): raise it to {length} at least, or lower env.max_token_length"
            for name, context in contexts.items()
            if context is not None and context < length
        )
        if training.max_token_len < length:
            yield (
                f"episodes have up to env.max_token_length {length} tokens, and the trainer drops sequences above "
                f"max_token_len {training.max_token_len}: raise it, or lower env.max_token_length"
            )
    teacher = env.teacher.weights
    if env.opd_enabled and teacher != "live" and env.teacher.base_url is None:
        if training.lora_rank is None:
            yield (
                f"env.teacher.weights {teacher} needs a policy that is trained with adapters: set the trainer's "
                "lora_rank"
            )
        elif teacher == "ema" and training.ema_decay is None:
            yield "env.teacher.weights ema needs the trainer's moving average: set its ema_decay, for example to 0.9"


def _device_problems(config: UpConfig, num_gpus: int) -> Iterator[str]:
    trainer = config.trainer
    users = {name: (server.devices, memory_share(server)) for name, server in config.servers.items()}
    devices = {name: devices_of(indices, num_gpus) for name, (indices, _) in users.items()}
    trainer_devices = devices_of(trainer.devices, num_gpus)
    if trainer.devices is not None and trainer.processes > len(trainer_devices):
        yield (
            f"trainer: {trainer.processes} processes need as many devices, and devices names {len(trainer_devices)} "
            f"({trainer.devices!r})"
        )
    elif num_gpus and trainer.processes > num_gpus:
        yield f"trainer: {trainer.processes} processes need as many GPUs, and this machine has {num_gpus}"
    for name, indices in {**devices, "trainer": trainer_devices}.items():
        if unknown := [index for index in indices if index.isdigit() and num_gpus and int(index) >= num_gpus]:
            yield f"{name}: devices names GPU {', '.join(unknown)}, and this machine has {num_gpus} (from 0)"
    for index in sorted({index for indices in devices.values() for index in indices}):
        sharing = {name: users[name][1] for name, indices in devices.items() if index in indices}
        with_trainer = index in trainer_devices
        total = sum(sharing.values())
        if total > 1 or (with_trainer and total >= _USUAL_SHARE):
            parts = ", ".join(f"{name} ({share:g} of the memory)" for name, share in sharing.items())
            and_trainer = " and the trainer" if with_trainer else ""
            yield (
                f"GPU {index} is used by {parts}{and_trainer}, which do not fit: give each its own `devices`, or set "
                'vllm_args: [--gpu-memory-utilization, "0.35"]'
            )


def devices_of(indices: str | None, num_gpus: int) -> Sequence[str]:
    """Return the GPUs that a part may use; without `indices`, all that are visible."""
    if indices is not None:
        return [index.strip() for index in indices.split(",") if index.strip()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if num_gpus and visible is not None:
        return [index.strip() for index in visible.split(",") if index.strip()]
    return [str(index) for index in range(num_gpus)]


def memory_share(server: ServerConfig) -> float:
    """Return the share of a GPU's memory that a server takes."""
    arguments = " ".join(server.vllm_args).replace("=", " ").replace("_", "-").split()
    values = [value for flag, value in pairwise(arguments) if flag == "--gpu-memory-utilization"]
    try:
        return float(values[-1]) if values else _USUAL_SHARE
    except ValueError:  # vLLM refuses it.
        return _USUAL_SHARE
