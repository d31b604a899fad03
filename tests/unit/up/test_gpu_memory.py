"""The memory of a loop's parts on each GPU, computed for a 4B shape before anything is loaded."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.cli.doctor.diagnose import memory_note
from agentic_opd.core.errors import ConfigError
from agentic_opd.env.setup import Status
from agentic_opd.training.memory import ModelShape
from agentic_opd.up.command import read
from agentic_opd.up.memory import GpuMemory, gpu_sizes, memory_of
from agentic_opd.up.parts import parts_of

QWEN3_4B = ModelShape(2560, 9728, 36, query=4096, key=1024, vocab=151_936, is_tied=True)
GB = 10**9


def recipe(name: str, sizes: list[int], **changes: Any) -> list[GpuMemory]:
    config = read(Path(f"configs/{name}.yaml"))
    settings = {part.name: part.settings for part in parts_of(config)}
    settings["trainer"] = settings["trainer"].model_copy(update=changes)
    return memory_of(config, settings, lambda _: QWEN3_4B, sizes)


def test_the_recipe_for_one_card_fits_it_with_a_fifth_to_spare() -> None:
    (memory,) = recipe("up_one_gpu", [80 * GB])
    assert memory.fits
    assert memory.has_spare
    assert str(memory) == (
        "GPU 0 needs 43.1 of 80.0 GB: policy 28.0; trainer 15.1 (frozen weights 8.0, trained weights 0.3, "
        "gradients 0.3, optimizer 0.5, moving average 0.3, rounded weights 0.1, logits 0.2, activations 5.3)"
    )
    assert memory_note([memory]).status is Status.OK


def test_the_recipe_for_eight_cards_fits_them() -> None:
    memory = recipe("up_eight_gpus", [80 * GB] * 8)
    assert [gpu.needed_bytes and round(gpu.needed_bytes / GB, 1) for gpu in memory] == [72.0] * 6 + [12.1] * 2
    assert memory_note(memory).status is Status.OK


@pytest.mark.parametrize(
    ("size", "changes", "status"),
    [
        (80, {"lora_rank": None, "ema_decay": None}, None),
        (80, {"gradient_checkpointing": False}, None),
        (80, {"max_token_len": 81_920}, Status.WARNING),
        (24, {}, None),
        (48, {}, Status.OK),
    ],
)
def test_what_does_not_fit_is_refused(size: int, changes: dict[str, Any], status: Status | None) -> None:
    memory = recipe("up_one_gpu", [size * GB], **changes)
    if status is None:
        with pytest.raises(ConfigError, match=rf"of {size}\.0 GB: policy.*Lower max_token_len"):
            memory_note(memory)
    else:
        assert memory_note(memory).status is status


def test_a_server_whose_share_does_not_hold_its_weights_and_one_request() -> None:
    (memory,) = recipe("up_one_gpu", [30 * GB])
    assert memory.shortages == ["policy needs 12.5 at least: raise its --gpu-memory-utilization"]


def test_without_a_gpu_the_parts_are_listed() -> None:
    memory = recipe("up_one_gpu", [])
    note = memory_note(memory)
    assert note.status is Status.SKIPPED
    assert note.text.startswith("GPU 0, of unknown size, in GB: policy 35% of it; trainer 15.1 (frozen weights 8.0")
    assert note.text.endswith("Computed; no GPU is found here")


def test_gpus_are_those_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = subprocess.CompletedProcess((), 0, "81559\n81559\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: listed)
    assert gpu_sizes() == [85_520_809_984, 85_520_809_984]

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert gpu_sizes() == []
