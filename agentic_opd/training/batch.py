"""The scored groups of a batch -> padded tensors whose alignment was checked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.types import IGNORED
from agentic_opd.wire.group import ScoredGroup, ScoredRollout


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """B sequences, padded on the right to T positions, with distillation rows of up to K entries."""

    tokens_BT: Tensor
    """int64; 0 if padded."""
    attended_BT: Tensor
    """bool: not padded."""
    sampled_BT: Tensor
    """bool: tokens that the policy sampled."""
    old_BT: Tensor
    """float32: `inference_logprobs` at sampled positions, else 0."""
    teacher_ids_BTK: Tensor
    """int64: `distill_token_ids`; the sampled token first. 0 if there is no entry."""
    teacher_BTK: Tensor
    """float32: `distill_logprobs`; 0 if there is no entry."""
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


def make_batch(groups: Sequence[ScoredGroup]) -> TrainBatch:
    """Pad the sequences of all groups, in order.

    If a sequence has turn records, only the spans of scored turns get entries: the K = 1 form fills all other sampled
    positions with the student's own logprob, and nothing else tells those from scored ones.

    Raises:
        AlignmentError: a row is not at a sampled position, does not start with the sampled token, repeats one, or has
            several entries outside of the scored turns. It says which group, sequence and position.
    """
    rollouts = [one for group in groups for one in group.rollouts]
    if not rollouts:
        raise AlignmentError("a batch holds no sequence")
    size = (len(rollouts), max(len(one.tokens_T) for one in rollouts))
    widest = max((len(row) for one in rollouts if one.rows for row in one.rows.token_ids_TK), default=0)
    batch = TrainBatch(
        tokens_BT=torch.zeros(size, dtype=torch.int64),
        attended_BT=torch.zeros(size, dtype=torch.bool),
        sampled_BT=torch.zeros(size, dtype=torch.bool),
        old_BT=torch.zeros(size),
        teacher_ids_BTK=torch.zeros((*size, max(1, widest)), dtype=torch.int64),
        teacher_BTK=torch.zeros((*size, max(1, widest))),
        entries_BTK=torch.zeros((*size, max(1, widest)), dtype=torch.bool),
        scores_B=torch.tensor([one.score for one in rollouts], dtype=torch.float32),
        groups_B=torch.tensor([number for number, group in enumerate(groups) for _ in group.rollouts]),
    )
    places = [
        f"group {number}, sequence {i}" for number, group in enumerate(groups) for i in range(len(group.rollouts))
    ]
    for i, (one, where) in enumerate(zip(rollouts, places, strict=True)):
        length = len(one.tokens_T)
        batch.tokens_BT[i, :length] = torch.tensor(one.tokens_T)
        batch.attended_BT[i, :length] = True
        batch.sampled_BT[i, :length] = torch.tensor(one.masks_T) != IGNORED
        batch.old_BT[i, :length] = torch.where(batch.sampled_BT[i, :length], torch.tensor(one.logprobs_T), 0.0)
        for position, ids, logprobs in _rows(one, where):
            batch.teacher_ids_BTK[i, position, : len(ids)] = torch.tensor(ids)
            batch.teacher_BTK[i, position, : len(ids)] = torch.tensor(logprobs)
            batch.entries_BTK[i, position, : len(ids)] = True
    return batch


def _rows(one: ScoredRollout, where: str) -> Iterator[tuple[int, Sequence[int], Sequence[float]]]:
    """Yield the position, ids and logprobs of each row that is about a scored turn; all rows are checked."""
    if one.rows is None:
        return
    scored = one.scored_positions
    for position, (ids, logprobs) in enumerate(zip(one.rows.token_ids_TK, one.rows.logprobs_TK, strict=True)):
        if not ids:
            continue
        token, is_scored = one.tokens_T[position], scored is None or position in scored
        if one.masks_T[position] == IGNORED:
            if list(ids) == [token] and list(logprobs) == [0.0]:  # How the K = 1 form fills a prompt position.
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
                yield position, ids, logprobs
            continue
        raise AlignmentError(f"{where}, position {position}: the distillation row {what}")
