"""The trained model as a function to logprobs of chosen tokens at chosen positions, without all logits in memory.

policy = load_policy(config, world)
chosen_BTK = policy(tokens_BT, attended_BT, ids_BTK, wanted_BT)
"""

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from agentic_opd.core.types import PlacedImage
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.distributed import DistContext
from agentic_opd.training.logprobs import head_logprobs, selected_logprobs
from agentic_opd.training.memory import (
    ModelShape,
    PartPlan,
    Recipe,
    free_for_activations,
    plan_parts,
    read_shape,
    unallocated_bytes,
)
from agentic_opd.training.model import in_float32, load_model, set_recomputing
from agentic_opd.training.packing import WORTH_SHARING, pack, packed_arguments, use_packed_attention
from agentic_opd.training.pictures import PictureReader, embedded_as

logger = logging.getLogger(__name__)

_TOLERANCE = 1e-3
"""Largest difference (nats) in float32 between a shortcut and the full computation."""


@dataclass(frozen=True, slots=True)
class Ways:
    """Shortcuts that give the same logprobs as the model's full forward pass."""

    by_head: bool = True
    """Apply the output head to the wanted positions only; the logits must depend on the last hidden state alone."""
    is_packed: bool = True
    """Pack sequences into one row; needs `by_head`."""


class ForwardPass(NamedTuple):
    chosen_BTK: Tensor
    """Logprobs (nats) in float32."""
    computed_tokens: int
    """Tokens computed by the layers, without padding."""
    tempered_BT: Tensor | None
    """Logprobs (nats) of the first ids for logits / temperature; None without temperatures."""


class TrainedPolicy(nn.Module):
    """A transformers model, with or without adapters."""

    def __init__(
        self, model: Any, precision: str = "fp32", *, pack: bool = True, pictures: PictureReader | None = None
    ) -> None:
        """Wrap a model; `pack` replaces its attention implementation by the packed one.

        `pictures` makes the inputs of sequences with pictures.
        """
        super().__init__()
        self.model = model
        self.pictures = pictures
        self.ways = Ways(is_packed=pack)
        self.plan: PartPlan | None = None
        """Which parts are recomputed in the backward pass; None: as the model is set."""
        self._is_bf16 = precision == "bf16"
        if pack:
            use_packed_attention(self._causal)

    def forward(
        self,
        tokens_BT: Tensor,
        attended_BT: Tensor,
        ids_BTK: Tensor,
        wanted_BT: Tensor,
        temperatures_BT: Tensor | None = None,
        images_B: Sequence[Sequence[PlacedImage]] | None = None,
    ) -> ForwardPass:
        """Compute the logprobs [B, T, K] of `ids_BTK` at each wanted position, given the tokens before it.

        With temperatures also those of each position's first id for logits / temperature. Sequences are padded on the
        right. Positions that are not wanted, and position 0, get 0. With pictures the sequences are not packed.

        Raises:
            AlignmentError, ConfigError, PlaceError: as `PictureReader.inputs`.
        """
        B, T, _ = ids_BTK.shape
        wanted_BT = wanted_BT.clone()
        wanted_BT[:, 0] = False
        row = pack(tokens_BT, attended_BT) if self.ways.is_packed and images_B is None else None
        computed = int(attended_BT.sum()) if row is None else len(row.tokens_N)
        if self.plan is not None and torch.is_grad_enabled():
            num_tokens = tokens_BT.numel() if row is None else computed
            set_recomputing(self._causal, is_on=self.plan.is_recomputed(num_tokens))
        with (
            torch.autocast(tokens_BT.device.type, torch.bfloat16, enabled=self._is_bf16),
            self._arguments(tokens_BT, attended_BT, images_B) as arguments,
        ):
            padded = {**arguments, "attention_mask": attended_BT.long(), "use_cache": False}
            if not self.ways.by_head:
                logits = self.model(**padded).logits
                chosen_BTK = selected_logprobs(logits, ids_BTK, temperatures_BT)
                return _forward_pass(torch.where(wanted_BT[..., None], chosen_BTK, 0.0), computed, temperatures_BT)
            if row is not None:
                hidden_ND = self._causal.base_model(**packed_arguments(row)).last_hidden_state[0]
                indices_BT = row.indices_BT
            else:
                hidden_ND = self._causal.base_model(**padded).last_hidden_state.flatten(0, 1)
                indices_BT = torch.arange(B * T, device=tokens_BT.device).view(B, T)
            before_W = indices_BT.roll(1, 1)[wanted_BT]
            head = self._causal.get_output_embeddings()
            temperatures_W = None if temperatures_BT is None else temperatures_BT[wanted_BT]
            states_WD, ids_WK = hidden_ND[before_W], ids_BTK[wanted_BT]
            chosen_WK = head_logprobs(states_WD, head.weight, ids_WK, head.bias, temperatures_W)
        chosen_BTK = chosen_WK.new_zeros(B, T, chosen_WK.shape[-1])
        chosen_BTK = chosen_BTK.index_put(wanted_BT.nonzero(as_tuple=True), chosen_WK)
        return _forward_pass(chosen_BTK, computed, temperatures_BT)

    @contextmanager
    def _arguments(
        self, tokens_BT: Tensor, attended_BT: Tensor, images_B: Sequence[Sequence[PlacedImage]] | None
    ) -> Generator[dict[str, Tensor]]:
        """Yield the forward arguments for tokens and pictures; the model must be called inside the block."""
        if images_B is None:
            yield {"input_ids": tokens_BT}
            return
        assert self.pictures is not None
        inputs = self.pictures.inputs(tokens_BT, attended_BT, images_B)
        with embedded_as(self._causal, tokens_BT):
            yield {"input_ids": inputs.input_ids_BT, **inputs.pixels}

    @torch.no_grad()
    def find_ways(self) -> None:
        """Test each shortcut on a small input, and disable those that differ from the full forward pass."""
        device = next(self.parameters()).device
        drawn = torch.Generator().manual_seed(0)
        tokens_BT = torch.randint(
            self._causal.config.get_text_config().vocab_size, (2, WORTH_SHARING + 8), generator=drawn
        ).to(device)
        tokens_BT[:, : WORTH_SHARING + 1] = tokens_BT[0, : WORTH_SHARING + 1]
        attended_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
        attended_BT[1, -2:] = False
        inputs, was_training = (tokens_BT, attended_BT, tokens_BT[..., None], attended_BT), self.training
        before, is_bf16, self._is_bf16 = self.ways, self._is_bf16, False
        self.eval()
        with in_float32(self.model):
            correct, why = self._correct_ways(inputs, before)
        if correct != before:
            how = "padded, not packed" if correct.by_head else "padded, with all logits at once"
            logger.warning("sequences of %s are %s: %s", type(self._causal).__name__, how, why)
        self.ways, self._is_bf16 = correct, is_bf16
        self.train(was_training)

    def _correct_ways(self, inputs: tuple[Tensor, Tensor, Tensor, Tensor], shortest: Ways) -> tuple[Ways, str]:
        """Return the shortest ways that give the full forward pass's logprobs, and why shorter ones do not."""
        correct = self.ways = Ways(by_head=False, is_packed=False)
        expected, why = self(*inputs).chosen_BTK, ""
        for ways in dict.fromkeys((Ways(is_packed=False), shortest)):
            self.ways = ways
            try:
                difference = float((self(*inputs).chosen_BTK - expected).abs().max())
            except (TypeError, ValueError, RuntimeError, AttributeError) as error:
                why = f"it can't be computed in the shorter way ({error})"
                continue
            if difference < _TOLERANCE:
                correct = ways
            else:
                why = f"its logprobs are {difference:.2g} nats apart in the shorter way"
        return correct, why

    @property
    def shape(self) -> ModelShape | None:
        """Shape of the model; None if it is of a kind whose memory is not computed."""
        try:
            return read_shape(self._causal.config.to_dict())
        except (KeyError, TypeError):
            return None

    @property
    def _causal(self) -> Any:
        """The model without its adapter wrapper."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model


def _forward_pass(chosen_BTK: Tensor, computed: int, temperatures_BT: Tensor | None) -> ForwardPass:
    """Separate the last column, which holds the tempered logprobs if there are temperatures."""
    if temperatures_BT is None:
        return ForwardPass(chosen_BTK, computed, None)
    return ForwardPass(chosen_BTK[..., :-1], computed, chosen_BTK[..., -1])


class StartingPolicy:
    """The policy at the start of the run: a second copy, or, with adapters, the same model with them disabled."""

    def __init__(self, policy: TrainedPolicy, load: Callable[[], TrainedPolicy]) -> None:
        """Call `load` for a second copy, unless `policy` has adapters."""
        self._has_adapters = hasattr(policy.model, "disable_adapter")
        self._policy = policy if self._has_adapters else load().requires_grad_(requires_grad=False)

    @contextmanager
    def reading(self) -> Generator[TrainedPolicy]:
        """Yield the starting policy; adapters are disabled inside the block."""
        with self._policy.model.disable_adapter() if self._has_adapters else nullcontext():
            yield self._policy


def load_policy(config: TrainerConfig, world: DistContext, *, is_frozen: bool = False) -> TrainedPolicy:
    """Load the model and shard it over the processes; only the first process reads the weights."""
    device = world.device if world.size == 1 else "cpu"
    model = load_model(config, device, is_empty=not world.is_first, is_frozen=is_frozen)
    pictures = PictureReader(config.model, config.picture_folders)
    policy = TrainedPolicy(model, config.precision, pack=config.pack, pictures=pictures)
    if world.is_first:
        policy.find_ways()
    policy.ways = world.share(policy.ways)
    policy = cast(TrainedPolicy, world.shard(policy, config.precision).train())
    policy.plan = plan_parts(config)
    return policy


def fit_memory(policy: TrainedPolicy, config: TrainerConfig, world: DistContext) -> TrainerConfig:
    """Choose the size of a batch's parts by the GPU's free memory, when everything that stays in it is loaded.

    Without a GPU, the settings or their defaults hold. The first process decides for all.

    Returns:
        The settings, with `micro_tokens` set if it was chosen.
    """
    plan, shape = plan_parts(config), policy.shape
    if world.device.startswith("cuda") and shape is not None:
        recipe = Recipe.of(config, world.size)
        free, total = torch.cuda.mem_get_info(world.device)
        free += torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
        available = free_for_activations(free, total, unallocated_bytes(shape, recipe))
        plan = world.share(plan_parts(config, shape, available))
        if world.is_first:
            _log_plan(plan, config, available)
    policy.plan = plan
    if world.size > 1 and plan.kept_tokens is not None:
        # A layer's weights are gathered for its recomputation, so all processes recompute, or none does.
        is_needed = plan.is_recomputed(max(config.max_token_len, plan.micro_tokens))
        policy.plan = replace(plan, kept_tokens=0 if is_needed else None)
    if plan.micro_tokens == config.part_tokens:
        return config
    return config.model_copy(update={"micro_tokens": plan.micro_tokens})


def _log_plan(plan: PartPlan, config: TrainerConfig, available: int) -> None:
    logger.info("%.1f GB are free for activations: %s", available / 1e9, plan)
    if plan.longest is not None and plan.longest < config.max_token_len:
        logger.warning(
            "by the computed memory, sequences of up to %d tokens fit this GPU, and max_token_len is %d: lower it, "
            "train adapters (lora_rank) in bf16, leave gradient_checkpointing unset, or give the trainer more memory",
            plan.longest,
            config.max_token_len,
        )
