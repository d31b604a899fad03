"""Convert the scored groups of a batch to padded tensors, and check the alignment of their rows."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agentic_opd.core.errors import AlignmentError, ConfigError
from agentic_opd.core.types import IGNORED, PlacedImage, sampled_spans
from agentic_opd.training.advantages import group_advantages, step_advantages, turn_starts
from agentic_opd.training.config import LossConfig
from agentic_opd.training.packing import packed_parts
from agentic_opd.training.turn_weights import TurnWeightSource, trajectory_weights
from agentic_opd.wire.checks import checked_group
from agentic_opd.wire.group import ScoredGroup, ScoredRollout


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """B sequences, padded on the right to T positions, with distillation rows of up to K entries."""

    tokens_BT: Tensor
    """int64; 0 if padded."""
    attended_BT: Tensor
    """bool: False at padding."""
    sampled_BT: Tensor
    """bool: tokens that the policy sampled."""
    old_BT: Tensor
    """float32: `inference_logprobs` at sampled positions, else 0."""
    baseline_BT: Tensor
    """float32: baseline of the gap, `ScoredRollout.baseline_T`, at sampled positions, else 0."""
    hinted_BT: Tensor
    """float32: the teacher's logprob of the sampled token with the hint, at scored positions, else 0."""
    control_BT: Tensor
    """float32: the teacher's logprob of the sampled token with the control hint; all 0 without contrast."""
    teacher_ids_BTK: Tensor
    """int64: `distill_token_ids`, the sampled token first; 0 where an entry is absent."""
    teacher_BTK: Tensor
    """float32: `distill_logprobs`; 0 where an entry is absent. `step.take_out_control` replaces them by its target."""
    entries_BTK: Tensor
    """bool: which entries exist."""
    start_BT: Tensor
    """float32: logprob of the sampled token under the policy at the start of the run, at sampled positions; all 0 until
    `step.read_start` sets it."""
    step_scores_BT: Tensor
    """float32: the judge's score (1, 0, -1) of the turn, at its sampled positions; 0 without a score. `with_rewards`
    replaces them if they are normalized."""
    turn_lengths_BT: Tensor
    """float32: number of sampled tokens in the turn of the sampled token, else 0."""
    scores_B: Tensor
    """float32: score of the sequence's rollout."""
    rewarded_B: Tensor
    """bool: whether the outcome of the sequence was judged; GRPO ignores the others."""
    groups_B: Tensor
    """int64: index of the sequence's group in the batch."""
    turn_means_BT: Tensor
    """float32: mean of the turns that the turn of the sampled token is compared with: `ScoredGroup.compared_turns`."""
    turn_deviations_BT: Tensor
    """float32: their standard deviation; 0 if they are equal, or if there is one alone."""
    compared_BS: Tensor
    """float32: scores of the rewarded rollouts of the sequence's group, each rollout once; NaN at padding."""
    advantages_B: Tensor
    """float32: advantage of the sequence by its group's scores; 0 until `with_rewards` sets it."""
    control_BTK: Tensor | None = None
    """float32: the teacher's logprobs of the same ids with the control hint. None without contrast, and after
    `step.take_out_control`."""
    special_BT: Tensor | None = None
    """bool: special tokens; None if their ids were not given."""
    temperatures_BT: Tensor | None = None
    """float32: temperature of the sampled token in ratios and `start_kl`, 1 elsewhere; None: 1 everywhere."""
    behaviour_BT: Tensor | None = None
    """float32: logprob of the sampled token at `temperatures_BT` before the first update on the batch, which
    `step.read_behaviour` sets; None: that of the policy now."""
    greedy_BT: Tensor | None = None
    """bool: tokens sampled at temperature 0, which no ratio fits; None: there are none."""
    images_B: tuple[tuple[PlacedImage, ...], ...] | None = None
    """The pictures among the tokens of each sequence, in order; None: there are none."""
    turn_weights_BT: Tensor | None = None
    """float32: weight of the scored turn at its scored positions, 1 elsewhere; None: no weights were asked for."""

    @property
    def scored_BT(self) -> Tensor:
        """Positions that have a distillation row, bool [B, T]."""
        return self.entries_BTK.any(-1)

    @property
    def turn_count(self) -> int:
        """Number of turns, counted as runs of sampled positions."""
        return int(turn_starts(self.sampled_BT).sum())

    def count(self, config: LossConfig) -> float:
        """Return the divisor of the loss's means over this batch."""
        return float(self.turn_count if config.mean == "turn" else self.sampled_BT.sum())

    def with_rewards(self, config: LossConfig) -> "TrainBatch":
        """Fill in the advantages by reward, and normalize the step scores if `config` says so.

        Raises:
            ConfigError: a part with a weight needs the distribution of the sampled tokens, and some were sampled at
                temperature 0.
        """
        if self.greedy_BT is not None and self.greedy_BT.any() and (parts := config.distribution_parts):
            raise ConfigError(
                f"loss.{parts[0]}: tokens of sequence {int(self.greedy_BT.any(-1).nonzero()[0])} were sampled at "
                "temperature 0, where the policy has one token and no distribution. Sample at a temperature above 0, "
                "give weights to the divergences alone, or set loss.temperature to the number with which these tokens "
                "should count"
            )
        divide = config.divide_by_std
        advantages_B = group_advantages(
            self.scores_B, self.groups_B, self.rewarded_B, compared_BS=self.compared_BS, divide_by_std=divide
        )
        if config.step_scores == "plain":
            return replace(self, advantages_B=advantages_B)
        compared = (self.turn_means_BT, self.turn_deviations_BT)
        steps_BT = step_advantages(
            self.step_scores_BT, self.scores_B, self.rewarded_B, *compared, self.sampled_BT, divide_by_std=divide
        )
        return replace(self, advantages_B=advantages_B, step_scores_BT=steps_BT)

    def before(self, ends_B: Tensor) -> "TrainBatch":
        """Return a copy in which each sequence ends before its position in `ends_B`, int64 [B]; 0 empties it."""
        kept_BT = torch.arange(self.tokens_BT.shape[1]) < ends_B[:, None]
        ends: list[int] = ends_B.tolist()
        images = self.images_B and (
            tuple(image for image in images if image.offset < end)
            for images, end in zip(self.images_B, ends, strict=True)
        )
        return replace(
            self,
            images_B=images_or_none(images or ()),
            attended_BT=self.attended_BT & kept_BT,
            sampled_BT=self.sampled_BT & kept_BT,
            entries_BTK=self.entries_BTK & kept_BT[..., None],
        )

    def rows(self, index: Sequence[int]) -> "TrainBatch":
        """Select sequences by index, and cut T to the longest of them."""
        indices = list(index)
        length = int(self.attended_BT[indices].sum(-1).max())
        images_B = self.images_B and images_or_none(self.images_B[index] for index in indices)
        rows = self._changed(lambda name, t: t[indices] if name.endswith(("_B", "_BS")) else t[indices][:, :length])
        return replace(rows, images_B=images_B)

    def parts(self, max_tokens: int, *, is_packed: bool) -> Iterator[list[int]]:
        """Yield the indices of the sequences of each forward pass, of about `max_tokens` tokens with padding.

        Sequences with a shared prefix are adjacent if packed, else sequences of similar length. Sequences with
        pictures are in parts of their own, which are never packed. Each part holds at least one sequence. Empty
        sequences are left out.
        """
        has_pictures_B = torch.tensor([bool(images) for images in self.images_B or ((),) * len(self.tokens_BT)])
        yield from self._parts(~has_pictures_B, max_tokens, is_packed=is_packed)
        yield from self._parts(has_pictures_B, max_tokens, is_packed=False)

    def _parts(self, chosen_B: Tensor, max_tokens: int, *, is_packed: bool) -> Iterator[list[int]]:
        """Yield the parts of the chosen sequences."""
        attended_BT = self.attended_BT & chosen_B[:, None]
        if is_packed:
            yield from packed_parts(self.tokens_BT, attended_BT, max_tokens)
            return
        lengths: list[int] = attended_BT.sum(-1).tolist()
        part: list[int] = []
        for i in sorted((i for i, length in enumerate(lengths) if length), key=lengths.__getitem__):
            if part and (len(part) + 1) * lengths[i] > max_tokens:
                yield part
                part = []
            part.append(i)
        if part:
            yield part

    def minibatches(self, count: int, order: torch.Generator) -> list["TrainBatch"]:
        """Shuffle the groups, and split them into `count` near-equal parts, or fewer if there are fewer groups."""
        groups = self.groups_B.unique()
        shuffled = groups[torch.randperm(len(groups), generator=order)]
        parts = (torch.isin(self.groups_B, part).nonzero()[:, 0] for part in shuffled.tensor_split(count) if len(part))
        return [self.rows(part.tolist()) for part in parts]

    def to(self, device: str | torch.device) -> "TrainBatch":
        return self._changed(lambda _, t: t.to(device))

    def _changed(self, change: Callable[[str, Tensor], Tensor]) -> "TrainBatch":
        """Apply `change` to each tensor and its name."""
        tensors: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors |= {name: change(name, value) for name, value in tensors.items() if isinstance(value, Tensor)}
        return TrainBatch(**tensors)


def images_or_none(images_B: Iterable[tuple[PlacedImage, ...]]) -> tuple[tuple[PlacedImage, ...], ...] | None:
    """Return the pictures of each sequence; None if no sequence has any."""
    images = tuple(images_B)
    return images if any(images) else None


_ZEROS = (
    *("old_BT", "baseline_BT", "hinted_BT", "control_BT", "start_BT", "step_scores_BT", "turn_lengths_BT"),
    *("turn_means_BT", "turn_deviations_BT"),
)


def make_batch(
    groups: Sequence[ScoredGroup],
    *,
    contrast: bool = False,
    special_ids: Sequence[int] | None = None,
    temperature: float | Literal["group"] = "group",
    turn_weight_source: TurnWeightSource | None = None,
) -> TrainBatch:
    """Pad the sequences of all groups, in order.

    If a sequence has turn records, only positions of scored turns get entries. The K = 1 form fills all other sampled
    positions with the student's own logprob, and only the turn records distinguish these from scored positions.

    Args:
        groups: Scored groups with at least one sequence in all.
        contrast: Read the control hint's logprobs too. An id without such a logprob is removed from its row, so its
            probability counts towards the tail bin.
        special_ids: Ids of the tokenizer's special tokens, for `loss.skip_special_tokens`.
        temperature: `loss.temperature`.
        turn_weight_source: `LossConfig.weighs_turns_by`.

    Raises:
        AlignmentError: a group violates the wire format, as `agentic-opd validate` reports it: masks, logprobs,
            records, rows or counts. The message names group, sequence and position, and the first violation.
        ConfigError: `contrast` is set, but a scored turn has no control logprobs; or weights of turns can't be
            computed from `turn_weight_source`.
    """
    checked = [checked_group(group, f"group {n}") for n, group in enumerate(groups)]
    return padded(checked, contrast, special_ids, temperature, turn_weight_source)


def padded(
    groups: Sequence[ScoredGroup],
    contrast: bool,
    special_ids: Sequence[int] | None,
    temperature: float | Literal["group"],
    turn_weight_source: TurnWeightSource | None,
) -> TrainBatch:
    """Pad the sequences of groups that were checked; see `make_batch`."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        raise AlignmentError("a batch holds no sequence")
    compared = [torch.tensor(group.compared_scores) for group in groups for _ in group.rollouts]
    size = (len(rollouts), max(len(rollout.tokens_T) for rollout in rollouts))
    widest = max((len(row) for rollout in rollouts if rollout.rows for row in rollout.rows.token_ids_TK), default=0)
    rows = (*size, max(1, widest))
    batch = TrainBatch(
        tokens_BT=torch.zeros(size, dtype=torch.int64),
        attended_BT=torch.zeros(size, dtype=torch.bool),
        sampled_BT=torch.zeros(size, dtype=torch.bool),
        teacher_ids_BTK=torch.zeros(rows, dtype=torch.int64),
        teacher_BTK=torch.zeros(rows),
        entries_BTK=torch.zeros(rows, dtype=torch.bool),
        control_BTK=torch.zeros(rows) if contrast else None,
        **{name: torch.zeros(size) for name in _ZEROS},
        scores_B=torch.tensor([rollout.score for rollout in rollouts], dtype=torch.float32),
        rewarded_B=torch.tensor([rollout.is_rewarded for rollout in rollouts]),
        groups_B=torch.tensor([number for number, group in enumerate(groups) for _ in group.rollouts]),
        compared_BS=pad_sequence(compared, batch_first=True, padding_value=math.nan),
        advantages_B=torch.zeros(len(rollouts)),
        images_B=images_or_none(rollout.attachments for rollout in rollouts),
    )
    turns = [
        (first, statistics)
        for group, statistics in zip(groups, map(_turn_statistics, groups), strict=True)
        for first in group.first_turns
    ]
    names = [f"group {n}, sequence {i}" for n, group in enumerate(groups) for i in range(len(group.rollouts))]
    for i, (rollout, name) in enumerate(zip(rollouts, names, strict=True)):
        length = len(rollout.tokens_T)
        sampled_T = torch.tensor(rollout.masks_T) != IGNORED
        batch.tokens_BT[i, :length] = torch.tensor(rollout.tokens_T)
        batch.attended_BT[i, :length] = True
        batch.sampled_BT[i, :length] = sampled_T
        batch.old_BT[i, :length] = torch.where(sampled_T, torch.tensor(rollout.logprobs_T), 0.0)
        batch.baseline_BT[i, :length] = torch.where(sampled_T, torch.tensor(rollout.baseline_T), 0.0)
        for turn in rollout.turns or ():
            start, end = turn.span
            batch.step_scores_BT[i, start:end] = torch.where(sampled_T[start:end], float(turn.step_score or 0), 0.0)
        first, statistics = turns[i]
        for (start, end), (mean, deviation) in zip(sampled_spans(rollout.masks_T), statistics[first:], strict=False):
            batch.turn_means_BT[i, start:end], batch.turn_deviations_BT[i, start:end] = mean, deviation
        _put_rows(batch, i, rollout, name)
    if special_ids is not None:
        special_BT = torch.isin(batch.tokens_BT, torch.tensor([*special_ids], dtype=torch.int64))
        batch = replace(batch, special_BT=special_BT & batch.attended_BT)
    batch = replace(batch, turn_lengths_BT=_turn_lengths(batch.sampled_BT))
    if turn_weight_source is not None:
        batch = replace(batch, turn_weights_BT=_turn_weights(batch, groups, turn_weight_source, names))
    return _with_temperatures(batch, rollouts, temperature)


def _with_temperatures(
    batch: TrainBatch, rollouts: Sequence[ScoredRollout], temperature: float | Literal["group"]
) -> TrainBatch:
    """Fill in the temperatures: those of the turns, or this one for all; greedy and unknown ones count as 1."""
    temperatures_BT = torch.ones_like(batch.old_BT)
    greedy_BT = torch.zeros_like(batch.sampled_BT)
    if temperature != "group":
        temperatures_BT[batch.sampled_BT] = temperature
    else:
        for i, rollout in enumerate(rollouts):
            for (start, end), distribution in rollout.turn_distributions:
                if distribution is not None and distribution.is_greedy:
                    greedy_BT[i, start:end] = True
                elif distribution is not None:
                    temperatures_BT[i, start:end] = distribution.temperature
    return replace(
        batch,
        temperatures_BT=temperatures_BT if (temperatures_BT != 1).any() else None,
        greedy_BT=greedy_BT if greedy_BT.any() else None,
    )


def _turn_weights(
    batch: TrainBatch, groups: Sequence[ScoredGroup], source: TurnWeightSource, names: Sequence[str]
) -> Tensor:
    weights_BT, rest = torch.ones_like(batch.old_BT), iter(names)
    by_sequence = chain.from_iterable(
        trajectory_weights(group, source, [next(rest) for _ in group.rollouts]) for group in groups
    )
    for weights_T, of_sequence in zip(weights_BT, by_sequence, strict=True):
        for (start, end), weight in of_sequence.items():
            weights_T[start:end] = weight
    return weights_BT


def _turn_lengths(sampled_BT: Tensor) -> Tensor:
    numbers_BT = torch.where(sampled_BT, turn_starts(sampled_BT).cumsum(1), 0)
    sizes = torch.zeros(len(sampled_BT), sampled_BT.shape[1] + 1).scatter_add_(1, numbers_BT, sampled_BT.float())
    return torch.where(sampled_BT, sizes.gather(1, numbers_BT), 0.0)


def _put_rows(batch: TrainBatch, i: int, rollout: ScoredRollout, name: str) -> None:
    """Write the rows of the scored turns of sequence `i`, [R, K], and with contrast those of their control."""
    if rollout.rows is None:
        return
    ids, logprobs = rollout.rows.token_ids_TK, rollout.rows.logprobs_TK
    scored = rollout.scored_positions
    candidates = range(len(ids)) if scored is None else sorted(scored)
    positions = [position for position in candidates if ids[position] and rollout.masks_T[position] != IGNORED]
    if not positions:
        return
    shape = (len(positions), len(ids[positions[0]]))
    ids_RK = np.fromiter(chain.from_iterable(map(ids.__getitem__, positions)), np.int64).reshape(shape)
    logprobs_RK = np.fromiter(chain.from_iterable(map(logprobs.__getitem__, positions)), np.float32).reshape(shape)
    entries_RK = np.ones(shape, np.bool_)
    width = slice(shape[1])
    if batch.control_BTK is not None:
        controls = _controls(rollout)
        if (missing := next((position for position in positions if position not in controls), None)) is not None:
            raise ConfigError(
                f"{name}, position {missing}: loss.contrast is on, but this scored turn was not read with a control "
                "hint. Set env.hint.control where the groups are made, or loss.contrast to false."
            )
        control_RK = np.array([controls[position] for position in positions], np.float32)  # None becomes NaN.
        order_RK = np.argsort(np.isnan(control_RK), axis=1, kind="stable")
        ids_RK, logprobs_RK, control_RK = (
            np.take_along_axis(values_RK, order_RK, axis=1) for values_RK in (ids_RK, logprobs_RK, control_RK)
        )
        entries_RK = ~np.isnan(control_RK)
        ids_RK, logprobs_RK, control_RK = (
            np.where(entries_RK, values_RK, 0) for values_RK in (ids_RK, logprobs_RK, control_RK)
        )
        batch.control_BTK[i, positions, width] = torch.from_numpy(control_RK)
        batch.control_BT[i, positions] = torch.from_numpy(control_RK[:, 0].copy())
    batch.teacher_ids_BTK[i, positions, width] = torch.from_numpy(ids_RK)
    batch.teacher_BTK[i, positions, width] = torch.from_numpy(logprobs_RK)
    batch.entries_BTK[i, positions, width] = torch.from_numpy(entries_RK)
    batch.hinted_BT[i, positions] = torch.from_numpy(logprobs_RK[:, 0].copy())


def _controls(rollout: ScoredRollout) -> dict[int, Sequence[float | None]]:
    """Map each position of the scored turns that have control logprobs to its row of them."""
    rows: dict[int, Sequence[float | None]] = {}
    for turn in rollout.turns or ():
        if turn.is_scored and turn.control is not None:
            rows |= zip(range(*turn.scored_span), turn.control.logprobs_RK, strict=True)
    return rows


def _turn_statistics(group: ScoredGroup) -> list[tuple[float, float]]:
    """Return mean and standard deviation of the compared turns of each turn number; (0, 0) if none is compared."""
    return [
        (float(np.mean(totals)), float(np.std(totals)) if len(set(totals)) > 1 else 0.0) if totals else (0.0, 0.0)
        for totals in group.compared_turns
    ]
