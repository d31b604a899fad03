"""A batch as the trajectory API hands it out -> padded tensors whose alignment was checked."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.types import IGNORED
from agentic_opd.wire.checks import scored_positions


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """B sequences, padded on the right to T positions, with distillation rows of up to K entries."""

    tokens_BT: Tensor
    """int64; 0 where padded."""
    attended_BT: Tensor
    """bool: not padded."""
    sampled_BT: Tensor
    """bool: tokens that the policy sampled."""
    old_BT: Tensor
    """float32: `inference_logprobs` at sampled positions, else 0."""
    teacher_ids_BTK: Tensor
    """int64: `distill_token_ids`; the sampled token first. 0 where there is no entry."""
    teacher_BTK: Tensor
    """float32: `distill_logprobs`; 0 where there is no entry."""
    entries_BTK: Tensor
    """bool: which entries there are."""
    scores_B: Tensor
    """float32."""
    groups_B: Tensor
    """int64: the place of each sequence's group in the batch."""

    @property
    def scored_BT(self) -> Tensor:
        """Positions that hold a distillation row, bool [B, T]."""
        return self.entries_BTK.any(-1)

    @property
    def common_prompt(self) -> int:
        """How many positions all sequences start with alike, before the last one that no sequence needs a loss at."""
        alike = (self.tokens_BT == self.tokens_BT[:1]).all(0) & self.attended_BT.all(0) & ~self.sampled_BT.any(0)
        return max(0, int(alike.long().cumprod(0).sum()) - 1)

    def after(self, position: int) -> "TrainBatch":
        """The same without the positions before this one."""
        kept = {field.name: getattr(self, field.name) for field in fields(self)}
        return TrainBatch(**{name: t if name.endswith("_B") else t[:, position:] for name, t in kept.items()})

    def before(self, ends_B: Tensor) -> "TrainBatch":
        """The same with each sequence ending before its position in `ends_B`, int64 [B]; 0: nothing of it is left."""
        kept_BT = torch.arange(self.tokens_BT.shape[1]) < ends_B[:, None]
        return replace(
            self,
            attended_BT=self.attended_BT & kept_BT,
            sampled_BT=self.sampled_BT & kept_BT,
            entries_BTK=self.entries_BTK & kept_BT[..., None],
        )

    def rows(self, index: Sequence[int]) -> "TrainBatch":
        """The sequences of these indices, cut to the longest of them."""
        length = int(self.attended_BT[list(index)].sum(-1).max())
        kept = {field.name: getattr(self, field.name)[list(index)] for field in fields(self)}
        return TrainBatch(**{name: t if name.endswith("_B") else t[:, :length] for name, t in kept.items()})

    def indexed_parts(self, max_tokens: int) -> Iterator[tuple[list[int], "TrainBatch"]]:
        """Sequences of like length together, with their indices: at most `max_tokens` padded tokens a part.

        A part holds one sequence at least; a sequence of which nothing is left is in none.
        """
        lengths: list[int] = self.attended_BT.sum(-1).tolist()
        part: list[int] = []
        for i in sorted((i for i, length in enumerate(lengths) if length), key=lengths.__getitem__):
            if part and (len(part) + 1) * lengths[i] > max_tokens:
                yield part, self.rows(part)
                part = []
            part.append(i)
        if part:
            yield part, self.rows(part)

    def minibatches(self, count: int, order: torch.Generator) -> list["TrainBatch"]:
        """All groups, shuffled and dealt into `count` parts of as equal a size as can be; fewer where groups are."""
        groups = self.groups_B.unique()
        shuffled = groups[torch.randperm(len(groups), generator=order)]
        parts = (torch.isin(self.groups_B, part).nonzero()[:, 0] for part in shuffled.tensor_split(count) if len(part))
        return [self.rows(part.tolist()) for part in parts]

    def to(self, device: str | torch.device) -> "TrainBatch":
        """The same on `device`."""
        return TrainBatch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def make_batch(groups: Sequence[Mapping[str, Any]]) -> TrainBatch:
    """Pad the sequences of all groups, in order.

    Where a sequence's overrides hold turn records, only the spans of scored turns get entries: the K = 1 form fills all
    other sampled positions with the student's own logprob, and nothing else tells those from scored ones.

    Raises:
        AlignmentError: a group's fields disagree in length; a row is not at a sampled position, does not start with the
            sampled token, repeats one, or has several entries outside of the scored turns. It says which group,
            sequence and position.
    """
    sequences = [row for number, group in enumerate(groups) for row in _sequences(number, group)]
    if not sequences:
        raise AlignmentError("a batch holds no sequence")
    size = (len(sequences), max(len(row.tokens) for row in sequences))
    widest = max((len(entry) for row in sequences for entry in row.ids), default=0)
    batch = TrainBatch(
        tokens_BT=torch.zeros(size, dtype=torch.int64),
        attended_BT=torch.zeros(size, dtype=torch.bool),
        sampled_BT=torch.zeros(size, dtype=torch.bool),
        old_BT=torch.zeros(size),
        teacher_ids_BTK=torch.zeros((*size, max(1, widest)), dtype=torch.int64),
        teacher_BTK=torch.zeros((*size, max(1, widest))),
        entries_BTK=torch.zeros((*size, max(1, widest)), dtype=torch.bool),
        scores_B=torch.tensor([row.score for row in sequences], dtype=torch.float32),
        groups_B=torch.tensor([row.group for row in sequences]),
    )
    for i, row in enumerate(sequences):
        length = len(row.tokens)
        batch.tokens_BT[i, :length] = torch.tensor(row.tokens)
        batch.attended_BT[i, :length] = True
        batch.sampled_BT[i, :length] = torch.tensor(row.masks) != IGNORED
        batch.old_BT[i, :length] = torch.where(batch.sampled_BT[i, :length], torch.tensor(row.old), 0.0)
        for position, (ids, logprobs) in enumerate(zip(row.ids, row.logprobs, strict=True)):
            if ids and row.masks[position] != IGNORED and row.may_hold(position):
                batch.teacher_ids_BTK[i, position, : len(ids)] = torch.tensor(ids)
                batch.teacher_BTK[i, position, : len(ids)] = torch.tensor(logprobs)
                batch.entries_BTK[i, position, : len(ids)] = True
    return batch


_WIRE = {
    "masks": "masks",
    "old": "inference_logprobs",
    "ids": "distill_token_ids",
    "logprobs": "distill_logprobs",
    "score": "scores",
}
"""Our names -> the group's."""


@dataclass(frozen=True, slots=True)
class _Sequence:
    group: int
    tokens: list[int]
    masks: list[int]
    old: list[float]
    ids: list[list[int]]
    logprobs: list[list[float]]
    score: float
    scored: frozenset[int] | None
    """Positions of scored turns, by the turn records; None where there are none."""

    def may_hold(self, position: int) -> bool:
        """Whether a row at this position is about a scored turn."""
        return self.scored is None or position in self.scored


def _sequences(number: int, group: Mapping[str, Any]) -> Iterator[_Sequence]:
    tokens: list[list[int]] = group["tokens"]
    empty: list[list[list[Any]]] = [[[] for _ in row] for row in tokens]
    parts: dict[str, list[Any]] = {
        "masks": group["masks"],
        "old": group.get("inference_logprobs") or [],
        "ids": group.get("distill_token_ids") or empty,
        "logprobs": group.get("distill_logprobs") or empty,
    }
    overrides: list[Mapping[str, Any]] = group.get("overrides") or [{} for _ in tokens]
    for name, part in {**parts, "score": group["scores"], "overrides": overrides}.items():
        if len(part) != len(tokens):
            raise AlignmentError(f"group {number}: {len(tokens)} sequences, but {_WIRE.get(name, name)}: {len(part)}")
    for i, row in enumerate(tokens):
        fields_T = {name: part[i] for name, part in parts.items()}
        for name, part in fields_T.items():
            if len(part) != len(row):
                raise AlignmentError(f"group {number}, sequence {i}: {len(row)} tokens, but {_WIRE[name]}: {len(part)}")
        where = f"group {number}, sequence {i}"
        scored = _scored_positions(overrides[i], where)
        sequence = _Sequence(group=number, tokens=row, score=group["scores"][i], scored=scored, **fields_T)
        _check_rows(sequence, where)
        yield sequence


def _scored_positions(overrides: Mapping[str, Any], where: str) -> frozenset[int] | None:
    if "opd" not in overrides:
        return None
    try:
        return scored_positions(overrides["opd"]["turns"])
    except (KeyError, TypeError, ValueError) as error:
        raise AlignmentError(f"{where}: the turn records in its overrides can't be read: {error!r}") from error


def _check_rows(row: _Sequence, where: str) -> None:
    for position, (ids, logprobs) in enumerate(zip(row.ids, row.logprobs, strict=True)):
        if not ids and not logprobs:
            continue
        if row.masks[position] == IGNORED:
            if _is_padding(ids, logprobs, row.tokens[position]):
                continue
            what = "is at a position that was not sampled"
        elif len(ids) != len(logprobs):
            what = f"has {len(ids)} ids and {len(logprobs)} logprobs"
        elif ids[0] != row.tokens[position]:
            what = f"starts with token {ids[0]}, but {row.tokens[position]} was sampled"
        elif len(set(ids)) != len(ids):
            what = "holds a token twice"
        elif len(ids) > 1 and not row.may_hold(position):
            what = "is outside of the scored turns"
        else:
            continue
        raise AlignmentError(f"{where}, position {position}: the distillation row {what}")


def _is_padding(ids: list[int], logprobs: list[float], token: int) -> bool:
    """Whether this is how the K = 1 form fills a prompt position: its own token with logprob 0."""
    return ids == [token] and logprobs == [0.0]
