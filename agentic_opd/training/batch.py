"""Convert the scored groups of a batch to padded tensors, and check the alignment of their rows."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agentic_opd.core.errors import AlignmentError, ConfigError
from agentic_opd.core.types import IGNORED, check_lengths
from agentic_opd.training.config import LossConfig
from agentic_opd.training.losses import group_advantages, step_advantages, turn_starts
from agentic_opd.training.packing import packed_parts
from agentic_opd.wire.group import SUM_SLACK, ScoredGroup, ScoredRollout


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
    compared_BS: Tensor
    """float32: scores of the rewarded rollouts of the sequence's group, each rollout once; NaN at padding."""
    advantages_B: Tensor
    """float32: advantage of the sequence by its group's scores; 0 until `with_rewards` sets it."""
    control_BTK: Tensor | None = None
    """float32: the teacher's logprobs of the same ids with the control hint. None without contrast, and after
    `step.take_out_control`."""
    special_BT: Tensor | None = None
    """bool: special tokens; None if their ids were not given."""

    @property
    def scored_BT(self) -> Tensor:
        """Positions that have a distillation row, bool [B, T]."""
        return self.entries_BTK.any(-1)

    @property
    def turn_count(self) -> int:
        return int(turn_starts(self.sampled_BT).sum())

    def count(self, config: LossConfig) -> float:
        """Return the divisor of the loss's means over this batch."""
        return float(self.turn_count if config.mean == "turn" else self.sampled_BT.sum())

    def with_rewards(self, config: LossConfig) -> "TrainBatch":
        """Fill in the advantages by reward, and normalize the step scores if `config` says so; needs whole groups."""
        whose = (self.groups_B, self.rewarded_B)
        divide = config.divide_by_std
        advantages_B = group_advantages(self.scores_B, *whose, compared_BS=self.compared_BS, divide_by_std=divide)
        if config.step_scores == "plain":
            return replace(self, advantages_B=advantages_B)
        rewards = (self.step_scores_BT, self.sampled_BT, self.scores_B, *whose)
        steps_BT = step_advantages(*rewards, divide_by_std=divide)
        return replace(self, advantages_B=advantages_B, step_scores_BT=steps_BT)

    def before(self, ends_B: Tensor) -> "TrainBatch":
        """Return a copy in which each sequence ends before its position in `ends_B`, int64 [B]; 0 empties it."""
        kept_BT = torch.arange(self.tokens_BT.shape[1]) < ends_B[:, None]
        return replace(
            self,
            attended_BT=self.attended_BT & kept_BT,
            sampled_BT=self.sampled_BT & kept_BT,
            entries_BTK=self.entries_BTK & kept_BT[..., None],
        )

    def rows(self, index: Sequence[int]) -> "TrainBatch":
        """Select sequences by index, and cut T to the longest of them."""
        length, kept = int(self.attended_BT[list(index)].sum(-1).max()), list(index)
        return self._changed(lambda name, t: t[kept] if name.endswith(("_B", "_BS")) else t[kept][:, :length])

    def parts(self, max_tokens: int, *, is_packed: bool) -> Iterator[list[int]]:
        """Yield the indices of the sequences of each forward pass, of about `max_tokens` tokens with padding.

        Sequences with a shared prefix are adjacent if packed, else sequences of similar length. Each part holds at
        least one sequence. Empty sequences are left out.
        """
        if is_packed:
            yield from packed_parts(self.tokens_BT, self.attended_BT, max_tokens)
            return
        lengths: list[int] = self.attended_BT.sum(-1).tolist()
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
        tensors |= {name: change(name, tensor) for name, tensor in tensors.items() if tensor is not None}
        return TrainBatch(**tensors)


_ZEROS = ("old_BT", "baseline_BT", "hinted_BT", "control_BT", "start_BT", "step_scores_BT", "turn_lengths_BT")


def make_batch(
    groups: Sequence[ScoredGroup], *, contrast: bool = False, special_ids: Sequence[int] | None = None
) -> TrainBatch:
    """Pad the sequences of all groups, in order.

    If a sequence has turn records, only positions of scored turns get entries. The K = 1 form fills all other sampled
    positions with the student's own logprob, and only the turn records distinguish these from scored positions.

    Args:
        groups: Scored groups with at least one sequence in all.
        contrast: Read the control hint's logprobs too. An id without such a logprob is removed from its row, so its
            probability counts towards the tail bin.
        special_ids: Ids of the tokenizer's special tokens, for `loss.skip_special_tokens`.

    Raises:
        AlignmentError: a sampled position is the first, or its mask or logprob is not that of a sampled token; a row is
            not at a sampled position, does not start with the sampled token, repeats a token, or has several entries
            outside of the scored turns; or a turn's control logprobs do not match its rows. The message names group,
            sequence and position.
        ConfigError: `contrast` is set, but a scored turn has no control logprobs.
    """
    rollouts = [one for group in groups for one in group.rollouts]
    if not rollouts:
        raise AlignmentError("a batch holds no sequence")
    compared = [torch.tensor(group.compared_scores) for group in groups for _ in group.rollouts]
    size = (len(rollouts), max(len(one.tokens_T) for one in rollouts))
    widest = max((len(row) for one in rollouts if one.rows for row in one.rows.token_ids_TK), default=0)
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
        scores_B=torch.tensor([one.score for one in rollouts], dtype=torch.float32),
        rewarded_B=torch.tensor([one.is_rewarded for one in rollouts]),
        groups_B=torch.tensor([number for number, group in enumerate(groups) for _ in group.rollouts]),
        compared_BS=pad_sequence(compared, batch_first=True, padding_value=math.nan),
        advantages_B=torch.zeros(len(rollouts)),
    )
    places = [f"group {n}, sequence {i}" for n, group in enumerate(groups) for i in range(len(group.rollouts))]
    for i, (one, where) in enumerate(zip(rollouts, places, strict=True)):
        length = len(one.tokens_T)
        _check_sampled(one, where)
        sampled_T = torch.tensor(one.masks_T) != IGNORED
        batch.tokens_BT[i, :length] = torch.tensor(one.tokens_T)
        batch.attended_BT[i, :length] = True
        batch.sampled_BT[i, :length] = sampled_T
        batch.old_BT[i, :length] = torch.where(sampled_T, torch.tensor(one.logprobs_T), 0.0)
        batch.baseline_BT[i, :length] = torch.where(sampled_T, torch.tensor(one.baseline_T), 0.0)
        for turn in one.turns or ():
            start, end = turn.span
            batch.step_scores_BT[i, start:end] = torch.where(sampled_T[start:end], float(turn.step_score or 0), 0.0)
        for row in _rows(one, where, contrast=contrast):
            at, width = (i, row.position), len(row.ids)
            batch.teacher_ids_BTK[at][:width] = torch.tensor(row.ids)
            batch.teacher_BTK[at][:width] = torch.tensor(row.logprobs)
            batch.entries_BTK[at][:width] = True
            batch.hinted_BT[at] = row.logprobs[0]
            if batch.control_BTK is not None:
                batch.control_BTK[at][:width] = torch.tensor(row.control)
                batch.control_BT[at] = row.control[0]
    if special_ids is not None:
        special_BT = torch.isin(batch.tokens_BT, torch.tensor([*special_ids], dtype=torch.int64))
        batch = replace(batch, special_BT=special_BT & batch.attended_BT)
    return replace(batch, turn_lengths_BT=_turn_lengths(batch.sampled_BT))


def _check_sampled(one: ScoredRollout, where: str) -> None:
    """Refuse other conventions of masks and marks, whose positions would count as sampled."""
    for position, (token, mask, logprob) in enumerate(zip(one.tokens_T, one.masks_T, one.logprobs_T, strict=True)):
        if mask == IGNORED:
            continue
        if mask != token:
            what = f"the mask is {mask}, expected {IGNORED} or the token {token}"
        elif logprob > SUM_SLACK:
            what = f"inference_logprobs is {logprob:g}, expected at most 0 at a sampled position"
        elif position == 0:
            what = "the first token is marked as sampled, but nothing before it predicts it"
        else:
            continue
        raise AlignmentError(f"{where}, position {position}: {what}")


def _turn_lengths(sampled_BT: Tensor) -> Tensor:
    numbers_BT = torch.where(sampled_BT, turn_starts(sampled_BT).cumsum(1), 0)
    sizes = torch.zeros(len(sampled_BT), sampled_BT.shape[1] + 1).scatter_add_(1, numbers_BT, sampled_BT.float())
    return torch.where(sampled_BT, sizes.gather(1, numbers_BT), 0.0)


class _Row(NamedTuple):
    """The distillation row of one position of a scored turn."""

    position: int
    ids: Sequence[int]
    logprobs: Sequence[float]
    control: Sequence[float] = ()
    """Logprobs of the same ids with the control hint; empty without contrast."""


def _rows(one: ScoredRollout, where: str, *, contrast: bool) -> Iterator[_Row]:
    """Check all rows, and yield those of scored turns."""
    if one.rows is None:
        return
    scored, controls = one.scored_positions, _controls(one) if contrast else {}
    for position, (ids, logprobs) in enumerate(zip(one.rows.token_ids_TK, one.rows.logprobs_TK, strict=True)):
        if not ids:
            continue
        token, is_scored = one.tokens_T[position], scored is None or position in scored
        if one.masks_T[position] == IGNORED:
            if list(ids) == [token] and list(logprobs) == [0.0]:  # The K = 1 form's filler at prompt positions.
                continue
            what = "is at a position that was not sampled"
        elif ids[0] != token:
            what = f"starts with token {ids[0]}, but {token} was sampled"
        elif len(set(ids)) != len(ids):
            what = "holds a token twice"
        elif len(ids) > 1 and not is_scored:
            what = "is outside of the scored turns"
        else:
            if is_scored:
                row = _Row(position, ids, logprobs)
                yield _with_control(row, controls, f"{where}, position {position}") if contrast else row
            continue
        raise AlignmentError(f"{where}, position {position}: the distillation row {what}")


def _controls(one: ScoredRollout) -> dict[int, Sequence[float | None]]:
    """Map each position of the scored turns that have control logprobs to its row of them."""
    rows: dict[int, Sequence[float | None]] = {}
    for turn in one.turns or ():
        if turn.is_scored and turn.control is not None:
            rows |= zip(range(*turn.scored_span), turn.control.logprobs_RK, strict=True)
    return rows


def _with_control(row: _Row, controls: Mapping[int, Sequence[float | None]], where: str) -> _Row:
    """Add the control logprobs to a row, and remove the ids that have none."""
    if row.position not in controls:
        raise ConfigError(
            f"{where}: loss.contrast is on, but this scored turn was not read with a control hint. Set env.control "
            "where the groups are made, or loss.contrast to false."
        )
    control = controls[row.position]
    check_lengths(f"{where}: the distillation row and its control", row=len(row.ids), control=len(control))
    if control[0] is None:
        raise AlignmentError(f"{where}: the control hint's reading lacks the sampled token {row.ids[0]}")
    entries = zip(row.ids, row.logprobs, control, strict=True)
    ids, logprobs, known = zip(*(entry for entry in entries if entry[2] is not None), strict=True)
    return _Row(row.position, ids, logprobs, known)
