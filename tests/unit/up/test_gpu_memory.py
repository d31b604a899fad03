"""The memory of a loop's parts on each GPU, computed for a 4B shape before anything is loaded."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.cli.doctor.diagnose import memory_note
from agentic_opd.core.errors import ConfigError
from agentic_opd.core.exit_codes import EXIT_USAGE
from agentic_opd.env.setup import Status
from agentic_opd.training.memory import ModelShape
from agentic_opd.up.command import main, read
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
        "GPU 0 needs 42.6 of 80.0 GB: policy 28.0; trainer 14.6 (frozen weights 8.0, trained weights 0.3, "
        "gradients 0.3, optimizer 0.5, moving average 0.3, rounded weights 0.1, logits 0.2, activations 4.9)"
    )
    assert memory_note([memory]).status is Status.OK


def test_the_recipe_for_eight_cards_fits_them() -> None:
    memory = recipe("up_eight_gpus", [80 * GB] * 8)
    assert [gpu.needed_bytes and round(gpu.needed_bytes / GB, 1) for gpu in memory] == [72.0] * 6 + [11.4] * 2
    assert memory_note(memory).status is Status.OK


FULL = {"lora_rank": None, "ema_decay": None}


def test_full_weights_need_more_than_a_card_of_80_gb() -> None:
    (memory,) = recipe("up_one_gpu", [80 * GB], **FULL)
    with pytest.raises(ConfigError) as refused:
        memory_note([memory])
    assert str(refused.value) == (
        "GPU 0 needs 109.1 of 80.0 GB: policy 28.0; trainer 81.1 (trained weights 16.1, gradients 16.1, optimizer "
        "32.2, rounded weights 8.0, logits 0.2, activations 8.4). To fit, train adapters (lora_rank 32, precision "
        "bf16): the trainer then needs 14.3 GB"
    )


def test_full_weights_fit_a_card_of_141_gb_without_a_fifth_to_spare() -> None:
    (memory,) = recipe("up_one_gpu", [141 * GB], **FULL)
    assert (memory.needed_bytes or 0) / GB == pytest.approx(130.4, abs=0.05)
    assert memory_note([memory]).status is Status.WARNING


@pytest.mark.parametrize(
    ("size", "changes", "remedy"),
    [
        (80, {"gradient_checkpointing": False}, "leave gradient_checkpointing unset: layers are recomputed"),
        (80, {"max_token_len": 200_000}, "lower max_token_len (and micro_tokens, if it is set) to 65536"),
        (30, {}, "policy needs 12.5 at least. To fit, raise --gpu-memory-utilization of policy to 0.42"),
        (24, {}, "raise --gpu-memory-utilization of policy to 0.52 and lower max_token_len"),
        (22, {}, "give the parts `devices` of their own, or take a GPU of 27.1 GB or more"),
    ],
)
def test_a_card_that_is_too_small_is_answered_with_what_to_do(size: int, changes: dict[str, Any], remedy: str) -> None:
    memory = recipe("up_one_gpu", [size * GB], **changes)
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        memory_note(memory)


@pytest.mark.parametrize(("size", "changes"), [(80, {"max_token_len": 81_920}), (48, {"max_token_len": 40_000})])
def test_less_than_a_fifth_to_spare_is_a_warning(size: int, changes: dict[str, Any]) -> None:
    memory = recipe("up_one_gpu", [size * GB], **changes)
    assert memory_note(memory).status is Status.WARNING


def test_a_card_of_48_gb_holds_the_recipe() -> None:
    assert memory_note(recipe("up_one_gpu", [48 * GB])).status is Status.OK


def test_up_refuses_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("agentic_opd.up.memory.gpu_sizes", lambda: [22 * GB])
    monkeypatch.setattr("agentic_opd.training.memory.shape_of_checkpoint", lambda _: QWEN3_4B)
    assert main(["--config", "configs/up_one_gpu.yaml", "--dry-run"]) == EXIT_USAGE
    assert "GPU 0 needs 22.3 of 22.0 GB: policy 7.7; trainer 14.6" in capsys.readouterr().err


def test_without_a_gpu_the_parts_are_listed() -> None:
    memory = recipe("up_one_gpu", [])
    note = memory_note(memory)
    assert note.status is Status.SKIPPED
    assert note.text.startswith("GPU 0, of unknown size, in GB: policy 35% of it; trainer 14.6 (frozen weights 8.0")
    assert note.text.endswith("Computed; no GPU is found here")


def test_gpus_are_those_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = subprocess.CompletedProcess((), 0, "81559\n81559\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: listed)
    assert gpu_sizes() == [85_520_809_984, 85_520_809_984]

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert gpu_sizes() == []
