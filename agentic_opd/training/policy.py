"""The trained model as the losses read it: logprobs of chosen tokens at chosen positions, and never all logits.

policy = load_policy(config, world)
chosen_BTK = policy(tokens_BT, attended_BT, ids_BTK, wanted_BT)
"""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.logprobs import head_logprobs, selected_logprobs
from agentic_opd.training.model import load_model
from agentic_opd.training.packing import WORTH_SHARING, pack, packed_arguments, use_packed_attention
from agentic_opd.training.world import World

logger = logging.getLogger(__name__)

_TOLERANCE = 1e-3
"""Nats between two ways to compute the same in float32."""


@dataclass(frozen=True, slots=True)
class Ways:
    """What of a model may be computed in a shorter way, with the same result."""

    by_head: bool = True
    """The output head is all that comes after the last hidden state, so that it can be applied to some positions."""
    is_packed: bool = True
    """Its layers read packed rows; needs `by_head`."""


class Reading(NamedTuple):
    """What a forward pass gave."""

    chosen_BTK: Tensor
    """Logprobs (nats) in float32."""
    computed_tokens: int
    """Tokens that went through the layers, without padding."""


class Policy(nn.Module):
    """A transformers model, perhaps with adapters."""

    def __init__(self, model: Any, precision: str = "fp32", *, pack: bool = True) -> None:
        """Wrap it; `pack` replaces what its layers attend by."""
        super().__init__()
        self.model = model
        self.ways = Ways(is_packed=pack)
        self._is_bf16 = precision == "bf16"
        if pack:
            use_packed_attention(self._causal)

    def forward(self, tokens_BT: Tensor, attended_BT: Tensor, ids_BTK: Tensor, wanted_BT: Tensor) -> Reading:
        """The logprobs [B, T, K] that the position before gives to each of `ids_BTK`.

        Args:
            tokens_BT: int64, right-padded.
            attended_BT: bool: not padded.
            ids_BTK: int64 in [0, V).
            wanted_BT: bool: where they are wanted; anywhere else, and at position 0, they are 0.
        """
        B, T, K = ids_BTK.shape
        wanted_BT = wanted_BT.clone()
        wanted_BT[:, 0] = False
        computed = int(attended_BT.sum())
        with torch.autocast(tokens_BT.device.type, torch.bfloat16, enabled=self._is_bf16):
            if not self.ways.by_head:
                logits = self.model(input_ids=tokens_BT, attention_mask=attended_BT.long(), use_cache=False).logits
                chosen_BTK = torch.where(wanted_BT[..., None], selected_logprobs(logits, ids_BTK), 0.0)
                return Reading(chosen_BTK, computed)
            if self.ways.is_packed:
                row = pack(tokens_BT, attended_BT)
                hidden_ND = self._causal.base_model(**packed_arguments(row)).last_hidden_state[0]
                places_BT, computed = row.places_BT, len(row.tokens_N)
            else:
                padded = {"input_ids": tokens_BT, "attention_mask": attended_BT.long(), "use_cache": False}
                hidden_ND = self._causal.base_model(**padded).last_hidden_state.flatten(0, 1)
                places_BT = torch.arange(B * T, device=tokens_BT.device).view(B, T)
            before_W = places_BT.roll(1, 1)[wanted_BT]
            head = self._causal.get_output_embeddings()
            chosen_WK = head_logprobs(hidden_ND[before_W], head.weight, ids_BTK[wanted_BT], head.bias)
        chosen_BTK = chosen_WK.new_zeros(B, T, K).index_put(wanted_BT.nonzero(as_tuple=True), chosen_WK)
        return Reading(chosen_BTK, computed)

    @torch.no_grad()
    def find_ways(self) -> None:
        """Compute a little in each way, and keep to those that give what the model itself gives."""
        device = next(self.parameters()).device
        drawn = torch.Generator().manual_seed(0)
        tokens_BT = torch.randint(self._causal.config.vocab_size, (2, WORTH_SHARING + 8), generator=drawn).to(device)
        tokens_BT[:, : WORTH_SHARING + 1] = tokens_BT[0, : WORTH_SHARING + 1]
        there_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
        there_BT[1, -2:] = False
        asked, asking = (tokens_BT, there_BT, tokens_BT[..., None], there_BT), self.training
        before, precision, self._is_bf16 = self.ways, self._is_bf16, False
        self.eval()
        self.ways = Ways(by_head=False, is_packed=False)
        expected = self(*asked).chosen_BTK
        found, why = self.ways, ""
        for ways in dict.fromkeys((Ways(is_packed=False), before)):
            self.ways = ways
            try:
                apart = float((self(*asked).chosen_BTK - expected).abs().max())
            except (TypeError, ValueError, RuntimeError, AttributeError) as error:
                why = f"it can't be computed in the shorter way ({error})"
                continue
            if apart < _TOLERANCE:
                found = ways
            else:
                why = f"its logprobs are {apart:.2g} nats apart in the shorter way"
        if found != before:
            how = "padded, not packed" if found.by_head else "padded, with all logits at once"
            logger.warning("sequences of %s are %s: %s", type(self._causal).__name__, how, why)
        self.ways, self._is_bf16 = found, precision
        self.train(asking)

    @property
    def _causal(self) -> Any:
        """The model below its adapters."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model


class StartingPolicy:
    """The policy as it is before it is trained: a second one, or, with adapters, the same one without them."""

    def __init__(self, policy: Policy, load: Callable[[], Policy]) -> None:
        """Keep it; the model's adapters, if it has any, have not been trained. `load` gives a second one."""
        self._has_adapters = hasattr(policy.model, "disable_adapter")
        self._policy = policy if self._has_adapters else load().requires_grad_(requires_grad=False)

    @contextmanager
    def reading(self) -> Generator[Policy]:
        """The policy to read with."""
        with self._policy.model.disable_adapter() if self._has_adapters else nullcontext():
            yield self._policy


def load_policy(config: TrainerConfig, world: World) -> Policy:
    """The model of the settings, sharded over the processes; only the first one reads its weights.

    Raises:
        ConfigError: it can't be loaded, or peft is needed and missing.
    """
    model = load_model(config, world.device if world.size == 1 else "cpu", is_empty=not world.is_first)
    policy = Policy(model, config.precision, pack=config.pack)
    if world.is_first:
        policy.find_ways()
    policy.ways = world.share(policy.ways)
    return cast(Policy, world.shard(policy, config.precision).train())
