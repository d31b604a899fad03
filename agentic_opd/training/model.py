"""Load the trained model, add adapters, and write checkpoints that vLLM can read."""

import inspect
import json
import os
import re
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentic_opd.core.errors import ConfigError, OutputError
from agentic_opd.training.config import TrainerConfig

_WEIGHTS = re.compile(r"\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx)$|\.index\.json$")
"""Names of weight files and their indices; all other files of a checkpoint are small."""


def pick_device(name: str) -> str:
    """Resolve `auto` to cuda or cpu, and check that cuda is available if it is named.

    Raises:
        ConfigError: `name` is a cuda device, but torch finds no GPU.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch sees no GPU; set device to cpu or auto")
    return name


def leave_cores_to_others() -> None:
    """Limit torch to half of the cores, unless OMP_NUM_THREADS is set.

    OpenMP threads wait for each other in a busy loop. With one thread for each core, and vLLM on the same cores, a step
    of the demo policy took four times as much processor time.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))


def load_model(config: TrainerConfig, device: str, *, is_empty: bool = False, is_frozen: bool = False) -> Any:
    """Load the model on `device`, with adapters if `lora_rank` is set.

    Trained weights are in float32. With adapters the frozen weights are in the compute precision, and so are the
    activations between layers. With `is_frozen` no weight is trained, the matrices that autocast would round are
    stored rounded, and the logprobs are equal to those of float32 weights.

    With `is_empty` no weights are read, and the parameters are on torch's device "meta".

    Raises:
        ConfigError: the model can't be loaded, or peft is needed and missing.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # It prints a line for each weight, and another for each save.
    has_adapters = config.lora_rank is not None
    dtype = torch.bfloat16 if has_adapters and config.precision == "bf16" else torch.float32
    model: Any
    try:
        if is_empty:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model), dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(config.model, dtype=dtype)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # The last two: a file that is cut off.
        problem = str(error)
        is_path = config.model.startswith(("/", ".", "~")) or config.model.count("/") > 1
        if is_path and not Path(config.model).is_dir():
            problem = f"there is no such folder (the current one is {Path.cwd()})"
        raise ConfigError(f"the model {config.model!r} can't be loaded: {problem}") from error
    recompute_cheap_parts(model)
    if is_frozen:
        model.requires_grad_(requires_grad=False)
        if config.precision == "bf16":
            round_matrices(model)
    if config.lora_rank is not None:
        model = _with_adapters(model, config.lora_rank)
    return (model if is_empty else model.to(device)).train()


def _with_adapters(model: Any, rank: int) -> Any:
    try:
        from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError("lora_rank needs peft: install agentic-opd[train]") from error
    model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            # Each adapter would keep a copy of its input: autocast keeps the input itself.
            module.cast_input_dtype_enabled = False
    return model


def round_matrices(model: nn.Module) -> None:
    """Store the weights of linear layers in bfloat16, but for an output head that is the embedding matrix."""
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in embedded:
            module.to(torch.bfloat16)


@contextmanager
def in_float32(model: nn.Module) -> Generator[None]:
    """Compute in float32 inside the block: each module's own weights are upcast during its forward pass only."""
    narrow = dict[nn.Module, dict[str, Tensor]]()

    def upcast(module: nn.Module, _: object) -> None:
        own = {name: p for name, p in module.named_parameters(recurse=False) if p.dtype == torch.bfloat16}
        narrow[module] = {name: parameter.data for name, parameter in own.items()}
        for parameter in own.values():
            parameter.data = parameter.data.float()

    def restore(module: nn.Module, *_: object) -> None:
        for name, value in narrow.pop(module, {}).items():
            module.get_parameter(name).data = value

    hooks = [module.register_forward_pre_hook(upcast) for module in model.modules()]
    hooks += [module.register_forward_hook(restore, always_call=True) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def recompute_cheap_parts(model: nn.Module) -> None:
    """Recompute norms, and the product of a gated MLP's halves, in the backward pass: autograd keeps their inputs only.

    This costs no matrix product, and keeps about a third less.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_recomputed, module.forward)
        elif _is_gated_mlp(module):
            module.forward = partial(_gated_mlp, module)


_GATED = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
"""The forward pass of transformers' gated MLPs."""


def _is_gated_mlp(module: nn.Module) -> bool:
    """Return whether a module's forward pass is `_GATED` and nothing else."""
    if not all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return False
    lines = [line.strip() for line in inspect.getsource(type(module).forward).splitlines()]
    return lines[1:] in ([f"down_proj = {_GATED}", "return down_proj"], [f"return {_GATED}"])


def _gated_mlp(module: Any, x: Tensor) -> Tensor:
    return module.down_proj(_recomputed(partial(_product, module.act_fn), module.gate_proj(x), module.up_proj(x)))


def _product(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return activation(gate) * up


def _recomputed(function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def set_recomputing(model: Any, *, is_on: bool) -> None:
    """Recompute whole layers in the backward pass, or keep their activations."""
    if is_on == model.is_gradient_checkpointing:
        return
    if is_on:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()


class MovingAverage:
    """Exponential moving average of a model's trained parameters over its steps."""

    def __init__(self, model: Any, decay: float) -> None:
        self._decay = decay
        self._model = model
        self._averages = {name: parameter.detach().clone() for name, parameter in _trained(model)}

    def update(self) -> None:
        """Set each average to decay * average + (1 - decay) * current parameter."""
        for name, parameter in _trained(self._model):
            self._averages[name].lerp_(parameter.detach(), 1.0 - self._decay)

    @contextmanager
    def swapped_in(self) -> Generator[None]:
        """Give the model the averages inside the block; restore its parameters bit by bit afterwards."""
        trained = {name: parameter.detach().clone() for name, parameter in _trained(self._model)}
        try:
            self._set_parameters(self._averages)
            yield
        finally:
            self._set_parameters(trained)

    def _set_parameters(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in _trained(self._model):
                parameter.copy_(values[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by parameter name."""
        return dict(self._averages)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore saved averages.

        Raises:
            ValueError: they belong to other parameters.
        """
        if state.keys() != self._averages.keys():
            raise ValueError("the saved average is of other parameters")
        for name, value in state.items():
            self._averages[name].copy_(value)


def _trained(model: Any) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def save_weights(
    model: Any,
    source: str,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a checkpoint for vLLM and transformers, with adapters merged and tied embeddings stored once.

    If `source`, the model that training started from, is a local folder, its small files (tokenizer, ...) are copied
    too. An existing `folder` is replaced. `state` is the unsharded state dict; None if the model is not sharded.

    Raises:
        OutputError: the folder can't be written.
    """
    weights = served_weights(model, model.state_dict() if state is None else state, dtype)
    write_weights(model, source, folder, without_aliases(model, weights))


def served_weights(model: Any, state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all weights by checkpoint name, with adapters merged and floats rounded to `dtype`.

    The matrix of tied embeddings appears under both of its names.
    """
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in merged(model, state)}


def merged(model: Any, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight of an unsharded state dict by checkpoint name, adapters merged, in training's precision."""
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
            # peft merges in place, and its unmerging does not restore the exact values.
            a, b = (state[f"{module_name}.lora_{factor}.default.weight"] for factor in "AB")
            value = (value + adapted[module_name].scaling["default"] * (b @ a)).detach().cpu()
        yield plain, value


def tied_names(model: Any) -> dict[str, str]:
    """Map each alias of a tied weight, such as `lm_head.weight`, to the weight's first name."""
    first_names, tied = dict[int, str](), dict[str, str]()
    for name, parameter in base_of(model).named_parameters(remove_duplicate=False):
        plain = plain_name(name)
        if (first_name := first_names.setdefault(id(parameter), plain)) != plain:
            tied[plain] = first_name
    return tied


def without_aliases(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop the aliases of tied weights, such as the output head."""
    tied = tied_names(model)
    return {name: value for name, value in weights.items() if name not in tied}


def base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "merge_adapter") else model


def plain_name(name: str) -> str:
    """Return the checkpoint name of a parameter of `base_of(model)`."""
    return name.replace(".base_layer.", ".")


def save_adapter(model: Any, folder: Path, state: Mapping[str, Tensor]) -> None:
    """Write the adapters of `state` in peft's format; the folder appears, or is replaced, once it is complete."""
    with _fresh_folder(folder) as fresh:
        model.save_pretrained(fresh, state_dict=dict(state))


@contextmanager
def _fresh_folder(folder: Path) -> Generator[Path]:
    """Yield a fresh folder, which replaces `folder` when the block ends without an error."""
    fresh = folder.with_name(folder.name + ".new")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        yield fresh
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write {str(folder)!r}: {error}") from error


def write_weights(model: Any, source: str, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a checkpoint of these weights, all in one precision, and name that precision in its configuration.

    If the model's embeddings are tied and `weights` contains the output head too, the checkpoint is untied.
    """
    tied = tied_names(model)
    has_head = bool(tied) and tied.keys() <= weights.keys()
    # `save_pretrained` omits a tensor that shares its memory with another one.
    state = {name: value.clone() if has_head and name in tied else value for name, value in weights.items()}
    dtype = next(value.dtype for value in weights.values() if value.is_floating_point())
    with _fresh_folder(folder) as fresh:
        base_of(model).save_pretrained(fresh, state_dict=state, safe_serialization=True)
        config = json.loads((fresh / "config.json").read_text())  # It describes the model in float32.
        config["dtype"] = str(dtype).removeprefix("torch.")
        if has_head:
            config["tie_word_embeddings"] = False
        (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in Path(source).glob("*") if Path(source).is_dir() else ():
            if file.is_file() and not _WEIGHTS.search(file.name) and not (fresh / file.name).exists():
                shutil.copyfile(file, fresh / file.name)
