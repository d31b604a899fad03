"""The losses for other trainers: a collator, the loss from logits, and `compute_loss` for transformers.Trainer.

docs/trainers.md has whole programs, and recipes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agentic_opd.core.errors import AlignmentError, ConfigError
from agentic_opd.core.types import IGNORED
from agentic_opd.training.advantages import turn_starts
from agentic_opd.training.batch import TrainBatch, padded
from agentic_opd.training.config import LossConfig
from agentic_opd.training.logprobs import selected_logprobs
from agentic_opd.training.losses import combined_loss, contrast_target
from agentic_opd.training.pictures import PictureReader
from agentic_opd.training.sampling import SamplingNotes
from agentic_opd.training.step import loss_inputs
from agentic_opd.wire.checks import checked_group
from agentic_opd.wire.group import ScoredGroup
from agentic_opd.wire.packed import unpacked

_notes = SamplingNotes()
"""Of the groups that this process collates."""


def collate(
    groups: Sequence[ScoredGroup | Mapping[str, Any]],
    config: LossConfig | None = None,
    *,
    special_ids: Sequence[int] | None = None,
    packed: bool = False,
    pictures: PictureReader | None = None,
) -> dict[str, Any]:
    """Build a batch of whole groups; `config` decides what it holds: `contrast`, `mean`, `temperature`, `turn_weights`.

    `pictures` makes the model's inputs for the pictures of groups.

    Returns:
        `input_ids` and `attention_mask` [B, T], padded on the right; or with `packed` `input_ids` and `position_ids`
        [1, N], whose positions start from 0 in each sequence, and no mask. `labels` of the same shape serve to count:
        all but -100 are the sampled tokens, or with `mean: turn` the first token of each turn. `opd` holds the tensors
        of a `TrainBatch` [B, T] by name. With pictures also the model's own arguments for them: idefics3 and smolvlm
        `pixel_values` [1, N, 3, H, W] and `pixel_attention_mask` [1, N, H, W] of the N tiles of all pictures in order,
        llava `pixel_values` [N, 3, H, W] of N pictures.

    Raises:
        WireError: a group can't be read, or an entry of its arrays is no id or number.
        AlignmentError, ConfigError: as `make_batch`. What `agentic-opd validate` refuses is refused in the same words.
        ConfigError: groups have pictures, and `pictures` is None, or the model's family does not take them.
        AlignmentError: the processor does not write the ids of a picture that vLLM read; or a token of a picture is
            not in any, so that the model would put pixels in its place.
        PlaceError: the file of a picture is missing or has changed.
    """
    config = config or LossConfig()
    origins = [f"group {number} of the batch" for number in range(len(groups))]
    checked = [checked_group(unpacked(group, origin), origin) for group, origin in zip(groups, origins, strict=True)]
    _notes.check(checked, config.temperature)
    batch = padded(checked, config.contrast, special_ids, config.temperature, config.weighs_turns_by)
    counted = turn_starts(batch.sampled_BT) if config.mean == "turn" else batch.sampled_BT
    labels = torch.where(counted, batch.tokens_BT, IGNORED)
    pixels = {} if batch.images_B is None else _pixels(batch, pictures)
    batch = replace(batch, images_B=None)
    opd = {name: value for name in TrainBatch.__slots__ if (value := getattr(batch, name)) is not None}
    if not packed:
        mask = batch.attended_BT.long()
        return {"input_ids": batch.tokens_BT, "attention_mask": mask, "labels": labels, **pixels, "opd": opd}
    positions = (batch.attended_BT.cumsum(1) - 1)[batch.attended_BT]
    rows = {"input_ids": batch.tokens_BT[batch.attended_BT], "labels": labels[batch.attended_BT]}
    return {**{name: row[None] for name, row in rows.items()}, "position_ids": positions[None], **pixels, "opd": opd}


def _pixels(batch: TrainBatch, pictures: PictureReader | None) -> dict[str, Tensor]:
    """Return the model's arguments for the pictures of a batch; see `collate`."""
    if pictures is None:
        raise ConfigError(
            "the groups have pictures: collate(groups, pictures=PictureReader.beside(MODEL, FILE_OF_GROUPS)) makes the "
            "model's inputs of them (docs/trainers.md)"
        )
    inputs = pictures.inputs(batch.tokens_BT, batch.attended_BT, batch.images_B or ())
    if inputs.stray_BT.any():
        sequence, position = inputs.stray_BT.nonzero()[0].tolist()
        raise AlignmentError(
            f"sequence {sequence}, position {position}: token {int(batch.tokens_BT[sequence, position])} is that of "
            "pictures, and no picture is there: the model would put pixels in its place. Leave the group out, or train "
            "it with `agentic-opd train`"
        )
    return inputs.pixels


def opd_loss(
    logits: Tensor,
    batch: Mapping[str, Any] | TrainBatch,
    config: LossConfig | None = None,
    sampled_count: Tensor | float | None = None,
    *,
    start_logits: Tensor | None = None,
    behaviour_logits: Tensor | None = None,
) -> Tensor:
    """Compute the combined loss of a batch from all its logits, a scalar with gradient.

    Args:
        logits: [B, T, V] of the padded sequences, or [1, N, V] of the packed ones.
        batch: From `collate` or `make_batch`, on the logits' device; with `step_scores: normalized` of whole groups.
        config: Weights and bounds. None: the defaults. Schedules have no effect; pass `config.at_step(step)`.
        sampled_count: Divisor of all means. If several batches make up one update, as with gradient accumulation, it
            is the count over all of them: of the labels that are not -100. None: that of this batch, for updates of
            one batch.
        start_logits: Logits of the policy at the start of the run, for `contrast` of divergences and `start_kl`. With
            `contrast_reference: batch` the current logits take their place.
        behaviour_logits: Logits of the policy before the first update on this batch, for tokens that were sampled at
            another temperature than 1. None: the current ones, so that the ratios of these tokens are 1, as in the
            first update on a batch.

    Raises:
        AlignmentError: the logits have other shapes, or fewer tokens than an id of the batch needs.
        ConfigError: the batch, or the start's logits, lack what a setting needs.
    """
    config = config or LossConfig()
    if isinstance(batch, Mapping):
        batch = TrainBatch(**batch["opd"])
    batch = batch.with_rewards(config)
    if config.contrast and batch.control_BTK is None:
        raise ConfigError("loss.contrast is on, but the batch was collated without it: collate(groups, config)")
    if config.reads_start and start_logits is None:
        raise ConfigError("loss.start_kl and loss.contrast need start_logits, of the policy at the start of the run")
    if batch.control_BTK is not None and config.contrast and config.has_divergence:
        reference = start_logits if config.contrast_reference == "start" else logits
        assert reference is not None
        rows = (_chosen(reference.detach(), batch)[0][..., 1:], batch.teacher_BTK, batch.control_BTK, batch.entries_BTK)
        batch = replace(batch, teacher_BTK=contrast_target(*rows, config.gap_clip))
    if start_logits is not None:
        batch = replace(batch, start_BT=_sampled(*_chosen(start_logits.detach(), batch)))
    if behaviour_logits is not None and batch.temperatures_BT is not None:
        batch = replace(batch, behaviour_BT=_sampled(*_chosen(behaviour_logits.detach(), batch)))
    count = batch.count(config) if sampled_count is None else float(sampled_count)
    chosen_BTK, tempered_BT = _chosen(logits, batch)
    return combined_loss(loss_inputs(chosen_BTK, batch, config, tempered_BT), config, count)[0]


def _sampled(chosen_BTK: Tensor, tempered_BT: Tensor | None) -> Tensor:
    return chosen_BTK[..., 0] if tempered_BT is None else tempered_BT


def _chosen(logits: Tensor, batch: TrainBatch) -> tuple[Tensor, Tensor | None]:
    """Return the logprobs [B, T, 1 + K] of each sampled token and of the ids of its row, and of the token at its
    temperature [B, T], if there are temperatures; 0 elsewhere.
    """
    ids_BTK = torch.cat((batch.tokens_BT[..., None], batch.teacher_ids_BTK), -1)
    if (highest := int(ids_BTK.max())) >= logits.shape[-1]:  # On a GPU such an id would end the process.
        raise AlignmentError(f"the batch has the token id {highest}, but the logits are of {logits.shape[-1]} tokens")
    wanted_BT = batch.sampled_BT.clone()
    wanted_BT[:, 0] = False
    attended_BT, temperatures_BT = batch.attended_BT, batch.temperatures_BT
    if logits.shape[:2] == wanted_BT.shape:
        chosen_BTK = selected_logprobs(logits, ids_BTK, temperatures_BT)
    elif logits.shape[:2] == (1, int(attended_BT.sum())):
        temperatures_N = None if temperatures_BT is None else temperatures_BT[attended_BT][None]
        chosen_NK = selected_logprobs(logits, ids_BTK[attended_BT][None], temperatures_N)[0]
        chosen_BTK = chosen_NK.new_zeros(*wanted_BT.shape, chosen_NK.shape[-1])
        chosen_BTK = chosen_BTK.index_put(attended_BT.nonzero(as_tuple=True), chosen_NK)
    else:
        padded, packed = list(wanted_BT.shape), [1, int(attended_BT.sum())]
        raise AlignmentError(f"logits are {list(logits.shape)}, expected {padded} padded or {packed} packed, and V")
    chosen_BTK = torch.where(wanted_BT[..., None], chosen_BTK, 0.0)
    return (chosen_BTK, None) if temperatures_BT is None else (chosen_BTK[..., :-1], chosen_BTK[..., -1])


def compute_loss(
    trainer: Any,
    model: Any,
    inputs: Mapping[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: Tensor | int | None = None,
) -> Any:
    """Method for a subclass of transformers.Trainer, whose data collator is `collate`.

    The trainer's attributes `loss_config` and `start_model` (the model at the start of the run, for `start_kl` and
    `contrast` of divergences) are optional.

    Raises:
        ConfigError: the trainer does not count over the whole update, so that the mean would be wrong.
    """
    config: LossConfig = getattr(trainer, "loss_config", None) or LossConfig()
    arguments, count = trainer.args, num_items_in_batch
    is_counted = count is not None and (arguments.world_size == 1 or arguments.average_tokens_across_devices)
    if model.training and not is_counted and (arguments.gradient_accumulation_steps > 1 or arguments.world_size > 1):
        raise ConfigError(
            "the trainer does not count the tokens of a whole update: set model_accepts_loss_kwargs of the trainer to "
            "True after it is made, and average_tokens_across_devices of its arguments"
        )
    forward = {name: value for name, value in inputs.items() if name not in ("opd", "labels")}
    outputs = model(**forward, use_cache=False)
    start, start_logits = getattr(trainer, "start_model", None), None
    if start is not None and config.reads_start:
        with torch.no_grad():
            start_logits = start(**forward, use_cache=False).logits
    batch = TrainBatch(**inputs["opd"])
    if (counted := int((inputs["labels"] != IGNORED).sum())) != batch.count(config):
        raise ConfigError(f"the labels count {counted}, expected {batch.count(config):g}: collate(groups, loss_config)")
    loss = opd_loss(outputs.logits, batch, config, count, start_logits=start_logits)
    if count is not None:
        loss = loss * trainer.accelerator.num_processes  # The processes' gradients are averaged.
    return (loss, outputs) if return_outputs else loss
