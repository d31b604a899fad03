"""Load the trained model, add adapters, and write checkpoints that vLLM can read."""

import inspect
import json
import math
import os
import re
import shutil
import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentic_opd.core.errors import ConfigError, OutputError
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.distributed import unsharded
from agentic_opd.training.pictures import FAMILIES, freeze_vision, language_matrices

Value = TypeVar("Value")

_CHUNK = 2**26
"""Bytes of page-locked memory through which a GPU's weights reach a file."""
_FILE_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}
"""The dtypes' names in safetensors files."""
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

    Of a model that reads pictures (`pictures.FAMILIES`) only the language model and its head are trained.

    With `is_empty` no weights are read, and the parameters are on torch's device "meta".

    Raises:
        ConfigError: the model can't be loaded, or peft is needed and missing.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # It prints a line for each weight, and another for each save.
    has_adapters = config.lora_rank is not None
    dtype = torch.bfloat16 if has_adapters and config.precision == "bf16" else torch.float32
    model: Any
    try:
        described = AutoConfig.from_pretrained(config.model)
        reads_pictures = described.model_type in FAMILIES
        kind: Any = AutoModelForImageTextToText if reads_pictures else AutoModelForCausalLM
        if is_empty:
            with torch.device("meta"):
                model = kind.from_config(described, dtype=dtype)
        else:
            model = kind.from_pretrained(config.model, dtype=dtype)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # The last two: a file that is cut off.
        problem = str(error)
        is_path = config.model.startswith(("/", ".", "~")) or config.model.count("/") > 1
        if is_path and not Path(config.model).is_dir():
            problem = f"there is no such folder (the current one is {Path.cwd()})"
        if problem.startswith("Unrecognized configuration class"):  # A list of all others follows.
            family = AutoConfig.from_pretrained(config.model).model_type
            problem = f"its family {family!r} is not trained here; of those that read pictures: {', '.join(FAMILIES)}"
        raise ConfigError(f"the model {config.model!r} can't be loaded: {problem}") from error
    recompute_cheap_parts(model)
    if reads_pictures:
        freeze_vision(model)
    if is_frozen:
        model.requires_grad_(requires_grad=False)
        if config.precision == "bf16":
            round_matrices(model)
    if config.lora_rank is not None:
        model = _with_adapters(model, config.lora_rank, language_matrices(model) if reads_pictures else "all-linear")
    return (model if is_empty else model.to(device)).train()


def _with_adapters(model: Any, rank: int, matrices: list[str] | str) -> Any:
    try:
        from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError("lora_rank needs peft: install agentic-opd[train]") from error
    model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=matrices))
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
        parameters = {name: p for name, p in module.named_parameters(recurse=False) if p.dtype == torch.bfloat16}
        narrow[module] = {name: parameter.data for name, parameter in parameters.items()}
        for parameter in parameters.values():
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

    This keeps about a third less, with adapters added afterwards about half less, and costs no matrix product but one
    with the first factor of an adapter.
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
    gate, up, down = module.gate_proj(x), module.up_proj(x), module.down_proj
    if not _is_adapted(down):
        return down(_recomputed(partial(_product, module.act_fn), gate, up))
    # Only the adapter's first factor needs the product in the backward pass: the base weights are frozen.
    both = partial(_product_and_inner, module.act_fn, down.lora_A["default"])
    product, inner = _recomputed(both, gate, up)
    result = down.base_layer(product)
    return (result + down.lora_B["default"](inner) * down.scaling["default"]).to(result.dtype)


def _is_adapted(matrix: Any) -> bool:
    """Return whether a matrix computes with an adapter, as `_with_adapters` adds them: without dropout or bias."""
    return hasattr(matrix, "lora_A") and not matrix.disable_adapters and not matrix.merged


def _product(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return activation(gate) * up


def _product_and_inner(
    activation: Callable[[Tensor], Tensor], factor: nn.Module, gate: Tensor, up: Tensor
) -> tuple[Tensor, Tensor]:
    product = _product(activation, gate, up)
    return product, factor(product)


def _recomputed(function: Callable[..., Any], *arguments: Tensor) -> Any:
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
            raise ValueError("the saved average has other parameters")
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
    weights = without_aliases(model, served_weights(model, model.state_dict() if state is None else state, dtype))
    specs = {name: TensorSpec(value.dtype, tuple(value.shape)) for name, value in weights.items()}
    write_weights(model, source, folder, specs, weights.items())


def served_weights(model: Any, state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all weights by checkpoint name, with adapters merged and floats rounded to `dtype`.

    The matrix of tied embeddings appears under both of its names.
    """
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in merged(model, state)}


def merged(model: Any, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight of a state dict by checkpoint name, adapters merged, in training's precision.

    Tensors are gathered and merged one at a time on their device. If the model is sharded, all processes must iterate.
    """
    base = base_of(model)
    if base is not model:
        state = {name.removeprefix("base_model.model."): value for name, value in state.items()}
    adapted = {name: module for name, module in base.named_modules() if hasattr(module, "get_delta_weight")}
    for name, sharded in state.items():
        if ".lora_" in name:
            continue
        plain, value = plain_name(name), unsharded(sharded.detach())
        module_name = plain.removesuffix(".weight")
        if module_name in adapted and plain != module_name:
            # peft merges in place, and its unmerging does not restore the exact values.
            a, b = (unsharded(state[f"{module_name}.lora_{factor}.default.weight"].detach()) for factor in "AB")
            value = with_delta(value, adapted[module_name], a, b)
        yield plain, value


def with_delta(weight: Tensor, lora: Any, a: Tensor, b: Tensor) -> Tensor:
    """Return a weight with the product of its adapter's factors A and B added."""
    return weight + lora.scaling["default"] * (b.detach() @ a.detach())


class TensorSpec(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def whole_specs(model: Any, dtype: torch.dtype, *, has_head: bool) -> dict[str, TensorSpec]:
    """Return the tensors of a push of whole weights by checkpoint name; with `has_head`, tied ones under each name."""
    is_adapted, specs = base_of(model) is not model, dict[str, TensorSpec]()
    for name, value in model.state_dict().items():
        if ".lora_" not in name:
            plain = plain_name(name.removeprefix("base_model.model.") if is_adapted else name)
            specs[plain] = TensorSpec(dtype if value.is_floating_point() else value.dtype, tuple(value.shape))
    return specs if has_head else without_aliases(model, specs)


def tied_names(model: Any) -> dict[str, str]:
    """Map each alias of a tied weight, such as `lm_head.weight`, to the weight's first name."""
    first_names, tied = dict[int, str](), dict[str, str]()
    for name, parameter in base_of(model).named_parameters(remove_duplicate=False):
        plain = plain_name(name)
        if (first_name := first_names.setdefault(id(parameter), plain)) != plain:
            tied[plain] = first_name
    return tied


def without_aliases(model: Any, weights: Mapping[str, Value]) -> dict[str, Value]:
    """Drop the aliases of tied weights, such as the output head."""
    tied = tied_names(model)
    return {name: value for name, value in weights.items() if name not in tied}


def base_of(model: Any) -> Any:
    """Return the model below peft's adapters; a model without adapters is returned as it is."""
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


def write_weights(
    model: Any,
    source: str,
    folder: Path,
    specs: Mapping[str, TensorSpec],
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Write a checkpoint of the tensors named in `specs`, all in one precision, and name it in the configuration.

    The tensors are iterated once, and each is written before the next one is taken. Those of an architecture whose
    checkpoints have other tensors than its modules (fused experts) are collected in memory, because transformers
    converts them together. If the model's embeddings are tied and `specs` has the head, the checkpoint is untied.
    """
    base, tied = base_of(model), tied_names(model)
    ignored = getattr(base, "_keys_to_ignore_on_save", None) or ()
    specs = {name: spec for name, spec in specs.items() if name not in ignored}
    has_head = bool(tied) and tied.keys() <= specs.keys()
    dtype = next(spec.dtype for spec in specs.values() if spec.dtype.is_floating_point)
    with _fresh_folder(folder) as fresh:
        if _is_converted(base, specs):
            # `save_pretrained` omits a tensor that shares its memory with another one.
            state = {name: value.to("cpu", copy=has_head and name in tied) for name, value in tensors if name in specs}
            base.save_pretrained(fresh, state_dict=state, safe_serialization=True)
        else:
            fresh.mkdir(parents=True)
            base.config.save_pretrained(fresh)
            if base.can_generate():
                base.generation_config.save_pretrained(fresh)
            write_safetensors(fresh / "model.safetensors", specs, tensors)
        config = json.loads((fresh / "config.json").read_text())  # It describes the model in float32.
        config["dtype"] = str(dtype).removeprefix("torch.")
        config["architectures"] = [type(base).__name__.removeprefix("FSDP")]
        if has_head:
            config["tie_word_embeddings"] = False
        (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in Path(source).glob("*") if Path(source).is_dir() else ():
            if file.is_file() and not _WEIGHTS.search(file.name) and not (fresh / file.name).exists():
                shutil.copyfile(file, fresh / file.name)


def _is_converted(model: Any, specs: Mapping[str, TensorSpec]) -> bool:
    """Return whether transformers converts these tensors when it saves them."""
    from transformers.core_model_loading import revert_weight_conversion

    before = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}
    after = revert_weight_conversion(model, dict(before))
    return {name: value.shape for name, value in after.items()} != {name: value.shape for name, value in before.items()}


def write_safetensors(file: Path, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write the tensors named in `specs` to a file, one at a time; their order is free.

    Raises:
        KeyError: a tensor is missing.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, spec in specs.items():
        end = offset + spec.size_bytes
        header[name] = {"dtype": _FILE_DTYPES[spec.dtype], "shape": spec.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    missing = set(specs)
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        first = opened.tell()
        for name, value in tensors:
            if name in missing:
                missing.remove(name)
                opened.seek(first + header[name]["data_offsets"][0])
                _write_tensor(opened, value)
    if missing:
        raise KeyError(f"{file.name} lacks {', '.join(sorted(missing)[:3])}")


def _write_tensor(opened: BinaryIO, value: Tensor) -> None:
    """Write a tensor's bytes: from its own memory on a CPU, else through page-locked memory of `_CHUNK` bytes."""
    raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.device.type == "cpu":
        opened.write(raw.numpy().data)
        return
    buffer = torch.empty(min(_CHUNK, len(raw)), dtype=torch.uint8, pin_memory=raw.is_cuda)
    for chunk in raw.split(_CHUNK):
        opened.write(buffer[: len(chunk)].copy_(chunk).numpy().data)
