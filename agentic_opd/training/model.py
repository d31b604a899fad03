"""The trained model: loading it, adapters, and a checkpoint that vLLM can read."""

import json
import os
import re
import shutil
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from agentic_opd.core.errors import ConfigError, OutputError
from agentic_opd.training.config import TrainerConfig

_WEIGHTS = re.compile(r"\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx)$|\.index\.json$")
"""Names of files that hold weights, or say which file holds which; all else that lies beside them is small."""


def pick_device(name: str) -> str:
    """`auto` resolved.

    Raises:
        ConfigError: cuda was asked for and is not there.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch sees no GPU; set device to cpu or auto")
    return name


def leave_cores_to_others() -> None:
    """Let torch compute with half of the cores, unless OMP_NUM_THREADS says how many.

    OpenMP's threads wait for each other in a busy loop: with one for each core, and vLLM on the same cores, a step of
    the demo policy took four times the processor time that it takes with half of them.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))


def load_model(config: TrainerConfig, device: str, *, is_empty: bool = False) -> Any:
    """The policy in float32 on `device`, with adapters where the settings ask for them.

    If it is to be empty, its parameters have no values (torch's device "meta"), and no weights are read.

    Raises:
        ConfigError: it can't be loaded, or peft is needed and missing.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # A line for each weight, and one more each time that it is saved.
    model: Any
    try:
        if is_empty:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model), dtype=torch.float32)
        else:
            model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the model {config.model!r} can't be loaded: {error}") from error
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    if config.lora_rank is not None:
        model = _with_adapters(model, config.lora_rank)
    return (model if is_empty else model.to(device)).train()


def _with_adapters(model: Any, rank: int) -> Any:
    try:
        from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError("lora_rank needs peft: install agentic-opd[train]") from error
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


class MovingAverage:
    """The average of a model's trained parameters over its steps, each step weighing less the longer ago it was."""

    def __init__(self, model: Any, decay: float) -> None:
        """Begin with the parameters as they are."""
        self._decay = decay
        self._model = model
        self._averages = {name: one.detach().clone() for name, one in _trained(model)}

    def update(self) -> None:
        """Take in the parameters of today."""
        for name, parameter in _trained(self._model):
            self._averages[name].lerp_(parameter.detach(), 1.0 - self._decay)

    def state_dict(self) -> dict[str, Tensor]:
        """By the parameters' names."""
        return dict(self._averages)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved average."""
        if state.keys() != self._averages.keys():
            raise ValueError("the saved average is of other parameters")
        for name, value in state.items():
            self._averages[name].copy_(value)


def _trained(model: Any) -> list[tuple[str, nn.Parameter]]:
    return [(name, one) for name, one in model.named_parameters() if one.requires_grad]


def save_weights(
    model: Any,
    source: str,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Write what vLLM and transformers read, adapters merged in and tied embeddings once.

    Args:
        model: The trained model.
        source: Where it came from: a local folder's tokenizer and configuration are copied along.
        folder: The checkpoint's folder; one that is there is replaced.
        dtype: What the weights are rounded to.
        state: The model's state dict, if it is sharded: `World.whole` of it.

    Raises:
        OutputError: it can't be written.
    """
    weights = served_weights(model, model.state_dict() if state is None else state, dtype)
    write_weights(model, source, folder, without_aliases(model, weights))


def served_weights(model: Any, state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Every weight of the model by the names of its checkpoint, adapters merged in and all floats rounded to `dtype`.

    The matrix of tied embeddings is there under both of its names.
    """
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in merged(model, state)}


def merged(model: Any, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight by its name in a checkpoint, adapters merged in, in the precision in which it is trained.

    Args:
        model: The trained model.
        state: Its state dict, whole.
    """
    base = base_of(model)
    if base is not model:
        state = {name.removeprefix("base_model.model."): value for name, value in state.items()}
    adapted = {name: module for name, module in base.named_modules() if hasattr(module, "get_delta_weight")}
    for name, value in state.items():
        if ".lora_" in name:
            continue
        plain = plain_name(name)
        module_name = plain.removesuffix(".weight")
        if module_name in adapted and plain != module_name:
            # Not by peft's own merging: that works in place, and what it takes back again is not what was there.
            a, b = (state[f"{module_name}.lora_{factor}.default.weight"] for factor in "AB")
            value = (value + adapted[module_name].scaling["default"] * (b @ a)).detach().cpu()
        yield plain, value


def tied_names(model: Any) -> dict[str, str]:
    """Further names of a weight that the model knows by another one: `lm_head.weight`, and what it is tied to."""
    first, tied = dict[int, str](), dict[str, str]()
    for name, one in base_of(model).named_parameters(remove_duplicate=False):
        plain = plain_name(name)
        if (known := first.setdefault(id(one), plain)) != plain:
            tied[plain] = known
    return tied


def without_aliases(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each matrix once: tied embeddings without the output head."""
    tied = tied_names(model)
    return {name: value for name, value in weights.items() if name not in tied}


def base_of(model: Any) -> Any:
    """The model below its adapters."""
    return model.get_base_model() if hasattr(model, "merge_adapter") else model


def plain_name(name: str) -> str:
    """The name of a parameter of `base_of(model)` in a checkpoint."""
    return name.replace(".base_layer.", ".")


def save_adapter(model: Any, folder: Path, state: Mapping[str, Tensor]) -> None:
    """Write adapters as peft does; the folder appears when it is whole.

    Args:
        model: A model with adapters.
        folder: Where to; one that is there is replaced.
        state: The adapters' values by the names of the model's parameters.

    Raises:
        OutputError: it can't be written.
    """
    with _whole(folder) as fresh:
        model.save_pretrained(fresh, state_dict=dict(state))


@contextmanager
def _whole(folder: Path) -> Generator[Path]:
    """A fresh folder, which takes the place of `folder` once it is written."""
    fresh = folder.with_name(folder.name + ".new")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        yield fresh
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write {str(folder)!r}: {error}") from error


def write_weights(model: Any, source: str, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a checkpoint of these weights, all in one precision, which its configuration then names.

    Embeddings are tied there if only the matrix of a tied model is given, and untied if its head is given too.

    Raises:
        OutputError: it can't be written.
    """
    tied = tied_names(model)
    has_head = bool(tied) and tied.keys() <= weights.keys()
    # A tensor that shares its memory with another one would be left out.
    state = {name: value.clone() if has_head and name in tied else value for name, value in weights.items()}
    dtype = next(value.dtype for value in weights.values() if value.is_floating_point())
    with _whole(folder) as fresh:
        base_of(model).save_pretrained(fresh, state_dict=state, safe_serialization=True)
        said = json.loads((fresh / "config.json").read_text())  # transformers describes the trained model.
        said["dtype"] = str(dtype).removeprefix("torch.")
        if has_head:
            said["tie_word_embeddings"] = False
        (fresh / "config.json").write_text(json.dumps(said, indent=2) + "\n")
        for file in Path(source).glob("*") if Path(source).is_dir() else ():
            if file.is_file() and not _WEIGHTS.search(file.name) and not (fresh / file.name).exists():
                shutil.copyfile(file, fresh / file.name)
