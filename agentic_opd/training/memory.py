"""Memory of a training step, computed from a model's shape: by part, and the tokens that fit a GPU. No torch.

The bytes of activations are those that autograd keeps, as `scripts/bench/training memory` counts them by its hooks.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from agentic_opd.training.config import TrainerConfig

SPARE = 0.2
"""Share of a GPU's memory that stays free: for fragments, the CUDA context, and what the formulas do not count."""
CHUNK_VALUES = 2**24
"""Number of logits in memory at a time (`logprobs.head_logprobs`); one position, if the vocabulary is larger."""
MAX_PART_TOKENS = 32_768
"""Largest part that is chosen: longer parts are not faster."""
MIN_PART_TOKENS = 4_096
"""Part below which the layers' products do not fill a GPU: layers are recomputed rather than split further."""
_CHUNK_BYTES = 14
"""Bytes for each logit of a chunk: in float32 the logits, their exponential and its gradient; in bfloat16 once."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder with gated MLPs, as its config.json names them."""

    hidden: int
    intermediate: int
    """Width of the MLP that a token passes: of all experts that it is routed to."""
    layers: int
    query: int
    """Number of attention heads times their width."""
    key: int
    """Number of key-value heads times their width."""
    vocab: int
    is_tied: bool = False
    """Whether the output head is the embedding matrix."""
    experts: float = 1.0
    """All experts of a layer, as a multiple of those that a token is routed to."""

    @property
    def matrices(self) -> int:
        """Number of weights of all layers' matrices."""
        attention = 2 * self.hidden * (self.query + self.key)
        return self.layers * int(attention + 3 * self.hidden * self.intermediate * self.experts)

    @property
    def parameters(self) -> int:
        """Number of weights, without those of the norms."""
        return self.matrices + (1 if self.is_tied else 2) * self.vocab * self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Number of weights of adapters of all layers' matrices."""
        return self.layers * rank * (7 * self.hidden + 2 * (self.query + self.key) + 3 * self.intermediate)


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape from the content of a checkpoint's config.json.

    Raises:
        KeyError: it is of another kind of model.
    """
    config = config.get("text_config", config)
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    intermediate, experts = config.get("intermediate_size"), 1.0
    if routed := config.get("num_experts_per_tok"):
        intermediate = routed * config["moe_intermediate_size"]
        experts = (config.get("num_experts") or config["n_routed_experts"]) / routed
    if intermediate is None:
        raise KeyError("intermediate_size")
    return ModelShape(
        hidden=config["hidden_size"],
        intermediate=intermediate,
        layers=config["num_hidden_layers"],
        query=heads * width,
        key=(config.get("num_key_value_heads") or heads) * width,
        vocab=config["vocab_size"],
        is_tied=bool(config.get("tie_word_embeddings")),
        experts=experts,
    )


def shape_of_checkpoint(model: str) -> ModelShape | None:
    """Return the shape of a checkpoint, a folder or a name on the hub; None if it can't be found or read."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    path = Path(model) / "config.json"
    try:
        if not path.is_file():
            path = Path(hf_hub_download(model, "config.json"))
        return read_shape(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, HFValidationError):
        return None


@dataclass(frozen=True, slots=True)
class Recipe:
    """What decides how many bytes a weight and a token take."""

    is_bf16: bool
    lora_rank: int | None = None
    has_average: bool = False
    """Whether a moving average of the trained weights is kept."""
    has_start: bool = False
    """Whether a second copy of the weights, of the start of the run, is kept: never with adapters."""
    processes: int = 1
    """Processes over which weights are sharded."""

    @classmethod
    def of(cls, config: TrainerConfig, processes: int = 1) -> "Recipe":
        """Return the recipe of a trainer's settings, with the weights sharded over `processes`."""
        needs_start = config.loss.reads_start or config.measure_start
        return cls(
            is_bf16=config.precision == "bf16",
            lora_rank=config.lora_rank,
            has_average=config.ema_decay is not None,
            has_start=needs_start and config.lora_rank is None,
            processes=processes,
        )

    @property
    def stream_bytes(self) -> int:
        """Bytes of a number of the residual stream: it has the precision of the embedding matrix."""
        return 2 if self.is_bf16 and self.lora_rank is not None else 4


def layer_bytes(shape: ModelShape, recipe: Recipe) -> int:
    """Return the bytes a token that autograd keeps of one layer whose activations are not recomputed.

    They are the inputs of norms and of trained matrices, the gate and the other half of the MLP, and what attention
    reads and writes. Norms and the product of the MLP's halves are recomputed (`model.recompute_cheap_parts`); full
    weights keep the product too, as the input of a trained matrix.
    """
    number = 2 if recipe.is_bf16 else 4
    attention = number * (4 * shape.query + 3 * shape.key)
    mlp = number * (3 if recipe.lora_rank is None or shape.experts > 1 else 2) * shape.intermediate
    norms = 2 * recipe.stream_bytes * shape.hidden
    # In bfloat16 autocast rounds a float32 stream for each of the five matrices that read it.
    rounded = recipe.is_bf16 and recipe.stream_bytes == 4
    return attention + mlp + norms + number * shape.hidden * (5 if rounded else 2)


def token_bytes(shape: ModelShape, recipe: Recipe, *, is_recomputed: bool) -> int:
    """Return the bytes a token of all layers: what autograd keeps, and the gradients of the layer under way."""
    layer, stream = layer_bytes(shape, recipe), recipe.stream_bytes * shape.hidden
    if is_recomputed:
        return shape.layers * stream + 2 * layer + 3 * stream
    return shape.layers * layer + layer + 3 * stream


class MemoryPart(NamedTuple):
    """A part of the memory that a step needs at its peak."""

    name: str
    size_bytes: int


def weight_parts(shape: ModelShape, recipe: Recipe) -> list[MemoryPart]:
    """Return what a step needs for any sequences: weights, gradients, optimizer, copies, a chunk of logits."""
    number, processes = (2 if recipe.is_bf16 else 4), recipe.processes
    chunk = MemoryPart("logits", _CHUNK_BYTES * max(CHUNK_VALUES, shape.vocab))
    if recipe.lora_rank is not None:
        trained = shape.adapter_parameters(recipe.lora_rank)
        parts = [MemoryPart("frozen weights", number * shape.parameters // processes)]
    else:
        trained, parts = shape.parameters, list[MemoryPart]()
    parts.append(MemoryPart("trained weights", 4 * trained // processes))
    parts.append(MemoryPart("gradients", 4 * trained // processes))
    parts.append(MemoryPart("optimizer", 8 * trained // processes))
    if recipe.has_average:
        parts.append(MemoryPart("moving average", 4 * trained // processes))
    if recipe.is_bf16:
        # Autocast keeps the rounded form of trained weights; sharded ones are rounded as they are gathered.
        matrices = 2 * (trained if processes == 1 else trained // shape.layers)
        parts.append(MemoryPart("rounded weights", matrices))
    if recipe.has_start:
        embeddings = (4 - number) * shape.vocab * shape.hidden * (1 if shape.is_tied else 2)
        parts.append(MemoryPart("weights at the start", (number * shape.parameters + embeddings) // processes))
    return [*parts, chunk]


LOADED = ("frozen weights", "trained weights", "moving average", "weights at the start")
"""Names of the parts that are in memory before the first step."""


def unallocated_bytes(shape: ModelShape, recipe: Recipe) -> int:
    """Return what a step allocates beside its activations: gradients, optimizer, rounded weights, logits."""
    return sum(part.size_bytes for part in weight_parts(shape, recipe) if part.name not in LOADED)


def step_parts(shape: ModelShape, recipe: Recipe, tokens: int, *, is_recomputed: bool) -> list[MemoryPart]:
    """Return the memory of a step by part, whose largest part of the batch has `tokens` tokens."""
    activations = tokens * token_bytes(shape, recipe, is_recomputed=is_recomputed)
    return [*weight_parts(shape, recipe), MemoryPart("activations", activations)]


def total_bytes(parts: list[MemoryPart]) -> int:
    return sum(part.size_bytes for part in parts)


@dataclass(frozen=True, slots=True)
class PartPlan:
    """Sizes of the parts into which a batch is divided, each of one forward and backward pass."""

    micro_tokens: int
    kept_tokens: int | None
    """Largest part whose activations are kept; those of larger ones are recomputed. None: no part is that large."""
    longest: int | None = None
    """Tokens of the longest sequence that fits; None: not computed."""

    def __str__(self) -> str:
        parts = f"parts of {self.micro_tokens} tokens"
        if self.kept_tokens is None:
            return f"{parts}, with their activations kept"
        if self.kept_tokens == 0:
            return f"{parts}, with their activations recomputed"
        return f"{parts}; activations are recomputed in parts of more than {self.kept_tokens}"

    def is_recomputed(self, tokens: int) -> bool:
        """Return whether the layers of a part are recomputed in its backward pass."""
        return self.kept_tokens is not None and tokens > self.kept_tokens


def plan_parts(
    config: TrainerConfig, shape: ModelShape | None = None, free_bytes: int | None = None, recipe: Recipe | None = None
) -> PartPlan:
    """Choose the size of a batch's parts, and from which size on layers are recomputed.

    Args:
        config: `micro_tokens` and `gradient_checkpointing` decide, where they are set.
        shape: Shape of the model; None: unknown.
        free_bytes: Memory for the activations, without `SPARE`; None: no GPU, or unknown.
        recipe: What decides the bytes a token; None: that of `config`.
    """
    setting = config.gradient_checkpointing
    if shape is None or free_bytes is None:
        return PartPlan(config.part_tokens, 0 if setting else None)
    recipe = recipe or Recipe.of(config)
    kept_limit, recomputed_limit = (
        max(0, free_bytes) // token_bytes(shape, recipe, is_recomputed=is_recomputed) for is_recomputed in (False, True)
    )
    if setting is not None:
        kept_limit = 0 if setting else kept_limit
        longest = recomputed_limit if setting else kept_limit
        chosen = min(longest, MAX_PART_TOKENS)
    else:
        longest = recomputed_limit
        chosen = min(max(kept_limit, min(MIN_PART_TOKENS, recomputed_limit)), MAX_PART_TOKENS)
    return PartPlan(config.micro_tokens or max(1, chosen), None if setting is False else kept_limit, longest)


def free_for_activations(free_bytes: int, total: int, unallocated: int) -> int:
    """Return the bytes for activations on a GPU that holds the weights already.

    Args:
        free_bytes: Free memory of the GPU.
        total: All of its memory, of which `SPARE` is left free.
        unallocated: Bytes that a step still allocates: gradients, optimizer, rounded weights, logits.
    """
    return max(0, int(free_bytes - SPARE * total) - unallocated)
